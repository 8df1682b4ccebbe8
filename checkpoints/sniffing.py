"""Detect the kind of a file: a torch or safetensors checkpoint, or one of many files that users mistake for one."""

import re
import zipfile
from pathlib import Path
from typing import Literal

from engine.files import open_regular, read_json

DOWNLOAD_AGAIN = "download it again, from a source that you trust"
NAME_INSIDE = "unpack it and name the checkpoint inside"
CONVERT = "convert it to a torch or safetensors file first"

# First bytes of a file, what it is, what the user should do.
SIGNATURES = (
    (b"version https://git-lfs", "a git-LFS pointer, not the file itself", "fetch the file with `git lfs pull`"),
    (b"\x1f\x8b", "a gzip archive", NAME_INSIDE),
    (b"BZh", "a bzip2 archive", NAME_INSIDE),
    (b"\xfd7zXZ\x00", "an xz archive", NAME_INSIDE),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", NAME_INSIDE),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", NAME_INSIDE),
    (b"Rar!", "a rar archive", NAME_INSIDE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)", CONVERT),
    (b"\x93NUMPY", "a numpy array", CONVERT),
    (b"GGUF", "a GGUF file", CONVERT),
    (b"\xff\xd8\xff", "a JPEG picture", "name a checkpoint"),
    (b"\x89PNG", "a PNG picture", "name a checkpoint"),
    (b"%PDF", "a PDF document", "name a checkpoint"),
)
# Bytes; safetensors' own limit. The length is eight bytes, which as text would be a larger number.
MAX_SAFETENSORS_HEADER = 100_000_000
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
JOIN_DISTRIBUTED = (
    "join it by `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE` and name FILE"
)
ZERO = "join it by the script that DeepSpeed leaves beside it, `python zero_to_fp32.py FOLDER OUT`, and name OUT's file"
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")  # name of one of several files, by transformers and timm


def kind_of(path: Path, part: bool = False) -> Literal["archive", "safetensors", "pickle"]:
    """Kind of a checkpoint file: torch's zip archive, safetensors, or a pickle of torch before version 1.6.

    "pickle" is the fallback; only reading the file shows whether it is one. Raises ValueError for a file recognised as
    something other than a checkpoint, OSError for one that cannot be read.

    part: accept one file of a checkpoint in several files.
    """
    if path.is_dir():
        raise ValueError(f"{path} is {_describe_folder(path)}")
    if path.suffix == ".distcp" or path.name == ".metadata":
        raise ValueError(f"{path} is a part of a distributed checkpoint; name its folder: {path.parent}")
    if not part and (shard := SHARD.fullmatch(path.name)) and int(shard[2]) > 1:
        raise ValueError(f"{path} is one of {int(shard[2])} parts; name their folder, with the index: {path.parent}")
    try:
        with open_regular(path) as file:
            head = file.read(512)
    except ValueError as error:
        raise ValueError(f"{path} is {error}; name a checkpoint") from error
    if not head:
        raise ValueError(f"{path} is empty; {DOWNLOAD_AGAIN}")
    if head.startswith(b"PK"):
        check_archive(path)
        return "archive"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_SAFETENSORS_HEADER:
        return "safetensors"
    for signature, meaning, remedy in SIGNATURES:
        if head.startswith(signature):
            raise ValueError(f"{path} is {meaning}; {remedy}")
    if head[257:262] == b"ustar":
        raise ValueError(f"{path} is a tar archive; {NAME_INSIDE}")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise ValueError(f"{path} is a web page, often an error page in place of the file; {DOWNLOAD_AGAIN}")
    if head.lstrip().startswith(b"{"):
        raise ValueError(f"{path} is {_describe_json(path)}")
    return "pickle"


def unknown_file_message(path: Path) -> str:
    """One-line error message for a file of unknown kind."""
    with open_regular(path) as file:
        head = file.read(512)
    if head.isascii() and all(byte >= 32 or byte in b"\t\r\n" for byte in head):
        return f"{path} is a text file that starts with {head[:40].decode()!r}; name a checkpoint"
    return f"{path} is not a checkpoint of a known kind (torch, safetensors); name one, or convert it to one"


def check_archive(path: Path) -> None:
    """Raise ValueError for a zip archive that torch.save did not write, or that is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            problem = _archive_problem(records)
            # torch does not compare checksums when it reads; with some settings it writes zeros for them
            if not problem and any(record.CRC for record in records) and (damaged := archive.testzip()):
                problem = f"damaged: {damaged!a} does not match its checksum; {DOWNLOAD_AGAIN}"
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(f"{path} is a damaged or truncated archive ({reason}); {DOWNLOAD_AGAIN}") from error
    if problem:
        raise ValueError(f"{path} is {problem}")


def _archive_problem(records: list[zipfile.ZipInfo]) -> str:
    """What an archive is instead of a checkpoint, and what to do; "" for one of torch.save."""
    names = [record.filename for record in records]
    root = names[0].partition("/")[0] if names else ""
    if f"{root}/constants.pkl" in names:
        return "a TorchScript program; save its tensors alone: torch.save(torch.jit.load(FILE).state_dict(), 'new.pth')"
    if f"{root}/data.pkl" not in names:
        if any(name.endswith(".npy") for name in names):
            return f"a numpy .npz file; {CONVERT}"
        if any(name.endswith(".h5") for name in names):
            return f"a Keras file; {CONVERT}"
        return f"a zip archive that torch.save did not write; {NAME_INSIDE}"
    if len(set(names)) != len(names):
        return f"an archive with two records of the same name; {DOWNLOAD_AGAIN}"
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        return "a checkpoint packed anew by a zip program (torch.save never compresses); save it again with torch.save"
    return ""


def _describe_folder(path: Path) -> str:
    """What a folder is, and what to do."""
    if (path / ".metadata").exists():
        return f"a distributed checkpoint folder; {JOIN_DISTRIBUTED}"
    if (path / "latest").is_file() or (path / "zero_to_fp32.py").exists() or any(path.glob("zero_pp_rank_*")):
        return f"a folder of DeepSpeed; name its mp_rank_00_model_states.pt (ZeRO stages 1 and 2), or {ZERO}"
    if metadata_files := sorted(path.glob("*/.metadata")):
        return f"a folder of distributed checkpoints; name one of them: {metadata_files[0].parent}"
    if (path / "saved_model.pb").exists():
        return f"a TensorFlow SavedModel folder; {CONVERT}"
    if (path / "export" / "config.json").exists():
        return f"the folder of a pretraining; name its export: {path / 'export'}"
    if (path / "run.json").exists():
        return f"the folder of a pretraining; `bench import {path} --out FOLDER` writes its encoder"
    endings = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".safetensors")
    names = sorted(child.name for child in path.iterdir() if child.suffix in endings)
    if not names and (files := sorted(path.glob("*/config.json")) + sorted(path.glob("*/run.json"))):
        return f"a folder of checkpoints; name one of them: {', '.join(str(file.parent) for file in files[:3])}"
    return "a folder; name a file inside it" + (f": {', '.join(names[:3])}" if names else ", it holds no checkpoint")


def _describe_json(path: Path) -> str:
    """What a JSON file is, and what to do."""
    try:
        content = read_json(path, most=10_000_000)
    except ValueError:
        content = {}
    if path.name in INDEX_FILES or "weight_map" in content:
        return "the index of a checkpoint in several files; name its folder"
    return "a JSON file; name a checkpoint"
