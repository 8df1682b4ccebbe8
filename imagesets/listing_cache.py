"""Listings of large folders, kept between runs, so that 1.28 million files are listed once and not by every command.

A listing is kept in `folder()`, one file for each root, and used again while every directory that it was made of has
the same stamp: no file came, went or was renamed. A file that was overwritten in place, with other bytes under the same
name, leaves its directory's stamp as it was. Of such files the sizes and times of SAMPLE are asked for whenever a
listing is used again, and those of every file once it is read (imagesets/sets.py). docs/images.md says so to users.

A kept listing is data without code. One that is damaged, of another version, or not to be read is made again, and one
that cannot be written is not kept. Names: as imagesets/walk.py.
"""

import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from engine.files import digest, write_atomic
from imagesets.names import PackedNames
from imagesets.selection import evenly
from imagesets.walk import LOST, Walk, stamp_of, walk

VERSION = 3  # of the files: raise it when the same folders would be listed otherwise
LARGE = 10_000  # images; fewer are listed in a tenth of a second
KEPT = 64  # files on disk in each folder; a listing of ImageNet-1k takes 12 MB
SAMPLE = 1_000  # files whose sizes and times are compared
SETTLED = 2e9  # ns; a directory that changed this shortly before may change again without another time of change
FIELDS = ("names", "lengths", "sizes", "changed", "counts", "folders", "folder_lengths", "stamps")


def user_cache() -> Path:
    """What runs of one user share: ssl-vit-bench in $XDG_CACHE_HOME or ~/.cache. Safe to delete."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "ssl-vit-bench"


def folder() -> Path:
    """Where listings are kept."""
    return user_cache() / "listings"


def find_images(root: str, folders: Sequence[str]) -> tuple[Walk, str]:
    """All images below root/FOLDER of every one of `folders`, as `walk` finds them, and the file that keeps their
    listing, "" if none. OSError as `walk` raises it."""
    path = _place(root, folders)
    if (kept := _read(path)) and _is_current(kept, root):
        return kept, str(path)
    started = time.time_ns()
    found = walk(root, folders)
    is_settled = found.stamps[:, :2].max(initial=0) < started - SETTLED
    is_kept = len(found.names) >= LARGE and is_settled and _write(path, found)
    return found, str(path) if is_kept else ""


def _place(root: str, folders: Sequence[str]) -> Path:
    # The stamp of the root tells apart what machines with one home each have under the same path.
    here = os.path.realpath(root)
    names = [os.fsencode(name).hex() for name in (here, "/".join(folders))]
    return folder() / f"{digest([VERSION, names[0], stamp_of(os.stat(here)), names[1]])[:32]}.npz"


def _is_current(kept: Walk, root: str) -> bool:
    # Whether the directories are those of the listing, and the sizes of some files.
    try:
        stamps = [stamp_of(os.stat(os.path.join(root, name))) for name in kept.folders]
    except OSError:
        return False
    if not np.array_equal(stamps, kept.stamps):
        return False
    some = evenly(len(kept.names), min(SAMPLE, len(kept.names)))
    kept_facts = zip(kept.sizes[some].tolist(), kept.changed[some, 0].tolist(), strict=True)
    return all(
        _facts(os.path.join(root, kept.names[index])) == each for index, each in zip(some, kept_facts, strict=True)
    )


def _facts(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return LOST, 0
    return status.st_size, status.st_mtime_ns


def _read(path: Path) -> Walk | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:  # each with its checksum
            return _checked(*(arrays[name] for name in FIELDS))
    except Exception:  # not there, or damaged: zipfile and NumPy raise nearly anything
        return None


def _checked(
    names: np.ndarray,
    lengths: np.ndarray,
    sizes: np.ndarray,
    changed: np.ndarray,
    counts: np.ndarray,
    folders: np.ndarray,
    folder_lengths: np.ndarray,
    stamps: np.ndarray,
) -> Walk:
    # ValueError unless the arrays fit together.
    found = Walk(
        names=_unpacked(names, lengths),
        sizes=sizes.astype(np.int64, casting="safe"),
        changed=np.ascontiguousarray(np.cumsum(changed.astype(np.int64, casting="safe"), axis=1).T),
        counts=counts.astype(np.int64, casting="safe"),
        folders=_unpacked(folders, folder_lengths),
        stamps=stamps.astype(np.int64, casting="safe"),
    )
    count = len(found.names)
    if (
        found.sizes.shape != (count,)
        or changed.shape != (2, count)
        or found.counts.sum() != count
        or stamps.shape != (len(found.folders), 3)
    ):
        raise ValueError("the arrays do not fit together")
    return found


def _unpacked(blob: np.ndarray, lengths: np.ndarray) -> PackedNames:
    ends = np.cumsum(lengths, dtype=np.int64)
    if blob.dtype != np.uint8 or blob.ndim != 1 or lengths.dtype != np.uint16 or ends[-1:].sum() != len(blob):
        raise ValueError("names and their lengths do not fit together")
    return PackedNames(blob=blob.tobytes(), ends=ends)


def _write(path: Path, found: Walk) -> bool:
    # Whether it could be kept.
    arrays = (
        *(np.frombuffer(found.names.blob, np.uint8), found.names.lengths.astype(np.uint16), found.sizes),
        *(np.diff(found.changed.T, prepend=0), found.counts),  # neighbours were mostly written one after another
        *(np.frombuffer(found.folders.blob, np.uint8), found.folders.lengths.astype(np.uint16), found.stamps),
    )
    return keep_arrays(path, dict(zip(FIELDS, arrays, strict=True)))


def keep_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write a .npz file into the user's cache, and remove the oldest in its folder beyond KEPT. Whether it is there."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # one might be a flag
    try:
        write_atomic(path, buffer.getvalue())
        others = sorted(path.parent.glob("*.npz"), key=lambda other: other.stat().st_mtime, reverse=True)
        for old in others[KEPT:]:
            old.unlink(missing_ok=True)
    except OSError:  # no space, no permission, or another process removed the same: nothing depends on it
        return path.exists()
    return True
