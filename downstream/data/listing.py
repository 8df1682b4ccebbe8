"""What a layout lists of a scene set: its images, and their masks, depth maps, objects or pairs.

N images, K classes, H x W pixels of an image.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from downstream.data.boxes import BEYOND, NO_AREA, Box, box_fault
from engine.files import read_text
from imagesets.walk import EXTENSIONS, note_on_hidden, visible_and_hidden

MAX_NAMED_FOLDERS = 4  # folders with files that are not read that a note names
IGNORED = 255  # class of pixels that neither loss nor score counts
WHITE = 0xFFFFFF  # colour of ignored pixels in masks that show colours, as a 24-bit number
MIN_SIDE = 32  # pixels; training skips smaller images: mmdet configs/_base_/datasets/coco_instance.py filter_cfg
Entry = dict[str, Any]  # one object of a COCO JSON file: an image or an annotation


@dataclass(frozen=True, kw_only=True)
class SceneFiles:
    """Base of all listings.

    images: paths (N,) of the images, relative to the root of the set. notes: remarks for the user. warnings: those that
    runs repeat and `bench data check` refuses. meaning: choices of what annotations mean, which the fingerprint covers.
    """

    HOLDS: ClassVar[str]  # what the images are annotated with, for error messages
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images",)  # names of the fields with one item per image
    PATHS: ClassVar[tuple[str, ...]]  # names of the fields with paths, whose files the fingerprint covers

    images: tuple[str, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    meaning: str = ""

    def check_with(self, val: "SceneFiles") -> None:
        """Raise ValueError if tasks cannot train on these scenes and evaluate on those of `val`."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all images and annotation files."""
        return tuple(path for name in self.PATHS for path in getattr(self, name))

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The listing of the images at `indices` (M,), in that order."""
        fields: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in indices) for name in self.BY_IMAGE}
        return replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class Listing(SceneFiles):
    """Images with masks of classes.

    masks: paths (N,) relative to the root. classes: names (K,). classes_of: the class of each value 0..255 of a mask
    file; IGNORED for none, any other number from K on makes the value an error. colours: red, green and blue of each
    class, and after these of colours that are ignored, if masks show colours; empty if they hold values. own_classes:
    whether a file of the set defines the classes, not the layout.
    """

    HOLDS: ClassVar[str] = "masks"
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images", "masks")
    PATHS: ClassVar[tuple[str, ...]] = BY_IMAGE

    masks: tuple[str, ...]
    classes: tuple[str, ...]
    classes_of: tuple[int, ...]
    colours: tuple[tuple[int, ...], ...] = ()
    own_classes: bool = False

    def to_classes(self, mask: np.ndarray) -> np.ndarray:
        """Convert values (H, W) uint8, or colours (H, W, 3), of a mask file to classes (H, W) uint8, IGNORED for none.

        Raises:
            ValueError: a value or colour belongs to no class and is not ignored.
        """
        if self.colours:
            return self._colours_to_classes(mask)
        class_of_value = np.array(self.classes_of, np.uint8)
        values = np.flatnonzero(np.bincount(mask.ravel(), minlength=256))  # four times as fast as np.unique
        classes = class_of_value[values]
        unknown = values[(classes >= len(self.classes)) & (classes != IGNORED)]
        if len(unknown):
            raise ValueError(f"the mask holds the value {unknown[0]}, allowed are {self.allowed}; {self._advice}")
        return class_of_value[mask]

    def _colours_to_classes(self, mask: np.ndarray) -> np.ndarray:
        class_of_colour = {
            int(_rgb_numbers(np.array(colour))): number if number < len(self.classes) else IGNORED
            for number, colour in enumerate(self.colours)
        }
        colours, inverse = np.unique(_rgb_numbers(mask), return_inverse=True)
        classes = [({WHITE: IGNORED} | class_of_colour).get(colour) for colour in colours.tolist()]
        if None in classes:
            colour = int(colours[classes.index(None)])
            rgb = f"{colour >> 16} {colour >> 8 & 255} {colour & 255}"
            raise ValueError(
                f"the mask shows the colour {rgb} (red, green, blue), which none of the {len(self.classes)} classes "
                f"has; {self._advice}"
            )
        return np.array(classes, np.uint8)[inverse].reshape(mask.shape[:2])

    @property
    def _advice(self) -> str:
        if self.own_classes:
            return "correct the mask, or give it a class in the set's list of classes"
        return "is this the annotation of another version of the set?"

    @property
    def known_values(self) -> list[int]:
        """The values of a mask file that are of a class or ignored, ascending."""
        valid = {*range(len(self.classes)), IGNORED}
        return [value for value, number in enumerate(self.classes_of) if number in valid]

    @property
    def allowed(self) -> str:
        """The values that a mask file may hold, such as "0 to 150, 255"."""
        values = self.known_values
        starts = [value for value in values if value - 1 not in values]
        ends = [value for value in values if value + 1 not in values]
        return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _rgb_numbers(colours: np.ndarray) -> np.ndarray:
    """Red, green and blue (..., 3) as 24-bit numbers (...), red in the highest bits."""
    red, green, blue = np.moveaxis(colours.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


@dataclass(frozen=True, kw_only=True)
class Videos(Listing):
    """Frames with masks whose classes are the objects of a video, 0 for none. A video is a folder of frames."""

    HOLDS: ClassVar[str] = "videos"


@dataclass(frozen=True, kw_only=True)
class DepthMaps(SceneFiles):
    """Images with a depth for each pixel.

    depths: paths (N,) of the depth files, relative to the root. per_metre: the value in a file that means one metre.
    range: metres; the largest depth of each image must be within it. scaled: whether the user gave the scale, as files
    of 8 bits need.
    """

    HOLDS: ClassVar[str] = "depth maps"
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images", "depths")
    PATHS: ClassVar[tuple[str, ...]] = BY_IMAGE

    depths: tuple[str, ...]
    per_metre: float
    range: tuple[float, float]
    scaled: bool = False
    classes: ClassVar[tuple[str, ...]] = ()

    def metres(self, values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Convert values (H, W) of a depth file to metres (H, W) float32, 0 where nothing was measured.

        0 and the largest value of 16 bits mean that nothing was measured.

        Raises:
            ValueError: the values are colours, do not fit an image of `size` (height, width), are no depths, or are in
                another unit.
        """
        if values.ndim != 2 or values.dtype == bool:
            raise ValueError("the file holds colours, or black and white, not depth; save depth as a 16-bit grey PNG")
        if values.shape != tuple(size):
            raise ValueError(
                f"the depth is {' x '.join(map(str, values.shape))} pixels and its image {size[0]} x {size[1]}; take "
                "both from the same download"
            )
        if values.dtype.itemsize == 1 and not self.scaled:
            raise ValueError(
                f"depths of 8 bits end at {255 / self.per_metre:g} m with {self.per_metre:g} per metre; save a 16-bit "
                "PNG, or give the value of one metre, such as ?scale=25.5"
            )
        measured = (values != 0) & ((values != 0xFFFF) | (values.dtype.itemsize != 2))
        if not measured.any():
            raise ValueError("no pixel has a depth: all values mean that nothing was measured")
        depth = np.where(measured, values.astype(np.float32) / np.float32(self.per_metre), np.float32(0))
        if not (depth >= 0).all() or not np.isfinite(depth).all():
            raise ValueError("the file holds negative, infinite or NaN values; save 0 where nothing was measured")
        lowest, highest = self.range
        if not lowest <= depth.max() <= highest:
            raise ValueError(
                f"the largest value is {depth.max() * self.per_metre:g}, read as {depth.max():g} m, but an image's "
                f"largest depth must be from {lowest:g} to {highest:g} m; is it in another unit (?unit=cm)? Save "
                f"{self.per_metre:g} for each metre"
            )
        return depth


class PairAnnotation(msgspec.Struct, frozen=True):
    """The fields that are read of a pair's file in SPair-71k, in pixels.

    Sizes are width, height and channels; boxes are x1, y1, x2, y2 of the object. Keypoints (x, y) are those visible in
    both images, in the same order.
    """

    src_imsize: tuple[int, int, int]
    trg_imsize: tuple[int, int, int]
    src_bndbox: Box
    trg_bndbox: Box
    src_kps: list[tuple[float, float]]
    trg_kps: list[tuple[float, float]]
    viewpoint_variation: int

    def check_end(self, end: int, size: tuple[int, int]) -> None:
        """Check the source (end 0) or the target (end 1) against its image of `size` (width, height).

        Raises:
            ValueError: the file gives another size, or a keypoint or the box lies outside of the image, or the box has
                no area.
        """
        if end == 0:
            name, stated_size, keypoints, box = "source", self.src_imsize, self.src_kps, self.src_bndbox
        else:
            name, stated_size, keypoints, box = "target", self.trg_imsize, self.trg_kps, self.trg_bndbox
        if stated_size[:2] != size:
            raise ValueError(
                f"the {name} should have {stated_size[0]} x {stated_size[1]} pixels (width x height), but its image "
                f"has {size[0]} x {size[1]}; take both from the same download"
            )
        for x, y in keypoints:
            if not (0 <= x <= size[0] and 0 <= y <= size[1]):
                raise ValueError(f"keypoint {x:g}, {y:g} lies outside of the {name} of {size[0]} x {size[1]} pixels")
        if (fault := box_fault(box, size)) in (NO_AREA, BEYOND):
            edges = ", ".join(f"{edge:g}" for edge in box)
            raise ValueError(
                f"the box {edges} (x1, y1, x2, y2) of the {name}, {size[0]} x {size[1]} pixels, has {fault}"
            )


@dataclass(frozen=True, kw_only=True)
class ImagePairs(SceneFiles):
    """Images and P pairs of them. The class of an image is the name of its folder.

    pairs: paths (P,) of the files, relative to the root, each of which holds a `PairAnnotation`. ends: (P, 2) indices
    of the source and the target image.
    """

    HOLDS: ClassVar[str] = "pairs of images"
    PATHS: ClassVar[tuple[str, ...]] = ("images", "pairs")

    pairs: tuple[str, ...]
    ends: np.ndarray

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.image_classes)))

    @cached_property
    def image_classes(self) -> list[str]:
        """Name of the class of each image (N,)."""
        return [image.split("/")[-2] for image in self.images]

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The listing of the images at `indices` (M,), and of the pairs whose two images are among them."""
        new_index = np.full(len(self.images), -1)
        new_index[np.asarray(indices, int)] = np.arange(len(indices))
        kept = np.flatnonzero((new_index[self.ends] >= 0).all(1))
        pairs = tuple(self.pairs[i] for i in kept)
        return replace(super().take(indices), pairs=pairs, ends=new_index[self.ends[kept]])


@dataclass(frozen=True, kw_only=True)
class Instances(SceneFiles):
    """Images with objects, as in COCO's JSON files.

    entries: (N,) entries of the images in the file. objects: (N,) annotations of each image. categories: id -> name, in
    the order of the classes. annotations: path, relative to the root, of the JSON file or of the folder with the
    annotation files. annotation_files: the paths of these files.
    """

    HOLDS: ClassVar[str] = "outlines of objects"
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images", "entries", "objects")
    PATHS: ClassVar[tuple[str, ...]] = ("images", "annotation_files")

    entries: tuple[Entry, ...]
    objects: tuple[tuple[Entry, ...], ...]
    categories: Mapping[int, str]
    annotations: str
    annotation_files: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.categories.values())

    @cached_property
    def has_outlines(self) -> bool:
        """Whether objects have outlines in addition to boxes."""
        return any(annotation.get("segmentation") for annotations in self.objects for annotation in annotations)

    @cached_property
    def used_categories(self) -> set[int]:
        """Ids of the categories that have objects."""
        return {entry["category_id"] for objects in self.objects for entry in objects if not entry["iscrowd"]}

    @cached_property
    def trainable(self) -> np.ndarray:
        """Indices of the images that training reads: those with an object and sides of at least MIN_SIDE."""
        shorter_sides = [min(entry["width"], entry["height"]) for entry in self.entries]
        return np.flatnonzero(
            [bool(objects) and side >= MIN_SIDE for objects, side in zip(self.objects, shorter_sides, strict=True)]
        )

    def check_with(self, val: SceneFiles) -> None:
        """Raise ValueError if the splits have different categories, or a split has nothing to learn or to score."""
        assert isinstance(val, Instances)
        if dict(self.categories) != dict(val.categories):
            number, name = min(self.categories.items() ^ val.categories.items())
            raise ValueError(
                f"{self.annotations} and {val.annotations} name other categories; number {number}, {name}, is not the "
                "same in both"
            )
        used = self.used_categories | val.used_categories
        name_of = {number: name for number, name in self.categories.items() if number in used}
        if same := [name for name, count in Counter(name_of.values()).items() if count > 1]:
            numbers = [str(number) for number, name in name_of.items() if name == same[0]]
            raise ValueError(
                f"{self.annotations}: categories {' and '.join(numbers)} are both {same[0]}, and have objects; give "
                "the objects of a class one category"
            )
        for split, listing, images in (("train", self, self.trainable), ("val", val, range(len(val.objects)))):
            if all(entry["iscrowd"] for index in images for entry in listing.objects[index]):
                small = f", nor images below {MIN_SIDE} px" if split == "train" else ""
                text = f"no image of {split} has an object, according to {listing.annotations}"
                raise ValueError(f"{text} (crowds and difficult objects do not count{small})")

    def check_size(self, index: int, height: int, width: int) -> None:
        """Raise ValueError if an image's height and width in pixels differ from those in its entry."""
        entry = self.entries[index]
        if (entry["height"], entry["width"]) != (height, width):
            raise ValueError(
                f"{self.images[index]}: the image is {width} x {height} pixels (width x height) and {self.annotations} "
                f"says {entry['width']} x {entry['height']}; take both from the same download"
            )


def find_folder(root: Path, needed: Sequence[str], advice: str, inner: Sequence[str] = ()) -> Path:
    """The folder that contains everything in `needed`: `root`, or else the first of its folders `inner`.

    Args:
        needed: names of files, and of folders with a slash at the end.
        advice: end of the error message.

    Raises:
        ValueError: no folder contains them all.
    """

    def missing_in(folder: Path) -> list[str]:
        kinds = {True: Path.is_dir, False: Path.is_file}
        return [name for name in needed if not kinds[name.endswith("/")](folder / name)]

    for folder in (root, *(root / name for name in inner)):
        if not missing_in(folder):
            return folder
    first, *_ = missing_in(root)
    kind = "folder" if first.endswith("/") else "file"
    problem = f"{first} is no regular {kind}" if (root / first).exists() else f"no {kind} {first} there"
    raise ValueError(f"{problem}; {advice}")


def mask_paths(root: Path, split: str, images: Sequence[str], folder: str, hint: str = "") -> tuple[str, ...]:
    """Paths, relative to `root`, of the PNG masks in `folder` that have the names of the images.

    Raises:
        ValueError: a mask is missing (the message ends in the hint), or an image has two masks or a mask two images.
    """
    names = [os.path.splitext(name)[0] for name in images]
    masks = named_files(root, folder, names, f"annotations of {split}", (".png",), hint)
    if shared := [mask for mask, count in Counter(masks).items() if count > 1]:
        raise ValueError(f"two images of {split} have the mask {shared[0]}; give them names of their own")
    return masks


def check_present(names: Sequence[str], present: Iterable[str], kind: str, folder: str, hint: str = "") -> None:
    """Raise ValueError if some of `names` are not among the present files.

    kind: what the names are, such as "images of val". folder: where they should be. hint: end of the message. If none
    is present, the message names a file that is.
    """
    present = set(present)
    missing = [name for name in names if name not in present]
    if missing:
        other = f"; {min(present)} is there instead" if present and len(missing) == len(names) else ""
        raise ValueError(
            f"{len(missing)} of {len(names)} {kind} are not there, such as {folder}/{missing[0]}{other}{hint}"
        )


def named_files(
    root: Path, folder: str, names: Sequence[str], kind: str, endings: tuple[str, ...] = EXTENSIONS, hint: str = ""
) -> tuple[str, ...]:
    """Paths, relative to `root`, of the files in `folder` with these names and one of the endings, in any case.

    kind: what the files are, such as "images of val". Raises ValueError if one is missing, and the message ends in the
    hint; or if two have one name.
    """
    files: dict[str, list[str]] = {}
    for file in files_below(root / folder, endings):
        ending = next(ending for ending in endings if file.lower().endswith(ending.lower()))
        files.setdefault(file[: -len(ending)], []).append(file)
    ending = endings[0] if len(endings) == 1 else ""
    present = [name + ending for name in files] or files_below(root / folder)
    check_present([name + ending for name in names], present, kind, folder, hint)
    for name in names:
        if len(files[name]) > 1:
            raise ValueError(f"{folder} holds {' and '.join(files[name])}, both named {name}; remove one")
    return tuple(f"{folder}/{files[name][0]}" for name in names)


def check_different(names: Iterable[str], kind: str) -> None:
    """Raise ValueError if a name occurs twice. kind: what the names are, such as "images of val.txt"."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{len(repeated)} {kind} occur twice, such as {repeated[0]}; list each once")


def read_names(file: Path, advice: str) -> list[str]:
    """The first word of each line that is not empty.

    Raises ValueError, with the advice, if there is no such file; and if a name is listed twice, since it would count
    twice.
    """
    try:
        names = [line.split()[0] for line in read_text(file).splitlines() if line.strip()]
    except FileNotFoundError:
        raise ValueError(f"there is no list {file}; {advice}") from None
    check_different(names, f"names of {file}")
    return names


def files_below(folder: Path, endings: str | tuple[str, ...] = "") -> list[str]:
    """Sorted paths, relative to `folder`, of everything below it that has one of the endings, in any case, and is not a
    folder.

    Links are followed, and hidden files and folders left out, as in image sets. This includes pipes and broken links:
    reading them later raises an error, instead of silently leaving out an image. Raises ValueError if the folder does
    not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    lower_endings = tuple(ending.lower() for ending in ([endings] if isinstance(endings, str) else endings))
    return sorted(name for name in visible_and_hidden(str(folder))[0] if name.lower().endswith(lower_endings))


def unread_files(root: Path, read: Iterable[str]) -> list[str]:
    """Notes that count the images and annotations below `root` that are not among the files `read`, by folder, and the
    hidden ones.

    read: paths relative to the root. Only files of the endings of images, and of the files that were read, are counted.
    """
    read = {os.path.normpath(name) for name in read}
    endings = {*EXTENSIONS, *(os.path.splitext(name)[1].lower() for name in read)}
    unread: Counter[tuple[str, str]] = Counter()
    visible, hidden = visible_and_hidden(str(root))
    for name in visible:
        ending = os.path.splitext(name)[1].lower()
        if name not in read and ending in endings and os.sep in name:
            unread["/".join(name.split(os.sep)[:-1][:2]), ending] += 1
    notes = []
    if unread:
        counts = [f"{count} {ending} in {folder}" for (folder, ending), count in unread.most_common(MAX_NAMED_FOLDERS)]
        others = sum(unread.values()) - sum(count for _, count in unread.most_common(MAX_NAMED_FOLDERS))
        notes.append(f"files not read: {', '.join(counts)}{f' and {others} more' if others else ''}")
    return notes + note_on_hidden(hidden)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collection.

    It would search hundreds of thousands of new dictionaries again and again: 40 % of the time for reading COCO's file
    and for an evaluation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
