"""What tells networks of the user's own apart whose weights are equal: their code, and the values that it reads."""

import hashlib
import inspect
import marshal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.export import digest_of_tensors
from engine.files import digest

Forward = Callable[[nn.Module, Tensor], Any]  # network, images (B, 3, H, W) -> output as checkpoints/frozen.py reads it


def code_digests(network: nn.Module, forward: Forward | None) -> dict[str, str]:
    """Name of a class or function outside of installed packages -> SHA-256 of its source."""
    hashes: dict[str, str] = {}
    for item in dict.fromkeys(map(type, network.modules())):
        if is_own_code(item):
            hashes[item.__qualname__] = hashlib.sha256(_source(item)).hexdigest()
    while isinstance(forward, partial):
        forward = forward.func
    if forward and is_own_code(forward):
        function = forward if hasattr(forward, "__qualname__") else type(forward)
        hashes[function.__qualname__] = hashlib.sha256(_source(function)).hexdigest()
    return hashes


def structure_digest(network: nn.Module, image: Tensor, module: nn.Module, forward: Forward | None = None) -> str:
    """SHA-256 of what tells networks of equal weights and code apart, without what forward passes leave behind.

    network: the module, or it behind `forward`. image: (1, 3, H, W), which it has read before without an error.
    """
    values = []
    for view in (image, image.flip(-1)):
        with torch.inference_mode():
            network(view)
        values.append(_values_read(module, forward))
    return digest(_unchanged(*values))


def _values_read(network: nn.Module, forward: Forward | None = None) -> dict[str, Any]:
    """JSON values of what tells networks of equal weights and code apart: their modules, the attributes and hooks of
    these, and the values outside of its code that a function reads."""
    of_module, kinds = vars(nn.Module()), dict.fromkeys(map(type, network.modules()))
    return {
        "modules": repr(network),
        "attributes": {
            name: {key: _comparable(value) for key, value in vars(module).items() if key not in of_module}
            for name, module in network.named_modules()
        },
        "hooks": {name: [_comparable(hook) for hook in hooks(module)] for name, module in network.named_modules()},
        "methods": [
            {key: _comparable(value) for key, value in vars(kind).items() if isinstance(value, FunctionType)}
            for kind in kinds
            if is_own_code(kind)
        ],
        "forward": _comparable(forward),
    }


def hooks(module: nn.Module) -> list[Any]:
    """The functions that are called before and after a module's forward pass."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _unchanged(before: Any, after: Any) -> Any:
    """The parts of a JSON value that are the same after passes of two images."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = {key: _unchanged(value, after.get(key)) for key, value in before.items()}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [_unchanged(*pair) for pair in zip(before, after, strict=True)]
    return before if before == after else None


def _comparable(value: Any, depth: int = 6) -> Any:
    """A JSON value that differs between values with which a network may compute different features.

    Of objects other than numbers, texts, arrays, modules, functions, dataclasses and collections of these it is the
    type alone. depth: of collections and functions within each other; of functions that call each other three.
    """
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        return digest_of_tensors({"": value.detach().cpu()})
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, nn.Module):
        return [repr(value), digest_of_tensors(parameters_and_buffers(value))]
    if value is None or isinstance(value, bool | int | float | complex | str | np.number | torch.dtype):
        return repr(value)
    if isinstance(value, Mapping):
        return {_name(key): _comparable(part, depth - 1) for key, part in (value.items() if depth else ())}
    if isinstance(value, Namespace | SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__")):
        return [_name(value), _comparable(vars(value), depth - 1) if depth and not isinstance(value, type) else ""]
    parts: Sequence[Any] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=_name)
    elif isinstance(value, partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, FunctionType) and is_own_code(value):
        parts = _source(value).hex(), value.__defaults__, value.__kwdefaults__, *_variables_outside(value)
    elif callable(value) and not isinstance(value, type | FunctionType):
        owner = getattr(value, "__self__", value)  # of a method
        parts = () if isinstance(owner, nn.Module | ModuleType) else (getattr(owner, "__dict__", None),)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return [name, *(_comparable(part, depth - 1) for part in (parts if depth else ()))]


def _variables_outside(function: FunctionType) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The variables of enclosing functions and of the module that a function reads; none while one has no value yet."""
    try:
        outside = inspect.getclosurevars(function)
    except ValueError:  # an empty cell
        return {}, {}
    return outside.nonlocals, outside.globals


def _name(value: Any) -> str:
    """A text for a key or a member of a set, the same in every process."""
    if qualified := getattr(value, "__qualname__", ""):
        return str(qualified)
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)


def parameters_and_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a network by name, on the CPU."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def is_own_code(item: Any) -> bool:
    """Whether a class or function is the user's: neither Python's nor from an installed package."""
    module = getattr(item, "__module__", None) or ""
    return module.partition(".")[0] not in sys.stdlib_module_names and not _is_installed(module)


def _source(item: Any) -> bytes:
    """The source of a class or function; where there is none, as in an interactive session, its compiled code."""
    try:
        return inspect.getsource(item).encode()
    except (OSError, TypeError):
        codes = [getattr(member, "__code__", None) for member in (item, *getattr(item, "__dict__", {}).values())]
        return b"".join(marshal.dumps(code) for code in codes if code)


def source_file(module: str) -> Path | None:
    """The file of an imported module, or None if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file and Path(file).is_file() else None


def package_of(module: str) -> str:
    """Name and version, such as `mynets 1.0`, of the installed package of a module; "" if it is not installed."""
    if not _is_installed(module):
        return ""
    names = packages_distributions().get(module.partition(".")[0], [])  # takes a second
    return f"{names[0]} {version(names[0])}" if names else ""


def _is_installed(module: str) -> bool:
    """Whether the file of a module is in a folder of installed packages."""
    file = source_file(module)
    return file is not None and bool({"site-packages", "dist-packages"} & {*file.parts})
