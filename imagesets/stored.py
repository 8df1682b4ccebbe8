"""Images inside larger files, such as Parquet tables and tar shards, as the set that a folder of them would be.

Classes, order, names and sizes are those of PATH/SPLIT/CLASS/IMAGE, so that a set has one fingerprint, the same subsets
and the same features in all its forms. N images.
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

from engine.files import digest
from imagesets.decoding import UnreadableImage, decode_rgb
from imagesets.listing import HOLD_OUT, SPLIT_WORDS, short_list
from imagesets.names import PackedNames
from imagesets.sets import HEAD, FileImages, ImageSet, Reported, Split, contents_of
from imagesets.walk import LARGEST, keep_arrays, user_cache

BLOCK = 8 << 20  # bytes that are read at once ahead of their use


class ImageStore(Protocol):
    """Where the bytes are. It is pickled into loader processes, without what it has open."""

    def read(self, place: int) -> bytes: ...


@runtime_checkable
class ShardStore(ImageStore, Protocol):
    """Where the bytes are in shards, which are read as a whole."""

    @property
    def shards(self) -> np.ndarray: ...  # (N,) the shard of each place, ascending
    def span(self, places: np.ndarray) -> tuple[str, int, int]: ...  # of one shard: file, first byte, end of the last
    def keeping(self, shards: int) -> "ShardStore": ...  # the same, for images of so many shards in turn


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredImages:
    """`names` (N) as in a folder of class folders, `sizes` (N,) int64 in bytes, `places` (N,) by which `store` reads.

    changed: (N, 2) int64 as in FileImages, of the file that each image is in. where: what stands before a name in
    messages.
    """

    store: ImageStore
    where: str
    names: PackedNames
    sizes: np.ndarray
    places: np.ndarray
    changed: np.ndarray

    def path(self, index: int) -> str:
        return f"{self.where}:{self.names[index]}"

    def encoded(self, index: int) -> bytes:
        try:
            return self.store.read(int(self.places[index]))
        except (OSError, ValueError) as error:
            raise UnreadableImage(self.path(index), " ".join(str(error).split())) from error

    def image(self, index: int) -> Image.Image:
        return decode_rgb(self.encoded(index), self.path(index))

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """The images (n,) of each shard in the order of its file."""
        assert isinstance(self.store, ShardStore)
        images = np.argsort(self.places)
        return np.split(images, np.flatnonzero(np.diff(self.store.shards[self.places[images]])) + 1)

    def read_ahead(
        self, shards: Iterator[tuple[int, np.ndarray]], steps: Iterable[int], distance: int
    ) -> Generator[int]:
        """Yield the steps of a training, while a thread reads the parts of shards that hold its next images
        sequentially, so that they are in the system's page cache.

        Args:
            shards: Pairs of the first step that needs images of a shard, ascending, and these images (n,).
            steps: All steps of the training.
            distance: How many steps ahead to read. What the first step needs is read at once, because no thread may
                run while loader processes are forked.
        """
        shard, thread = next(shards, None), ThreadPoolExecutor(1)
        try:
            for number, step in enumerate(steps):
                while number == 0 and shard and shard[0] <= step:
                    self._read(shard[1])
                    shard = next(shards, None)
                yield step
                while shard and shard[0] <= step + distance:
                    thread.submit(self._read, shard[1])
                    shard = next(shards, None)
        finally:
            thread.shutdown(cancel_futures=True)

    def _read(self, indices: np.ndarray) -> None:
        assert isinstance(self.store, ShardStore)
        block = memoryview(bytearray(BLOCK))
        with suppress(OSError):  # which whoever decodes the image reports
            path, start, end = self.store.span(self.places[indices])
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                while start < end and (count := file.readinto(block[: end - start])):
                    start += count

    def take(self, indices: np.ndarray) -> "StoredImages":
        return self.renamed(indices, self.names.take(indices))

    def renamed(self, indices: np.ndarray, names: PackedNames) -> "StoredImages":
        """The images at `indices` (M,) under other names (M)."""
        return replace(
            self, names=names, sizes=self.sizes[indices], places=self.places[indices], changed=self.changed[indices]
        )

    def facts(self) -> tuple[bytes, ...]:
        return self.names.blob, self.names.ends.tobytes(), self.sizes.tobytes()

    @cached_property
    def contents(self) -> str:
        return contents_of(self.changed, lambda index: self.encoded(index)[:HEAD])

    @property
    def modified(self) -> int:
        return int(self.changed[:, 0].max(initial=0))


def stored_set(
    *,
    url: str,
    split: Split,
    classes: Sequence[str],
    labels: np.ndarray | None,
    images: StoredImages | FileImages,
    notes: Sequence[str],
    reports: Reported = "top1",
    complete: bool = True,
) -> ImageSet:
    """The set, its images in the order that they would have in folders: by class, then by name; those of several
    labels, (N, K), by name.

    Stored images are named, and files called, by file names alone. Without labels the order stays, and there is no
    split val. ValueError for labels that are no class, for classes without an image (of the validation images only if
    `complete`), and for two images of one class and name.
    """
    if not len(images.names):
        raise ValueError(f"{url}: the {split} split holds no image")
    if labels is None:
        if split == "val":
            raise ValueError(f"{url}: these images have no labels, so they can be pretrained on but not evaluated on")
        notes, labels = [*notes, "no labels: for pretraining alone"], np.full(len(images.names), -1)
        return ImageSet(url=url, split=split, classes=(), labels=labels, images=images, notes=tuple(notes))
    bare = (images.called or images.names) if isinstance(images, FileImages) else images.names
    if labels.ndim == 2:
        order = np.array(sorted(range(len(bare)), key=list(bare).__getitem__))
        names = bare.take(order)
    else:
        low, high = labels.min(), labels.max()
        if not 0 <= low <= high < len(classes):
            raise ValueError(f"{url}: labels from {low} to {high}, and {len(classes)} classes; correct one of them")
        empty = [classes[label] for label in np.setdiff1d(np.arange(len(classes)), labels)]
        if empty and not complete and split == "val":
            notes = [*notes, f"{len(empty)} of {len(classes)} classes have no image in val, {empty[0]!r} first"]
        elif empty:
            raise ValueError(f"{url}: no image of class {short_list(empty)} in {split}; fill or remove it")
        order, names, double = _in_folders(classes, labels, bare)
        if double:
            raise ValueError(f"{url}: two images of {split} are called {double!r}; give them names of their own")
    return ImageSet(
        url=url,
        split=split,
        classes=tuple(classes),
        labels=labels[order],
        images=images.renamed(order, names),
        notes=tuple(notes),
        reports=reports,
    )


def _in_folders(classes: Sequence[str], labels: np.ndarray, names: PackedNames) -> tuple[np.ndarray, PackedNames, str]:
    """Rows (N,) by class and by name, their names as CLASS/IMAGE, and one that occurs twice, "" if none.

    The names of one class at a time are in memory as texts.
    """
    orders, parts, double = [], [], ""
    ends = np.cumsum(np.bincount(labels, minlength=len(classes)))
    for name, own in zip(classes, np.split(np.argsort(labels, kind="stable"), ends[:-1]), strict=True):
        pairs = sorted((names[row], row) for row in own.tolist())
        orders.append(np.array([row for _, row in pairs], np.int64))
        parts.append(PackedNames.pack(f"{name}/{image}" for image, _ in pairs))
        double = double or next((f"{name}/{one}" for (one, _), (other, _) in pairwise(pairs) if one == other), "")
    return np.concatenate(orders), PackedNames.joined(parts), double


def split_files(url: str, place: str, split: Split, suffix: str) -> list[str]:
    """Sorted paths of a split's files: below a folder, or those that a pattern names, with a word for the split.

    ValueError where there are none.
    """
    if not place:
        raise ValueError(f"{url}: no path after the colon; write {url}/path/to/folder")
    pattern = os.path.join(place, "**", f"*{suffix}") if os.path.isdir(place) else place
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if path.endswith(suffix))
    if not paths:
        raise ValueError(f"{url}: no file *{suffix} there; give the folder that holds them, or a pattern in quotes")
    if odd := [path for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{url}: {odd[0]} is no regular file, or a broken link; remove it")
    root = place if os.path.isdir(place) else os.path.commonpath([os.path.dirname(path) or "." for path in paths])

    def named(word: str) -> list[str]:
        return [path for path in paths if word in re.split(r"[^a-z]+", os.path.relpath(path, root).lower())]

    if of_split := next(filter(None, map(named, SPLIT_WORDS[split])), None):
        return of_split
    if split == "train" and not any(named(word) for word in SPLIT_WORDS["val"]):
        return paths
    words = " or ".join(SPLIT_WORDS[split])
    raise ValueError(
        f"{url}: none of its {len(paths)} files *{suffix} has {words} in its name, {os.path.basename(paths[0])} first; "
        f"name those of the split {split} so, {SPLIT_WORDS[split][0]}-0000{suffix}"
        + (f", {HOLD_OUT}" if split == "val" else "")
    )


def indexed(
    files: Sequence[str], version: object, make: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Arrays that `make` reads out of large files, cached for the user until a file changes in path, size or time.

    The arrays hold numbers or bytes only. version: a JSON value that changes whenever `make` does. A damaged cache file
    is rebuilt.
    """
    stats = [os.stat(path) for path in files]
    stamps = [[os.path.realpath(p), stat.st_size, stat.st_mtime_ns] for p, stat in zip(files, stats, strict=True)]
    path = user_cache() / "indexes" / f"{digest([version, stamps])[:32]}.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # not there, or damaged: NumPy and zipfile raise nearly anything
        arrays = dict(make())
    keep_arrays(path, arrays)
    return arrays


def changed_of(files: Sequence[str], file_of: Any) -> np.ndarray:
    """Times of modification in ns and inodes (N, 2) of the files that images are in. file_of (N,): which of `files`."""
    facts = [(status.st_mtime_ns, status.st_ino & LARGEST) for status in map(os.stat, files)]
    return np.array(facts, np.int64).reshape(-1, 2)[file_of]


def class_numbers(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Labels (N,) as int64. ValueError for labels that are not whole numbers: a float is not rounded to a class."""
    labels = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.max(initial=0) > np.iinfo(np.int64).max:
        example = " ".join(str(values[0]).split())[:40]
        raise ValueError(f"labels such as {example!a} ({labels.dtype}) are not class indices; make them 0, 1, 2, ...")
    return labels.astype(np.int64)


def numbered_classes(labels: np.ndarray) -> tuple[str, ...]:
    """Names of classes that have none: their numbers, from 0 to the largest label. ValueError for a label beyond the
    number of images, as some class would have no image."""
    largest = int(labels.max(initial=-1))
    if largest >= len(labels):
        raise ValueError(f"label {largest} of only {len(labels)} images; number the classes 0, 1, 2, ... or name them")
    return tuple(str(number) for number in range(int(labels.max(initial=-1)) + 1))


def shards_of(image_set: ImageSet) -> list[np.ndarray]:
    """Image indices (n,) of every shard of a set that is stored in shards."""
    assert isinstance(image_set.images, StoredImages)
    return image_set.images.shards


def in_windows(image_set: ImageSet, window: int, readers: int = 1) -> ImageSet:
    """The set, with `window` of its shards read at a time by `readers` processes together.

    ValueError if the set is not stored in shards, has fewer than `window`, or `readers` cannot share them equally.
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
    """Short hexadecimal digest of which images are in each shard."""
    return digest([hashlib.sha256(shard.tobytes()).hexdigest() for shard in shards_of(image_set)])[:16]
