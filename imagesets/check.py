"""`bench data check URL`: open its splits, decode every image, and say what is there and what to fix.

N images of a split. Reading is the only thing done to a folder.
"""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from engine.printing import text_of
from imagesets.decoding import GREY_BITS, UnreadableImage, count_pages, decode_rgb, releasing_large_images
from imagesets.sets import FileImages, ImageSet, Split, open_set, open_uncached, splits_of
from imagesets.stored import StoredImages
from imagesets.subsets import class_counts
from imagesets.walk import EXTENSIONS

MOST = 20  # unreadable images of a split that are listed
BATCH = 256  # images between two reports of progress
DARK = 64  # of 255; 16-bit images that all stay below it hold at most 14 bits


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """A split and what decoding told of its N images, in N rows, 0 of an unreadable image; in none where they were
    listed alone."""

    image_set: ImageSet
    extents: np.ndarray  # (N, 2) int32: width, height in pixels
    digests: np.ndarray  # (N,) uint64 of the file bytes (in memory: the pixels)
    pages: np.ndarray  # (N,) int32: of TIFF files; 1 of other images
    deep: np.ndarray  # (N,) int16: the brightest value, 0..255, of grey that had more than 8 bits; -1 of other images
    unreadable: tuple[tuple[str, str], ...]  # path, reason

    @property
    def notes(self) -> list[str]:
        notes, deep = list(self.image_set.notes), int((self.deep >= 0).sum())
        if deep:
            notes.append(f"{deep} images of 16-bit grey, of which the upper 8 bits are read")
        if len(self.extents):
            notes += _files_not_read(self.image_set.images, self.image_set.notes)
        return notes


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `check_image_set` found. `problems`: whole sentences that say how to fix them; `ok`: there are none."""

    url: str
    splits: tuple[SplitReport, ...]
    in_both_splits: tuple[tuple[str, str], ...]  # files of train and val with the same content
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def check_image_set(
    url: str,
    split: Split | None = None,
    *,
    read_all: bool = True,
    workers: int | None = None,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Report:
    """Check one split, or all there can be. A set that cannot be opened is a problem in the report, not an error.

    read_all: decode every image (`workers` threads, all processors by default); else only list them. `start` is called
    once with the number of images to decode, `advance` with the number decoded since its last call.
    """
    opened: list[ImageSet] = []
    problems: list[str] = []
    try:
        names = (split,) if split else splits_of(url)
    except ValueError as error:
        names, problems = (), [str(error)]
    for name in names:
        try:
            opened.append(open_uncached(url, name) if read_all else open_set(url, name))
        except ValueError as error:
            problems.append(str(error))
    if read_all:
        start(sum(map(len, opened)))
    splits = tuple(read_split(image_set, len(image_set) if read_all else 0, workers, advance) for image_set in opened)
    if bad := sum(len(report.unreadable) for report in splits):
        problems.append(f"{bad} unreadable image{'s' * (bad > 1)}, listed above: replace them, or run with --skip-bad")
    problems += chain.from_iterable(map(_unfit, splits))
    if both := _in_both(splits):
        problems.append(
            f"{len(both)} image{'s' * (len(both) > 1)} of val also in train, such as {both[0][1]} and {both[0][0]}: "
            f"remove one of each pair, since scores on them say nothing"
        )
    return Report(url=url, splits=splits, in_both_splits=both, problems=tuple(dict.fromkeys(problems)))


def read_split(image_set: ImageSet, count: int, workers: int | None, advance: Callable[[int], None]) -> SplitReport:
    """Decode the first `count` images of a set, all or none, in threads; Pillow lets them run side by side."""
    extents, digests = np.zeros((count, 2), np.int32), np.zeros(count, np.uint64)
    deep, pages = np.full(count, -1, np.int16), np.ones(count, np.int32)
    unreadable = []
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for first in range(0, count, BATCH):  # in batches: a million waiting futures would take gigabytes
            batch = range(first, min(first + BATCH, count))
            for index, seen in zip(batch, pool.map(partial(_read, image_set), batch), strict=True):
                if isinstance(seen, UnreadableImage):
                    unreadable.append((seen.path, seen.reason))
                else:
                    extents[index], digests[index], deep[index], pages[index] = seen
            advance(len(batch))
    return SplitReport(
        image_set=image_set, extents=extents, digests=digests, pages=pages, deep=deep, unreadable=tuple(unreadable)
    )


@releasing_large_images()
def _read(image_set: ImageSet, index: int) -> tuple[tuple[int, int], int, int, int] | UnreadableImage:
    try:
        data = image_set.encoded(index)
        image = image_set.image(index) if data is None else decode_rgb(data, image_set.path(index))
    except UnreadableImage as error:
        return error
    content = image.tobytes() if data is None else data
    brightest = int(np.asarray(image).max()) if GREY_BITS in image.info else -1
    digested = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return image.size, digested, brightest, count_pages(io.BytesIO(data or b""))


def _unfit(report: SplitReport) -> Iterator[str]:
    """What makes a readable set unfit for evaluation."""
    image_set = report.image_set
    if len(image_set.classes) == 1 and image_set.reports != "retrieval":
        yield (
            f"only one class, {image_set.classes[0]!r}, where accuracy needs two or more: give each class a folder of "
            "its own; pretraining takes the images without classes as images:PATH"
        )
    stacks = report.pages[report.pages > 1]
    if len(stacks):
        yield (
            f"TIFF files of several pages in {image_set.split}: {len(stacks)}, with {stacks.sum()} pages in all, of "
            "which the first alone is read: save each page as a file of its own"
        )
    deep = report.deep[report.deep >= 0]
    if len(deep) and deep.max() < DARK:
        yield (
            f"none of the {len(deep)} images of 16-bit grey in {image_set.split} reaches a quarter of 65535, which is "
            "read as white: if they hold 12 or 14 bits, scale them up to 16 and save them again"
        )


def _files_not_read(images: object, notes: Sequence[str]) -> tuple[str, ...]:
    """The files below the folder of a set that no run reads, by their endings; not tables that a note names."""
    if not isinstance(images, FileImages):
        return ()
    paths = [
        os.path.join(folder, name) for folder, _, files in os.walk(images.root) for name in files if name[0] != "."
    ]
    not_read = [path for path in paths if not path.lower().endswith(EXTENSIONS)]
    endings = Counter(
        Path(path).suffix.lower() or "no ending"
        for path in not_read
        if not any(f" of {path}: " in note for note in notes)
    )
    if not endings:
        return ()
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(4))
    files = "1 file is" if endings.total() == 1 else f"{endings.total()} files are"
    return (f"{files} not read: their names do not end in {', '.join(EXTENSIONS)}: {counts}",)


def _in_both(splits: Sequence[SplitReport]) -> tuple[tuple[str, str], ...]:
    """Pairs of paths (train, val) with the same content, one for every image of val that has a twin in train."""
    if len(splits) < 2 or splits[0].image_set.reports == "retrieval":  # whose queries may be copies, by design
        return ()
    train, val = splits
    if not len(train.digests):
        return ()
    order = np.argsort(train.digests, kind="stable")
    place = np.searchsorted(train.digests, val.digests, sorter=order).clip(max=len(order) - 1)
    twin = order[place]
    both = np.flatnonzero((train.digests[twin] == val.digests) & (val.extents[:, 0] > 0))
    return tuple((train.image_set.path(int(twin[index])), val.image_set.path(int(index))) for index in both)


def render(report: Report) -> str:
    """The report as plain text for a terminal, each line printable."""
    lines = [report.url]
    for split in report.splits:
        lines += _render_split(split)
    if report.splits and not any(len(split.extents) for split in report.splits):
        lines.append("  images were listed, not decoded")
    lines += [f"  FIX: {problem}" for problem in report.problems]
    return text_of(lines if report.problems else [*lines, "  no problems found"])


def _render_split(report: SplitReport) -> list[str]:
    image_set, images = report.image_set, report.image_set.images
    size = "in memory"
    if isinstance(images, FileImages | StoredImages):
        size = f"{images.sizes.clip(0).sum() / 1e6:,.1f} MB"
    classes = image_set.classes
    kinds = f"{len(classes):,} classes" if classes else "no labels"
    lines = [f"  {image_set.split}: {len(image_set):,} images, {kinds}, {size}"]
    if classes and image_set.reports != "retrieval":
        counts = class_counts(image_set)
        least, most = counts.argmin(), counts.argmax()
        lines.append(
            f"    smallest class {classes[least]}: {counts[least]:,}; largest class {classes[most]}: {counts[most]:,}"
        )
    decoded = report.extents[report.extents[:, 0] > 0]
    if len(decoded):
        (narrowest, lowest), (widest, highest) = decoded.min(axis=0), decoded.max(axis=0)
        lines.append(f"    width {narrowest} to {widest} px, height {lowest} to {highest} px")
    lines.append(f"    fingerprint {image_set.fingerprint[:16]}")
    lines += [f"    note: {note}" for note in report.notes]
    lines += [f"    unreadable: {path} ({reason})" for path, reason in report.unreadable[:MOST]]
    if len(report.unreadable) > MOST:
        lines.append(f"    and {len(report.unreadable) - MOST} more")
    return lines
