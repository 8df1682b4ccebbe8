"""The images that a probe works on: two splits, opened and checked together, and held-out training images, which select
heads and epochs in place of the validation images."""

from collections.abc import Sequence

import numpy as np

from engine.tasks import Workspace
from imagesets.selection import held_out_sample
from imagesets.sets import SPLITS, ImageSet, open_set, parse_url


def open_splits(space: Workspace, several_labels: bool = False) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of `space.data`, limited as the workspace says.

    several_labels: whether the task evaluates on images that show several classes. Raises ValueError where they do and
    it does not, when their classes differ, and when there is only one class.
    """
    parse_url(space.data)  # the workspace may have labelled scenes open under this URL, which are for dense tasks
    train, val = (space.images(split, open_set) for split in SPLITS)
    if train.has_several_labels and not several_labels:
        raise ValueError(
            f"{space.data}: its images have several labels each, and this task knows one; of the probes, logistic "
            "regression on all training images takes them: logreg@dinov2"
        )
    if train.classes != val.classes:
        counts = f"{len(train.classes)} and {len(val.classes)}"
        raise ValueError(f"{space.data}: the classes of train and val differ ({counts}); give both the same folders")
    if len(train.classes) < 2:
        raise ValueError(f"{space.data}: there is only one class, {train.classes[0]!r}; accuracy needs two or more")
    return train, val


def held_out(train: ImageSet, share: float, seed: int) -> np.ndarray:
    """Images (n,) of the set, the same share of every class, at least one and never all, so none of a class of one
    image; ascending. ValueError where every class is such."""
    indices = held_out_sample(train.labels, len(train.classes), share, seed)
    if not len(indices):
        raise ValueError(
            f"{train.url}: every class has one training image, so none can be held out to select by; add images, raise "
            "--limit, or --select val"
        )
    return indices


def without_held_out(labels: np.ndarray, classes: Sequence[str]) -> str:
    """A warning about classes with one training image (N,), of which none is held out; "" where there are none."""
    single = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 1)
    if not len(single):
        return ""
    first = f"{classes[single[0]]!r}{' first' if len(single) > 1 else ''}"
    return f"{len(single)} of {len(classes)} classes, {first}, have one training image: none of theirs is held out"


def check_labels(trained: np.ndarray, evaluated: np.ndarray, train: ImageSet) -> None:
    """ValueError for evaluated labels that are not among those trained on: such images could never be right."""
    if len(lacking := np.setdiff1d(evaluated, trained)):
        names = ", ".join(train.classes[label] for label in lacking[:3])
        raise ValueError(
            f"{train.url}: {len(lacking)} classes of the validation images have no training image ({names}"
            f"{', ...' if len(lacking) > 3 else ''}); add training images, or raise --limit"
        )
