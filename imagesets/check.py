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
from imagesets.decoding import GREY_BITS, UnreadableImage, decode_rgb, pages_of, releasing_large_images
from imagesets.sets import FileImages, ImageSet, Split, open_anew, open_set, splits_of
from imagesets.stored import StoredImages
from imagesets.subsets import class_counts
from imagesets.walk import EXTENSIONS

MOST = 20  # unreadable images of a split that are listed
BATCH = 256  # images between two reports of progress
DARK = 64  # of 255; 16-bit images that all stay below it hold at most 14 bits


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What one split holds. Extents are in pixels, None where no image was decoded."""

    split: Split
    images: int
    classes: int
    smallest_class: tuple[str, int] | None  # None without labels
    largest_class: tuple[str, int] | None
    file_bytes: int | None  # None for images in memory
    widths: tuple[int, int] | None  # least and most
    heights: tuple[int, int] | None
    unreadable: tuple[tuple[str, str], ...]  # path, reason
    fingerprint: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `check_image_set` found. `problems`: whole sentences that say how to fix them; `ok`: there are none."""

    url: str
    splits: tuple[SplitReport, ...]
    in_both_splits: tuple[tuple[str, str], ...]  # files of train and val with the same content
    problems: tuple[str, ...]
    read_all: bool

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What decoding all images of a split told; rows of an unreadable image are 0."""

    extents: np.ndarray  # (N, 2) int32: width, height
    digests: np.ndarray  # (N,) uint64 of the file bytes (in memory: the pixels)
    pages: np.ndarray  # (N,) int32: of TIFF files; 1 of other images
    deep: np.ndarray  # (N,) int16: the brightest value, 0..255, of grey that had more than 8 bits; -1 of other images
    unreadable: tuple[tuple[str, str], ...] = ()


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
        splits = (split,) if split else splits_of(url)
    except ValueError as error:
        splits, problems = (), [str(error)]
    for of_split in splits:
        try:
            opened.append(open_anew(url, of_split) if read_all else open_set(url, of_split))
        except ValueError as error:
            problems.append(str(error))
    if not read_all:
        return _report(url, opened, [None] * len(opened), problems)
    start(sum(map(len, opened)))
    return _report(url, opened, [read_contents(image_set, workers, advance) for image_set in opened], problems)


def read_contents(image_set: ImageSet, workers: int | None, advance: Callable[[int], None]) -> Contents:
    """Decode every image of a set in threads; Pillow lets them run side by side."""
    count = len(image_set)
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
    return Contents(extents=extents, digests=digests, deep=deep, pages=pages, unreadable=tuple(unreadable))


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
    return image.size, digested, brightest, pages_of(io.BytesIO(data or b""))


def _report(url: str, opened: list[ImageSet], contents: Sequence[Contents | None], problems: list[str]) -> Report:
    splits = tuple(map(_describe, opened, contents))
    bad = sum(len(split.unreadable) for split in splits)
    if bad:
        problems.append(f"{bad} unreadable image{'s' * (bad > 1)}, listed above: replace them, or run with --skip-bad")
    problems += chain.from_iterable(map(_unfit, opened, contents))
    both = _in_both(opened, contents)
    if both:
        problems.append(
            f"{len(both)} image{'s' * (len(both) > 1)} of val also in train, such as {both[0][1]} and {both[0][0]}: "
            f"remove one of each pair, since scores on them say nothing"
        )
    return Report(
        url=url,
        splits=splits,
        in_both_splits=both,
        problems=tuple(dict.fromkeys(problems)),
        read_all=all(content is not None for content in contents),
    )


def _unfit(image_set: ImageSet, contents: Contents | None) -> Iterator[str]:
    """What makes a readable set unfit for evaluation."""
    if len(image_set.classes) == 1 and image_set.reports != "retrieval":
        yield (
            f"only one class, {image_set.classes[0]!r}, where accuracy needs two or more: give each class a folder of "
            "its own; pretraining takes the images without classes as images:PATH"
        )
    if contents and (several := int((contents.pages > 1).sum())):
        yield (
            f"TIFF files of several pages in {image_set.split}: {several}, with "
            f"{contents.pages[contents.pages > 1].sum()} pages in all, of which the first alone is read: save each "
            "page as a file of its own"
        )
    deep = contents.deep[contents.deep >= 0] if contents else np.empty(0)
    if len(deep) and deep.max() < DARK:
        yield (
            f"none of the {len(deep)} images of 16-bit grey in {image_set.split} reaches a quarter of 65535, which is "
            "read as white: if they hold 12 or 14 bits, scale them up to 16 and save them again"
        )


def _describe(image_set: ImageSet, contents: Contents | None) -> SplitReport:
    images = image_set.images
    extents = contents.extents[contents.extents[:, 0] > 0] if contents else np.empty((0, 2))
    ranges = [(int(side.min()), int(side.max())) if len(side) else None for side in extents.T]
    notes = list(image_set.notes)
    if contents:
        if deep := int((contents.deep >= 0).sum()):
            notes.append(f"{deep} images of 16-bit grey, of which the upper 8 bits are read")
        notes += _files_not_read(images, image_set.notes)
    return SplitReport(
        split=image_set.split,
        images=len(image_set),
        classes=len(image_set.classes),
        smallest_class=_class_at(image_set, np.argmin),
        largest_class=_class_at(image_set, np.argmax),
        file_bytes=int(images.sizes.clip(0).sum()) if isinstance(images, FileImages | StoredImages) else None,
        widths=ranges[0],
        heights=ranges[1],
        unreadable=contents.unreadable if contents else (),
        fingerprint=image_set.fingerprint,
        notes=tuple(notes),
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


def _class_at(image_set: ImageSet, extreme: Callable[[np.ndarray], np.integer]) -> tuple[str, int] | None:
    if not image_set.classes or image_set.reports == "retrieval":
        return None
    counts = class_counts(image_set)
    place = int(extreme(counts))
    return image_set.classes[place], int(counts[place])


def _in_both(opened: list[ImageSet], contents: Sequence[Contents | None]) -> tuple[tuple[str, str], ...]:
    """Pairs of paths (train, val) with the same content, one for every image of val that has a twin in train."""
    read = [content for content in contents if content is not None]
    if len(read) < 2 or opened[0].reports == "retrieval":  # whose queries may be copies, by design
        return ()
    train, val = (content.digests for content in read)
    order = np.argsort(train, kind="stable")
    place = np.searchsorted(train, val, sorter=order).clip(max=len(train) - 1)
    twin = order[place]
    both = np.flatnonzero((train[twin] == val) & (read[1].extents[:, 0] > 0))
    return tuple((opened[0].path(int(twin[index])), opened[1].path(int(index))) for index in both)


def render(report: Report) -> str:
    """The report as plain text for a terminal, each line printable."""
    lines = [report.url]
    for split in report.splits:
        lines += _render_split(split)
    if not report.read_all:
        lines.append("  images were listed, not decoded")
    lines += [f"  FIX: {problem}" for problem in report.problems]
    return text_of(lines if report.problems else [*lines, "  no problems found"])


def _render_split(split: SplitReport) -> list[str]:
    size = "in memory" if split.file_bytes is None else f"{split.file_bytes / 1e6:,.1f} MB"
    kinds = f"{split.classes:,} classes" if split.classes else "no labels"
    lines = [f"  {split.split}: {split.images:,} images, {kinds}, {size}"]
    if split.smallest_class and split.largest_class:
        (least, fewest), (most, largest) = split.smallest_class, split.largest_class
        lines.append(f"    smallest class {least}: {fewest:,}; largest class {most}: {largest:,}")
    if split.widths and split.heights:
        lines.append(
            f"    width {split.widths[0]} to {split.widths[1]} px, height {split.heights[0]} to {split.heights[1]} px"
        )
    lines.append(f"    fingerprint {split.fingerprint[:16]}")
    lines += [f"    note: {note}" for note in split.notes]
    lines += [f"    unreadable: {path} ({reason})" for path, reason in split.unreadable[:MOST]]
    return lines + [f"    and {len(split.unreadable) - MOST} more"] * (len(split.unreadable) > MOST)
