"""Lists of scenes: images with masks, whose values become classes, or with objects as in COCO's JSON files."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

IGNORED = 255  # value of pixels that no loss and no score counts
WHITE = 0xFFFFFF  # their colour, where masks show colours
MIN_SIDE = 32  # pixels; mmdet configs/_base_/datasets/coco_instance.py filter_cfg
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SceneFiles:
    """Base of all listings. images: paths (N,) below a root. notes: lines for people."""

    HOLDS: ClassVar[str]  # what belongs to the images
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images",)  # names of the fields that hold an entry for each image
    PATHS: ClassVar[tuple[str, ...]]  # names of those that hold paths, of which a fingerprint is

    images: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the images and of what belongs to them."""
        return tuple(path for name in self.PATHS for path in getattr(self, name))

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """The images at `indices` (M,), in that order, and what belongs to them."""
        entries: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in indices) for name in self.BY_IMAGE}
        return replace(self, **entries)


@dataclass(frozen=True, kw_only=True)
class Listing(SceneFiles):
    """masks: paths (N,) below the root. classes: names (K,). classes_of: class of each value 0..255 of a mask.

    colours: red, green and blue (K,) of each class where masks show colours; empty where they hold values.
    own_classes: whether a file of the set lists them, and not the layout.
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
        """Values of a mask's file (H, W) uint8 -> classes (H, W) uint8, IGNORED where there is none.

        Of colours (H, W, 3). ValueError for a value or colour that is no class's and is not ignored.
        """
        if self.colours:
            return self._coded_colours(mask)
        table = np.array(self.classes_of, np.uint8)
        values = np.flatnonzero(np.bincount(mask.ravel(), minlength=256))  # four times as fast as np.unique
        unknown = values[(table[values] >= len(self.classes)) & (table[values] != IGNORED)]
        if len(unknown):
            raise ValueError(f"the mask holds the value {unknown[0]}, allowed are {self.allowed}; {self._advice}")
        return table[mask]

    def _coded_colours(self, mask: np.ndarray) -> np.ndarray:
        known = {_packed(np.array(colour)): number for number, colour in enumerate(self.colours)}
        colours, inverse = np.unique(_packed(mask), return_inverse=True)
        codes = [({WHITE: IGNORED} | known).get(colour) for colour in colours.tolist()]
        if None in codes:
            colour = int(colours[codes.index(None)])
            rgb = f"{colour >> 16} {colour >> 8 & 255} {colour & 255}"
            raise ValueError(
                f"the mask shows the colour {rgb} (red, green, blue), which none of the {len(known)} classes has; "
                f"{self._advice}"
            )
        return np.array(codes, np.uint8)[inverse].reshape(mask.shape[:2])

    @property
    def _advice(self) -> str:
        if self.own_classes:
            return "correct the mask, or give it a class in the set's list of classes"
        return "is this the annotation of another version of the set?"

    @property
    def allowed(self) -> str:
        """The values that a mask's file may hold, such as "0 to 150, 255"."""
        known = {*range(len(self.classes)), IGNORED}
        values = [value for value, number in enumerate(self.classes_of) if number in known]
        starts = [value for value in values if value - 1 not in values]
        ends = [value for value in values if value + 1 not in values]
        return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _packed(colours: np.ndarray) -> np.ndarray:
    """Red, green and blue (..., 3) -> numbers (...), red first."""
    red, green, blue = np.moveaxis(colours.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


@dataclass(frozen=True, kw_only=True)
class DepthMaps(SceneFiles):
    """Images and the depth of their pixels. depths: paths (N,) below the root.

    per_metre: values of a file that make a metre. range: metres; the largest depth of each file must be within it.
    """

    HOLDS: ClassVar[str] = "depth maps"
    BY_IMAGE: ClassVar[tuple[str, ...]] = ("images", "depths")
    PATHS: ClassVar[tuple[str, ...]] = BY_IMAGE

    depths: tuple[str, ...]
    per_metre: float
    range: tuple[float, float]
    classes: ClassVar[tuple[str, ...]] = ()

    def metres(self, values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Values of a file (H, W) -> metres, 0 where nothing was measured. ValueError unless they fit an image of
        `size` (height, width) and the unit."""
        if values.ndim != 2 or values.dtype == bool:
            raise ValueError("the file holds no depth but colours, or black and white; save it as a 16-bit grey PNG")
        if values.shape != tuple(size):
            raise ValueError(
                f"the depth is {' x '.join(map(str, values.shape))} pixels and its image {size[0]} x {size[1]}; take "
                "both from the same download"
            )
        least, most = self.range
        if values.dtype.kind != "f" and (highest := np.iinfo(values.dtype).max / self.per_metre) < most:
            raise ValueError(
                f"depths of {8 * values.dtype.itemsize} bits end at {highest:g} m, and are read as {self.per_metre:g} "
                f"for each metre, up to {most:g} m; save them so, as a 16-bit PNG"
            )
        if not values.any():
            raise ValueError("no pixel has a depth: all values are 0")
        depth = values.astype(np.float32) / np.float32(self.per_metre)
        if not least <= depth.max() <= most:
            raise ValueError(
                f"the largest value is {values.max():g}, read as {depth.max():g} m: an image's largest depth must be "
                f"from {least:g} to {most:g} m; is it in another unit? Save {self.per_metre:g} for each metre"
            )
        return depth


class Pair(msgspec.Struct, frozen=True):
    """What is read of a file of SPair-71k. Sizes are width, height and channels, the box is x1, y1, x2, y2 of the
    target's object. Keypoints (x, y) are those that both images show, in one order."""

    src_imsize: tuple[int, int, int]
    trg_imsize: tuple[int, int, int]
    trg_bndbox: tuple[float, float, float, float]
    src_kps: list[tuple[float, float]]
    trg_kps: list[tuple[float, float]]
    viewpoint_variation: int

    def check_end(self, end: int, size: tuple[int, int]) -> None:
        """ValueError unless the source (end 0) or target (1) has the `size` (width, height) of its image, and its
        keypoints lie in it."""
        source, target = ("source", self.src_imsize, self.src_kps), ("target", self.trg_imsize, self.trg_kps)
        name, stated, points = (source, target)[end]
        if stated[:2] != size:
            raise ValueError(
                f"the {name} is said to be {stated[0]} x {stated[1]} pixels (width x height), and its image has "
                f"{size[0]} x {size[1]}; take both from the same download"
            )
        for x, y in points:
            if not (0 <= x <= size[0] and 0 <= y <= size[1]):
                raise ValueError(f"keypoint {x:g}, {y:g} lies outside of the {name} of {size[0]} x {size[1]} pixels")


@dataclass(frozen=True, kw_only=True)
class ImagePairs(SceneFiles):
    """Images and pairs of them. pairs: paths (P,) below the root of files, each of which holds a `Pair`. ends: (P, 2)
    source and target, as places among the images, whose folders are their classes."""

    HOLDS: ClassVar[str] = "pairs of images"
    PATHS: ClassVar[tuple[str, ...]] = ("images", "pairs")

    pairs: tuple[str, ...]
    ends: np.ndarray

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.class_of)))

    @cached_property
    def class_of(self) -> list[str]:
        """Name of the class of each image (N,)."""
        return [image.split("/")[-2] for image in self.images]

    def take(self, indices: Sequence[int] | np.ndarray) -> Self:
        """And the pairs of which both are among them."""
        places = np.full(len(self.images), -1)
        places[np.asarray(indices, int)] = np.arange(len(indices))
        kept = np.flatnonzero((places[self.ends] >= 0).all(1))
        return replace(super().take(indices), pairs=tuple(self.pairs[i] for i in kept), ends=places[self.ends[kept]])


def find_folder(root: Path, needed: Sequence[str], advice: str, inner: Sequence[str] = ()) -> Path:
    """`root`, or the first of the folders `inner` in it, that holds what is needed: files, or folders if their names
    end in a slash. ValueError, which ends in the advice, where none does."""
    for folder in (root, *(root / name for name in inner)):
        if all((folder / name).is_dir() if name.endswith("/") else (folder / name).is_file() for name in needed):
            return folder
    lacking = [name for name in needed if not (root / name).exists()] or needed
    kind = "folder" if lacking[0].endswith("/") else "file"
    raise ValueError(f"no {kind} {lacking[0]} there; {advice}")


def mask_paths(root: Path, split: str, pictures: Sequence[str], folder: str, hint: str = "") -> tuple[str, ...]:
    """Paths below `root` of the masks in `folder`, named as the pictures, as PNG. ValueError if one is missing."""
    masks = [f"{name.rpartition('.')[0]}.png" for name in pictures]
    check_present(masks, files_below(root / folder, ""), f"annotations of {split}", folder, hint)
    if twice := [name for name, count in Counter(masks).items() if count > 1]:
        raise ValueError(f"two images of {split} have the mask {folder}/{twice[0]}; give them names of their own")
    return tuple(f"{folder}/{name}" for name in masks)


def check_present(names: Sequence[str], present: Iterable[str], kind: str, folder: str, hint: str = "") -> None:
    """ValueError unless all `names`, such as "images of val" (kind) in `folder`, are present. Where none is, it names a
    file that is there instead."""
    present = set(present)
    missing = [name for name in names if name not in present]
    if missing:
        other = f"; {min(present)} is there instead" if present and len(missing) == len(names) else ""
        raise ValueError(
            f"{len(missing)} of {len(names)} {kind} are not there, such as {folder}/{missing[0]}{other}{hint}"
        )


def read_names(file: Path, advice: str) -> list[str]:
    """The first word of each line of a list. ValueError, which ends in the advice, where there is no such file."""
    if not file.is_file():
        raise ValueError(f"there is no list {file}; {advice}")
    return [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def files_below(folder: Path, suffix: str) -> list[str]:
    """Sorted paths, relative to `folder`, of whatever below it ends in `suffix` and is no folder.

    Pipes and broken links are among them, so that reading names them instead of passing over an image.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}") if not path.is_dir())


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """A block without garbage collection, which would search the hundred thousands of new dictionaries over and over:
    two fifths of the time of an evaluation, and of reading COCO's file."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class Instances(SceneFiles):
    """Images by number, and objects in them. entries: of the images in the JSON file. objects: of each image.

    categories: number -> name, in the order of the classes. annotations: path below the root of the JSON file, which is
    the only one of annotation_files, or of the folder that holds them.
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
        """Whether objects have outlines, not boxes alone."""
        return any(annotation.get("segmentation") for annotations in self.objects for annotation in annotations)

    @cached_property
    def trainable(self) -> np.ndarray:
        """Indices of the images that training reads: with an object, and not too small."""
        sides = [min(entry["width"], entry["height"]) for entry in self.entries]
        large = [bool(objects) and side >= MIN_SIDE for objects, side in zip(self.objects, sides, strict=True)]
        return np.flatnonzero(large)

    def check_size(self, index: int, height: int, width: int) -> None:
        """ValueError unless an image's pixels are as many as its entry says."""
        entry = self.entries[index]
        if (entry["height"], entry["width"]) != (height, width):
            raise ValueError(
                f"{self.images[index]}: the image is {width} x {height} pixels (width x height) and {self.annotations} "
                f"says {entry['width']} x {entry['height']}; take both from the same download"
            )
