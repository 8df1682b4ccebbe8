"""Read checkpoints that are folders: of transformers, several files with an index, distributed checkpoints.

All weights are read by reading.py, like every foreign file. `.metadata` of torch.distributed.checkpoint (DCP) is a
pickle, which is built only of inert stand-ins (engine/pickles.py). Values that are not tensors are left out, and the
optimiser's state is read as names and shapes. Layout: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

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
from torch import Tensor

from checkpoints.allowed import Attributes, Ignored, path_text
from checkpoints.dotted import split
from checkpoints.reading import ForeignFile, foreign_file, read_foreign, tensor_in
from checkpoints.sniffing import INDEX_FILES, JOIN_DISTRIBUTED
from engine.files import digest, open_regular, read_json, sha256_of_file
from engine.pickles import read_pickle

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # transformers and timm (models/_hub.py) prefer the first
PREPARATION = "preprocessor_config.json"
Settings = dict[str, Any]  # of these JSON files
ADAPTER = "adapter_config.json"  # written by peft and by save_pretrained of a model with an adapter
PROCESSOR = "processor_config.json"  # since version 5; has the same settings under "image_processor"


def is_transformers(folder: Path) -> bool:
    """Whether a folder's config.json is that of a transformers model."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config and "architecture" not in config


def read_folder(folder: Path) -> ForeignFile:
    """The checkpoint in a folder of transformers, with facts `config.*` and `preparation.*`.

    Raises ValueError for missing files, for a tensor that two files hold, and for an adapter, which the library would
    apply to the weights.
    """
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER}), which is not applied to the weights here: save the merged model "
            f"(model.merge_and_unload() of peft), or remove {ADAPTER} to evaluate the model without it"
        )
    settings: dict[str, Any] = {"config": read_json(folder / "config.json", type=Settings)}
    if (folder / PREPARATION).exists():
        settings["preparation"] = read_json(folder / PREPARATION, type=Settings)
    elif (folder / PROCESSOR).exists():
        settings["preparation"] = read_json(folder / PROCESSOR, type=Settings).get("image_processor")
    try:
        _, facts = split(settings)
    except ValueError as error:
        raise ValueError(f"{folder}: a JSON file in it {error}") from error
    return _read_files(folder, _weight_files(folder), facts)


def is_in_parts(path: Path) -> bool:
    """Whether a path is a checkpoint in several files (its index or its folder) without transformers' config.json."""
    folder = path.parent if path.name in INDEX_FILES else path
    return not (folder / "config.json").exists() and any((folder / name).is_file() for name in INDEX_FILES)


def read_parts(path: Path) -> ForeignFile:
    """The checkpoint in several files, named by its index or its folder. Raises ValueError as `read_folder`."""
    folder = path.parent if path.name in INDEX_FILES else path
    return _read_files(folder, _weight_files(folder), {})


def _read_files(folder: Path, names: list[str], facts: dict[str, Any]) -> ForeignFile:
    """The tensors of all files as one checkpoint. Raises ValueError for a tensor that two files hold."""
    files = [read_foreign(folder / name, part=len(names) > 1) for name in names]
    tensors: dict[str, Any] = {}
    for file in files:
        if duplicates := tensors.keys() & file.tensors.keys():
            raise ValueError(f"{file.path} holds {min(duplicates)!a} a second time")
        tensors |= file.tensors
    return ForeignFile(path=folder, sha256=digest([file.sha256 for file in files]), tensors=tensors, facts=facts)


def _weight_files(folder: Path) -> list[str]:
    """Names of the weight files in a folder: only one, or those of an index. Raises ValueError if one is missing."""
    if weights := next((name for name in WEIGHTS if (folder / name).exists()), None):
        return [weights]
    index = next((name for name in INDEX_FILES if (folder / name).exists()), None)
    if index is None:
        raise ValueError(f"there is no {' or '.join((*WEIGHTS, *INDEX_FILES))} in {folder}")
    weight_map = read_json(folder / index, type=Settings).get("weight_map")
    names = [*weight_map.values()] if isinstance(weight_map, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ValueError(f"{folder / index} lists no files of this folder")
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise ValueError(f"{folder / index} lists {missing[0]}, which is not there; download it as well")
    return sorted({*names})


DOWNLOADED = ["config.json", PREPARATION, PROCESSOR, ADAPTER, "*.safetensors", "*.safetensors.index.json"]


def transformers_snapshot(repository: str) -> Path | None:
    """Folder of a downloaded transformers repository, `user/name` or `user/name@revision`; None for any other.

    Only weights in safetensors are downloaded. Raises ValueError if the hub is unreachable and its cache incomplete.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    name, _, revision = repository.partition("@")
    try:
        with offline_if_unreachable():
            config = Path(hf_hub_download(name, "config.json", revision=revision or None))
            if not is_transformers(config.parent):
                return None
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=DOWNLOADED))
    except ConnectionError as error:
        raise ValueError(f"hf-hub:{repository} cannot be fetched: {error}") from error
    except (OSError, ValueError, RuntimeError):  # timm then says what is wrong with the name
        return None


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Context in which only the hub's cache is used if the hub is unreachable, because its client retries for minutes.

    Raises ConnectionError if the cache lacks a file.
    """
    from huggingface_hub import constants

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
    """Whether the hub answers a request."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # any type of the hub's HTTP client
        return False
    return True


METADATA = ".metadata"  # file of a distributed checkpoint
OPTIMISER = re.compile(r"(.*\.)?(optimi[sz]ers?|optim|opt)\..*")  # names of tensors of an optimiser
Shape = tuple[int, ...]
Boxes = list[tuple[Shape, Shape]]  # first index and shape of each piece of a tensor


def shape_from(values: Any) -> Shape:
    """Stands for torch.Size."""
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"a shape with other entries than whole numbers ({values!a:.40})")
    return tuple(values)


def nothing(*_: Any) -> None:
    """Stands for functions whose values are not needed."""


CHECKPOINT = "torch.distributed.checkpoint"
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"  # in older versions
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
    f"{SHARDED_TENSOR}.TensorProperties": Ignored,
    f"{SHARDED_TENSOR}.MEM_FORMAT_ENCODING": nothing,
    "torch.serialization._get_layout": nothing,
    "torch.Size": shape_from,
    "collections.OrderedDict": OrderedDict,
    **{f"{module}.{kind}Path": path_text for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def is_distributed(path: Path) -> bool:
    """Whether a path is the folder of a distributed checkpoint."""
    return (path / METADATA).is_file()


def read_distributed(folder: Path) -> ForeignFile:
    """The checkpoint of torch.distributed.checkpoint in a folder, its tensors assembled from pieces.

    Raises a one-line ValueError for missing, damaged or unsupported files.
    """
    try:
        with open_regular(folder / METADATA) as stream:
            metadata = read_pickle(stream, STAND_INS, "latin1").values
        entries, storage = metadata["state_dict_metadata"], metadata["storage_data"]
        # (name of the tensor, first index of the piece, or None for a whole tensor) -> where its bytes are
        pieces = {(index.values["fqn"], index.values.get("offset")): info.values for index, info in storage.items()}
        _check_lengths(folder, pieces.values())
        tensors = {
            name: _assemble_tensor(folder, name, entry, pieces)
            for name, entry in entries.items()
            if isinstance(entry, Attributes) and "chunks" in entry.values
        }
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read: {error.filename} ({error.strerror}); copy the whole folder"
        ) from error
    except Exception as error:  # damaged files may raise any type
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{folder} is a distributed checkpoint that cannot be read ({reason}); {JOIN_DISTRIBUTED}"
        ) from error
    files = sorted({METADATA, *(info["relative_path"] for info in pieces.values())})
    return foreign_file(folder, digest([sha256_of_file(folder / name) for name in files]), tensors)


def _check_lengths(folder: Path, pieces: Collection[Mapping[str, Any]]) -> None:
    """Raise ValueError if all pieces together are longer than their files, which limits the memory that they take."""
    total = sum(info["length"] for info in pieces)
    file_bytes = sum((folder / name).stat().st_size for name in {_file_name(info) for info in pieces})
    if not isinstance(total, int) or min((info["length"] for info in pieces), default=0) < 0 or total > file_bytes:
        raise ValueError(f"its pieces are of {total} bytes, its files of {file_bytes}")


def _assemble_tensor(
    folder: Path, name: str, entry: Attributes, pieces: Mapping[tuple[str, Any], dict[str, Any]]
) -> Tensor:
    """A tensor from its pieces; one of an optimiser without its values, on the device "meta".

    entry: its metadata. pieces: where the bytes of all pieces are. Raises ValueError if pieces do not make the tensor.
    """
    shape = entry.values["size"]
    boxes: Boxes = [(chunk.values["offsets"], chunk.values["sizes"]) for chunk in entry.values["chunks"]]
    infos = [pieces[name, start if len(boxes) > 1 or (name, start) in pieces else None] for start, _ in boxes]
    if prod(shape) > sum(info["length"] for info in infos):
        raise ValueError(f"{name} is larger than its files")
    _check_boxes(name, shape, boxes)
    if OPTIMISER.fullmatch(name):
        return torch.empty(shape, device="meta")
    tensor: Tensor | None = None
    for (start, piece_shape), info in zip(boxes, infos, strict=True):
        piece = _read_piece(folder, info)
        if piece.shape != piece_shape:
            raise ValueError(f"a piece of {name} is {tuple(piece.shape)}, not {piece_shape}")
        tensor = piece.new_empty(shape) if tensor is None else tensor
        tensor[_slices(start, piece_shape)] = piece
    return torch.empty(shape) if tensor is None else tensor


def _slices(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """Index of a box by its first index and its shape."""
    return tuple(slice(first, first + side) for first, side in zip(start, shape, strict=True))


def _check_boxes(name: str, shape: Shape, boxes: Boxes) -> None:
    """Raise ValueError unless the boxes cover a tensor of this shape, without overlap."""
    are_inside = all(
        len(start) == len(box_shape) == len(shape)
        and all(first + side <= length for first, side, length in zip(start, box_shape, shape, strict=True))
        for start, box_shape in boxes
    )
    is_covered = are_inside and sum(prod(box_shape) for _, box_shape in boxes) == prod(shape)
    if is_covered and len(boxes) > 1:  # the volumes add up, so only an overlap can leave a gap
        covered = np.zeros(shape, bool)
        for start, box_shape in boxes:
            covered[_slices(start, box_shape)] = True
        is_covered = bool(covered.all())
    if not is_covered:
        raise ValueError(f"the pieces of {name} do not make a tensor of {shape}")


def _file_name(info: Mapping[str, Any]) -> str:
    """Name of the file that holds a piece. Raises ValueError if it is elsewhere, or the piece is transformed."""
    path, transforms = info["relative_path"], info.get("transform_descriptors")
    if transforms or not isinstance(path, str) or Path(path).name != path:
        raise ValueError(f"pieces that are transformed ({transforms}) or elsewhere ({path!a})")
    return path


def _read_piece(folder: Path, info: Mapping[str, Any]) -> Tensor:
    """The tensor of a piece. Raises ValueError if its file ends before it."""
    path, offset, length = _file_name(info), info["offset"], info["length"]
    with open_regular(folder / path) as stream:
        if not 0 <= offset <= offset + length <= os.fstat(stream.fileno()).st_size:
            raise ValueError(f"{path} ends before a piece of it")
        stream.seek(offset)
        return tensor_in(stream.read(length))
