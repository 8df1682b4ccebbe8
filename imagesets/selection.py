"""Which images a subset keeps: index arithmetic on labels, without any image set. N images, K classes."""

import numpy as np


def quotas(counts: np.ndarray, total: int) -> np.ndarray:
    """Share `total` picks over classes of the sizes `counts` (K,), as equally as the sizes allow -> (K,) int64.

    No class gets more than it has; classes that could take one more than the others get it evenly spread over them.
    """
    shares = np.zeros(len(counts), np.int64)
    left = min(total, int(counts.sum()))
    while left:
        open_classes = np.flatnonzero(shares < counts)
        share = left // len(open_classes)
        if not share:
            shares[open_classes[evenly_spaced(len(open_classes), left)]] += 1
            break
        added = np.minimum(share, counts[open_classes] - shares[open_classes])
        shares[open_classes] += added
        left -= int(added.sum())
    return shares


def evenly_spaced(length: int, picks: int) -> np.ndarray:
    """`picks` <= `length` different positions of range(length), evenly spread and ascending -> (picks,) int64."""
    return (2 * np.arange(picks, dtype=np.int64) + 1) * length // (2 * picks)


def balanced_indices(labels: np.ndarray, classes: int, total: int) -> np.ndarray:
    """At most `total` indices into `labels` (N,), balanced over classes and evenly spread in each; ascending."""
    counts = np.bincount(labels, minlength=classes)
    by_class = np.argsort(labels, kind="stable")
    starts = np.cumsum(counts) - counts
    shares = quotas(counts, total)
    chosen = [
        by_class[start + evenly_spaced(count, share)]
        for start, count, share in zip(starts, counts, shares, strict=True)
        if share
    ]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def stratified_sample(labels: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """For every class c, `shares[c]` random indices into `labels` (N,); ascending.

    One permutation of all images decides, and each class takes its first ones: with the same seed, a smaller draw lies
    inside a larger one, as in MSN's lists (1-shot in 2-shot in 5-shot).
    """
    # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels, minlength=len(shares))
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank_in_class = np.arange(len(labels)) - starts
    return np.sort(by_class[rank_in_class < shares[labels[by_class]]])


def held_out_sample(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """A random `share` of the images of every class, rounded, at least one and never all: indices into `labels` (N,),
    ascending. Of a class of one image none."""
    counts = np.bincount(labels, minlength=classes)
    shares = np.minimum(np.maximum(np.rint(share * counts), 1), counts - 1).clip(0).astype(np.int64)
    return stratified_sample(labels, shares, seed)


def rarest_classes(labels: np.ndarray) -> np.ndarray:
    """Rarest class (N,) of each image with several labels (N, K); K for an image that shows none."""
    has_class = labels == 1
    counts = np.where(has_class, has_class.sum(axis=0), len(labels) + 1)
    return np.where(has_class.any(axis=1), counts.argmin(axis=1), labels.shape[1])
