"""Read a checkpoint file that someone else wrote, without running any code in it.

Two checks guard every pickle. First, `engine.pickles` scans its instructions, and every name outside the short list
of `checkpoints.allowed` is refused. Then torch's weights-only reader builds the values, with inert stand-ins for the
few classes that are not torch's. Neither check can be switched off.
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
from checkpoints.sniffing import DOWNLOAD_AGAIN, ZERO, kind_of, unknown
from engine.files import sha256_of_file
from engine.pickles import Scan, scan_pickle

LEGACY_NUMBER = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
LEGACY_PICKLES = 5  # that number, protocol, system, the values, storage keys; then the bytes of the storages
RESAVE = "save the tensors alone where it was made: torch.save({'model': model.state_dict()}, 'new.pth')"
SPECIAL_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_qtensor": "quantised",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_meta_tensor_no_storage": "meta (without values)",
}


@dataclass(frozen=True)
class ForeignFile:
    """A foreign checkpoint.

    tensors: every tensor of the file under its dotted path from the root, without wrapper components such as
    `module`; on the CPU, shapes and types as stored. Those of a zip archive are mapped from the file, not yet read.
    facts: the small values that are no tensors under their dotted paths: finite numbers, texts up to 1000 characters,
    lists of up to 64 of these. All are JSON values.
    """

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def read_foreign(path: Path | str, opened: Collection[str] = (), part: bool = False) -> ForeignFile:
    """Read a torch or safetensors checkpoint. Raises a one-line ValueError for everything else.

    part: accept one file of a checkpoint split into several; such files are refused otherwise.
    opened: names of classes whose pickled objects are read as the values of their attributes; no such class is built.
    """
    path = Path(path)
    try:
        kind = kind_of(path, part)
        sha256 = sha256_of_file(path)
        tree = _read_safetensors(path) if kind == "safetensors" else _read_torch(path, kind, opened)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or _short(error)}") from error
    return foreign_file(path, sha256, tree)


def foreign_file(path: Path, sha256: str, tree: Any) -> ForeignFile:
    """The tensors and facts of a loaded file, under names without wrappers. ValueError as in `read_foreign`."""
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
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()
            return {"__metadata__": file.metadata() or {}} | {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is a damaged safetensors file ({_short(error)}); {DOWNLOAD_AGAIN}") from error


def _read_torch(path: Path, kind: str, opened: Collection[str]) -> Any:
    scans = _scan_archive(path) if kind == "archive" else _scan_legacy(path)
    refused = [name for scan in scans for name in scan.names if not is_allowed(name, opened)]
    if refused:
        raise ValueError(f"{path} {_about_refused(refused)}")
    if kind == "pickle" and scans[0].number != LEGACY_NUMBER:
        raise ValueError(f"{path} is a pickle that torch.save did not write; {RESAVE}")
    try:
        with only_stand_ins(opened), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=kind == "archive")
    except Exception as error:  # of any type: the file decides
        protocol = max(scan.protocol for scan in scans)
        if protocol != 2:
            problem = f"uses pickle protocol {protocol}, of which torch's safe reader knows 2"
            raise ValueError(f"{path} {problem}; {RESAVE}") from error
        raise ValueError(f"{path} is damaged or made to mislead ({_short(error)}); {DOWNLOAD_AGAIN}") from error


def tensor_in(archive: bytes) -> torch.Tensor:
    """The tensor in an in-memory archive of torch.save. ValueError if it holds anything but one tensor."""
    if refused := [name for scan in _scan_archive(io.BytesIO(archive)) for name in scan.names if not is_allowed(name)]:
        raise ValueError(_about_refused(refused))
    with only_stand_ins():
        value = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__} in place of a tensor")
    return value


def _scan_archive(path: Path | io.BytesIO) -> list[Scan]:
    try:
        # torch.load's own: what is scanned is what is loaded
        reader = torch._C.PyTorchFileReader(str(path) if isinstance(path, Path) else path)
        return [scan_pickle(io.BytesIO(reader.get_record("data.pkl")))]
    except (RuntimeError, ValueError) as error:
        what = path if isinstance(path, Path) else "a piece"
        raise ValueError(f"{what} cannot be read: {_short(error)}; {DOWNLOAD_AGAIN}") from error


def _scan_legacy(path: Path) -> list[Scan]:
    """Scans of the pickles at the head of a legacy file; of the first one only if torch did not write it."""
    scans: list[Scan] = []
    with open(path, "rb") as stream:
        pickled = stream.peek(1)[:1] == b"\x80"
        try:
            while len(scans) < LEGACY_PICKLES and (not scans or scans[0].number == LEGACY_NUMBER):
                scans.append(scan_pickle(stream))
        except ValueError as error:
            if scans or pickled:
                raise ValueError(f"{path} cannot be read: {_short(error)}; {DOWNLOAD_AGAIN}") from error
            raise ValueError(unknown(path)) from error
    return scans


def _about_refused(names: list[str]) -> str:
    """What is wrong with a file that asks for `names`, and what to do."""
    for name in names:
        if name in SPECIAL_TENSORS:
            return f"holds a {SPECIAL_TENSORS[name]} tensor; make it dense and {RESAVE}"
        if name.startswith("deepspeed."):
            return f"is a state of DeepSpeed's (it holds {ascii(name)[1:-1][:80]}); {ZERO}"
        if name.startswith("torch.distributed."):
            return f"is sharded over several processes (it holds {ascii(name)[1:-1]}); {GATHER}"
    listed = ", ".join(ascii(name)[1:-1][:80] for name in names[:3])
    return f"wants {listed} to be loaded, which could run code and is refused; if you trust its source, {RESAVE}"


def _short(error: Exception) -> str:
    """One line of a library's message, without torch's advice to load the file unsafely."""
    text = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
    return ascii(text.partition(" Check the documentation")[0][:120])[1:-1] or type(error).__name__
