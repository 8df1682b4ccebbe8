"""Nested checkpoint values as flat dictionaries: every tensor and every small value under its dotted path.

`{"teacher": {"module.backbone.cls_token": t}, "args": Namespace(arch="vit_small")}` becomes the tensor
`teacher.backbone.cls_token` and the fact `args.arch`. Wrapper components come from DataParallel and
DistributedDataParallel and DeepSpeed (`module`), torch.compile (`_orig_mod`), FSDP, activation checkpointing, and
Lightning's strategies (`_forward_module`).

ValueErrors raised here omit the file's name; the caller puts it in front of the message.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from checkpoints.allowed import Attributes
from engine.pickles import MAX_DEPTH, MAX_VALUES

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
FLAT_PARAMETER = re.compile(r"_?flat_param(_\d+)?")  # torch's FSDP; the numbered ones are fairscale's
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
    """Tensors and facts of a nested value. Facts are short JSON values; all other values are left out.

    Raises ValueError for two tensors with the same path, tensors that are not plain and dense, and endless nesting.
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
    """The tensors under names without wrapper components. Raises ValueError where two names become one, and for the
    flattened parameters of FSDP, which hold a whole layer's weights in one row."""
    sources: dict[str, str] = {}
    for path in tensors:
        parts = path.split(".")
        if FLAT_PARAMETER.fullmatch(parts[-1]):
            raise ValueError(f"holds flattened FSDP parameters ({path!a}); {GATHER}")
        name = _bare(parts) or path
        if name in sources:
            raise ValueError(f"holds {sources[name]!a} and {path!a}, which are one name without wrappers: {name!a}")
        sources[name] = path
    return {name: tensors[path] for name, path in sources.items()}


def without_wrappers(prefix: str) -> str:
    """A prefix as it reads after `unwrap`, with a final dot: `student.module.backbone` -> `student.backbone.`"""
    return f"{_bare(prefix.rstrip('.').split('.'))}."


def _bare(parts: list[str]) -> str:
    return ".".join(part for part in parts if part not in WRAPPERS)


def without_lightning_attribute(tensors: dict[str, torch.Tensor], facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Drop the name under which a LightningModule keeps its model, `state_dict.model.x` -> `state_dict.x`, if the file
    is Lightning's and all its weights share one; other names stay."""
    weights = [name.split(".") for name in tensors if name.startswith("state_dict.")]
    if LIGHTNING not in facts or len({parts[1] for parts in weights}) != 1 or min(map(len, weights)) < 3:
        return tensors
    attribute = f"state_dict.{weights[0][1]}."
    renamed = {name: f"state_dict.{name.removeprefix(attribute)}" for name in tensors if name.startswith(attribute)}
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _is_small(value: Any) -> bool:
    """Whether a value becomes a fact: a scalar or a short list of scalars, of types that JSON has."""
    if isinstance(value, list | tuple | set):
        return len(value) <= LONGEST_LIST and all(map(_is_scalar, value))
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    if isinstance(value, int):
        return value.bit_length() <= 64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, torch.dtype | torch.device)


def _json(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(map(_json, value), key=str)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, torch.dtype | torch.device) else value


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested value with their paths, depth first in the file's order, without recursion."""
    pending = [("", tree, 0)]
    seen = 0
    while pending:
        path, value, depth = pending.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_VALUES:
            raise ValueError(f"nests its values without end (at {path[:60]!a})")
        children = _children(path, value)
        if children is None:
            yield path, value
        else:
            pending.extend((_join(path, key), child, depth + 1) for key, child in reversed(children))


def _children(path: str, value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Attributes):
        return list(value.values.items())
    if isinstance(value, dict):
        return list(dict.items(value))  # not value.items(): a file can give an OrderedDict an attribute of that name
    if isinstance(value, SEQUENCES) and any(not isinstance(item, SCALARS) or not _is_scalar(item) for item in value):
        return list(enumerate(value))
    return None


def _join(path: str, key: Any) -> str:
    if not isinstance(key, KEYS):
        raise ValueError(f"has a key of type {type(key).__name__} in {path or 'its root'!a}, where a name is expected")
    return f"{path}.{key}" if path else str(key)


def _plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient and hooks, shape and type as they are."""
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        raise ValueError(f"holds a tensor at {path!a} that is not a plain dense one ({tensor.dtype}, {tensor.layout})")
    stored = tensor.untyped_storage().nbytes() // tensor.itemsize
    if tensor.numel() > max(stored, MAX_VALUES):  # a stride of 0: small files become more than any memory holds
        raise ValueError(f"holds a tensor at {path!a} that repeats {stored} values up to {tensor.numel()}; {UNFOLD}")
    return tensor.detach()
