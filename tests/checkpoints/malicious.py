"""Checkpoints that try to run code or to crash or exhaust their reader.

`CALLS` are values that create a file, `marker`, when an ordinary unpickler builds them. `RAW` are pickles written
instruction by instruction: names that no pickler writes, bombs, and tensors that do not fit their storage.
`CONTAINERS` wrap a pickle the ways that torch.load accepts.
"""

import argparse
import copyreg
import importlib
import operator
import os
import pickle
import runpy
import subprocess
import timeit
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from yacs.config import CfgNode

PROTOCOL = b"\x80\x02"


class Call:
    """Pickles as a call of `function(*arguments)`, with a state for the result's `__setstate__` if there is one."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple:
        return self.parts

    def __call__(self) -> None:
        """Let one Call be the function of another, which pickle requires to be callable."""


def touch(marker: Path) -> Call:
    return Call(os.system, f"touch '{marker}'")


def code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def module_os() -> Call:
    return Call(importlib.import_module, "os")


def ordered_with_state(marker: Path) -> OrderedDict:
    value = OrderedDict(a=1)
    value._metadata = {"": touch(marker)}
    return value


def node_with_item(marker: Path) -> CfgNode:
    node = CfgNode()
    dict.__setitem__(node, "TYPE", touch(marker))
    return node


def node_with_state(marker: Path) -> CfgNode:
    node = CfgNode()
    node.__dict__[CfgNode.IMMUTABLE] = touch(marker)
    return node


def object_array(marker: Path) -> np.ndarray:
    array = np.empty(1, object)
    array[0] = touch(marker)
    return array


CALLS: dict[str, Callable[[Path], Any]] = {
    "os_system": touch,
    "eval": lambda marker: Call(eval, code(marker)),
    "exec": lambda marker: Call(exec, code(marker)),
    "open": lambda marker: Call(open, str(marker), "w"),
    "popen": lambda marker: Call(subprocess.Popen, ["touch", str(marker)]),
    "check_output": lambda marker: Call(subprocess.check_output, ["touch", str(marker)]),
    "getattr_chain": lambda marker: Call(Call(getattr, module_os(), "system"), f"touch '{marker}'"),
    "attrgetter": lambda marker: Call(Call(operator.attrgetter("system"), module_os()), f"touch '{marker}'"),
    "methodcaller": lambda marker: Call(operator.methodcaller("system", f"touch '{marker}'"), module_os()),
    "timeit": lambda marker: Call(timeit.timeit, code(marker), "pass", timeit.default_timer, 1),
    "runpy": lambda marker: Call(runpy._run_code, code(marker), {}),
    "pickle_in_pickle": lambda marker: Call(pickle.loads, pickle.dumps(touch(marker))),
    "dict_key": lambda marker: {touch(marker): 1},
    "dict_value": lambda marker: {"model": {"weight": torch.ones(2), "bias": touch(marker)}},
    "tuple": lambda marker: {"args": (1, (2, (touch(marker),)))},
    "set": lambda marker: {touch(marker)},
    "ordered_dict_state": ordered_with_state,
    "ordered_dict_argument": lambda marker: Call(OrderedDict, [("a", touch(marker))]),
    "counter_argument": lambda marker: Call(Counter, {"a": touch(marker)}),
    "default_factory": lambda marker: Call(defaultdict, touch(marker)),
    "namespace_attribute": lambda marker: argparse.Namespace(arch="vit_small", output=touch(marker)),
    "namespace_state": lambda marker: Call(argparse.Namespace, state={"__class__": touch(marker)}),
    "namespace_slots": lambda marker: Call(argparse.Namespace, state=({}, {"__dict__": touch(marker)})),
    "node_item": node_with_item,
    "node_state": node_with_state,
    "parameter_hook": lambda marker: Call(
        torch._utils._rebuild_parameter, torch.ones(2), False, OrderedDict(hook=touch(marker))
    ),
    "parameter_state": lambda marker: Call(
        torch._utils._rebuild_parameter_with_state, torch.ones(2), False, OrderedDict(), {"tag": touch(marker)}
    ),
    "tensor_subclass": lambda marker: Call(
        torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (f"touch '{marker}'",), {}
    ),
    "numpy_scalar": lambda marker: Call(np._core.multiarray.scalar, np.dtype("f8"), touch(marker)),
    "numpy_array": object_array,
    "reconstructor": lambda marker: Call(copyreg._reconstructor, dict, dict, {"a": touch(marker)}),
    "torch_load": lambda marker: [Call(torch.load, "/nowhere", "cpu"), touch(marker)][::-1],
    "torch_hub": lambda marker: [touch(marker), Call(torch.hub.load, "/nowhere", "model")],
}


def name(dotted: str) -> bytes:
    """GLOBAL of a module and a name, given as "module name"."""
    return b"c" + dotted.replace(" ", "\n").encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def small_tensor(count: int = 2) -> bytes:
    return tensor(count, b"K\x00", b"K\x02\x85", b"K\x01\x85")


def storage(count: int) -> bytes:
    """BINPERSID of a float storage that claims `count` elements."""
    number = b"\x8a\x08" + count.to_bytes(8, "little", signed=True)
    return b"(" + text("storage") + name("torch FloatStorage") + text("0") + text("cpu") + number + b"tQ"


def tensor(count: int, offset: bytes, size: bytes, stride: bytes) -> bytes:
    hooks = name("collections OrderedDict") + b")R"
    return (
        name("torch._utils _rebuild_tensor_v2")
        + b"("
        + storage(count)
        + offset
        + size
        + stride
        + b"\x89"
        + hooks
        + b"tR"
    )


def under_key(value: bytes) -> bytes:
    """`{"model": value, "weight": a valid tensor}`: only the value can be a reason to refuse it."""
    return PROTOCOL + b"}" + text("model") + value + b"s" + text("weight") + small_tensor() + b"s."


def list_bomb() -> bytes:
    """Ten lists, each holding the one before ten times: 10 billion values from 300 bytes."""
    value: list = [0] * 10
    for _ in range(9):
        value = [value] * 10
    return pickle.dumps({"model": value}, 2)


def late_bomb() -> bytes:
    """The same filled from the outside in, so that every list is still empty when it is appended."""
    lists = [bytes([i]) for i in range(10)]
    empty_lists = b"".join(b"]q" + i for i in lists)
    appends = b"".join(b"h" + outer + b"(" + (b"h" + inner) * 10 + b"e" for outer, inner in pairwise(lists))
    return under_key(b"](" + empty_lists + appends + b"e")


def cycle() -> bytes:
    value: list = []
    value += [value, {}]
    return pickle.dumps({"model": value}, 2)


RAW: dict[str, Callable[[], bytes]] = {
    "deep_tuple_as_key": lambda: PROTOCOL + b"})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "deep_tuple_in_set": lambda: PROTOCOL + name("__builtin__ set") + b"](" + b")" + b"\x85" * 500_000 + b"e\x85R.",
    "deep_lists": lambda: under_key(b"]" * 100_000 + b"a" * 99_999),
    "deep_dicts": lambda: under_key((b"}" + text("a")) * 50_000 + b"K\x01" + b"s" * 50_000),
    "list_bomb": list_bomb,
    "late_bomb": late_bomb,
    "cycle": cycle,
    "dotted_global": lambda: under_key(name("argparse Namespace.__init__.__globals__")),
    "stack_global": lambda: b"\x80\x04\x8c\x08argparse\x8c\x1eNamespace.__init__.__globals__\x93.",
    "getattr_of_namespace": lambda: under_key(
        name("__builtin__ getattr") + name("argparse Namespace") + text("__init__") + b"\x86R"
    ),
    "getattr_of_history": lambda: under_key(
        name("__builtin__ getattr")
        + name("mmengine.logging.history_buffer HistoryBuffer")
        + text("__setstate__")
        + b"\x86R)R"
    ),
    "call_of_a_string": lambda: under_key(text("os.system") + text("true") + b"\x85R"),
    "instance": lambda: PROTOCOL + b"(" + text("true") + b"ios\nsystem\n.",
    "extension": lambda: PROTOCOL + b"\x82\x01.",
    "module_source": lambda: under_key(
        b"(" + text("module") + name("collections OrderedDict") + text("a.py") + text("x") + b"tQ"
    ),
    "text_in_place_of_storage": lambda: under_key(text("/etc/passwd") + b"Q"),
    "item_of_a_tensor": lambda: under_key(small_tensor() + b"K\x00K\x01s"),
    "storage_beyond_file": lambda: under_key(tensor(2**26, b"K\x00", b"J\x00\x00\x00\x04\x85", b"K\x01\x85")),
    "storage_negative": lambda: under_key(small_tensor(-8)),
    "tensor_beyond_storage": lambda: under_key(tensor(2, b"K\x00", b"J\x00\x00\x00\x10\x85", b"K\x01\x85")),
    "stride_beyond_storage": lambda: under_key(tensor(2, b"K\x00", b"K\x02\x85", b"J\x00\x00\x00\x10\x85")),
    "offset_beyond_storage": lambda: under_key(tensor(2, b"J\x00\x00\x00\x10", b"K\x02\x85", b"K\x01\x85")),
    "offset_negative": lambda: under_key(tensor(2, b"J\xf0\xff\xff\xff", b"K\x02\x85", b"K\x01\x85")),
    "numpy_object_scalar": lambda: under_key(
        name("numpy._core.multiarray scalar") + name("numpy dtype") + text("O8") + b"\x85R" + text("x") + b"\x86R"
    ),
    "numpy_short_scalar": lambda: under_key(
        name("numpy._core.multiarray scalar") + name("numpy dtype") + text("f8") + b"\x85R" + b"U\x01x\x86R"
    ),
    "memory": lambda: under_key(name("__builtin__ bytearray") + b"\x8a\x06\x00\x00\x00\x00\x00\x7f\x85R"),
    "key_without_a_name": lambda: PROTOCOL + b"}K\x01K\x02\x86" + small_tensor() + b"s.",
    "unknown_memo": lambda: PROTOCOL + b"h\x07.",
    "empty_stack": lambda: PROTOCOL + b"R.",
    "no_stop": lambda: PROTOCOL + b"}",
    "names_with_escapes": lambda: PROTOCOL + b"cos\x1b[31m\nsystem\x1b]0;x\x07\n.",
}


def as_archive(pickled: bytes, path: Path) -> None:
    """torch's zip format with one storage of two floats."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", np.ones(2, "<f4").tobytes())
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def as_legacy(pickled: bytes, path: Path) -> None:
    """The format before torch 1.6: four pickles around the values, then the storages, here of two floats.

    A storage's description has one more part than in an archive: the storage that it is a view of.
    """
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    keys = ["0"] if b"tQ" in pickled else []
    storages = (2).to_bytes(8, "little") + np.ones(2, "<f4").tobytes()
    parts = [pickle.dumps(part, 2) for part in head] + [pickled.replace(b"tQ", b"NtQ"), pickle.dumps(keys, 2)]
    path.write_bytes(b"".join(parts) + storages)


def as_pickle(pickled: bytes, path: Path) -> None:
    path.write_bytes(pickled)


CONTAINERS: dict[str, Callable[[bytes, Path], None]] = {
    "archive": as_archive,
    "legacy": as_legacy,
    "pickle": as_pickle,
}
