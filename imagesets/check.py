"""`bench data check URL`: open the splits of a set, decode every image, and report what is there and what to fix.

Files are only read. Shapes: N images of a split.
"""

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from engine.printing import counted, text_of
from imagesets.decoding import (
    CUT_TO_8_BITS,
    UnreadableImage,
    count_pages,
    decode_rgb,
    orientation_of,
    releasing_large_images,
)
from imagesets.listing import short_list
from imagesets.sets import FileImages, ImageSet, MissingSplit, Split, content_digest, open_set, open_uncached, splits_of
from imagesets.stored import StoredImages
from imagesets.subsets import class_counts
from imagesets.walk import EXTENSIONS, note_on_hidden, visible_and_hidden

MAX_LISTED = 20  # unreadable images of a split that the report names
BATCH = 256  # images between two calls of `advance`
# Classes, images of train and val, and images of val that are also in train, counted in copies of the official files.
PUBLISHED: dict[tuple[int, ...], str] = {
    (100, 50_000, 10_000, 10): "CIFAR-100",
    (200, 100_000, 10_000, 7): "Tiny-ImageNet",
}
REMOVE_ONE = "remove one of each pair, since scores on them say nothing"
DARK = 64  # of 255; 16-bit images that are all darker hold at most 14 bits


class ImageFacts(NamedTuple):
    """Facts about an image that can be read. size: width and height. Others: as in SplitReport."""

    size: tuple[int, int]
    digest: int
    pages: int
    deep_maximum: int
    is_turned: bool


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """A split, and facts about its N images. Arrays are empty if images were only listed, not decoded."""

    image_set: ImageSet
    sizes: np.ndarray  # (N, 2) int32, width and height in pixels; 0 for an unreadable image
    digests: np.ndarray  # (N,) uint64 of the file's bytes, or of the pixels if in memory
    pages: np.ndarray  # (N,) int32, pages of a TIFF file; 1 for other images
    deep_maxima: np.ndarray  # (N,) int16, brightest value, 0..255, of images of more than 8 bits; -1 for other images
    turned: int  # images with an EXIF orientation
    unreadable: tuple[tuple[str, str], ...]  # path, reason

    @property
    def notes(self) -> list[str]:
        """Notes for users: those of the set, and those on its files."""
        notes = [*self.image_set.notes, *notes_on_pixels(self.deep_maxima, self.turned)]
        if len(self.sizes):
            readable = np.flatnonzero(self.sizes[:, 0] > 0)
            notes += _notes_on_files(self.image_set)
            notes += note_on_copies(
                readable, self.digests[readable], self.image_set.labels[readable], self.image_set.path
            )
        return notes


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `check_image_set`."""

    url: str
    splits: tuple[SplitReport, ...]
    in_both_splits: tuple[tuple[str, str], ...]  # paths in train and val with the same content
    problems: tuple[str, ...]  # sentences that say what is wrong and how to fix it
    notes: tuple[str, ...] = ()  # on both splits together

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
    """Check one split of a set, or all its splits.

    A set that cannot be opened is a problem in the report, not an exception.

    Args:
        url: Names the set.
        split: The split to check; None: all.
        read_all: Decode every image; else only list them.
        workers: Threads that decode; None: one for each processor.
        start: Called once with the number of images to decode.
        advance: Called with the number of images decoded since its last call.
    """
    image_sets: list[ImageSet] = []
    problems: list[str] = []
    missing: dict[Split, str] = {}  # split without images -> why, if the set could be opened
    try:
        names = (split,) if split else splits_of(url)
    except ValueError as error:
        names, problems = (), [str(error)]
    for name in names:
        try:
            image_sets.append(open_uncached(url, name) if read_all else open_set(url, name))
        except MissingSplit as error:
            missing[name] = str(error).removeprefix(f"{url}: ")
        except ValueError as error:
            problems.append(str(error))
    notes = []
    if [report.split for report in image_sets] == ["val"] and "train" in missing:
        notes.append(f"{missing.pop('train')}; only protocols that need no training images can run")
    problems += missing.values()
    if read_all:
        start(sum(map(len, image_sets)))
    splits = tuple(
        read_split(image_set, len(image_set) if read_all else 0, workers, advance) for image_set in image_sets
    )
    if bad := sum(len(report.unreadable) for report in splits):
        problems.append(f"{counted(bad, 'unreadable image')}, listed above: replace them, or run with --skip-bad")
    problems += chain.from_iterable(map(_problems_of_split, splits))
    if pairs := _in_both_splits(splits):
        text = in_both_text(pairs)
        counts = (len(splits[0].image_set.classes), *(len(split.image_set) for split in splits), len(pairs))
        is_official = url.startswith("torchvision:") and "?" not in url
        if is_official or counts in PUBLISHED:
            official = PUBLISHED.get(counts, "this set")
            notes.append(f"{text}: so it is in {official} as published, and numbers in papers include them: keep them")
        else:
            problems.append(f"{text}: {REMOVE_ONE}")
    return Report(
        url=url, splits=splits, in_both_splits=pairs, problems=tuple(dict.fromkeys(problems)), notes=tuple(notes)
    )


def read_split(image_set: ImageSet, count: int, workers: int | None, advance: Callable[[int], None]) -> SplitReport:
    """Decode the first `count` images of a set in threads, which Pillow lets run in parallel. count: N or 0."""
    sizes, digests = np.zeros((count, 2), np.int32), np.zeros(count, np.uint64)
    deep_maxima, pages = np.full(count, -1, np.int16), np.ones(count, np.int32)
    unreadable, turned = [], 0
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for first in range(0, count, BATCH):  # in batches, because a million pending futures would take gigabytes
            batch = range(first, min(first + BATCH, count))
            for index, facts in zip(batch, pool.map(partial(_read_image, image_set), batch), strict=True):
                if isinstance(facts, UnreadableImage):
                    unreadable.append((facts.path, facts.reason))
                else:
                    sizes[index], digests[index], pages[index], deep_maxima[index], is_turned = facts
                    turned += is_turned
            advance(len(batch))
    return SplitReport(
        image_set=image_set,
        sizes=sizes,
        digests=digests,
        pages=pages,
        deep_maxima=deep_maxima,
        turned=turned,
        unreadable=tuple(unreadable),
    )


@releasing_large_images()
def _read_image(image_set: ImageSet, index: int) -> ImageFacts | UnreadableImage:
    """Facts about an image, or why it cannot be read."""
    try:
        data = image_set.encoded(index)
        image = image_set.image(index) if data is None else decode_rgb(data, image_set.path(index))
    except UnreadableImage as error:
        return error
    return image_facts(image, data)


def image_facts(image: Image.Image, data: bytes | None) -> ImageFacts:
    """Facts about an image of decode_rgb. data: its file; None for an image in memory."""
    return ImageFacts(
        size=image.size,
        digest=content_digest(image.tobytes() if data is None else data),
        pages=count_pages(io.BytesIO(data or b"")),
        deep_maximum=int(np.asarray(image).max()) if image.info.get(CUT_TO_8_BITS) else -1,
        is_turned=orientation_of(image) != 1,
    )


def notes_on_pixels(deep_maxima: np.ndarray, turned: int) -> list[str]:
    """Notes on images of more than 8 bits, and on those with an EXIF orientation. Arguments: as in SplitReport."""
    notes = []
    if deep := int((deep_maxima >= 0).sum()):
        notes.append(f"{counted(deep, '16-bit image')}, of which the upper 8 bits are read")
    if turned:
        images = "1 image has" if turned == 1 else f"{turned} images have"
        notes.append(f"{images} an EXIF orientation, which is ignored: pixels are read as they are stored")
    return notes


def problems_of_pixels(split: Split, pages: np.ndarray, deep_maxima: np.ndarray) -> Iterator[str]:
    """Sentences on images that are read in part, or nearly black. pages, deep_maxima: as in SplitReport."""
    multipage = pages[pages > 1]
    if len(multipage):
        yield (
            f"TIFF files of several pages in {split}: {len(multipage)}, with {multipage.sum()} pages in all, "
            "of which only the first is read: save each page as a file of its own"
        )
    deep_maxima = deep_maxima[deep_maxima >= 0]
    if len(deep_maxima) and deep_maxima.max() < DARK:
        yield (
            f"none of the {len(deep_maxima)} 16-bit images in {split} reaches a quarter of 65535, "
            "which is read as white: if they hold 12 or 14 bits, scale them up to 16 and save them again"
        )


def note_on_copies(
    indices: np.ndarray,
    digests: np.ndarray,
    labels: np.ndarray,
    path_of: Callable[[int], object],
    label: str = "label",
) -> list[str]:
    """A note on images of a split with the same content, and whether some have different labels; [] if there are none.

    Args:
        indices: (M,) of the images that were read.
        digests: (M,) of their contents.
        labels: (M,) or (M, L).
        path_of: Returns the path of the image at an index.
        label: What a label is called.
    """
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    originals = first[group]
    copies = np.arange(len(digests)) != originals
    if not copies.any():
        return []
    differ = copies & (labels != labels[originals]).reshape(len(labels), -1).any(axis=1)
    text = f"{counted(int(copies.sum()), 'duplicate')} of other images"
    text += f", {differ.sum()} with another {label}" * bool(differ.any())
    copy = np.flatnonzero(differ if differ.any() else copies)[0]
    return [f"{text}, such as {path_of(int(indices[copy]))} of {path_of(int(indices[originals[copy]]))}"]


def _problems_of_split(report: SplitReport) -> Iterator[str]:
    """Sentences on what makes a readable split unfit for evaluation."""
    image_set = report.image_set
    if len(image_set.classes) == 1 and image_set.reports != "retrieval":
        yield (
            f"only one class, {image_set.classes[0]!r}, where accuracy needs two or more: give each class a folder of "
            "its own; pretraining takes the images without classes as images:PATH"
        )
    yield from problems_of_pixels(image_set.split, report.pages, report.deep_maxima)


def _notes_on_files(image_set: ImageSet) -> list[str]:
    """Notes on what lies in a set's folder and is not read, or not as a class of its own."""
    images = image_set.images
    if not isinstance(images, FileImages):
        return []
    names, hidden = visible_and_hidden(images.root)
    others = [os.path.join(images.root, name) for name in names if not name.lower().endswith(EXTENSIONS)]
    others = [path for path in others if not any(f" of {path}: " in note for note in image_set.notes)]  # not tables
    notes = _note_on_other_files(others) if others else []
    if all("/" in name for name in images.names):  # in class folders
        if loose := [name for name in names if "/" not in name and name.lower().endswith(EXTENSIONS)]:
            count = counted(len(loose), "image")
            notes.append(f"not read: {count} beside the class folders, such as {images.root}/{loose[0]}")
        notes += _note_on_nested_folders(image_set, images.names)
    return notes + note_on_hidden(hidden)


def _note_on_other_files(paths: Sequence[str]) -> list[str]:
    """A note that counts files that are no images, by ending."""
    endings = Counter(Path(path).suffix.lower() or "no ending" for path in paths)
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(8))
    counts += f" and {len(endings) - 8} other endings" * (len(endings) > 8)
    files = "1 file is" if len(paths) == 1 else f"{len(paths)} files are"
    return [f"{files} not read: their names do not end in {', '.join(EXTENSIONS)}: {counts}"]


def _note_on_nested_folders(image_set: ImageSet, names: Iterable[str]) -> list[str]:
    """A note on class folders of several folders. names: of the images, CLASS/IMAGE or CLASS/FOLDER/IMAGE."""
    classes, inner = set(image_set.classes), dict[str, set[str]]()
    for name in names:
        folder, *rest = name.split("/")
        if len(rest) > 1 and folder in classes:
            inner.setdefault(folder, set()).add(rest[0])
    several = ((folder, short_list(sorted(folders))) for folder, folders in inner.items() if len(folders) > 1)
    return [f"folders in a class folder count as one class, such as {text} in {folder}" for folder, text in several][:1]


def _in_both_splits(splits: Sequence[SplitReport]) -> tuple[tuple[str, str], ...]:
    """Pairs of paths (train, val) with the same content, one for each image of val that is also in train."""
    if len(splits) < 2 or splits[0].image_set.reports == "retrieval":  # retrieval queries may be in the database
        return ()
    train, val = splits
    digests = [dict(enumerate(split.digests.tolist())) for split in splits]
    readable = {index: digest for index, digest in digests[1].items() if val.sizes[index, 0]}
    return tuple((train.image_set.path(i), val.image_set.path(j)) for i, j in same_contents(digests[0], readable))


def same_contents(train: Mapping[int, int], val: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs of indices in train and val with the same digest, one for each image of val that is also in train.

    train, val: index -> digest.
    """
    first = {digest: index for index, digest in reversed([*train.items()])}
    return [(first[digest], index) for index, digest in val.items() if digest in first]


def in_both_text(pairs: Sequence[tuple[object, object]]) -> str:
    """How many images of val are also in train, with an example. pairs: paths in train and val."""
    train, val = pairs[0]
    return f"{counted(len(pairs), 'image')} of val also in train, such as {val} and {train}"


def render(report: Report) -> str:
    """The report as plain text for a terminal, each line printable."""
    lines = [report.url]
    for split in report.splits:
        lines += _render_split(split)
    if report.splits and not any(len(split.sizes) for split in report.splits):
        lines.append("  images were listed, not decoded")
    lines += [f"  note: {note}" for note in report.notes]
    lines += [f"  FIX: {problem}" for problem in report.problems]
    return text_of(lines if report.problems else [*lines, "  no problems found"])


def _render_split(report: SplitReport) -> list[str]:
    """The lines of the report on one split."""
    image_set, images = report.image_set, report.image_set.images
    storage = "in memory"
    if isinstance(images, FileImages | StoredImages):
        storage = f"{images.sizes.clip(0).sum() / 1e6:,.1f} MB"
    classes = image_set.classes
    class_text = f"{len(classes):,} classes" if classes else "no labels"
    lines = [f"  {image_set.split}: {len(image_set):,} images, {class_text}, {storage}"]
    if classes and image_set.reports != "retrieval":
        counts = class_counts(image_set)
        smallest, largest = counts.argmin(), counts.argmax()
        lines.append(
            f"    smallest class {classes[smallest]}: {counts[smallest]:,}; largest class {classes[largest]}: "
            f"{counts[largest]:,}"
        )
    decoded_sizes = report.sizes[report.sizes[:, 0] > 0]
    if len(decoded_sizes):
        (min_width, min_height), (max_width, max_height) = decoded_sizes.min(axis=0), decoded_sizes.max(axis=0)
        lines.append(f"    width {min_width} to {max_width} px, height {min_height} to {max_height} px")
    lines.append(f"    fingerprint {image_set.fingerprint[:16]}")
    lines += [f"    note: {note}" for note in report.notes]
    lines += [f"    unreadable: {path} ({reason})" for path, reason in report.unreadable[:MAX_LISTED]]
    if len(report.unreadable) > MAX_LISTED:
        lines.append(f"    and {len(report.unreadable) - MAX_LISTED} more")
    return lines
