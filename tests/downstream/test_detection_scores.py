"""Average precision: both back ends, mmdet's metric and ours give one number; weights are repeated images."""

import importlib

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

NUMBERS = (1, 3, 7, 90)  # of categories; of the last no object exists
HEIGHT, WIDTH, MOST = 48, 64, 12


def outline(box: np.ndarray) -> dict:
    """Run lengths of a box's inside without its lowest right quarter, so that masks are not boxes."""
    left, top, right, bottom = map(int, box)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    mask[top:bottom, left:right] = 1
    mask[(top + bottom) // 2 : bottom, (left + right) // 2 : right] = 0
    found = masks.encode(mask)
    return found | {"counts": found["counts"].decode()}


def drawn(images: int, seed: int) -> tuple[Instances, list[dict]]:
    """Random objects, a sixth of them crowds, and detections near half of them; many scores are equal."""
    random = np.random.RandomState(seed)

    def box() -> np.ndarray:
        return np.concatenate([low := random.randint(0, 30, 2), low + random.randint(6, 18, 2)])

    entries, objects, found = [], [], []
    for image in range(10, 10 + images):
        own = []
        for _ in range(random.randint(0, 6)):
            corners, facts = (
                box(),
                {"id": 100 * image + len(own), "image_id": image, "iscrowd": int(random.rand() < 1 / 6)},
            )
            size = (corners[2:] - corners[:2]).tolist()
            shape = outline(corners)
            facts |= {"bbox": [*corners[:2].tolist(), *size], "area": float(masks.area(shape)), "segmentation": shape}
            own.append(facts | {"category_id": NUMBERS[random.randint(3)]})
        boxes, labels = [], []
        for _ in range(random.randint(0, MOST + 1)):
            near = own[random.randint(len(own))] if own and random.rand() < 0.6 else None
            x, y, w, h = near["bbox"] if near else (0, 0, 0, 0)
            boxes.append(np.array([x, y, x + w, y + h]) + random.randint(-1, 2, 4) * (0.7, 1, 1, 1) if near else box())
            labels.append(NUMBERS.index(near["category_id"]) if near and random.rand() < 0.9 else random.randint(4))
        corners = np.clip(np.array(boxes, np.float32).reshape(-1, 4), 0, HEIGHT)
        scores = np.sort(np.round(random.rand(len(boxes)), 1))[::-1].astype(np.float32)
        found.append({"bboxes": corners, "labels": np.array(labels, int), "scores": scores})
        found[-1]["masks"] = [outline(each) for each in corners]
        entries.append({"id": image, "height": HEIGHT, "width": WIDTH, "file_name": f"{image}.jpg"})
        objects.append(tuple(own))
    return listing(entries, objects), found


def listing(entries: list, objects: list) -> Instances:
    return Instances(
        images=tuple(entry["file_name"] for entry in entries),
        entries=tuple(entries),
        objects=tuple(objects),
        categories={number: f"thing {number}" for number in NUMBERS},
        annotations="annotations/instances_val2017.json",
    )


@pytest.mark.parametrize("seed", range(3))
def test_pycocotools_agrees_exactly(seed, monkeypatch):
    """And with ours, which `evaluate` checks."""
    instances, found = drawn(40, seed)
    one = evaluate(instances, found, MOST)
    monkeypatch.setattr(detection_metric, "COCO", COCO)
    monkeypatch.setattr(detection_metric, "COCOeval_faster", COCOeval)
    other = evaluate(instances, found, MOST)
    assert one[0] == other[0] and 5 < one[0]["box_AP"] < 90 and one[0]["box_AP"] != one[0]["mask_AP"]
    assert all(np.array_equal(values, other[1][name]) for name, values in one[1].items())


def test_the_numbers_are_those_of_mmdets_metric(tmp_path, capsys):
    instances, found = drawn(40, 0)
    content = {
        "images": list(instances.entries),
        "annotations": [thing for own in instances.objects for thing in own],
        "categories": [{"id": number, "name": name} for number, name in instances.categories.items()],
    }
    path = tmp_path / "truth.json"
    path.write_text(importlib.import_module("json").dumps(content))
    with quiet_libraries():
        theirs = CocoMetric(ann_file=str(path), metric=["bbox", "segm"])
        metrics = [theirs, DetectionMetric(instances, MOST)]
        for metric in metrics:
            metric.dataset_meta = {"classes": instances.classes}
            for entry, each in zip(instances.entries, found, strict=True):
                given = {name: torch.from_numpy(each[name].copy()) for name in ("bboxes", "labels", "scores")}
                sample = {"img_id": entry["id"], "ori_shape": (HEIGHT, WIDTH)}
                metric.process({}, [sample | {"pred_instances": given | {"masks": [dict(m) for m in each["masks"]]}}])
        wanted, ours = (metric.evaluate(len(found)) for metric in metrics)
    assert {"classes", "boxes", "shown_of", "shown_masks", "shown_sizes"} <= set(metrics[1].arrays)
    for kind, name in (("box", "bbox"), ("mask", "segm")):
        for mine, suffix in (("AP", "mAP"), ("AP50", "mAP_50"), ("AP75", "mAP_75")):
            assert ours[f"{kind}_{mine}"] / 100 == pytest.approx(wanted[f"coco/{name}_{suffix}"], abs=0.00051)


def test_a_weight_is_so_many_copies_of_an_image():
    instances, found = drawn(30, 4)
    found = [
        each | {"scores": each["scores"] + np.float32(1e-4) * place} for place, each in enumerate(found)
    ]  # no ties
    weights = np.random.RandomState(0).multinomial(30, np.full(30, 1 / 30))
    _, arrays = evaluate(instances, found, MOST)
    copies = np.repeat(np.arange(30), weights)
    entries, objects = [], []
    for number, place in enumerate(copies, 1000):
        entries.append(instances.entries[place] | {"id": number})
        own = instances.objects[place]
        objects.append(tuple(thing | {"id": 100 * number + k, "image_id": number} for k, thing in enumerate(own)))
    wanted, _ = evaluate(listing(entries, objects), [found[place] for place in copies], MOST)
    for kind in ("box", "mask"):
        ours = average_precisions(arrays, kind, weights[None])
        assert all(values[0] == pytest.approx(wanted[f"{kind}_{name}"], rel=1e-9) for name, values in ours.items())


def test_masks_of_the_surest_things_are_kept_of_a_few_images():
    """As many as the labels hold, the surer in front."""
    instances, found = drawn(10, 7)
    kept = preview_detections(instances, found)
    assert kept["shown_of"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and kept["shown_sizes"].tolist() == [[48, 64]] * 8
    several = 0
    for place, numbers in zip(kept["shown_of"], kept["shown_masks"], strict=True):
        order = np.argsort(-found[place]["scores"], kind="stable")[: max(1, len(instances.objects[place]))]
        free = np.ones((HEIGHT, WIDTH), bool)
        for number, mask in enumerate((masks.decode(found[place]["masks"][k]) for k in order), 1):
            assert np.array_equal(numbers[:HEIGHT, :WIDTH] == number, free & (mask == 1))
            free &= mask == 0
        several += len(order) > 1
        assert not numbers[:HEIGHT, :WIDTH][free].any() and not numbers[HEIGHT:].any()
    assert several > 3


def test_perfect_and_missing_detections():
    instances, found = drawn(20, 5)
    right = [
        {
            "bboxes": np.array([[x, y, x + w, y + h] for x, y, w, h in boxes], np.float32).reshape(-1, 4),
            "labels": np.array([NUMBERS.index(thing["category_id"]) for thing in own], int),
            "scores": np.ones(len(own), np.float32),
            "masks": [thing["segmentation"] for thing in own],
        }
        for own in instances.objects
        for boxes in [[thing["bbox"] for thing in own]]
    ]
    metrics, arrays = evaluate(instances, right, MOST)
    assert set(metrics.values()) == {100.0}
    weights = np.random.RandomState(0).randint(0, 3, (3, 20)).astype(np.float64)
    assert all(values == pytest.approx(np.full(3, 100.0)) for values in weighted_ap(arrays, weights).values())
    nothing = [{name: values[:0] for name, values in each.items()} for each in found]
    metrics, arrays = evaluate(instances, nothing, MOST)
    assert set(metrics.values()) == {0.0} and (arrays["classes"] == -1).all()
