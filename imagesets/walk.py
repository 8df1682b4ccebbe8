"""Find the image files below a folder, in torchvision's order, and cache the listings of large folders.

The order is that of torchvision.datasets.ImageFolder (DatasetFolder.make_dataset): for each requested folder, the
folders below it sorted by path, and in each the files sorted by name. As there, links are followed. Unlike there,
hidden files and folders are left out (`is_hidden`).

A large listing is cached for the user, one file for each root, so that 1.28 million files are not listed by every
command. It is valid as long as each of its directories has the same stamp, which changes when a file is added, removed
or renamed. A file overwritten in place leaves the stamp unchanged: for these, sizes and times of SAMPLED_FILES are
compared whenever a listing is loaded, and those of each file when it is read (imagesets/sets.py). docs/images.md
explains this to users. A cache file holds arrays and no code. If it is damaged, unreadable or of another version, the
folders are listed again; if it cannot be written, the listing is not cached.

Shapes: N images below K requested folders, D directories in all.
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

from engine.files import digest, open_regular, write_atomic
from imagesets.names import PackedNames
from imagesets.selection import evenly_spaced

# torchvision.datasets.folder.IMG_EXTENSIONS, compared in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
BROKEN_LINK_SIZE = -1  # listed as in torchvision; reading it raises UnreadableImage
MAX_INT64 = (1 << 63) - 1  # mask for inodes, which some file systems number beyond it
THREADS = 8  # over a network each size is a round trip; on a local disk the interpreter is the bottleneck

# Folders in which programs keep copies and thumbnails: of Synology's photo server, and of archives from macOS.
HIDDEN_FOLDERS = ("@eaDir", "__MACOSX")

Stamp = tuple[int, int, int]


def is_hidden(name: str) -> bool:
    """Whether every image set leaves out a file or folder of this name, such as `.ipynb_checkpoints` and `._1.jpg`."""
    return name.startswith(".") or name in HIDDEN_FOLDERS


@dataclass(frozen=True, kw_only=True, eq=False)
class FileListing:
    """Image files below a root folder. All names are relative to it."""

    names: PackedNames  # (N) of images
    sizes: np.ndarray  # (N,) int64, bytes
    changed: np.ndarray  # (N, 2) int64, modification time (ns) and inode
    counts: np.ndarray  # (K,) int64, images below each requested folder
    folders: PackedNames  # (D) of directories
    stamps: np.ndarray  # (D, 3) int64, `stamp_of` each directory before it was listed


def visible_and_hidden(root: str) -> tuple[list[str], list[str]]:
    """Names, relative to `root`, of all files below it, and of the hidden files and folders that are left out.

    Links are followed.
    """
    visible, hidden = [], []
    above = {root: {os.path.realpath(root)}}  # real paths of a folder and those above it
    for path, folders, files in os.walk(root, followlinks=True):
        prefix, ancestors = "" if path == root else f"{os.path.relpath(path, root)}{os.sep}", above.pop(path)
        hidden += [prefix + name for name in (*folders, *files) if is_hidden(name)]
        visible += [prefix + name for name in files if not is_hidden(name)]
        real = {name: os.path.realpath(os.path.join(path, name)) for name in folders if not is_hidden(name)}
        folders[:] = [name for name in real if real[name] not in ancestors]  # a link to a folder above has no end
        above |= {os.path.join(path, name): ancestors | {real[name]} for name in folders}
    return visible, hidden


def note_on_hidden(hidden: Sequence[str]) -> list[str]:
    """A note that counts hidden files and folders; [] if there are none."""
    if not hidden:
        return []
    count = "1 hidden file or folder is" if len(hidden) == 1 else f"{len(hidden)} hidden files and folders are"
    return [f"{count} left out, such as {hidden[0]}"]


def walk(root: str, folders: Sequence[str]) -> FileListing:
    """List all images below each root/FOLDER of `folders`; "." is the root itself.

    Raises OSError for a folder that cannot be listed.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        directories_by_folder = list(pool.map(partial(_directories_below, root), folders))
    directories = [directory for group in directories_by_folder for directory in group]
    return FileListing(
        names=PackedNames.joined([directory.names for directory in directories]),
        sizes=np.concatenate([np.empty(0, np.int64), *(directory.sizes for directory in directories)]),
        changed=np.concatenate([np.empty((0, 2), np.int64), *(directory.changed for directory in directories)]),
        counts=np.array(
            [sum(len(directory.names) for directory in group) for group in directories_by_folder], np.int64
        ),
        folders=PackedNames.pack(directory.name for directory in directories),
        stamps=np.array([directory.stamp for directory in directories], np.int64).reshape(-1, 3),
    )


def stamp_of(status: os.stat_result) -> Stamp:
    """Modification and status-change time (ns) and inode of a directory.

    They change when an entry is added, removed or renamed, and differ for another directory in its place.
    """
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@dataclass(frozen=True, kw_only=True, eq=False)
class _Directory:
    """One directory, with its n images sorted by name."""

    name: str
    stamp: Stamp
    names: PackedNames  # (n)
    sizes: np.ndarray  # (n,)
    changed: np.ndarray  # (n, 2)


def _directories_below(root: str, folder: str) -> list[_Directory]:
    """root/folder and all directories below it, sorted by path."""
    directories, pending = [], [folder]
    while pending:
        directory, subfolders = _list_directory(root, pending.pop())
        directories.append(directory)
        pending += subfolders
    return sorted(directories, key=lambda directory: directory.name)


def _list_directory(root: str, name: str) -> tuple[_Directory, list[str]]:
    """The directory root/name, and the names of the directories in it, relative to root."""
    prefix = "" if name == "." else f"{name}/"
    images, subfolders = [], []
    handle = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY)
    try:
        stamp = stamp_of(os.fstat(handle))  # before listing, so that a change during it makes the stamp outdated
        with os.scandir(handle) as entries:  # with a handle, entry.stat() needs no lookup of the whole path
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    subfolders.append(prefix + entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append((entry.name, *size_and_change(entry)))
    finally:
        os.close(handle)
    images.sort()
    names = PackedNames.pack(prefix + image for image, *_ in images)
    facts = np.array([facts for _, *facts in images], np.int64).reshape(-1, 3)
    sizes, changed = np.ascontiguousarray(facts[:, 0]), np.ascontiguousarray(facts[:, 1:])
    return _Directory(name=name, stamp=stamp, names=names, sizes=sizes, changed=changed), subfolders


def size_and_change(entry: os.DirEntry | Path) -> tuple[int, int, int]:
    """Size in bytes, modification time (ns) and inode of a file; BROKEN_LINK_SIZE, 0, 0 for a broken link."""
    try:
        status = entry.stat()
    except OSError:
        return BROKEN_LINK_SIZE, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino & MAX_INT64


# The cache of listings.
VERSION = 4  # of the files; raise it if the same folders would be listed differently
MIN_CACHED_IMAGES = 10_000  # smaller sets are listed in a tenth of a second
MAX_CACHE_FILES = 64  # in each folder of the cache; a listing of ImageNet-1k takes 12 MB
SAMPLED_FILES = 1_000  # whose sizes and times are compared when a listing is loaded
SETTLING_NS = 2e9  # a directory changed more recently may change again without getting another time


def user_cache() -> Path:
    """Folder that all runs of a user share: ssl-vit-bench in $XDG_CACHE_HOME or ~/.cache. Safe to delete."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "ssl-vit-bench"


def listings_folder() -> Path:
    """Folder of the cached listings."""
    return user_cache() / "listings"


def find_images(root: str, folders: Sequence[str]) -> tuple[FileListing, str]:
    """`walk(root, folders)`, from the cache if possible, and the path of the cache file, "" if it is not cached.

    Raises OSError for a folder that cannot be listed.
    """
    path = _cache_path(root, folders)
    if (listing := _load(path)) and _is_current(listing, root):
        return listing, str(path)
    start = time.time_ns()
    listing = walk(root, folders)
    is_settled = listing.stamps[:, :2].max(initial=0) < start - SETTLING_NS
    is_cached = len(listing.names) >= MIN_CACHED_IMAGES and is_settled and _save(path, listing)
    return listing, str(path) if is_cached else ""


def _cache_path(root: str, folders: Sequence[str]) -> Path:
    """Cache file of a listing. The root's stamp tells machines apart that share a home, but not their data."""
    real_root = os.path.realpath(root)
    names = [os.fsencode(name).hex() for name in (real_root, "/".join(folders))]
    return listings_folder() / f"{digest([VERSION, names[0], stamp_of(os.stat(real_root)), names[1]])[:32]}.npz"


def _is_current(listing: FileListing, root: str) -> bool:
    """Whether the stamps of all directories are unchanged, and sizes and times of a sample of the files."""
    try:
        stamps = [stamp_of(os.stat(os.path.join(root, name))) for name in listing.folders]
    except OSError:
        return False
    if not np.array_equal(stamps, listing.stamps):
        return False
    sample = evenly_spaced(len(listing.names), min(SAMPLED_FILES, len(listing.names)))
    sizes, times = listing.sizes[sample].tolist(), listing.changed[sample, 0].tolist()
    return all(
        _size_and_time(os.path.join(root, listing.names[index])) == size_and_time
        for index, *size_and_time in zip(sample, sizes, times, strict=True)
    )


def _size_and_time(path: str) -> list[int]:
    """Size in bytes and modification time (ns) of a file; BROKEN_LINK_SIZE, 0 if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return [BROKEN_LINK_SIZE, 0]
    return [status.st_size, status.st_mtime_ns]


def _load(path: Path) -> FileListing | None:
    """The listing in a cache file, or None if there is none or it is damaged."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:  # each array has a checksum
            return _from_arrays(arrays)
    except Exception:  # missing or damaged file: zipfile and NumPy raise nearly any type
        return None


def _from_arrays(arrays: Mapping[str, np.ndarray]) -> FileListing:
    """The listing that `_save` wrote. Raises ValueError if the arrays do not fit each other."""
    sizes, changed, counts, stamps = (
        arrays[name].astype(np.int64, casting="safe") for name in ("sizes", "changed", "counts", "stamps")
    )
    names = _names_from_arrays(arrays["names"], arrays["lengths"])
    folders = _names_from_arrays(arrays["folders"], arrays["folder_lengths"])
    count, shapes = len(names), (sizes.shape, changed.shape, stamps.shape)
    if shapes != ((count,), (2, count), (len(folders), 3)) or counts.sum() != count:
        raise ValueError("the arrays do not fit together")
    changed = np.ascontiguousarray(np.cumsum(changed, axis=1).T)
    return FileListing(names=names, sizes=sizes, changed=changed, counts=counts, folders=folders, stamps=stamps)


def _names_from_arrays(blob: np.ndarray, lengths: np.ndarray) -> PackedNames:
    """Names from their bytes, uint8, and their lengths, uint16. Raises ValueError if these do not fit each other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if blob.dtype != np.uint8 or blob.ndim != 1 or lengths.dtype != np.uint16 or ends[-1:].sum() != len(blob):
        raise ValueError("names and their lengths do not fit together")
    return PackedNames(blob=blob.tobytes(), ends=ends)


def _save(path: Path, listing: FileListing) -> bool:
    """Write a listing to a cache file. Returns whether that succeeded."""
    arrays: dict[str, np.ndarray] = {
        "names": np.frombuffer(listing.names.blob, np.uint8),
        "lengths": listing.names.lengths.astype(np.uint16),
        "sizes": listing.sizes,
        "changed": np.diff(listing.changed.T, prepend=0),  # compresses well: neighbours were written in sequence
        "counts": listing.counts,
        "folders": np.frombuffer(listing.folders.blob, np.uint8),
        "folder_lengths": listing.folders.lengths.astype(np.uint16),
        "stamps": listing.stamps,
    }
    return write_cached_arrays(path, arrays)


def write_cached_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write a .npz file into the user's cache, and delete the oldest files of its folder beyond MAX_CACHE_FILES.

    Returns whether the file exists afterwards; a cache that cannot be written is no error.
    """
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # one might be a flag
    try:
        write_atomic(path, buffer.getvalue())
        newest_first = sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in newest_first[MAX_CACHE_FILES:]:
            file.unlink(missing_ok=True)
    except OSError:  # no space, no permission, or another process deleted the same file
        return path.exists()
    return True
