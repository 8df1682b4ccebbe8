"""Read a checkpoint file of unknown origin without running any code in it.

Two checks guard every pickle. First, `engine.pickles` scans its instructions, and names that `checkpoints.allowed` does
not list are refused. Then torch's weights-only reader builds the values, with inert stand-ins for the few classes that
are not torch's. Neither check can be switched off.
"""

import io
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints.allowed import is_allowed, only_stand_ins
from checkpoints.dotted import GATHER, split, unwrap, without_lightning_attribute
from checkpoints.sniffing import DOWNLOAD_AGAIN, ZERO, kind_of, unknown_file_message
from engine.files import open_regular, sha256_of_file
from engine.pickles import Scan, scan_pickle

LEGACY_NUMBER = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
LEGACY_PICKLES = 5  # magic number, protocol, system, values, storage keys; after them the bytes of the storages
RESAVE = "save the tensors alone where it was made: torch.save({'model': model.state_dict()}, 'new.pth')"
# Function of torch's in a pickle -> kind of tensor that it makes, which is refused.
SPECIAL_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_qtensor": "quantised",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_meta_tensor_no_storage": "meta (without values)",
}


@dataclass(frozen=True)
class ForeignFile:
    """The content of a foreign checkpoint.

    Attributes:
        path: The file, or the folder if there are several files.
        sha256: Digest of the file or files.
        tensors: Dotted path from the root of the file, without wrapper components such as `module` -> tensor on the
            CPU, with shape and type as stored. Those of a zip archive are memory-mapped.
        facts: Dotted path -> other small value, as JSON: finite numbers, texts of up to 1000 characters, lists of up to
            64 of these.
    """

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def read_foreign(path: Path | str, attribute_classes: Collection[str] = (), part: bool = False) -> ForeignFile:
    """Read a torch or safetensors checkpoint.

    Args:
        path: The file.
        attribute_classes: Names of classes that may be in the pickle; their objects are read as dictionaries of their
            attributes, and the classes are not built.
        part: Accept one file of a checkpoint in several files, which is refused otherwise.

    Raises:
        ValueError: One line, for any other file, and for one without tensors.
    """
    path = Path(path)
    try:
        kind = kind_of(path, part)
        sha256 = sha256_of_file(path)
        tree = _read_safetensors(path) if kind == "safetensors" else _read_torch(path, kind, attribute_classes)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or _one_line(error)}") from error
    return foreign_file(path, sha256, tree)


def foreign_file(path: Path, sha256: str, tree: Any) -> ForeignFile:
    """A ForeignFile from the nested values of a loaded file. Raises ValueError as `read_foreign`."""
    try:
        tensors, facts = split(tree)
        tensors = without_lightning_attribute(unwrap(tensors), facts)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    if not tensors:
        raise ValueError(f"{path} holds no torch tensors; name a checkpoint that holds weights")
    if "ds_version" in facts and not any(tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"{path} holds names without values, as DeepSpeed's ZeRO stage 3 writes them; {ZERO}")
    return ForeignFile(path, sha256, tensors, facts)


def _read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, and its metadata under `__metadata__`."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()
            return {"__metadata__": file.metadata() or {}} | {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is a damaged safetensors file ({_one_line(error)}); {DOWNLOAD_AGAIN}") from error


def _read_torch(path: Path, kind: str, attribute_classes: Collection[str]) -> Any:
    """The nested values of a file of torch.save. kind: "archive" or "pickle", as from `kind_of`."""
    scans = _scan_archive(path) if kind == "archive" else _scan_legacy(path)
    refused = [name for scan in scans for name in scan.names if not is_allowed(name, attribute_classes)]
    if refused:
        raise ValueError(f"{path} {_refusal_message(refused)}")
    if kind == "pickle" and scans[0].number != LEGACY_NUMBER:
        raise ValueError(f"{path} is a pickle that torch.save did not write; {RESAVE}")
    try:
        with only_stand_ins(attribute_classes), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=kind == "archive")
    except Exception as error:  # a damaged file may raise any type
        protocol = max(scan.protocol for scan in scans)
        if protocol != 2:
            problem = f"uses pickle protocol {protocol}, of which torch's safe reader knows 2"
            raise ValueError(f"{path} {problem}; {RESAVE}") from error
        raise ValueError(f"{path} is damaged or made to mislead ({_one_line(error)}); {DOWNLOAD_AGAIN}") from error


def tensor_in(archive: bytes) -> torch.Tensor:
    """The tensor in the bytes of an archive of torch.save. Raises ValueError if it holds anything but one tensor."""
    scans = _scan_archive(io.BytesIO(archive))
    if refused := [name for scan in scans for name in scan.names if not is_allowed(name)]:
        raise ValueError(_refusal_message(refused))
    with only_stand_ins():
        value = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__} in place of a tensor")
    return value


def _scan_archive(file: Path | io.BytesIO) -> list[Scan]:
    """The scan of the pickle in an archive of torch.save. Raises ValueError if it cannot be read."""
    try:
        # The reader of torch.load, so that the same bytes are scanned and loaded.
        reader = torch._C.PyTorchFileReader(str(file) if isinstance(file, Path) else file)
        return [scan_pickle(io.BytesIO(reader.get_record("data.pkl")))]
    except (RuntimeError, ValueError) as error:
        name = file if isinstance(file, Path) else "a piece"
        raise ValueError(f"{name} cannot be read: {_one_line(error)}; {DOWNLOAD_AGAIN}") from error


def _scan_legacy(path: Path) -> list[Scan]:
    """Scans of the pickles at the start of a legacy file; only of the first one if torch did not write it."""
    scans: list[Scan] = []
    with open_regular(path) as stream:
        starts_as_pickle = stream.peek(1)[:1] == b"\x80"
        try:
            while len(scans) < LEGACY_PICKLES and (not scans or scans[0].number == LEGACY_NUMBER):
                scans.append(scan_pickle(stream))
        except ValueError as error:
            if scans or starts_as_pickle:
                raise ValueError(f"{path} cannot be read: {_one_line(error)}; {DOWNLOAD_AGAIN}") from error
            raise ValueError(unknown_file_message(path)) from error
    return scans


def _refusal_message(names: list[str]) -> str:
    """Error message, without the path, for a file whose pickles use these names, which are not allowed."""
    for name in names:
        if name in SPECIAL_TENSORS:
            return f"holds a {SPECIAL_TENSORS[name]} tensor; make it dense and {RESAVE}"
        if name.startswith("deepspeed."):
            return f"is a state of DeepSpeed's (it holds {ascii(name)[1:-1][:80]}); {ZERO}"
        if name.startswith("torch.distributed."):
            return f"is sharded over several processes (it holds {ascii(name)[1:-1]}); {GATHER}"
    first_names = ", ".join(ascii(name)[1:-1][:80] for name in names[:3])
    return f"wants {first_names} to be loaded, which could run code and is refused; if you trust its source, {RESAVE}"


def _one_line(error: Exception) -> str:
    """Message of an exception in one short line, without torch's advice to load the file unsafely."""
    text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
    return ascii(text.partition(" Check the documentation")[0][:120])[1:-1] or type(error).__name__
