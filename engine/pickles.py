"""Read untrusted pickles without running any code in them.

A scan reads a pickle's instructions without executing them: it finds all names that the pickle imports, and measures
how deeply values are nested and how many there are. Python crashes when it hashes a tuple that is nested some hundred
thousand levels deep (`hash` of a tuple has no recursion limit), so such a file must be refused before anything is built
from it. `read_pickle` then builds the values with inert stand-ins. Checkpoints, which hold tensors, are built by
torch's weights-only reader instead (checkpoints/reading.py). That reader cannot replace `read_pickle`: it knows neither
the instructions of Python 2's strings nor those of pickle protocol 4.
"""

import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

MAX_DEPTH = 100  # levels; the files of the supported methods stay under 20
MAX_VALUES = 1_000_000  # shared values count at every use; a ViT-L with its optimiser has fewer than 50 000
MAX_INSTRUCTIONS = 10_000_000  # a checkpoint has about ten for each value
CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"})
CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
READS_MEMO = frozenset({"GET", "BINGET", "LONG_BINGET"})
WRITES_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
COMPUTED = "(a computed function)"  # stands for a callable that is not a global, but the result of other instructions
# Pickle protocols 0 to 2 write some modules under their old names.
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "commands": "subprocess"}


@dataclass(slots=True)
class Value:
    """Facts about one value on the pickle's stack. The memo holds the same object, as pickle's memo does."""

    depth: int = 0  # levels of nesting below it
    size: int = 1  # number of values in it, itself included
    text: str = ""  # the string, if it is one
    name: str = ""  # the imported name, if it is a global


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Result of scanning one pickle."""

    protocol: int
    names: tuple[str, ...]  # the globals that it imports, in their order, and COMPUTED
    number: int | None  # its first integer; torch's legacy files start with a pickle of one known number


class _Machine:
    """Pickle's stack machine, which computes depths and sizes in place of values."""

    def __init__(self) -> None:
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}
        self.names: dict[str, None] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Execute one instruction on depths and sizes. Raises ValueError for nesting beyond the limits."""
        if opcode.name == "MARK":
            self.marks.append(len(self.stack))
        elif opcode.name in READS_MEMO:
            self.stack.append(self.memo[argument])
        elif opcode.name in WRITES_MEMO:
            self.memo[argument] = self.stack[-1]
        elif opcode.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        else:
            result = self.evaluate(opcode.name, argument, self.pop_operands(opcode))
            self.stack.extend(result for _ in opcode.stack_after)

    def pop_operands(self, opcode: pickletools.OpcodeInfo) -> list[Value]:
        """Pop an instruction's operands: a fixed number of values, or some before the last mark and all after it."""
        count, marked = _operands(opcode)
        start = (self.marks.pop() if marked else len(self.stack)) - count
        if start < 0:
            raise IndexError("empty stack")
        operands, self.stack[start:] = self.stack[start:], []
        return operands

    def evaluate(self, opcode: str, argument: Any, operands: list[Value]) -> Value:
        """The value that an instruction leaves on the stack: a new one, or `operands[0]`, changed in place."""
        name = ""
        if opcode in ("GLOBAL", "INST"):
            name = _global_name(*argument.split(" ", 1))
        elif opcode == "STACK_GLOBAL":
            name = _global_name(operands[0].text, operands[1].text)
        if name or (opcode in CALLS and not operands[0].name):
            self.names[name or COMPUTED] = None
        if opcode in CHANGES:
            result, *parts = operands
        else:
            result, parts = Value(text=argument if isinstance(argument, str) else "", name=name), operands
        result.depth = max([result.depth, *(1 + part.depth for part in parts)])
        result.size += sum(part.size for part in parts)
        if result.depth > MAX_DEPTH:
            raise ValueError(f"it nests values more than {MAX_DEPTH} levels deep")
        if result.size > MAX_VALUES:
            raise ValueError(f"it unfolds into more than {MAX_VALUES} values")
        return result


@cache
def _operands(opcode: pickletools.OpcodeInfo) -> tuple[int, bool]:
    """Number of an instruction's operands, those before the mark if it has one, and whether it pops to a mark."""
    kinds = [kind.name for kind in opcode.stack_before]
    return (kinds.index("mark"), True) if "mark" in kinds else (len(kinds), False)


def _global_name(module: str, name: str = "") -> str:
    return f"{PYTHON_2.get(module, module)}.{name}"


def scan_pickle(stream: BinaryIO) -> Scan:
    """Scan one pickle and leave `stream` at its end.

    ValueError, with a message that begins with "it", for a malformed pickle and one that exceeds the limits.
    """
    machine, protocol = _Machine(), 0
    number: int | None = None
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_INSTRUCTIONS:
                raise ValueError(f"it has more than {MAX_INSTRUCTIONS} instructions")
            stated = argument if opcode.name == "PROTO" and isinstance(argument, int) else opcode.proto
            protocol = max(protocol, stated)
            if number is None and isinstance(argument, int) and opcode.name != "PROTO":
                number = argument
            machine.step(opcode, argument)
    except (IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"it is not a well-formed pickle ({type(error).__name__})") from error
    return Scan(protocol=protocol, names=tuple(machine.names), number=number)


def read_pickle(stream: BinaryIO, stand_ins: Mapping[str, Any], encoding: str) -> Any:
    """The value of one pickle: containers, strings, numbers, and `stand_ins` in place of the names that it imports.

    encoding: of Python 2's strings. ValueError or UnpicklingError for a name without a stand-in. A damaged pickle may
    raise these and nearly anything else.
    """
    start = stream.tell()
    refused = [name for name in scan_pickle(stream).names if name not in stand_ins]
    if refused:
        raise ValueError(f"it asks for {refused[0]}, which is not allowed")
    stream.seek(start)
    return _Unpickler(stream, stand_ins, encoding).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, stand_ins: Mapping[str, Any], encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self.stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; imports nothing and refuses every name without one, even if the scan missed it."""
        if (stand_in := self.stand_ins.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return stand_in
