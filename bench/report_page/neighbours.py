"""Some validation images and the training images that a k-NN found nearest to them: from what results keep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.report_page.pictures import Opened, small_picture
from bench.statistics.matching import Measured
from imagesets.sets import ImageSet

ARRAYS = ("neighbours_of", "neighbours", "similarities")


@dataclass(frozen=True, kw_only=True)
class SeenImage:
    """One image; right: whether its class is that of the image that was asked about."""

    picture: str  # a data: URL
    label: str
    right: bool
    similarity: float  # cosine


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A validation image, and its nearest training images by checkpoint, the nearest first."""

    picture: str
    label: str
    found: Mapping[str, tuple[SeenImage, ...]]


def neighbours_of(measured: Mapping[str, Measured], opened: Opened) -> tuple[Asked, ...]:
    """Neighbours by the named results of one table. Empty where none are kept, or the images are not on this
    machine."""
    kept = {name: each for name, each in measured.items() if set(ARRAYS) <= set(each.result.arrays)}
    if not kept:
        return ()
    first = next(iter(kept.values()))
    sets = [opened(first.result, split) for split in ("train", "val")]
    train, val = sets
    if train is None or val is None:
        return ()
    asked = first.arrays["neighbours_of"]
    kept = {name: each for name, each in kept.items() if np.array_equal(each.arrays["neighbours_of"], asked)}
    picture = picture_maker(train)
    return tuple(
        Asked(
            picture=small_picture(val, index),
            label=val.classes[val.labels[index]],
            found={name: _row(each, place, val.labels[index], train, picture) for name, each in kept.items()},
        )
        for place, index in enumerate(asked.tolist())
    )


def picture_maker(images: ImageSet) -> Callable[[int], str]:
    """A function that makes the picture of an image once."""
    made: dict[int, str] = {}

    def picture(index: int) -> str:
        return made.setdefault(index, made.get(index) or small_picture(images, index))

    return picture


def _row(
    measured: Measured, place: int, label: int, train: ImageSet, picture: Callable[[int], str]
) -> tuple[SeenImage, ...]:
    near, similarities = (measured.arrays[name][place].tolist() for name in ("neighbours", "similarities"))
    return tuple(
        SeenImage(
            picture=picture(index),
            label=train.classes[train.labels[index]],
            right=bool(train.labels[index] == label),
            similarity=similarity,
        )
        for index, similarity in zip(near, similarities, strict=True)
    )
