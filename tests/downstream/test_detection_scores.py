"""Average precision: both COCO back ends, mmdet's metric and ours agree; weights count like repeated images."""

import json

import numpy as np
import pytest
import torch
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from downstream.data.listing import Instances
from downstream.metrics.previews import preview_detections
from downstream.metrics.scores import average_precisions, weighted_ap
from downstream.models.operators import quiet_libraries

with quiet_libraries():
    from mmdet.evaluation import CocoMetric

    from downstream.metrics import detection_metric
    from downstream.metrics.detection_metric import DetectionMetric, evaluate

CATEGORIES = (1, 3, 7, 90)  # the last one has no objects
HEIGHT, WIDTH, MAX_DETECTIONS = 48, 64, 12


def notched_box(box: np.ndarray) -> dict:
    """Run lengths of a box without its lower right quarter, so that masks differ from boxes."""
    left, top, right, bottom = map(int, box)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    mask[top:bottom, left:right] = 1
    mask[(top + bottom) // 2 : bottom, (left + right) // 2 : right] = 0
    encoded = masks.encode(mask)
    return encoded | {"counts": encoded["counts"].decode()}


def random_detections(images: int, seed: int) -> tuple[Instances, list[dict]]:
    """Random objects, a sixth of them crowds, and detections near half of them; many scores are equal."""
    random = np.random.RandomState(seed)

    def box() -> np.ndarray:
        return np.concatenate([low := random.randint(0, 30, 2), low + random.randint(6, 18, 2)])

    entries, objects, detections = [], [], []
    for image in range(10, 10 + images):
        annotations = []
        for number in range(random.randint(0, 6)):
            corners, is_crowd = box(), int(random.rand() < 1 / 6)
            mask = notched_box(corners)
            annotation = {"id": 100 * image + number, "image_id": image, "iscrowd": is_crowd}
            annotation |= {"bbox": [*corners[:2].tolist(), *(corners[2:] - corners[:2]).tolist()]}
            annotation |= {"area": float(masks.area(mask)), "segmentation": mask}
            annotations.append(annotation | {"category_id": CATEGORIES[random.randint(3)]})
        boxes, labels = [], []
        for _ in range(random.randint(0, MAX_DETECTIONS + 1)):
            near = annotations[random.randint(len(annotations))] if annotations and random.rand() < 0.6 else None
            x, y, w, h = near["bbox"] if near else (0, 0, 0, 0)
            boxes.append(np.array([x, y, x + w, y + h]) + random.randint(-1, 2, 4) * (0.7, 1, 1, 1) if near else box())
            of_near = near and random.rand() < 0.9
            labels.append(CATEGORIES.index(near["category_id"]) if of_near else random.randint(4))
        corners = np.clip(np.array(boxes, np.float32).reshape(-1, 4), 0, HEIGHT)
        scores = np.sort(np.round(random.rand(len(boxes)), 1))[::-1].astype(np.float32)
        detections.append({"bboxes": corners, "labels": np.array(labels, int), "scores": scores})
        detections[-1]["masks"] = [notched_box(corners_of_box) for corners_of_box in corners]
        entries.append({"id": image, "height": HEIGHT, "width": WIDTH, "file_name": f"{image}.jpg"})
        objects.append(tuple(annotations))
    return instances_of(entries, objects), detections


def instances_of(entries: list, objects: list) -> Instances:
    return Instances(
        images=tuple(entry["file_name"] for entry in entries),
        entries=tuple(entries),
        objects=tuple(objects),
        categories={category: f"thing {category}" for category in CATEGORIES},
        annotations="annotations/instances_val2017.json",
    )


@pytest.mark.parametrize("seed", range(3))
def test_pycocotools_gives_exactly_the_same_numbers(seed, monkeypatch):
    """`evaluate` itself compares with our own average precision."""
    instances, detections = random_detections(40, seed)
    faster = evaluate(instances, detections, MAX_DETECTIONS)
    monkeypatch.setattr(detection_metric, "COCO", COCO)
    monkeypatch.setattr(detection_metric, "COCOeval_faster", COCOeval)
    original = evaluate(instances, detections, MAX_DETECTIONS)
    assert faster[0] == original[0] and 5 < faster[0]["box_AP"] < 90 and faster[0]["box_AP"] != faster[0]["mask_AP"]
    assert all(np.array_equal(values, original[1][name]) for name, values in faster[1].items())


def test_metric_equals_mmdets(tmp_path, capsys):
    instances, detections = random_detections(40, 0)
    content = {
        "images": list(instances.entries),
        "annotations": [entry for entries in instances.objects for entry in entries],
        "categories": [{"id": number, "name": name} for number, name in instances.categories.items()],
    }
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(content))
    with quiet_libraries():
        theirs = CocoMetric(ann_file=str(path), metric=["bbox", "segm"])
        metrics = [theirs, DetectionMetric(instances, MAX_DETECTIONS)]
        for metric in metrics:
            metric.dataset_meta = {"classes": instances.classes}
            for entry, of_image in zip(instances.entries, detections, strict=True):
                predicted = {name: torch.from_numpy(of_image[name].copy()) for name in ("bboxes", "labels", "scores")}
                sample = {"img_id": entry["id"], "ori_shape": (HEIGHT, WIDTH)}
                predicted["masks"] = [dict(mask) for mask in of_image["masks"]]
                metric.process({}, [sample | {"pred_instances": predicted}])
        expected, ours = (metric.evaluate(len(detections)) for metric in metrics)
    assert {"classes", "boxes", "shown_of", "shown_masks", "shown_sizes"} <= set(metrics[1].arrays)
    for kind, name in (("box", "bbox"), ("mask", "segm")):
        for our_suffix, suffix in (("AP", "mAP"), ("AP50", "mAP_50"), ("AP75", "mAP_75")):
            assert ours[f"{kind}_{our_suffix}"] / 100 == pytest.approx(expected[f"coco/{name}_{suffix}"], abs=0.00051)


def test_a_weighted_image_counts_like_that_many_copies():
    instances, detections = random_detections(30, 4)
    for index, of_image in enumerate(detections):
        of_image["scores"] = of_image["scores"] + np.float32(1e-4) * index  # no ties between images
    weights = np.random.RandomState(0).multinomial(30, np.full(30, 1 / 30))
    _, arrays = evaluate(instances, detections, MAX_DETECTIONS)
    copies = np.repeat(np.arange(30), weights)
    entries, objects = [], []
    for image_id, index in enumerate(copies, 1000):
        entries.append(instances.entries[index] | {"id": image_id})
        annotations = instances.objects[index]
        numbered = enumerate(annotations, 100 * image_id)
        objects.append(tuple(annotation | {"id": number, "image_id": image_id} for number, annotation in numbered))
    expected, _ = evaluate(instances_of(entries, objects), [detections[index] for index in copies], MAX_DETECTIONS)
    for kind in ("box", "mask"):
        ours = average_precisions(arrays, kind, weights[None])
        assert all(values[0] == pytest.approx(expected[f"{kind}_{name}"], rel=1e-9) for name, values in ours.items())


def test_previews_show_as_many_detections_as_objects_by_score():
    """Higher scores are drawn in front."""
    instances, detections = random_detections(10, 7)
    previews = preview_detections(instances, detections)
    assert previews["shown_of"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert previews["shown_sizes"].tolist() == [[48, 64]] * 8
    several = 0
    for index, shown in zip(previews["shown_of"], previews["shown_masks"], strict=True):
        order = np.argsort(-detections[index]["scores"], kind="stable")[: max(1, len(instances.objects[index]))]
        free = np.ones((HEIGHT, WIDTH), bool)
        for number, mask in enumerate((masks.decode(detections[index]["masks"][position]) for position in order), 1):
            assert np.array_equal(shown[:HEIGHT, :WIDTH] == number, free & (mask == 1))
            free &= mask == 0
        several += len(order) > 1
        assert not shown[:HEIGHT, :WIDTH][free].any() and not shown[HEIGHT:].any()
    assert several > 3


def test_perfect_and_missing_detections():
    instances, detections = random_detections(20, 5)
    perfect = [
        {
            "bboxes": np.array([[x, y, x + w, y + h] for x, y, w, h in boxes], np.float32).reshape(-1, 4),
            "labels": np.array([CATEGORIES.index(annotation["category_id"]) for annotation in annotations], int),
            "scores": np.ones(len(annotations), np.float32),
            "masks": [annotation["segmentation"] for annotation in annotations],
        }
        for annotations in instances.objects
        for boxes in [[annotation["bbox"] for annotation in annotations]]
    ]
    metrics, arrays = evaluate(instances, perfect, MAX_DETECTIONS)
    assert set(metrics.values()) == {100.0}
    weights = np.random.RandomState(0).randint(0, 3, (3, 20)).astype(np.float64)
    assert all(values == pytest.approx(np.full(3, 100.0)) for values in weighted_ap(arrays, weights).values())
    empty = [{name: values[:0] for name, values in of_image.items()} for of_image in detections]
    metrics, arrays = evaluate(instances, empty, MAX_DETECTIONS)
    assert set(metrics.values()) == {0.0} and (arrays["classes"] == -1).all()
