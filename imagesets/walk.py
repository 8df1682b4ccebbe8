"""Finding the image files below a folder, in torchvision's order. Nothing is opened or written.

The order of torchvision.datasets.ImageFolder (DatasetFolder.make_dataset): below each folder asked for the folders by
path, in a folder the files by name. Links are followed, and hidden folders count, as they do there.

N images below K folders asked for, D directories visited.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from imagesets.names import PackedNames

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
        below = list(pool.map(partial(_below, root), folders))
    found = [directory for directories in below for directory in directories]
    return Walk(
        names=PackedNames.joined([directory.names for directory in found]),
        sizes=np.concatenate([np.empty(0, np.int64), *(directory.sizes for directory in found)]),
        changed=np.concatenate([np.empty((0, 2), np.int64), *(directory.changed for directory in found)]),
        counts=np.array([sum(len(each.names) for each in directories) for directories in below], np.int64),
        folders=PackedNames.pack(directory.name for directory in found),
        stamps=np.array([directory.stamp for directory in found], np.int64).reshape(-1, 3),
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


def _below(root: str, folder: str) -> list[_Directory]:
    # The folder and those in it, by path.
    found, pending = [], [folder]
    while pending:
        directory, inside = _listed(root, pending.pop())
        found.append(directory)
        pending += inside
    return sorted(found, key=lambda directory: directory.name)


def _listed(root: str, name: str) -> tuple[_Directory, list[str]]:
    # One directory, and the names of those in it.
    prefix = "" if name == "." else f"{name}/"
    images, inside = [], []
    handle = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY)
    try:
        stamp = stamp_of(os.fstat(handle))  # before the listing: a change during it shows as another stamp
        with os.scandir(handle) as entries:  # by handle, sizes are asked for by name and not by whole path
            for entry in entries:
                if entry.is_dir():
                    inside.append(prefix + entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append((entry.name, *_facts(entry)))
    finally:
        os.close(handle)
    images.sort()
    names = PackedNames.pack(prefix + image for image, *_ in images)
    facts = np.array([each[1:] for each in images], np.int64).reshape(-1, 3)
    sizes, changed = np.ascontiguousarray(facts[:, 0]), np.ascontiguousarray(facts[:, 1:])
    return _Directory(name=name, stamp=stamp, names=names, sizes=sizes, changed=changed), inside


def _facts(entry: os.DirEntry) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return LOST, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino & LARGEST
