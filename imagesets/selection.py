"""Indices of subsets: evenly spaced, balanced over classes, or random in each class. N images, K classes."""

import numpy as np


def quotas(counts: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` images over classes that have `counts` (K,), as equally as possible: (K,) int64.

    A remainder of one for only some classes goes to classes that are evenly spaced among those that have images left.
    """
    sizes = np.zeros(len(counts), np.int64)
    remaining = min(total, int(counts.sum()))
    while remaining:
        open_classes = np.flatnonzero(sizes < counts)
        share = remaining // len(open_classes)
        if not share:
            sizes[open_classes[evenly_spaced(len(open_classes), remaining)]] += 1
            break
        added = np.minimum(share, counts[open_classes] - sizes[open_classes])
        sizes[open_classes] += added
        remaining -= int(added.sum())
    return sizes


def evenly_spaced(length: int, count: int) -> np.ndarray:
    """`count` different, evenly spaced indices (count,) int64 of range(length), ascending; count <= length."""
    return (2 * np.arange(count, dtype=np.int64) + 1) * length // (2 * count)


def balanced_indices(labels: np.ndarray, classes: int, total: int) -> np.ndarray:
    """At most `total` ascending indices of images with labels (N,), balanced over K classes, evenly spaced in each."""
    counts = np.bincount(labels, minlength=classes)
    by_class = np.argsort(labels, kind="stable")
    starts = np.cumsum(counts) - counts
    sizes = quotas(counts, total)
    parts = [
        by_class[start + evenly_spaced(count, size)]
        for start, count, size in zip(starts, counts, sizes, strict=True)
        if size
    ]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def stratified_sample(labels: np.ndarray, sizes: np.ndarray, seed: int) -> np.ndarray:
    """Ascending indices of a random sample of images with labels (N,), `sizes[k]` of each class k.

    Each class takes its first images of one permutation of all images. So with the same seed a smaller sample is part
    of a larger one, as in MSN's lists (1-shot in 2-shot in 5-shot).
    """
    # RandomState's streams never change (NumPy NEP 19); those of default_rng may change with a release.
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels, minlength=len(sizes))
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank_in_class = np.arange(len(labels)) - starts
    return np.sort(by_class[rank_in_class < sizes[labels[by_class]]])


def held_out_sample(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """Ascending indices of a random `share` of each of K classes, for images with labels (N,).

    The share is rounded, to at least one image and never all: a class of one image keeps it.
    """
    counts = np.bincount(labels, minlength=classes)
    sizes = np.minimum(np.maximum(np.rint(share * counts), 1), counts - 1).clip(0).astype(np.int64)
    return stratified_sample(labels, sizes, seed)


def rarest_classes(labels: np.ndarray) -> np.ndarray:
    """The rarest class (N,) of each image with several labels (N, K), K for an image without any."""
    has_class = labels == 1
    counts = np.where(has_class, has_class.sum(axis=0), len(labels) + 1)
    return np.where(has_class.any(axis=1), counts.argmin(axis=1), labels.shape[1])
