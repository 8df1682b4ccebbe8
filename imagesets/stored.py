"""Images inside larger files, such as Parquet tables and tar shards, as an ImageSet.

Classes, order, names and sizes are those of the same images in folders, PATH/SPLIT/CLASS/IMAGE. So a set has the same
fingerprint, subsets and features in every form of storage. N images.
"""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from engine.files import digest, open_regular
from imagesets.decoding import UnreadableImage, decode_rgb
from imagesets.listing import HOLD_OUT, SPLIT_WORDS, short_list
from imagesets.names import PackedNames
from imagesets.sets import HEAD_BYTES, FileImages, ImageSet, MissingSplit, ReportedMetric, Split, contents_digest
from imagesets.walk import MAX_INT64, is_hidden, user_cache, write_cached_arrays

READ_BLOCK = 8 << 20  # bytes of one read when reading ahead


class ImageStore(Protocol):
    """Reads the bytes of images by their number. It is pickled into loader processes, without open files."""

    def read(self, index: int) -> bytes: ...


@runtime_checkable
class ShardStore(ImageStore, Protocol):
    """An ImageStore whose images lie in shards that are best read as a whole."""

    @property
    def shards(self) -> np.ndarray: ...  # (N,) shard of each image, ascending
    def span(self, indices: np.ndarray) -> tuple[str, int, int]: ...  # file, first and end byte of images of one shard
    def keeping(self, shards: int) -> "ShardStore": ...  # the same store, with a cache for this many shards


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredImages:
    """Images that an ImageStore reads out of larger files."""

    store: ImageStore
    where: str  # text before the name of an image in messages
    names: PackedNames  # (N) as in a folder of class folders
    sizes: np.ndarray  # (N,) int64, bytes
    store_indices: np.ndarray  # (N,) arguments of `store.read`
    changed: np.ndarray  # (N, 2) int64, modification time (ns) and inode of the file that holds each image

    def path(self, index: int) -> str:
        return f"{self.where}:{self.names[index]}"

    def encoded(self, index: int) -> bytes:
        try:
            return self.store.read(int(self.store_indices[index]))
        except (OSError, ValueError) as error:
            raise UnreadableImage(self.path(index), " ".join(str(error).split())) from error

    def image(self, index: int) -> Image.Image:
        return decode_rgb(self.encoded(index), self.path(index))

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """Image indices (n,) of each shard, in the order of its file."""
        assert isinstance(self.store, ShardStore)
        indices = np.argsort(self.store_indices)
        return np.split(indices, np.flatnonzero(np.diff(self.store.shards[self.store_indices[indices]])) + 1)

    def read_ahead(
        self, shards: Iterator[tuple[int, np.ndarray]], steps: Iterable[int], distance: int
    ) -> Generator[int]:
        """Yield the steps of a training while a thread reads the next shards into the system's page cache.

        Args:
            shards: Pairs of the first step that needs a shard, ascending, and the indices (n,) of its images.
            steps: All steps of the training.
            distance: How many steps ahead to read. Shards of the first step are read before it is yielded, because no
                thread may run while loader processes are forked.
        """
        shard, thread = next(shards, None), ThreadPoolExecutor(1)
        try:
            for number, step in enumerate(steps):
                while number == 0 and shard and shard[0] <= step:
                    self._read_through(shard[1])
                    shard = next(shards, None)
                yield step
                while shard and shard[0] <= step + distance:
                    thread.submit(self._read_through, shard[1])
                    shard = next(shards, None)
        finally:
            thread.shutdown(cancel_futures=True)

    def _read_through(self, indices: np.ndarray) -> None:
        """Read the part of a shard that holds the images at `indices`, sequentially, and discard it."""
        assert isinstance(self.store, ShardStore)
        block = memoryview(bytearray(READ_BLOCK))
        with suppress(OSError, ValueError):  # raised again when the image is decoded
            path, start, end = self.store.span(self.store_indices[indices])
            with open_regular(path) as file:
                file.seek(start)
                while start < end and (count := file.readinto(block[: end - start])):
                    start += count

    def take(self, indices: np.ndarray) -> "StoredImages":
        return self.take_renamed(indices, self.names.take(indices))

    def take_renamed(self, indices: np.ndarray, names: PackedNames) -> "StoredImages":
        """The images at `indices` (M,), with other names (M)."""
        return replace(
            self,
            names=names,
            sizes=self.sizes[indices],
            store_indices=self.store_indices[indices],
            changed=self.changed[indices],
        )

    def facts(self) -> tuple[bytes, ...]:
        return self.names.blob, self.names.ends.tobytes(), self.sizes.tobytes()

    @cached_property
    def contents(self) -> str:
        return contents_digest(self.changed, lambda index: self.encoded(index)[:HEAD_BYTES])


def stored_set(
    *,
    url: str,
    split: Split,
    classes: Sequence[str],
    labels: np.ndarray | None,
    images: StoredImages | FileImages,
    notes: Sequence[str],
    reports: ReportedMetric = "top1",
    complete: bool = True,
) -> ImageSet:
    """An ImageSet with its images in the order that they would have in folders.

    The order is by class, then by name; by name for images with several labels. Images without labels keep theirs.

    Args:
        labels: (N,) int64, indices into `classes`; or (N, K) as in ImageSet; or None, for split train only.
        images: Named by their file name alone (FileImages: by `fingerprint_names`), not by CLASS/IMAGE.
        complete: Whether every class needs an image in split val. In train every class does.

    Raises:
        ValueError: No images, labels out of range, a class without an image, or two images of the same class and name.
    """
    if not len(images.names):
        raise ValueError(f"{url}: the {split} split holds no image")
    if labels is None:
        if split == "val":
            raise ValueError(f"{url}: these images have no labels, so they can be pretrained on but not evaluated on")
        notes, labels = [*notes, "no labels: for pretraining alone"], np.full(len(images.names), -1)
        return ImageSet(url=url, split=split, classes=(), labels=labels, images=images, notes=tuple(notes))
    file_names = images.names
    if isinstance(images, FileImages) and images.fingerprint_names:
        file_names = images.fingerprint_names
    if labels.ndim == 2:
        order = np.array(sorted(range(len(file_names)), key=list(file_names).__getitem__))
        names = file_names.take(order)
    else:
        low, high = labels.min(), labels.max()
        if not 0 <= low <= high < len(classes):
            raise ValueError(f"{url}: labels from {low} to {high}, and {len(classes)} classes; correct one of them")
        empty = [classes[label] for label in np.setdiff1d(np.arange(len(classes)), labels)]
        if empty and not complete and split == "val":
            notes = [*notes, f"{len(empty)} of {len(classes)} classes have no image in val, {empty[0]!r} first"]
        elif empty:
            raise ValueError(f"{url}: no image of class {short_list(empty)} in {split}; fill or remove it")
        order, names, duplicate = _folder_order(classes, labels, file_names)
        if duplicate:
            raise ValueError(f"{url}: two images of {split} are called {duplicate!r}; rename one of them")
    return ImageSet(
        url=url,
        split=split,
        classes=tuple(classes),
        labels=labels[order],
        images=images.take_renamed(order, names),
        notes=tuple(notes),
        reports=reports,
    )


def _folder_order(
    classes: Sequence[str], labels: np.ndarray, file_names: PackedNames
) -> tuple[np.ndarray, PackedNames, str]:
    """Order (N,) by class, then by file name; the names as CLASS/IMAGE in that order; and a duplicate of these or "".

    Unpacks the names of only one class at a time.
    """
    orders, names, duplicate = [], [], ""
    ends = np.cumsum(np.bincount(labels, minlength=len(classes)))
    indices_by_class = np.split(np.argsort(labels, kind="stable"), ends[:-1])
    for class_name, indices in zip(classes, indices_by_class, strict=True):
        pairs = sorted((file_names[index], index) for index in indices.tolist())
        orders.append(np.array([index for _, index in pairs], np.int64))
        names.append(PackedNames.pack(f"{class_name}/{name}" for name, _ in pairs))
        for (name, _), (next_name, _) in pairwise(pairs):
            if name == next_name:
                duplicate = duplicate or f"{class_name}/{name}"
    return np.concatenate(orders), PackedNames.joined(names), duplicate


def split_files(url: str, place: str, split: Split, suffix: str) -> list[str]:
    """Sorted paths of the files of a split, which have a word for the split in their path.

    Args:
        place: A folder, which is searched recursively, or a pattern.
        suffix: End of the file names, such as ".tar".

    Raises:
        ValueError: There are no files, or none of this split. If no file names a split, all are of train.
    """
    if not place:
        raise ValueError(f"{url}: no path after the colon; write {url}/path/to/folder")
    pattern = os.path.join(place, "**", f"*{suffix}") if os.path.isdir(place) else place
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if path.endswith(suffix))
    folders = [place] if os.path.isdir(place) else [os.path.dirname(path) or "." for path in paths]
    root = os.path.commonpath(folders) if folders else ""
    paths = [path for path in paths if not any(map(is_hidden, os.path.relpath(path, root).split(os.sep)))]
    if not paths:
        raise ValueError(f"{url}: no file *{suffix} there; give the folder that holds them, or a pattern in quotes")
    if irregular := [path for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{url}: {irregular[0]} is no regular file, or a broken link; remove it")

    def paths_with(word: str) -> list[str]:
        return [path for path in paths if word in re.split(r"[^a-z]+", os.path.relpath(path, root).lower())]

    for word in SPLIT_WORDS[split]:
        if matches := paths_with(word):
            return matches
    if split == "train" and not any(paths_with(word) for word in SPLIT_WORDS["val"]):
        return paths
    words = " or ".join(SPLIT_WORDS[split])
    raise MissingSplit(
        f"{url}: none of its {len(paths)} files *{suffix} has {words} in its name, {os.path.basename(paths[0])} first; "
        f"name those of the split {split} so, {SPLIT_WORDS[split][0]}-0000{suffix}"
        + (f", {HOLD_OUT}" if split == "val" else "")
    )


def cached_index(
    files: Sequence[str], version: object, read: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Arrays that `read` extracts from large files, cached for the user until a file changes in path, size or time.

    A damaged cache file is rebuilt.

    Args:
        files: Paths of the files.
        version: A JSON value that changes whenever `read` would return other arrays for the same files.
        read: Returns the arrays by name; they hold only numbers or bytes.
    """
    stats = [os.stat(path) for path in files]
    stamps = [[os.path.realpath(p), stat.st_size, stat.st_mtime_ns] for p, stat in zip(files, stats, strict=True)]
    path = user_cache() / "indexes" / f"{digest([version, stamps])[:32]}.npz"
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # missing or damaged file: NumPy and zipfile raise nearly any type
        arrays = dict(read())
    write_cached_arrays(path, arrays)
    return arrays


def changes_of_files(files: Sequence[str], file_indices: Any) -> np.ndarray:
    """Modification time (ns) and inode (N, 2) int64 of the file that holds each image.

    file_indices: (N,) indices into `files`, or a slice.
    """
    changes = [(status.st_mtime_ns, status.st_ino & MAX_INT64) for status in map(os.stat, files)]
    return np.array(changes, np.int64).reshape(-1, 2)[file_indices]


def integer_labels(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Labels (N,) as int64. Raises ValueError for anything but integers and booleans; floats are not rounded."""
    labels = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.max(initial=0) > np.iinfo(np.int64).max:
        example = " ".join(str(values[0]).split())[:40]
        raise ValueError(f"labels such as {example!a} ({labels.dtype}) are not class indices; make them 0, 1, 2, ...")
    return labels.astype(np.int64)


def numbered_classes(labels: np.ndarray) -> tuple[str, ...]:
    """Class names for labels (N,) without names: "0", "1", ... up to the largest label.

    Raises ValueError for a label of N or more, because some class would have no image.
    """
    largest = int(labels.max(initial=-1))
    if largest >= len(labels):
        raise ValueError(f"label {largest} of only {len(labels)} images; number the classes 0, 1, 2, ... or name them")
    return tuple(str(number) for number in range(largest + 1))


def shards_of(image_set: ImageSet) -> list[np.ndarray]:
    """Image indices (n,) of every shard of a set that is stored in shards."""
    assert isinstance(image_set.images, StoredImages)
    return image_set.images.shards


def with_shuffle_window(image_set: ImageSet, window: int, readers: int = 1) -> ImageSet:
    """The same set with caches for reading images of `window` shards in turn, divided among `readers` processes.

    Raises ValueError if the set is not stored in shards, has fewer than `window`, or if `readers` does not divide it.
    """
    images, window_text = image_set.images, f"a shuffle window of {window} shards"
    if not (isinstance(images, StoredImages) and isinstance(images.store, ShardStore)):
        raise ValueError(
            f"{window_text}: {image_set.url} is not stored in shards; "
            "name a set of wds: or parquet:, or omit the window"
        )
    if window > len(images.shards):
        raise ValueError(f"{window_text}: {image_set.url} has {len(images.shards)} shards; give at most as many")
    if window % readers:
        raise ValueError(f"{window_text} cannot be shared equally by {readers} processes; give a multiple of {readers}")
    return replace(image_set, images=replace(images, store=images.store.keeping(window // readers)))


def shards_digest(image_set: ImageSet) -> str:
    """16 hexadecimal digits over the image indices of every shard."""
    return digest([hashlib.sha256(shard.tobytes()).hexdigest() for shard in shards_of(image_set)])[:16]
