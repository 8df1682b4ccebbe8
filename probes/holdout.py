"""Held-out training images, which select heads and epochs in place of the validation images."""

import numpy as np

from imagesets.selection import stratified_sample
from imagesets.sets import ImageSet
from imagesets.subsets import class_counts


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
