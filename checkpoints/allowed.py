"""The names that a foreign pickle may use, and the inert stand-ins that replace them.

torch's weights-only reader looks up each name of a pickle in a table instead of importing it. The table has torch's own
names and those that the process registered by `torch.serialization.add_safe_globals`. During a read the registered ones
are replaced by `STAND_INS`: classes and functions of this file that only store their arguments. No class of argparse,
yacs, numpy, pathlib or mmengine is ever built, so none of their `__init__`, `__setstate__` or `__reduce__` can run, and
none of them needs to be installed.
"""

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Attributes:
    """Stands for an object with attributes, whose values it stores in a plain dict, without setting them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("attributes that are not a dict")
        self.values = state


class Ignored:
    """Stands for an object whose contents are not needed."""

    def __setstate__(self, state: Any) -> None:
        pass


class NumpyType:
    """Stands for `numpy.dtype(code, align, copy)`, whose pickled state has the byte order at index 1."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def number(self, raw: bytes) -> Any:
        """The Python value of one scalar. Raises ValueError unless it is a boolean, integer, float or text."""
        text = f"{self.order}{self.code}"
        if not re.fullmatch(r"[<>|=][biufU][0-9]{1,3}", text):
            raise ValueError(f"a numpy scalar of type {text!a:.40}")
        return np.frombuffer(raw, text)[0].item()


def numpy_scalar(dtype: NumpyType, raw: bytes) -> Any:
    """Stands for `numpy.core.multiarray.scalar`."""
    if type(dtype) is not NumpyType:
        raise ValueError("a numpy scalar without a type")
    return dtype.number(raw)


def numpy_array(*_: Any) -> Ignored:
    """Stands for `numpy.core.multiarray._reconstruct`."""
    return Ignored()


def default_dict(*_: Any) -> OrderedDict:
    """Stands for `collections.defaultdict(factory)`: keeps the items, but not the factory."""
    return OrderedDict()


def path_text(*parts: str) -> str:
    """Stands for a pathlib path of any system: its parts, joined by slashes."""
    return "/".join(parts).replace("//", "/")


def method_of_ignored(owner: Any, name: str) -> None:
    """Stands for `getattr`, by which mmengine's HistoryBuffer names its methods. Raises ValueError for other uses."""
    if owner is not Ignored:
        raise ValueError(f"builtins.getattr of {name!a:.40}")


STAND_INS: dict[str, Any] = {
    "argparse.Namespace": Attributes,  # `args` of MAE, LUT, DINO, iBOT, MOCA, data2vec, BEiT
    "yacs.config.CfgNode": OrderedDict,  # `config` of SimMIM; its items are the settings, its attributes are flags
    "collections.defaultdict": default_dict,  # `state` of torch optimisers, if a file stores them as they are
    "builtins.dict": dict,  # the usual factories of a defaultdict
    "builtins.list": list,
    "pathlib.PosixPath": path_text,  # output folders in `args` and in Lightning's hyper_parameters
    "pathlib.WindowsPath": path_text,
    "pathlib._local.PosixPath": path_text,  # the same, saved under Python 3.13
    "pathlib._local.WindowsPath": path_text,
    "numpy.dtype": NumpyType,  # numpy scalars: `max_accuracy` of SimMIM, learning rates, losses
    "numpy.core.multiarray.scalar": numpy_scalar,  # numpy 1
    "numpy._core.multiarray.scalar": numpy_scalar,  # numpy 2
    "numpy.ndarray": Ignored,  # states of random generators, mmengine's histories
    "numpy.core.multiarray._reconstruct": numpy_array,
    "numpy._core.multiarray._reconstruct": numpy_array,
    "mmengine.logging.history_buffer.HistoryBuffer": Ignored,  # `message_hub` of every mmengine file
    "builtins.getattr": method_of_ignored,
}

# Names in torch's own table that a checkpoint of dense tensors needs; all others are refused.
TORCH_NAMES = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",  # milestones of MultiStepLR
        "builtins.set",  # attributes of CfgNode, names of sparse modules in DeepSpeed files
        "_codecs.encode",  # how pickle protocol 2 writes bytes
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",  # unsigned 16 to 64 bit
        "torch._utils._rebuild_parameter",
        "torch.Size",
        "torch.device",
    }
)


def is_allowed(name: str, attribute_classes: Collection[str] = ()) -> bool:
    """Whether a pickle may use a name: that of a stand-in, or of torch's tensors, storages and dtypes.

    attribute_classes: further names that are allowed, for which `Attributes` stands.
    """
    if name in STAND_INS or name in TORCH_NAMES or name in attribute_classes:
        return True
    if re.fullmatch(r"torch\.(cuda\.|storage\.)?[A-Z][A-Za-z0-9]*Storage", name):
        return True
    return isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype) and name.startswith("torch.")


@contextmanager
def only_stand_ins(attribute_classes: Collection[str] = ()) -> Iterator[None]:
    """Context in which torch's weights-only reader uses `STAND_INS` instead of what other code registered.

    torch has one table for the whole process, so reads in other threads use it as well.

    attribute_classes: further names, for which `Attributes` stands.
    """
    registered = torch.serialization.get_safe_globals()
    stand_ins = dict.fromkeys(attribute_classes, Attributes) | STAND_INS
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(stand_in, name) for name, stand_in in stand_ins.items()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)
