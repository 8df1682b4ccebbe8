"""Segmentation scores from areas, of the validation images as they are or each counted several times.

N images, K classes. An image's areas (K, 3) are its pixels, by class: predicted rightly, predicted, labelled. They hold
all of a confusion matrix that mIoU, aAcc and mAcc depend on, at a hundredth of its size for 150 classes.
"""

from collections.abc import Sequence

import numpy as np

RIGHT, PREDICTED, LABELLED = range(3)


def scores(areas: np.ndarray) -> dict[str, float]:
    """Areas (N, K, 3) -> mIoU, aAcc and mAcc in percent over the whole set, as mmseg's IoUMetric defines them:
    means over the classes that occur, in labels or predictions (IoU), in labels (accuracy)."""
    found = means(areas.sum(0, dtype=np.int64)[None])
    return {name: float(values[0]) for name, values in found.items()}


def constant_scores(areas: np.ndarray) -> tuple[int, dict[str, float]]:
    """Areas (N, K, 3) -> the class that most labelled pixels have, and the scores of predicting it everywhere."""
    labelled = areas[..., LABELLED].sum(0, dtype=np.int64)
    totals = np.zeros((1, len(labelled), 3), np.int64)
    totals[0, :, LABELLED], most = labelled, int(labelled.argmax())
    totals[0, most] = labelled[most], labelled.sum(), labelled[most]
    return most, scores(totals)


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


def weighted_scores(trainings: Sequence[np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Areas (N, K, 3) of each training, weights (R, N), how often each image counts -> name -> (R,) percent, means over
    the trainings."""
    count, *rest = trainings[0].shape
    found = [means((weights @ areas.reshape(count, -1).astype(np.float64)).reshape(-1, *rest)) for areas in trainings]
    return {name: np.mean([each[name] for each in found], axis=0) for name in found[0]}
