"""COCO's evaluation of detections by faster-coco-eval, each image's detections kept beside the numbers."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from mmdet.evaluation import CocoMetric

from downstream.data.listing import Instances, garbage_collection_paused
from downstream.metrics.previews import preview_detections
from downstream.metrics.scores import AP_THRESHOLDS, NO_DETECTION, THRESHOLDS, average_precisions, match

KINDS = {"box": "bbox", "mask": "segm"}
ALL_SIZES = [0.0, 1e10]  # pixels; COCO's "all"
CLOSE = 1e-6  # percent: the library's mean and ours differ in rounding alone
Detections = Mapping[str, Any]  # in one image: bboxes (d, 4), scores (d,), labels (d,), masks in run lengths


class DetectionMetric(CocoMetric):
    """mmdet's CocoMetric, with percentages that are not rounded, and every image's detections in `arrays`.

    classes (N, D), scores (N, D), boxes (N, D, 4) as x1, y1, x2, y2 in pixels, box_hits, box_passed, mask_hits,
    mask_passed (N, D), objects (N, K): see downstream/metrics/scores.py. Small masks of a few images: see
    downstream/metrics/previews.py. Nothing of masks where the detector finds boxes alone.
    """

    default_prefix = None

    def __init__(self, listing: Instances, most: int) -> None:
        super().__init__(metric=list(KINDS.values()))
        self.listing, self.most = listing, most
        self.arrays: dict[str, np.ndarray] = {}
        self._coco_api = listing  # so that mmdet does not collect objects; it is read nowhere else

    def compute_metrics(self, results: list) -> dict[str, float]:
        by_image = {predictions["img_id"]: predictions for _, predictions in results}
        detections = [by_image[entry["id"]] for entry in self.listing.entries]
        with garbage_collection_paused():
            metrics, arrays = evaluate(self.listing, detections, self.most)
            self.arrays = arrays | (preview_detections(self.listing, detections) if "masks" in detections[0] else {})
        return metrics


def evaluator_version() -> str:
    """Name and version of what evaluates."""
    return f"faster-coco-eval {version('faster-coco-eval')}"


def evaluate(
    listing: Instances, detections: Sequence[Detections], most: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics in percent, and the arrays behind them. There must be an object.

    detections: in each image of the listing, in its order, at most `most`, best first.
    """
    arrays = _arrays(listing, detections, most)
    metrics: dict[str, float] = {}
    for kind, name in KINDS.items() if "masks" in detections[0] else [("box", KINDS["box"])]:
        precisions, overlaps = _by_library(listing, detections, name, most)
        arrays[f"{kind}_hits"], arrays[f"{kind}_passed"] = _matches(listing, arrays, overlaps)
        metrics |= {f"{kind}_{at}": precision for at, precision in precisions.items()}
        ours = average_precisions(arrays, kind, np.ones((1, len(detections))))
        assert all(abs(ours[at][0] - precision) < CLOSE for at, precision in precisions.items()), (ours, metrics)
    return metrics, arrays


def _arrays(listing: Instances, detections: Sequence[Detections], most: int) -> dict[str, np.ndarray]:
    shape, labels = (len(detections), most), {category: label for label, category in enumerate(listing.categories)}
    classes, scores = np.full(shape, NO_DETECTION, np.int16), np.zeros(shape, np.float32)
    boxes, objects = np.zeros((*shape, 4), np.float32), np.zeros((len(detections), len(labels)), np.uint16)
    for row, (detected, annotations) in enumerate(zip(detections, listing.objects, strict=True)):
        count = len(detected["labels"])
        classes[row, :count], scores[row, :count] = detected["labels"], detected["scores"]
        boxes[row, :count] = detected["bboxes"]
        for annotation in annotations:
            objects[row, labels[annotation["category_id"]]] += not annotation.get("iscrowd", 0)
    return {"classes": classes, "scores": scores, "boxes": boxes, "objects": objects}


def _by_library(
    listing: Instances, detections: Sequence[Detections], name: str, most: int
) -> tuple[dict[str, float], Mapping[tuple[int, int], Any]]:
    """The library's AP, AP50 and AP75, and its (d, g) overlaps by image and category."""
    answers = _coco_results(listing, detections, name)
    if not answers:
        return dict.fromkeys(AP_THRESHOLDS, 0.0), {}
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": list(listing.entries),
            "annotations": [{"iscrowd": 0} | thing for own in listing.objects for thing in own],
            "categories": [{"id": number, "name": title} for number, title in listing.categories.items()],
        }
        truth.createIndex()
        evaluation = COCOeval_faster(truth, truth.loadRes(answers), name)
        params = evaluation.params
        params.maxDets, params.areaRng, params.areaRngLbl = [most], [ALL_SIZES], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])[..., 0, 0]  # (T, recalls, K), -1 without objects
    of_threshold = {name: precision[thresholds] for name, thresholds in AP_THRESHOLDS.items()}
    return {name: float(100 * values[values > -1].mean()) for name, values in of_threshold.items()}, evaluation.ious


def _coco_results(listing: Instances, detections: Sequence[Detections], name: str) -> list[dict[str, Any]]:
    """Detections as COCO's result files hold them, image by image."""
    categories, answers = list(listing.categories), []
    for entry, detected in zip(listing.entries, detections, strict=True):
        corners = detected["bboxes"].astype(np.float64)
        corners[:, 2:] -= corners[:, :2]
        shapes = {"bbox": corners.tolist()} if name == "bbox" else {"segmentation": detected["masks"]}
        for k, (label, score) in enumerate(zip(detected["labels"].tolist(), detected["scores"].tolist(), strict=True)):
            shape = {key: values[k] for key, values in shapes.items()}
            answers.append({"image_id": entry["id"], "category_id": categories[label], "score": score, **shape})
    return answers


def _matches(listing: Instances, arrays: Mapping[str, np.ndarray], overlaps: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """hits, passed (N, D) of overlaps (d, g) by image and category."""
    hits, passed = (np.zeros(arrays["classes"].shape, np.uint16) for _ in range(2))
    assert len(THRESHOLDS) <= 16
    rows = {entry["id"]: row for row, entry in enumerate(listing.entries)}
    labels = {category: label for label, category in enumerate(listing.categories)}
    for (image, category), overlap in overlaps.items():
        if len(overlap):
            row = rows[image]
            objects = [annotation for annotation in listing.objects[row] if annotation["category_id"] == category]
            crowd = np.array([bool(annotation.get("iscrowd", 0)) for annotation in objects])
            detected = np.flatnonzero(arrays["classes"][row] == labels[category])
            detected = detected[np.argsort(-arrays["scores"][row, detected], kind="stable")]
            hits[row, detected], passed[row, detected] = match(np.asarray(overlap), crowd)
    return hits, passed
