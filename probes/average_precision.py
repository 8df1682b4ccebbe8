"""Average precision as Pascal VOC 2007 defines it, on eleven levels of recall, and its mean over classes.

VOCdevkit's VOCevalcls.m (2007): images are ranked by score; AP is the mean over recalls 0, 0.1, ..., 1 of the best
precision at that recall or above. Images that are not judged count neither way. Recalls are compared as whole numbers,
10 tp >= k P, where floating-point numbers miss some of the levels. N images, C classes.
"""

import numpy as np

LEVELS = range(11)


def average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(r,) of one class in percent, NaN where no image shows it.

    scores: (N,), the largest first; of equals the first image. labels: (N,) 1, 0, or -1 for images that are not judged.
    weights: (r, N), how often each image counts, whole numbers.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[labels[order] >= 0]
    shown = np.flatnonzero(labels[order] == 1)  # precision is best, and recall rises, at these places alone
    if not len(shown):
        return np.full(len(weights), np.nan)
    counts = weights[:, order]
    found = np.cumsum(counts[:, shown], axis=1)
    precision = found / np.maximum(np.cumsum(counts, axis=1)[:, shown], 1)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # at that recall or above
    total = found[:, -1:]
    places = np.stack([(10 * found >= level * total).argmax(axis=1) for level in LEVELS], axis=1)  # (r, 11)
    values = 100 * np.take_along_axis(best, places, axis=1).mean(axis=1)
    return np.where(total[:, 0] > 0, values, np.nan)


def mean_average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(r,) mean over the classes that some image shows, of scores (N, C) and labels (N, C); the rest as above."""
    columns = range(labels.shape[1])
    values = np.stack([average_precision(scores[:, column], labels[:, column], weights) for column in columns])
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
