"""COCO's evaluation of detections by faster-coco-eval, and what is kept of each image's detections.

N images, K classes, D detections per image at most, T thresholds of overlap.
"""

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

COCO_TYPES = {"box": "bbox", "mask": "segm"}  # COCO's names of the two kinds of AP
ALL_SIZES = [0.0, 1e10]  # COCO's area range "all", in pixels
MAX_DIFFERENCE = 1e-6  # percent; the library's AP and ours differ only by rounding
Detections = Mapping[str, Any]  # of one image: bboxes (d, 4), scores (d,), labels (d,), masks as run lengths


class DetectionMetric(CocoMetric):
    """mmdet's CocoMetric with percentages that are not rounded, and with the detections of each image.

    arrays: after an evaluation, classes, scores, box_hits, box_passed, mask_hits, mask_passed (N, D), boxes (N, D, 4)
    as x1, y1, x2, y2 in pixels, and objects (N, K), see downstream/metrics/scores.py; and small masks of a few images,
    see downstream/metrics/previews.py. Arrays of masks are missing if the detector predicts only boxes.
    """

    default_prefix = None

    def __init__(self, listing: Instances, max_detections: int) -> None:
        super().__init__(metric=list(COCO_TYPES.values()))
        self.listing, self.max_detections = listing, max_detections
        self.arrays: dict[str, np.ndarray] = {}
        self._coco_api = listing  # not None, so that mmdet does not collect annotations; nothing else reads it

    def compute_metrics(self, results: list) -> dict[str, float]:
        by_image = {predictions["img_id"]: predictions for _, predictions in results}
        detections = [by_image[entry["id"]] for entry in self.listing.entries]
        with garbage_collection_paused():
            metrics, self.arrays = evaluate(self.listing, detections, self.max_detections)
            if "masks" in detections[0]:
                self.arrays |= preview_detections(self.listing, detections)
        return metrics


def evaluator_version() -> str:
    """Name and version of the library that evaluates."""
    return f"faster-coco-eval {version('faster-coco-eval')}"


def evaluate(
    listing: Instances, detections: Sequence[Detections], max_detections: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """AP, AP50 and AP75 of boxes, and of masks if there are any, in percent; and the arrays of a DetectionMetric.

    Args:
        listing: images and objects, with at least one object.
        detections: of each image in the order of the listing, by falling score.
        max_detections: largest number of detections per image.
    """
    arrays = _arrays(listing, detections, max_detections)
    metrics: dict[str, float] = {}
    for kind in COCO_TYPES if "masks" in detections[0] else ["box"]:
        precisions, overlaps = _evaluate_by_library(listing, detections, COCO_TYPES[kind], max_detections)
        arrays[f"{kind}_hits"], arrays[f"{kind}_passed"] = _match_all(listing, arrays, overlaps)
        metrics |= {f"{kind}_{name}": precision for name, precision in precisions.items()}
        ours = average_precisions(arrays, kind, np.ones((1, len(detections))))
        for name, precision in precisions.items():
            if not abs(ours[name][0] - precision) < MAX_DIFFERENCE:
                raise ValueError(
                    f"{listing.annotations}: {evaluator_version()} computes {kind} {name} {precision:.6f} and this "
                    f"project {ours[name][0]:.6f} from the same detections; please report this with the file"
                )
    return metrics, arrays


def _arrays(listing: Instances, detections: Sequence[Detections], max_detections: int) -> dict[str, np.ndarray]:
    """classes, scores (N, D), boxes (N, D, 4) of the detections, and objects (N, K), the number of objects to find."""
    label_of = {category: label for label, category in enumerate(listing.categories)}
    shape = (len(detections), max_detections)
    classes, scores = np.full(shape, NO_DETECTION, np.int16), np.zeros(shape, np.float32)
    boxes, objects = np.zeros((*shape, 4), np.float32), np.zeros((len(detections), len(label_of)), np.uint16)
    for row, (detected, annotations) in enumerate(zip(detections, listing.objects, strict=True)):
        count = len(detected["labels"])
        classes[row, :count], scores[row, :count] = detected["labels"], detected["scores"]
        boxes[row, :count] = detected["bboxes"]
        for annotation in annotations:
            objects[row, label_of[annotation["category_id"]]] += not annotation.get("iscrowd", 0)
    return {"classes": classes, "scores": scores, "boxes": boxes, "objects": objects}


def _evaluate_by_library(
    listing: Instances, detections: Sequence[Detections], coco_type: str, max_detections: int
) -> tuple[dict[str, float], Mapping[tuple[int, int], Any]]:
    """The library's AP, AP50 and AP75 in percent, and its overlaps (d, g) of detections and objects.

    The overlaps are by (row of the image, category id). Images and objects are numbered here, whatever their ids: the
    library takes an object with id 0 for none, one of two objects with the same id for both, and no negative image id.
    """
    results = _coco_results(listing, detections, coco_type)
    if not results:
        return dict.fromkeys(AP_THRESHOLDS, 0.0), {}
    objects = [annotation | {"image_id": row} for row, own in enumerate(listing.objects) for annotation in own]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [entry | {"id": row} for row, entry in enumerate(listing.entries)],
            "annotations": [{"iscrowd": 0} | entry | {"id": number} for number, entry in enumerate(objects, 1)],
            "categories": [{"id": number, "name": title} for number, title in listing.categories.items()],
        }
        truth.createIndex()
        evaluation = COCOeval_faster(truth, truth.loadRes(results), coco_type)
        params = evaluation.params
        params.maxDets, params.areaRng, params.areaRngLbl = [max_detections], [ALL_SIZES], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])[..., 0, 0]  # (T, recalls, K), -1 for classes without objects
    precisions = {}
    for name, thresholds in AP_THRESHOLDS.items():
        values = precision[thresholds]
        precisions[name] = float(100 * values[values > -1].mean())
    return precisions, evaluation.ious


def _coco_results(listing: Instances, detections: Sequence[Detections], coco_type: str) -> list[dict[str, Any]]:
    """All detections in the form of COCO's result files, image by image."""
    categories, results = list(listing.categories), []
    for row, detected in enumerate(detections):
        if coco_type == "bbox":
            boxes = detected["bboxes"].astype(np.float64)
            boxes[:, 2:] -= boxes[:, :2]  # x1, y1, x2, y2 -> x, y, width, height
            key, shapes = "bbox", boxes.tolist()
        else:
            key, shapes = "segmentation", detected["masks"]
        for k, (label, score) in enumerate(zip(detected["labels"].tolist(), detected["scores"].tolist(), strict=True)):
            ids = {"image_id": row, "category_id": categories[label]}
            results.append({**ids, "score": score, key: shapes[k]})
    return results


def _match_all(
    listing: Instances, arrays: Mapping[str, np.ndarray], overlaps: Mapping[tuple[int, int], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """hits and passed (N, D) uint16 of all detections, see `match`. overlaps: (d, g) by (row, category id)."""
    hits, passed = (np.zeros(arrays["classes"].shape, np.uint16) for _ in range(2))
    assert len(THRESHOLDS) <= 16  # bits of uint16
    label_of = {category: label for label, category in enumerate(listing.categories)}
    for (row, category), overlap in overlaps.items():
        if not len(overlap):
            continue
        objects = [annotation for annotation in listing.objects[row] if annotation["category_id"] == category]
        crowd = np.array([bool(annotation.get("iscrowd", 0)) for annotation in objects])
        detected = np.flatnonzero(arrays["classes"][row] == label_of[category])
        detected = detected[np.argsort(-arrays["scores"][row, detected], kind="stable")]
        hits[row, detected], passed[row, detected] = match(np.asarray(overlap), crowd)
    return hits, passed
