"""Segmentation scores from areas, and how far another draw of validation images could move them.

N images, K classes. An image's areas (K, 3) are its pixels, by class: predicted rightly, predicted, labelled. They hold
all of a confusion matrix that mIoU, aAcc and mAcc depend on, at a hundredth of its size for 150 classes.
"""

from collections.abc import Sequence

import numpy as np

RIGHT, PREDICTED, LABELLED = range(3)
LEVEL = 0.95
RESAMPLES = 1000
BLOCK = 50  # resamples at once: N x BLOCK weights stay small


def scores(areas: np.ndarray) -> dict[str, float]:
    """Areas (N, K, 3) -> mIoU, aAcc and mAcc in percent over the whole set, as mmseg's IoUMetric defines them:
    means over the classes that occur, in labels or predictions (IoU), in labels (accuracy)."""
    found = means(areas.sum(0, dtype=np.int64)[None])
    return {name: float(values[0]) for name, values in found.items()}


def means(totals: np.ndarray) -> dict[str, np.ndarray]:
    """Summed areas (R, K, 3) -> name -> (R,) percent."""
    right, predicted, labelled = (totals[..., column] for column in (RIGHT, PREDICTED, LABELLED))
    with np.errstate(invalid="ignore", divide="ignore"):
        iou, accuracy = right / (predicted + labelled - right), right / labelled
        return {
            "mIoU": 100 * np.nanmean(iou, axis=1),
            "aAcc": 100 * right.sum(1) / labelled.sum(1),
            "mAcc": 100 * np.nanmean(accuracy, axis=1),
        }


def intervals(trainings: Sequence[np.ndarray], seed: int, resamples: int = RESAMPLES) -> dict[str, tuple[float, float]]:
    """Name -> (low, high) in percent, percentile bootstrap over images of the mean over trainings.

    trainings: areas (N, K, 3) of each on the same images.
    """
    generator, count = np.random.default_rng(seed), len(trainings[0])
    drawn: dict[str, list[np.ndarray]] = {}
    for first in range(0, resamples, BLOCK):
        rows = min(BLOCK, resamples - first)
        weights = generator.multinomial(count, np.full(count, 1 / count), size=rows)
        found = [means((weights @ areas.reshape(count, -1)).reshape(rows, *areas.shape[1:])) for areas in trainings]
        for name in found[0]:
            drawn.setdefault(name, []).append(np.mean([each[name] for each in found], axis=0))
    edges = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    return {name: tuple(map(float, np.quantile(np.concatenate(parts), edges))) for name, parts in drawn.items()}
