"""The images that a probe works on: two splits, opened and checked together, and held-out training images, which select
heads and epochs in place of the validation images."""

import numpy as np

from engine.tasks import Workspace
from imagesets.selection import stratified_sample
from imagesets.sets import SPLITS, ImageSet, open_set, parse_url
from imagesets.subsets import class_counts


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
    """Images (n,) of the set, the same share of every class, at least one and never all; ascending.

    Raises ValueError for a class of one image.
    """
    counts = class_counts(train)
    if (counts == 1).any():
        raise ValueError(
            f"{train.url}: class {train.classes[int((counts == 1).argmax())]!r} has one training image, which cannot "
            "be held out as well; add images, raise --limit, or set select=val"
        )
    shares = np.clip(np.rint(share * counts), 1, np.maximum(counts - 1, 1)).astype(np.int64)
    return stratified_sample(train.labels, np.where(counts > 0, shares, 0), seed)


def check_labels(trained: np.ndarray, evaluated: np.ndarray, train: ImageSet) -> None:
    """ValueError for evaluated labels that are not among those trained on: such images could never be right."""
    if len(lacking := np.setdiff1d(evaluated, trained)):
        names = ", ".join(train.classes[label] for label in lacking[:3])
        raise ValueError(
            f"{train.url}: {len(lacking)} classes of the validation images have no training image ({names}"
            f"{', ...' if len(lacking) > 3 else ''}); add training images, or raise --limit"
        )
