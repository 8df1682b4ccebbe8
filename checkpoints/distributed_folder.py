"""Read a folder of torch.distributed.checkpoint (DCP): `.metadata`, which is a pickle, and files of pieces of tensors.

The pickle is built of inert stand-ins alone (engine/pickles.py), and every piece goes through the reader of foreign
files. Values that are no tensors are left out, and of the optimiser's state only names and shapes are taken.
Layout: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints.allowed import Attributes, Ignored, path_text
from checkpoints.reading import ForeignFile, foreign_file, tensor_in
from checkpoints.sniffing import JOIN_DISTRIBUTED
from engine.files import digest, open_regular, sha256_of_file
from engine.pickles import read_pickle

METADATA = ".metadata"
OPTIMISER = re.compile(r"(.*\.)?(optimi[sz]ers?|optim|opt)\..*")
Shape = tuple[int, ...]
Boxes = list[tuple[Shape, Shape]]  # where each piece begins, and its sides


def size_of(values: Any) -> Shape:
    """Stands for torch.Size."""
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError("a shape that is none")
    return tuple(values)


def nothing(*_: Any) -> None:
    """Stands for functions whose values are not needed."""


CHECKPOINT = "torch.distributed.checkpoint"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # of older versions
STAND_INS: dict[str, Any] = {
    **{
        f"{CHECKPOINT}.metadata.{name}": Attributes
        for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
    },
    f"{CHECKPOINT}.filesystem._StorageInfo": Attributes,
    **{
        f"{CHECKPOINT}.metadata.{name}": Ignored for name in ("BytesStorageMetadata", "StorageMeta", "TensorProperties")
    },
    f"{CHECKPOINT}.metadata._MEM_FORMAT_ENCODING": nothing,
    f"{SHARDED}.TensorProperties": Ignored,
    f"{SHARDED}.MEM_FORMAT_ENCODING": nothing,
    "torch.serialization._get_layout": nothing,
    "torch.Size": size_of,
    "collections.OrderedDict": OrderedDict,
    **{f"{module}.{kind}Path": path_text for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def is_distributed(path: Path) -> bool:
    return (path / METADATA).is_file()


def read_distributed(folder: Path) -> ForeignFile:
    """Tensors put together of their pieces. ValueError, in one line, for what is missing, damaged or otherwise."""
    try:
        with open_regular(folder / METADATA) as stream:
            metadata = read_pickle(stream, STAND_INS, "latin1").values
        stored, places = metadata["state_dict_metadata"], metadata["storage_data"]
        pieces = {(index.values["fqn"], index.values.get("offset")): place.values for index, place in places.items()}
        _check_lengths(folder, pieces.values())
        tensors = {
            name: _tensor(folder, name, entry, pieces)
            for name, entry in stored.items()
            if isinstance(entry, Attributes) and "chunks" in entry.values
        }
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read: {error.filename} ({error.strerror}); copy the whole folder"
        ) from error
    except Exception as error:  # of any type: the files decide
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{folder} is a distributed checkpoint that cannot be read ({reason}); {JOIN_DISTRIBUTED}"
        ) from error
    files = sorted({METADATA, *(place["relative_path"] for place in pieces.values())})
    return foreign_file(folder, digest([sha256_of_file(folder / name) for name in files]), tensors)


def _check_lengths(folder: Path, places: Collection[Mapping[str, Any]]) -> None:
    """ValueError unless the files are as long as all their pieces together, which bounds the memory that these take."""
    claimed = sum(place["length"] for place in places)
    held = sum((folder / name).stat().st_size for name in {_file_of(place) for place in places})
    if not isinstance(claimed, int) or min((place["length"] for place in places), default=0) < 0 or claimed > held:
        raise ValueError(f"its pieces are of {claimed} bytes, its files of {held}")


def _tensor(folder: Path, name: str, stored: Attributes, pieces: Mapping[tuple[str, Any], dict[str, Any]]) -> Tensor:
    size = stored.values["size"]
    boxes: Boxes = [(chunk.values["offsets"], chunk.values["sizes"]) for chunk in stored.values["chunks"]]
    places = [pieces[name, start if len(boxes) > 1 or (name, start) in pieces else None] for start, _ in boxes]
    if prod(size) > sum(place["length"] for place in places):
        raise ValueError(f"{name} is larger than its files")
    _check_boxes(name, size, boxes)
    if OPTIMISER.fullmatch(name):
        return torch.empty(size, device="meta")
    whole: Tensor | None = None
    for (start, sides), place in zip(boxes, places, strict=True):
        piece = _piece(folder, place)
        if piece.shape != sides:
            raise ValueError(f"a piece of {name} is {tuple(piece.shape)}, not {sides}")
        whole = piece.new_empty(size) if whole is None else whole
        whole[tuple(slice(first, first + side) for first, side in zip(start, sides, strict=True))] = piece
    return torch.empty(size) if whole is None else whole


def _check_boxes(name: str, size: Shape, boxes: Boxes) -> None:
    """ValueError unless the pieces cover the tensor, each value once."""
    inside = all(
        len(start) == len(sides) == len(size)
        and all(first + side <= whole for first, side, whole in zip(start, sides, size, strict=True))
        for start, sides in boxes
    )
    covered = inside and sum(prod(sides) for _, sides in boxes) == prod(size)
    if covered and len(boxes) > 1:  # as many values as it has: each once, unless one is in no piece
        seen = np.zeros(size, bool)
        for start, sides in boxes:
            seen[tuple(slice(first, first + side) for first, side in zip(start, sides, strict=True))] = True
        covered = bool(seen.all())
    if not covered:
        raise ValueError(f"the pieces of {name} do not make a tensor of {size}")


def _file_of(place: Mapping[str, Any]) -> str:
    """Name of the file in the folder that holds a piece."""
    path, transforms = place["relative_path"], place.get("transform_descriptors")
    if transforms or not isinstance(path, str) or Path(path).name != path:
        raise ValueError(f"pieces that are transformed ({transforms}) or elsewhere ({path!a})")
    return path


def _piece(folder: Path, place: Mapping[str, Any]) -> Tensor:
    path, offset, length = _file_of(place), place["offset"], place["length"]
    with open_regular(folder / path) as stream:
        if not 0 <= offset <= offset + length <= os.fstat(stream.fileno()).st_size:
            raise ValueError(f"{path} ends before a piece of it")
        stream.seek(offset)
        return tensor_in(stream.read(length))
