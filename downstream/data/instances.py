"""Lists of images and the things in them, as entries of COCO's JSON files."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

MIN_SIDE = 32  # pixels; mmdet configs/_base_/datasets/coco_instance.py filter_cfg
Entry = dict[str, Any]


@contextmanager
def uncollected() -> Iterator[None]:
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
class Instances:
    """images: paths (N,) below a root, by image number. entries: theirs in the JSON file. objects: of each image.

    categories: number -> name, in the order of the classes. annotations: path below the root of the JSON file, or of
    the folder that holds annotation_files.
    """

    images: tuple[str, ...]
    entries: tuple[Entry, ...]
    objects: tuple[tuple[Entry, ...], ...]
    categories: Mapping[int, str]
    annotations: str
    annotation_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.categories.values())

    @property
    def files(self) -> tuple[str, ...]:
        """What a fingerprint is of."""
        return (*self.images, *(self.annotation_files or (self.annotations,)))

    @cached_property
    def outlined(self) -> bool:
        """Whether things have outlines, not boxes alone."""
        return any(thing.get("segmentation") for own in self.objects for thing in own)

    @cached_property
    def learnable(self) -> np.ndarray:
        """Indices of the images that training reads: with an object, and not too small."""
        sides = [min(entry["width"], entry["height"]) for entry in self.entries]
        return np.flatnonzero([bool(own) and side >= MIN_SIDE for own, side in zip(self.objects, sides, strict=True)])

    def take(self, indices: Sequence[int] | np.ndarray) -> "Instances":
        images, entries, objects = self.images, self.entries, self.objects
        return replace(
            self,
            images=tuple(images[i] for i in indices),
            entries=tuple(entries[i] for i in indices),
            objects=tuple(objects[i] for i in indices),
        )

    def check_size(self, index: int, height: int, width: int) -> None:
        """ValueError unless an image's pixels are as many as its entry says."""
        entry = self.entries[index]
        if (entry["height"], entry["width"]) != (height, width):
            raise ValueError(
                f"{self.images[index]}: the image is {width} x {height} pixels (width x height) and {self.annotations} "
                f"says {entry['width']} x {entry['height']}; take both from the same download"
            )
