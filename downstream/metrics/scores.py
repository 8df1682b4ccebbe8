"""Scores of segmentation and detection for any weights of the validation images, as a bootstrap needs them.

N images, K classes, R weightings of the images.

Segmentation: the areas (K, 3) of an image are, for each class, its numbers of pixels that are correctly predicted,
predicted, and labelled. mIoU, aAcc and mAcc depend on nothing else of the confusion matrix, which is a hundred times as
large for 150 classes.

Detection: COCO's average precision, computed from the matches of at most D detections per image with objects at T
thresholds of overlap. Libraries compute one number for a set of images. Here detections are matched once, and the
matches give the number for any weights, up to rounding (pycocotools cocoeval.py evaluateImg and accumulate). For few
images, resampled values are too high on average, by 1.1 to 1.9 points for the 24 images of tiny-coco:, and so is the
interval, which is not corrected. Of this, 0.1 to 0.4 points remained in the difference of two checkpoints.
"""

from collections.abc import Mapping, Sequence

import numpy as np

RIGHT, PREDICTED, LABELLED = range(3)  # columns of the areas


def scores(areas: np.ndarray) -> dict[str, float]:
    """mIoU, aAcc and mAcc in percent over all images, as in mmseg's IoUMetric, from their areas (N, K, 3).

    mIoU is a mean over the classes that occur in labels or predictions, mAcc over those that occur in labels.
    """
    return {name: float(values[0]) for name, values in scores_of_totals(areas.sum(0, dtype=np.int64)[None]).items()}


def scene_mious(areas: np.ndarray) -> np.ndarray:
    """mIoU of each scene (N,) in percent, from areas (N, K, 3); NaN for a scene without a labelled pixel."""
    return scores_of_totals(areas)["mIoU"]


def worst_and_median(scores: np.ndarray) -> list[int]:
    """Index of the lowest of scores (N,), and of the lower median; fewer if fewer are not NaN."""
    order, known = np.argsort(scores, kind="stable"), np.count_nonzero(~np.isnan(scores))
    return list(dict.fromkeys(order[[0, (known - 1) // 2]].tolist())) if known else []


def constant_scores(areas: np.ndarray) -> tuple[int, dict[str, float]]:
    """The most frequent class of the labelled pixels, and the scores of predicting it for every pixel.

    areas: (N, K, 3).
    """
    labelled = areas[..., LABELLED].sum(0, dtype=np.int64)
    constant = int(labelled.argmax())
    constant_areas = np.zeros((1, len(labelled), 3), np.int64)
    constant_areas[0, :, LABELLED] = labelled
    constant_areas[0, constant, RIGHT] = labelled[constant]
    constant_areas[0, constant, PREDICTED] = labelled.sum()
    return constant, scores(constant_areas)


def scores_of_totals(totals: np.ndarray) -> dict[str, np.ndarray]:
    """mIoU, aAcc and mAcc, (R,) percent each, from areas that are summed over images (R, K, 3)."""
    right, predicted, labelled = (totals[..., column] for column in (RIGHT, PREDICTED, LABELLED))
    with np.errstate(invalid="ignore"):  # 0 / 0, where no pixel is labelled
        return {
            "mIoU": 100 * _mean_of_classes(right, predicted + labelled - right),
            "aAcc": 100 * right.sum(1) / labelled.sum(1),
            "mAcc": 100 * _mean_of_classes(right, labelled),
        }


def _mean_of_classes(right: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Mean (R,) of right / pixels, both (R, K), over the classes that have pixels; NaN if none has."""
    shares = np.divide(right, pixels, out=np.zeros(pixels.shape), where=pixels > 0)
    return shares.sum(1) / (pixels > 0).sum(1)


def weighted_scores(trainings: Sequence[np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """mIoU, aAcc and mAcc, (R,) percent each, for weighted images: means over the trainings.

    trainings: areas (N, K, 3) of each training. weights: (R, N), how often each image counts.
    """
    image_count, *shape = trainings[0].shape
    scores_of_trainings = []
    for areas in trainings:
        totals = (weights @ areas.reshape(image_count, -1).astype(np.float64)).reshape(-1, *shape)
        scores_of_trainings.append(scores_of_totals(totals))
    return {name: np.mean([values[name] for values in scores_of_trainings], axis=0) for name in scores_of_trainings[0]}


# pycocotools cocoeval.py Params.setDetParams
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # thresholds of intersection over union (T,)
RECALLS = np.linspace(0.0, 1.0, 101)  # recalls at which precision is read
AP_THRESHOLDS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}  # metric -> its thresholds
NO_DETECTION = -1  # class of the missing detections of an image with fewer than D


def match(overlaps: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match the detections of one class in one image with its objects, at every threshold.

    By falling score, a detection is matched with the object that it overlaps most, among those above the threshold and
    not matched yet; if there is none, with any crowd.

    Args:
        overlaps: (d, g) intersection over union of detections, by falling score, and objects.
        crowd: (g,), True for crowds, which are not counted as objects.

    Returns:
        hits (d,) and passed (d,) uint16: bit t of hits is set if a detection is matched with an object at threshold t,
        and bit t of passed if it is matched with a crowd and so does not count.
    """
    hits, passed = (np.zeros(len(overlaps), np.uint16) for _ in range(2))
    if not overlaps.size:
        return hits, passed
    with_objects, with_crowds = overlaps[:, ~crowd], overlaps[:, crowd]
    bits = np.uint16(1) << np.arange(len(THRESHOLDS), dtype=np.uint16)
    thresholds = np.minimum(THRESHOLDS, 1 - 1e-10)  # as in evaluateImg
    free = np.ones((len(THRESHOLDS), with_objects.shape[1]), bool)  # objects that are not matched yet
    for row in np.flatnonzero(overlaps.max(1) >= thresholds[0]):
        matched = np.zeros(len(THRESHOLDS), bool)
        if with_objects.shape[1]:
            candidates = np.where(free, with_objects[row], -1.0)
            best = candidates.shape[1] - 1 - candidates[:, ::-1].argmax(1)  # the last of equal ones
            matched = candidates[np.arange(len(thresholds)), best] >= thresholds
            free[matched, best[matched]] = False
        hits[row] = bits[matched].sum()
        if with_crowds.shape[1]:
            passed[row] = bits[~matched & (with_crowds[row].max() >= thresholds)].sum()
    return hits, passed


def average_precisions(arrays: Mapping[str, np.ndarray], kind: str, weights: np.ndarray) -> dict[str, np.ndarray]:
    """AP, AP50 and AP75 of "box" or "mask" detections, (R,) percent each: means over thresholds and classes.

    Args:
        arrays: classes, scores (N, D); {kind}_hits, {kind}_passed (N, D), see `match`; objects (N, K), number of
            objects of each class without crowds.
        kind: "box" or "mask".
        weights: (R, N), how often each image counts. The result is nan if the weighted images have no object.
    """
    classes, objects = arrays["classes"].ravel(), arrays["objects"]
    hits, passed = arrays[f"{kind}_hits"].ravel(), arrays[f"{kind}_passed"].ravel()
    order = np.argsort(-arrays["scores"].ravel(), kind="stable")
    curves = []
    for label in np.flatnonzero(objects.any(0)):
        detections = order[classes[order] == label]  # indices in the flat arrays, by falling score
        counts = weights[:, detections // arrays["classes"].shape[1]].astype(np.float64)
        totals = weights @ objects[:, label].astype(np.float64)
        curves.append(_precision_of_class(hits[detections], passed[detections], counts, totals))
    if not curves:
        return dict.fromkeys(AP_THRESHOLDS, np.full(len(weights), np.nan))
    precision = np.stack(curves)  # (K, R, T)
    has_objects = ~np.isnan(precision)
    with np.errstate(invalid="ignore"):
        class_means = np.where(has_objects, precision, 0.0).sum(0) / has_objects.sum(0)  # (R, T)
    return {name: 100 * class_means[:, thresholds].mean(1) for name, thresholds in AP_THRESHOLDS.items()}


def _precision_of_class(hits: np.ndarray, passed: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Mean precision (R, T) of one class over the recalls; nan without objects.

    Args:
        hits, passed: (d,) of all detections of the class, by falling score, see `match`.
        counts: (R, d), how often each detection counts.
        totals: (R,), number of objects.
    """
    result = np.zeros((len(counts), len(THRESHOLDS)))
    detected = np.cumsum(counts, axis=1)
    for threshold in range(len(THRESHOLDS)):
        hit, ignored = (np.flatnonzero(bits >> threshold & 1) for bits in (hits, passed))
        if len(hit):
            ignored_before = np.cumsum(np.pad(counts[:, ignored], ((0, 0), (1, 0))), axis=1)
            positives = detected[:, hit] - ignored_before[:, np.searchsorted(ignored, hit)]
            result[:, threshold] = _mean_precision(np.cumsum(counts[:, hit], axis=1), positives, totals)
    result[totals == 0] = np.nan
    return result


def _mean_precision(true_positives: np.ndarray, positives: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Precision (R,), interpolated as in COCO and averaged over RECALLS.

    true_positives, positives: (R, m), how many hits and how many detections there are up to each hit. totals: (R,),
    number of objects.
    """
    precision = true_positives / (positives + np.spacing(1))
    interpolated = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # the largest at this or a higher recall
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = np.searchsorted(RECALLS, np.nan_to_num(true_positives / totals[:, None]), side="right")
    reached[true_positives == 0] = 0  # hits in images with weight 0
    return (interpolated * np.diff(reached, axis=1, prepend=0)).sum(1) / len(RECALLS)


def weighted_ap(arrays: Mapping[str, np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """`box_AP`, `box_AP50`, `mask_AP` and so on, (R,) percent each, for weights (R, N) of the images.

    arrays: those of a DetectionMetric.
    """
    return {
        f"{kind}_{name}": values
        for kind in ("box", "mask")
        if f"{kind}_hits" in arrays
        for name, values in average_precisions(arrays, kind, weights).items()
    }
