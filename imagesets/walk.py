"""Finding the image files below a folder, in torchvision's order, and keeping the listings of large folders.

The order of torchvision.datasets.ImageFolder (DatasetFolder.make_dataset): below each folder asked for the folders by
path, in a folder the files by name. Links are followed, and hidden folders count, as they do there.

A large listing is kept in the user's cache, one file for each root, so that 1.28 million files are listed once and not
by every command. It is used again while every directory that it was made of has the same stamp: no file came, went or
was renamed. A file that was overwritten in place, with other bytes under the same name, leaves its directory's stamp as
it was. Of such files the sizes and times of SAMPLE are asked for whenever a listing is used again, and those of every
file once it is read (imagesets/sets.py). docs/images.md says so to users. A kept listing is data without code. One that
is damaged, of another version, or not to be read is made again, and one that cannot be written is not kept.

N images below K folders asked for, D directories visited.
"""

import io
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from engine.files import digest, write_atomic
from imagesets.names import PackedNames
from imagesets.selection import evenly

# torchvision.datasets.folder.IMG_EXTENSIONS, compared in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
LOST = -1  # size of a broken link: listed as torchvision lists it, and UnreadableImage once it is read
LARGEST = (1 << 63) - 1  # int64; some file systems number inodes beyond it
THREADS = 8  # over a network every size is a round trip; from a local disk it is the interpreter that takes the time

Stamp = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """What was found below a root. All names are relative to it."""

    names: PackedNames  # (N) of images
    sizes: np.ndarray  # (N,) int64, bytes
    changed: np.ndarray  # (N, 2) int64, when each was modified (ns), and its inode
    counts: np.ndarray  # (K,) int64, images below each folder asked for
    folders: PackedNames  # (D) of directories
    stamps: np.ndarray  # (D, 3) int64, `stamp_of` each directory before it was listed


def walk(root: str, folders: Sequence[str]) -> Walk:
    """All images below root/FOLDER of every one of `folders`; "." is the root itself. OSError for what cannot be
    listed."""
    with ThreadPoolExecutor(THREADS) as pool:
        by_folder = list(pool.map(partial(_directories_below, root), folders))
    directories = [directory for below in by_folder for directory in below]
    return Walk(
        names=PackedNames.joined([directory.names for directory in directories]),
        sizes=np.concatenate([np.empty(0, np.int64), *(directory.sizes for directory in directories)]),
        changed=np.concatenate([np.empty((0, 2), np.int64), *(directory.changed for directory in directories)]),
        counts=np.array([sum(len(directory.names) for directory in below) for below in by_folder], np.int64),
        folders=PackedNames.pack(directory.name for directory in directories),
        stamps=np.array([directory.stamp for directory in directories], np.int64).reshape(-1, 3),
    )


def stamp_of(status: os.stat_result) -> Stamp:
    """A directory's times (ns) of the last change of its entries and of its status, and its inode.

    They differ once an entry came, went or was renamed, and where another directory took its place.
    """
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@dataclass(frozen=True, kw_only=True, eq=False)
class _Directory:
    name: str
    stamp: Stamp
    names: PackedNames  # of its images, by name
    sizes: np.ndarray
    changed: np.ndarray


def _directories_below(root: str, folder: str) -> list[_Directory]:
    """The folder and those in it, by path."""
    directories, pending = [], [folder]
    while pending:
        directory, subfolders = _list_directory(root, pending.pop())
        directories.append(directory)
        pending += subfolders
    return sorted(directories, key=lambda directory: directory.name)


def _list_directory(root: str, name: str) -> tuple[_Directory, list[str]]:
    """One directory, and the names of those in it."""
    prefix = "" if name == "." else f"{name}/"
    images, subfolders = [], []
    handle = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY)
    try:
        stamp = stamp_of(os.fstat(handle))  # before the listing: a change during it shows as another stamp
        with os.scandir(handle) as entries:  # by handle, sizes are asked for by name and not by whole path
            for entry in entries:
                if entry.is_dir():
                    subfolders.append(prefix + entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append((entry.name, *_facts(entry)))
    finally:
        os.close(handle)
    images.sort()
    names = PackedNames.pack(prefix + image for image, *_ in images)
    facts = np.array([facts for _, *facts in images], np.int64).reshape(-1, 3)
    sizes, changed = np.ascontiguousarray(facts[:, 0]), np.ascontiguousarray(facts[:, 1:])
    return _Directory(name=name, stamp=stamp, names=names, sizes=sizes, changed=changed), subfolders


def _facts(entry: os.DirEntry) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return LOST, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino & LARGEST


VERSION = 3  # of the files: raise it when the same folders would be listed otherwise
LARGE = 10_000  # images; fewer are listed in a tenth of a second
KEPT = 64  # files on disk in each folder; a listing of ImageNet-1k takes 12 MB
SAMPLE = 1_000  # files whose sizes and times are compared
SETTLED = 2e9  # ns; a directory that changed this shortly before may change again without another time of change


def user_cache() -> Path:
    """What runs of one user share: ssl-vit-bench in $XDG_CACHE_HOME or ~/.cache. Safe to delete."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "ssl-vit-bench"


def listings_folder() -> Path:
    """Where listings are kept."""
    return user_cache() / "listings"


def find_images(root: str, folders: Sequence[str]) -> tuple[Walk, str]:
    """All images below root/FOLDER of every one of `folders`, as `walk` finds them, and the file that keeps their
    listing, "" if none. OSError as `walk` raises it."""
    path = _place(root, folders)
    if (listing := _read(path)) and _is_current(listing, root):
        return listing, str(path)
    started = time.time_ns()
    listing = walk(root, folders)
    is_settled = listing.stamps[:, :2].max(initial=0) < started - SETTLED
    is_kept = len(listing.names) >= LARGE and is_settled and _write(path, listing)
    return listing, str(path) if is_kept else ""


def _place(root: str, folders: Sequence[str]) -> Path:
    # The stamp of the root tells apart what machines with one home each have under the same path.
    here = os.path.realpath(root)
    names = [os.fsencode(name).hex() for name in (here, "/".join(folders))]
    return listings_folder() / f"{digest([VERSION, names[0], stamp_of(os.stat(here)), names[1]])[:32]}.npz"


def _is_current(kept: Walk, root: str) -> bool:
    # Whether the directories are those of the listing, and the sizes of some files.
    try:
        stamps = [stamp_of(os.stat(os.path.join(root, name))) for name in kept.folders]
    except OSError:
        return False
    if not np.array_equal(stamps, kept.stamps):
        return False
    sample = evenly(len(kept.names), min(SAMPLE, len(kept.names)))
    kept_facts = zip(kept.sizes[sample].tolist(), kept.changed[sample, 0].tolist(), strict=True)
    return all(
        _size_and_time(os.path.join(root, kept.names[index])) == facts
        for index, facts in zip(sample, kept_facts, strict=True)
    )


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return LOST, 0
    return status.st_size, status.st_mtime_ns


def _read(path: Path) -> Walk | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:  # each with its checksum
            return _checked(arrays)
    except Exception:  # not there, or damaged: zipfile and NumPy raise nearly anything
        return None


def _checked(arrays: Mapping[str, np.ndarray]) -> Walk:
    # ValueError unless the arrays fit together.
    sizes, changed, counts, stamps = (
        arrays[name].astype(np.int64, casting="safe") for name in ("sizes", "changed", "counts", "stamps")
    )
    names = _unpacked(arrays["names"], arrays["lengths"])
    folders = _unpacked(arrays["folders"], arrays["folder_lengths"])
    count, shapes = len(names), (sizes.shape, changed.shape, stamps.shape)
    if shapes != ((count,), (2, count), (len(folders), 3)) or counts.sum() != count:
        raise ValueError("the arrays do not fit together")
    changed = np.ascontiguousarray(np.cumsum(changed, axis=1).T)
    return Walk(names=names, sizes=sizes, changed=changed, counts=counts, folders=folders, stamps=stamps)


def _unpacked(blob: np.ndarray, lengths: np.ndarray) -> PackedNames:
    ends = np.cumsum(lengths, dtype=np.int64)
    if blob.dtype != np.uint8 or blob.ndim != 1 or lengths.dtype != np.uint16 or ends[-1:].sum() != len(blob):
        raise ValueError("names and their lengths do not fit together")
    return PackedNames(blob=blob.tobytes(), ends=ends)


def _write(path: Path, listing: Walk) -> bool:
    # Whether it could be kept.
    arrays: dict[str, np.ndarray] = {
        "names": np.frombuffer(listing.names.blob, np.uint8),
        "lengths": listing.names.lengths.astype(np.uint16),
        "sizes": listing.sizes,
        "changed": np.diff(listing.changed.T, prepend=0),  # neighbours were mostly written one after another
        "counts": listing.counts,
        "folders": np.frombuffer(listing.folders.blob, np.uint8),
        "folder_lengths": listing.folders.lengths.astype(np.uint16),
        "stamps": listing.stamps,
    }
    return keep_arrays(path, arrays)


def keep_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write a .npz file into the user's cache, and remove the oldest in its folder beyond KEPT. Whether it is there."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # one might be a flag
    try:
        write_atomic(path, buffer.getvalue())
        kept = sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in kept[KEPT:]:
            old.unlink(missing_ok=True)
    except OSError:  # no space, no permission, or another process removed the same: nothing depends on it
        return path.exists()
    return True
