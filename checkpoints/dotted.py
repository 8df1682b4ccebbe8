"""Flatten the nested values of a checkpoint: dotted path -> tensor, and dotted path -> small value.

`{"teacher": {"module.backbone.cls_token": t}, "args": Namespace(arch="vit_small")}` becomes the tensor
`teacher.backbone.cls_token` and the fact `args.arch`. Components of wrappers are removed: those of DataParallel,
DistributedDataParallel and DeepSpeed (`module`), torch.compile (`_orig_mod`), FSDP, activation checkpointing, and
Lightning's strategies (`_forward_module`).

Messages of ValueErrors raised here do not name the file; the caller puts its name in front.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from checkpoints.allowed import Attributes
from engine.pickles import MAX_DEPTH, MAX_VALUES

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
FLAT_PARAMETER = re.compile(r"_?flat_param(_\d+)?")  # torch's FSDP, or with a number fairscale's
LIGHTNING = "pytorch-lightning_version"
SEQUENCES = (list, tuple)
SCALARS = (str, int, float, type(None), torch.dtype, torch.device)
KEYS = (str, int, float, type(None))
LONGEST_LIST = 64
LONGEST_TEXT = 1000
GATHER = (
    "gather it where it was made, with get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
    "of torch.distributed.checkpoint.state_dict or FSDP's StateDictType.FULL_STATE_DICT, and save that"
)

UNFOLD = "save clones: {name: tensor.clone() for name, tensor in model.state_dict().items()}"


def split(tree: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and facts (short JSON values) of a nested value; all other values are left out.

    Raises ValueError for two tensors with the same path, tensors that are not plain and dense, and too deep nesting.
    """
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for path, value in _leaves(tree):
        if isinstance(value, torch.Tensor):
            if path in tensors:
                raise ValueError(f"holds two tensors named {path!a}")
            tensors[path] = _plain(path, value)
        elif _is_small(value):
            facts[path] = _json(value)
    return tensors, facts


def unwrap(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under names without wrapper components.

    Raises ValueError if two names become one, and for flattened parameters of FSDP, each of which holds all weights of
    a layer.
    """
    sources: dict[str, str] = {}  # new name -> old name
    for path in tensors:
        parts = path.split(".")
        if FLAT_PARAMETER.fullmatch(parts[-1]):
            raise ValueError(f"holds flattened FSDP parameters ({path!a}); {GATHER}")
        name = _without_wrapper_parts(parts) or path
        if name in sources:
            raise ValueError(f"holds {sources[name]!a} and {path!a}, which are one name without wrappers: {name!a}")
        sources[name] = path
    return {name: tensors[path] for name, path in sources.items()}


def without_wrappers(prefix: str) -> str:
    """A user's prefix as `unwrap` changes names, with a final dot: `student.module.backbone` -> `student.backbone.`"""
    return f"{_without_wrapper_parts(prefix.rstrip('.').split('.'))}."


def _without_wrapper_parts(parts: list[str]) -> str:
    """Dotted name from those parts that are no wrapper components."""
    return ".".join(part for part in parts if part not in WRAPPERS)


def without_lightning_attribute(tensors: dict[str, torch.Tensor], facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a Lightning file without the module's attribute: `state_dict.model.x` becomes `state_dict.x`.

    Unchanged for other files, and if the weights are in several attributes.
    """
    split_names = [name.split(".") for name in tensors if name.startswith("state_dict.")]
    if LIGHTNING not in facts or len({parts[1] for parts in split_names}) != 1 or min(map(len, split_names)) < 3:
        return tensors
    prefix = f"state_dict.{split_names[0][1]}."
    new_names = {name: f"state_dict.{name.removeprefix(prefix)}" for name in tensors if name.startswith(prefix)}
    return {new_names.get(name, name): tensor for name, tensor in tensors.items()}


def _is_small(value: Any) -> bool:
    """Whether a value becomes a fact: a scalar that JSON can represent, or a short list of scalars."""
    if isinstance(value, list | tuple | set):
        return len(value) <= LONGEST_LIST and all(map(_is_scalar, value))
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    """Whether a value is a short text, an integer of 64 bits, a finite float, None, or a dtype or device of torch."""
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    if isinstance(value, int):
        return value.bit_length() <= 64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, torch.dtype | torch.device)


def _json(value: Any) -> Any:
    """The JSON form of a fact: sets become sorted lists, dtypes and devices their names."""
    if isinstance(value, set):
        return sorted(map(_json, value), key=str)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, torch.dtype | torch.device) else value


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Dotted paths and leaves of a nested value, depth first in the file's order, without recursion."""
    pending = [("", tree, 0)]
    count = 0
    while pending:
        path, value, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise ValueError(f"nests its values without end (at {path[:60]!a})")
        children = _children(path, value)
        if children is None:
            yield path, value
        else:
            pending.extend((_join(path, key), child, depth + 1) for key, child in reversed(children))


def _children(path: str, value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values in a container; None for a leaf."""
    if isinstance(value, Attributes):
        return list(value.values.items())
    if isinstance(value, dict):
        return list(dict.items(value))  # not value.items(), because a file can give an OrderedDict such an attribute
    if isinstance(value, SEQUENCES) and any(not isinstance(item, SCALARS) or not _is_scalar(item) for item in value):
        return list(enumerate(value))
    return None


def _join(path: str, key: Any) -> str:
    """The path of a child. Raises ValueError for a key that is no text, number or None."""
    if not isinstance(key, KEYS):
        raise ValueError(f"has a key of type {type(key).__name__} in {path or 'its root'!a}, where a name is expected")
    return f"{path}.{key}" if path else str(key)


def _plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient and hooks. Raises ValueError unless it is a plain dense tensor."""
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        raise ValueError(f"holds a tensor at {path!a} that is not a plain dense one ({tensor.dtype}, {tensor.layout})")
    stored = tensor.untyped_storage().nbytes() // tensor.itemsize
    if tensor.numel() > max(stored, MAX_VALUES):  # strides of 0 let a small file claim any amount of memory
        raise ValueError(f"holds a tensor at {path!a} that repeats {stored} values up to {tensor.numel()}; {UNFOLD}")
    return tensor.detach()
