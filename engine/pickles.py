"""Read pickles from outside without running any code in them.

A scan reads a pickle's instructions and executes none: it finds all names that the pickle imports, and measures how
deeply values are nested and how many there are. Python crashes when it hashes a tuple that is nested some
hundred thousand levels deep (`hash` of a tuple has no recursion limit), so such a file must be refused before
anything is built from it. `read_pickle` then builds the values with inert stand-ins; for checkpoints, which hold
tensors, torch's weights-only reader does (checkpoints/reading.py). That reader cannot replace `read_pickle`: it knows
neither the instructions of Python 2's strings nor those of pickle protocol 4.
"""

import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

MAX_DEPTH = 100  # levels; the files of the supported methods stay under 20
MAX_VALUES = 1_000_000  # values, shared ones counted at every use; a ViT-L with its optimiser has under 50 000
MAX_INSTRUCTIONS = 10_000_000  # instructions; about ten for each value of a checkpoint
CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"})
CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
READS_MEMO = frozenset({"GET", "BINGET", "LONG_BINGET"})
WRITES_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
COMPUTED = "(a computed function)"  # name of a callable that is no global but the result of other instructions
# Pickle protocols 0 to 2 write some modules under their old names.
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "commands": "subprocess"}


@dataclass(slots=True)
class Value:
    """What is known of one value on the pickle's stack. The memo holds the same object, as pickle's memo does."""

    depth: int = 0  # levels of nesting below it
    size: int = 1  # values in it, itself included
    text: str = ""  # of a string
    name: str = ""  # of a global


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What one pickle holds."""

    protocol: int
    names: tuple[str, ...]  # the globals that it asks for, in their order, and COMPUTED
    number: int | None  # its first integer; torch's legacy files start with a pickle of one known number


class _Machine:
    """Pickle's stack machine, over depths and sizes in place of values."""

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
            made = self.make(opcode.name, argument, self.take(opcode))
            self.stack.extend(made for _ in opcode.stack_after)

    def take(self, opcode: pickletools.OpcodeInfo) -> list[Value]:
        """Pop what the instruction takes: a fixed number of values, or some before the last mark and all after it."""
        count, marked = _appetite(opcode)
        start = (self.marks.pop() if marked else len(self.stack)) - count
        if start < 0:
            raise IndexError("empty stack")
        taken, self.stack[start:] = self.stack[start:], []
        return taken

    def make(self, opcode: str, argument: Any, taken: list[Value]) -> Value:
        """The value that an instruction leaves on the stack: a new one, or `taken[0]`, changed in place."""
        name = ""
        if opcode in ("GLOBAL", "INST"):
            name = _global_name(*argument.split(" ", 1))
        elif opcode == "STACK_GLOBAL":
            name = _global_name(taken[0].text, taken[1].text)
        if name or (opcode in CALLS and not taken[0].name):
            self.names[name or COMPUTED] = None
        made = taken[0] if opcode in CHANGES else Value(text=argument if isinstance(argument, str) else "", name=name)
        parts = taken[1:] if opcode in CHANGES else taken
        made.depth = max([made.depth, *(1 + part.depth for part in parts)])
        made.size += sum(part.size for part in parts)
        if made.depth > MAX_DEPTH:
            raise ValueError(f"it nests values more than {MAX_DEPTH} levels deep")
        if made.size > MAX_VALUES:
            raise ValueError(f"it unfolds into more than {MAX_VALUES} values")
        return made


@cache
def _appetite(opcode: pickletools.OpcodeInfo) -> tuple[int, bool]:
    """How many values an instruction takes (before the mark, where it takes one), and whether it takes to a mark."""
    kinds = [kind.name for kind in opcode.stack_before]
    return (kinds.index("mark"), True) if "mark" in kinds else (len(kinds), False)


def _global_name(module: str, name: str = "") -> str:
    return f"{PYTHON_2.get(module, module)}.{name}"


def scan_pickle(stream: BinaryIO) -> Scan:
    """Scan one pickle and leave `stream` behind it. Raises ValueError, saying what "it" does, for a malformed pickle
    and for nesting beyond the limits."""
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
    """The value of one pickle: containers, texts, numbers, and the `stand_ins` in place of the names that it imports.

    encoding: of Python 2's texts. ValueError or UnpicklingError for a name without a stand-in. A damaged pickle may
    raise these and nearly anything else.
    """
    start = stream.tell()
    if refused := [name for name in scan_pickle(stream).names if name not in stand_ins]:
        raise ValueError(f"it asks for {refused[0]}, which is not allowed")
    stream.seek(start)
    return _Unpickler(stream, stand_ins, encoding).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, stand_ins: Mapping[str, Any], encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self.stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        """Never imports: every name that the scan missed is refused here."""
        if (stand_in := self.stand_ins.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return stand_in
