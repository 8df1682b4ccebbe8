"""Scores of dense tasks for any weights of the validation images, which is what a bootstrap needs.

N images, K classes, R weightings of the images.

Segmentation: an image's areas (K, 3) are its pixels, by class: predicted rightly, predicted, labelled. They hold all of
a confusion matrix that mIoU, aAcc and mAcc depend on, at a hundredth of its size for 150 classes.

Detection: average precision as COCO defines it, from which of at most D detections of an image hit an object at each of
T thresholds of overlap. Libraries give one number for a set of images. Here detections are matched once and then give
it for any weights, equal but for rounding (pycocotools cocoeval.py evaluateImg and accumulate).
With few images resampled values are too high on average, by 1.1 to 1.9 points for the 24 of tiny-coco:, and so is the
interval, which is not corrected. In the difference of two checkpoints 0.1 to 0.4 points of this were left.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from engine.tasks import BLOCK, Score, resampled, resamples_of
from engine.work import seconds_of

RIGHT, PREDICTED, LABELLED = range(3)


def scores(areas: np.ndarray) -> dict[str, float]:
    """Areas (N, K, 3) -> mIoU, aAcc and mAcc in percent over the whole set, as mmseg's IoUMetric defines them:
    means over the classes that occur, in labels or predictions (IoU), in labels (accuracy)."""
    return {name: float(values[0]) for name, values in means(areas.sum(0, dtype=np.int64)[None]).items()}


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
    scored = [means((weights @ areas.reshape(count, -1).astype(np.float64)).reshape(-1, *rest)) for areas in trainings]
    return {name: np.mean([values[name] for values in scored], axis=0) for name in scored[0]}


def closing_seconds(score: Score, images: int) -> float:
    """Seconds of one resample of so many images, for plans."""
    return seconds_of(lambda: resampled(score, images, BLOCK), 0.0) / min(BLOCK, resamples_of(images))


THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of intersection over union, (T,)
RECALLS = np.linspace(0.0, 1.0, 101)  # at which precision is read
AP_THRESHOLDS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}
NO_DETECTION = -1  # class where an image has fewer than D detections


def match(overlaps: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match the detections of one class in one image: hits, passed (d,) uint16.

    overlaps: (d, g) of detections, best score first, with objects; crowd: (g,), which objects do not count. At each
    threshold a detection takes, of the objects that are still free, the one that it overlaps most; else any crowd. Bit
    t of hits is set where it has an object to itself at threshold t, of passed where it meets only a crowd.
    """
    hits, passed = (np.zeros(len(overlaps), np.uint16) for _ in range(2))
    if not overlaps.size:
        return hits, passed
    single, crowds, bits = overlaps[:, ~crowd], overlaps[:, crowd], np.uint16(1) << np.arange(10, dtype=np.uint16)
    needed = np.minimum(THRESHOLDS, 1 - 1e-10)
    free = np.ones((len(THRESHOLDS), single.shape[1]), bool)
    for row in np.flatnonzero(overlaps.max(1) >= needed[0]):
        matched = np.zeros(len(THRESHOLDS), bool)
        if single.shape[1]:
            overlap = np.where(free, single[row], -1.0)
            best = overlap.shape[1] - 1 - overlap[:, ::-1].argmax(1)  # of equals the last
            matched = overlap[np.arange(len(needed)), best] >= needed
            free[matched, best[matched]] = False
        hits[row] = bits[matched].sum()
        if crowds.shape[1]:
            passed[row] = bits[~matched & (crowds[row].max() >= needed)].sum()
    return hits, passed


def average_precisions(arrays: Mapping[str, np.ndarray], kind: str, weights: np.ndarray) -> dict[str, np.ndarray]:
    """AP, AP50 and AP75 of "box" or "mask" detections, (R,) percent each: means over thresholds and classes.

    Args:
        arrays: classes, scores (N, D) in order of detection; {kind}_hits, {kind}_passed (N, D), see `match`; objects
            (N, K), how many of each class count.
        weights: (R, N), how often each image counts. The result is nan where no object counts.
    """
    classes, objects = arrays["classes"].ravel(), arrays["objects"]
    hits, passed = arrays[f"{kind}_hits"].ravel(), arrays[f"{kind}_passed"].ravel()
    order = np.argsort(-arrays["scores"].ravel(), kind="stable")
    curves = []
    for label in np.flatnonzero(objects.any(0)):
        detections = order[classes[order] == label]  # places in the flat arrays, best first
        counts = weights[:, detections // arrays["classes"].shape[1]].astype(np.float64)
        totals = weights @ objects[:, label].astype(np.float64)
        curves.append(_precision_of_class(hits[detections], passed[detections], counts, totals))
    if not curves:
        return dict.fromkeys(AP_THRESHOLDS, np.full(len(weights), np.nan))
    precision = np.stack(curves)  # (K, R, T)
    counted = ~np.isnan(precision)
    with np.errstate(invalid="ignore"):
        means = np.where(counted, precision, 0.0).sum(0) / counted.sum(0)
    return {name: 100 * means[:, thresholds].mean(1) for name, thresholds in AP_THRESHOLDS.items()}


def _precision_of_class(hits: np.ndarray, passed: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Mean precision (R, T) over the recalls. hits, passed (d,), best score first; counts (R, d): how often each
    detection counts; totals (R,): objects."""
    result = np.zeros((len(counts), len(THRESHOLDS)))
    seen = np.cumsum(counts, axis=1)
    for bit in range(len(THRESHOLDS)):
        right, left_out = (np.flatnonzero(bits >> bit & 1) for bits in (hits, passed))
        if len(right):
            ignored = np.cumsum(np.pad(counts[:, left_out], ((0, 0), (1, 0))), axis=1)
            answered = seen[:, right] - ignored[:, np.searchsorted(left_out, right)]
            result[:, bit] = _precision(np.cumsum(counts[:, right], axis=1), answered, totals)
    result[totals == 0] = np.nan
    return result


def _precision(right: np.ndarray, answered: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """After each right detection (R, m): how many were right, how many answered; objects (R,) -> (R,)."""
    precision = right / (answered + np.spacing(1))
    falling = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = np.searchsorted(RECALLS, np.nan_to_num(right / objects[:, None]), side="right")
    reached[right == 0] = 0  # of images that are left out
    return (falling * np.diff(reached, axis=1, prepend=0)).sum(1) / len(RECALLS)


def weighted_ap(arrays: Mapping[str, np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """What an outcome keeps of its images, weights (R, N) -> `box_AP`, `mask_AP50` and so on -> (R,) percent."""
    return {
        f"{kind}_{name}": values
        for kind in ("box", "mask")
        if f"{kind}_hits" in arrays
        for name, values in average_precisions(arrays, kind, weights).items()
    }
