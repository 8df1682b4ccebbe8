"""COCO's evaluation of detections by whichever back end is there, each image's detections kept beside the numbers."""

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
from mmdet.evaluation import CocoMetric

from downstream.data.instances import Instances, uncollected
from downstream.metrics.average_precision import AT, NONE, THRESHOLDS, average_precisions, detections, match
from downstream.metrics.shown import shown_things

KINDS = {"box": "bbox", "mask": "segm"}
ALL_SIZES = [0.0, 1e10]  # pixels; COCO's "all"
CLOSE = 1e-6  # percent: the back end's mean and ours differ in rounding alone
Found = Mapping[str, Any]  # of one image: bboxes (d, 4), scores (d,), labels (d,), masks in run lengths


class DetectionMetric(CocoMetric):
    """mmdet's CocoMetric, with percentages that are not rounded, and every image's detections in `arrays`.

    classes (N, D), scores (N, D), boxes (N, D, 4) as x1, y1, x2, y2 in pixels, box_hits, box_passed, mask_hits,
    mask_passed (N, D), objects (N, K): see downstream/metrics/average_precision.py. Small masks of a few images: see
    downstream/metrics/shown.py. Nothing of masks where the detector finds boxes alone.
    """

    default_prefix = None

    def __init__(self, listing: Instances, most: int) -> None:
        super().__init__(metric=list(KINDS.values()))
        self.listing, self.most = listing, most
        self.arrays: dict[str, np.ndarray] = {}
        self._coco_api = listing  # so that mmdet does not collect objects; it is read nowhere else

    def compute_metrics(self, results: list) -> dict[str, float]:
        by_image = {found["img_id"]: found for _, found in results}
        found = [by_image[entry["id"]] for entry in self.listing.entries]
        with uncollected():
            metrics, arrays = evaluated(self.listing, found, self.most)
            self.arrays = arrays | (shown_things(self.listing, found) if "masks" in found[0] else {})
        return metrics


def backend() -> ModuleType:
    """faster-coco-eval, or pycocotools."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("faster_coco_eval")
    return importlib.import_module("pycocotools")


def name_and_version(module: ModuleType) -> str:
    """Name and version."""
    name = module.__name__.replace("_", "-")
    return f"{name} {version(name)}"


def evaluated(
    listing: Instances, found: Sequence[Found], most: int, module: ModuleType | None = None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics in percent, and the arrays behind them. There must be an object.

    found: of each image of the listing, in its order, at most `most` detections, best first.
    """
    module = module or backend()
    arrays = _arrays(listing, found, most)
    metrics: dict[str, float] = {}
    for kind, name in KINDS.items() if "masks" in found[0] else [("box", KINDS["box"])]:
        precisions, overlaps = _by_backend(listing, found, name, module, most)
        arrays[f"{kind}_hits"], arrays[f"{kind}_passed"] = _matches(listing, arrays, overlaps)
        metrics |= {f"{kind}_{each}": precisions[each] for each in AT}
        ours = average_precisions(detections(arrays, kind), np.ones((1, len(found))))
        assert all(abs(ours[each][0] - metrics[f"{kind}_{each}"]) < CLOSE for each in ours), (ours, metrics)
    return metrics, arrays


def _arrays(listing: Instances, found: Sequence[Found], most: int) -> dict[str, np.ndarray]:
    shape, numbers = (len(found), most), {value: place for place, value in enumerate(listing.categories)}
    classes, scores = np.full(shape, NONE, np.int16), np.zeros(shape, np.float32)
    boxes, objects = np.zeros((*shape, 4), np.float32), np.zeros((len(found), len(numbers)), np.uint16)
    for place, (each, own) in enumerate(zip(found, listing.objects, strict=True)):
        count = len(each["labels"])
        classes[place, :count], scores[place, :count] = each["labels"], each["scores"]
        boxes[place, :count] = each["bboxes"]
        for thing in own:
            objects[place, numbers[thing["category_id"]]] += not thing.get("iscrowd", 0)
    return {"classes": classes, "scores": scores, "boxes": boxes, "objects": objects}


def _by_backend(
    listing: Instances, found: Sequence[Found], name: str, module: ModuleType, most: int
) -> tuple[dict[str, float], Mapping[tuple[int, int], Any]]:
    """The back end's AP, AP50 and AP75, and its (d, g) overlaps by image and category."""
    answers = _answers(listing, found, name)
    if not answers:
        return dict.fromkeys(AT, 0.0), {}
    faster = module.__name__ == "faster_coco_eval"
    home = module if faster else importlib.import_module("pycocotools.coco")
    evaluator = module.COCOeval_faster if faster else importlib.import_module("pycocotools.cocoeval").COCOeval
    with contextlib.redirect_stdout(io.StringIO()):
        truth = home.COCO()
        truth.dataset = {
            "images": list(listing.entries),
            "annotations": [{"iscrowd": 0} | thing for own in listing.objects for thing in own],
            "categories": [{"id": number, "name": title} for number, title in listing.categories.items()],
        }
        truth.createIndex()
        evaluation = evaluator(truth, truth.loadRes(answers), name)
        asked = evaluation.params
        asked.maxDets, asked.areaRng, asked.areaRngLbl = [most], [ALL_SIZES], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])[..., 0, 0]  # (T, recalls, K), -1 without objects
    there = {each: precision[at] for each, at in AT.items()}
    return {each: float(100 * values[values > -1].mean()) for each, values in there.items()}, evaluation.ious


def _answers(listing: Instances, found: Sequence[Found], name: str) -> list[dict[str, Any]]:
    """Detections as COCO's result files hold them, image by image."""
    numbers, answers = list(listing.categories), []
    for entry, each in zip(listing.entries, found, strict=True):
        corners = each["bboxes"].astype(np.float64)
        corners[:, 2:] -= corners[:, :2]
        shapes = {"bbox": corners.tolist()} if name == "bbox" else {"segmentation": each["masks"]}
        for place, (label, score) in enumerate(zip(each["labels"].tolist(), each["scores"].tolist(), strict=True)):
            shape = {key: values[place] for key, values in shapes.items()}
            answers.append({"image_id": entry["id"], "category_id": numbers[label], "score": score, **shape})
    return answers


def _matches(listing: Instances, arrays: Mapping[str, np.ndarray], overlaps: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """hits, passed (N, D)."""
    hits, passed = (np.zeros(arrays["classes"].shape, np.uint16) for _ in range(2))
    assert len(THRESHOLDS) <= 16
    places = {entry["id"]: place for place, entry in enumerate(listing.entries)}
    labels = {number: label for label, number in enumerate(listing.categories)}
    for (image, number), found in overlaps.items():
        if len(found):
            row, own = places[image], listing.objects[places[image]]
            crowd = np.array([bool(thing.get("iscrowd", 0)) for thing in own if thing["category_id"] == number])
            mine = np.flatnonzero(arrays["classes"][row] == labels[number])
            mine = mine[np.argsort(-arrays["scores"][row, mine], kind="stable")]
            hits[row, mine], passed[row, mine] = match(np.asarray(found), crowd)
    return hits, passed
