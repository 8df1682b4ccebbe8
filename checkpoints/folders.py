"""Checkpoints that are folders: those of Hugging Face transformers and the hub, weights in several files with an index,
and torch.distributed.checkpoint (DCP).

All weights go through reading.py like every foreign file; of JSON files only values are taken. DCP's `.metadata` is a
pickle, which is built of inert stand-ins alone (engine/pickles.py); values that are no tensors are left out, and of the
optimiser's state only names and shapes are taken. Layout: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download
from torch import Tensor

from checkpoints.allowed import Attributes, Ignored, path_text
from checkpoints.dotted import split
from checkpoints.reading import ForeignFile, foreign_file, read_foreign, tensor_in
from checkpoints.sniffing import INDEX_FILES, JOIN_DISTRIBUTED
from engine.files import digest, open_regular, sha256_of_file
from engine.pickles import read_pickle

WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in the order that transformers and timm (models/_hub.py) prefer
PREPARATION = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # of version 5 on: the same under "image_processor", beside a tokenizer


def is_transformers(folder: Path) -> bool:
    """Whether a folder's config.json names one of transformers' kinds of models."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config and "architecture" not in config


def read_folder(folder: Path) -> ForeignFile:
    """Tensors of all files; facts `config.*` and `preparation.*`. ValueError names what is missing or held twice."""
    tree: dict[str, Any] = {"config": _json(folder / "config.json")}
    if (folder / PREPARATION).exists():
        tree["preparation"] = _json(folder / PREPARATION)
    elif (folder / PROCESSOR).exists():
        tree["preparation"] = _json(folder / PROCESSOR).get("image_processor")
    return _joined(folder, _files(folder), split(tree)[1])


def is_in_parts(path: Path) -> bool:
    """Whether a path is a multi-file checkpoint (its index file or its folder) without transformers' config.json."""
    folder = path.parent if path.name in INDEX_FILES else path
    return not (folder / "config.json").exists() and any((folder / name).is_file() for name in INDEX_FILES)


def read_parts(path: Path) -> ForeignFile:
    """Tensors of all files that an index lists. ValueError as for `read_folder`."""
    folder = path.parent if path.name in INDEX_FILES else path
    return _joined(folder, _files(folder), {})


def _joined(folder: Path, names: list[str], facts: dict[str, Any]) -> ForeignFile:
    files = [read_foreign(folder / name, part=len(names) > 1) for name in names]
    tensors: dict[str, Any] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise ValueError(f"{file.path} holds {min(twice)!a} a second time")
        tensors |= file.tensors
    return ForeignFile(path=folder, sha256=digest([file.sha256 for file in files]), tensors=tensors, facts=facts)


def _files(folder: Path) -> list[str]:
    """Names of the weight files: one, or those that an index lists."""
    if weights := next((name for name in WEIGHTS if (folder / name).exists()), None):
        return [weights]
    index = next((name for name in INDEX_FILES if (folder / name).exists()), None)
    if index is None:
        raise ValueError(f"there is no {' or '.join((*WEIGHTS, *INDEX_FILES))} in {folder}")
    listed = _json(folder / index).get("weight_map")
    names = set(listed.values()) if isinstance(listed, dict) else set()
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ValueError(f"{folder / index} lists no files of this folder")
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise ValueError(f"{folder / index} lists {missing[0]}, which is not there; download it as well")
    return sorted(names)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings by name")
    return content


FILES = ["config.json", PREPARATION, PROCESSOR, "*.safetensors", "*.safetensors.index.json"]


def transformers_snapshot(place: str) -> Path | None:
    """Folder of a hub repository, `user/name` or `user/name@revision`, that transformers wrote; None for any other.

    Weights are fetched as safetensors alone. Raises ValueError where there is no way to the hub.
    """
    name, _, revision = place.partition("@")
    try:
        with offline_if_unreachable():
            config = Path(hf_hub_download(name, "config.json", revision=revision or None))
            if not is_transformers(config.parent):
                return None
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=FILES))
    except ConnectionError as error:
        raise ValueError(f"hf-hub:{place} cannot be fetched: {error}") from error
    except (OSError, ValueError, RuntimeError):  # what is wrong with the name is for timm to say
        return None


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Use only the hub's cache if the hub is unreachable, because its client would retry for minutes.

    Raises ConnectionError for files that the cache lacks.
    """
    if constants.HF_HUB_OFFLINE or _is_reachable():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"there is no connection to {constants.ENDPOINT}, and its cache {constants.HF_HUB_CACHE} does not hold the "
            "weights; connect, or name a file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of any type: they are those of the hub's own client
        return False
    return True


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
    """Tensors assembled from their pieces. Raises a one-line ValueError for missing, damaged or unsupported files."""
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
