"""Predictions of dense tasks in a report: those of a perfect result look like the labels, others do not."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_results import made_checkpoint, save_result
from shown_results import result

from bench.reports.page import report_page
from bench.reports.scenes import labelled_objects, measured_images, scene_details
from bench.results.record import DataUsed
from bench.results.store import StoredResult
from downstream.data.overlays import FAR_APART, class_colours
from downstream.data.scenes import SceneSet, open_scenes, scene_mask
from downstream.frozen.task import class_areas
from downstream.metrics.previews import preview_arrays, preview_detections, preview_masks, thumbnail


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def measured(folder, scenes: SceneSet, number: int, arrays: dict[str, np.ndarray], **others) -> StoredResult:
    data = DataUsed(name="tiny", url=scenes.url, fingerprints={"val": scenes.fingerprint}, images={"val": len(scenes)})
    checkpoint = made_checkpoint(f"c{number}", number, source=f"/imports/c{number}")
    return save_result(folder, result(checkpoint, 50.0, data=data, arrays=tuple(arrays), **others), arrays)


def test_perfect_masks_look_like_the_labels(tmp_path, cache):
    scenes = open_scenes("tiny-ade20k:", "val", cache)
    labels = [scene_mask(scenes, index) for index in range(len(scenes))]
    right = preview_masks([thumbnail(torch.from_numpy(mask)) for mask in labels])
    wrong = preview_masks([thumbnail(torch.from_numpy((mask + 1) % len(scenes.classes))) for mask in labels])
    results = {f"c{number}": measured(tmp_path, scenes, number, arrays) for number, arrays in ((1, right), (2, wrong))}
    details = scene_details(results, cache)
    assert details["columns"] == ["image", "labels", "c1", "c2"] and len(details["rows"]) == 8
    assert all(row[1] == row[2] and len({row[0], row[1], row[3]}) == 3 for row in details["rows"])
    assert {name for name, _ in details["legend"]} <= set(scenes.classes) and details["legend"][0][1].startswith("#")
    text = report_page(tmp_path, pictures=True)
    assert text.count('alt="scene 8, ') == 4
    areas = np.stack([class_areas(mask, mask, len(scenes.classes)) for mask in labels])
    areas[3, :, 0] //= 2  # half of its pixels are wrong: the worst scene
    ranked = right | preview_arrays([3, 1], [thumbnail(torch.from_numpy(labels[index])) for index in (3, 1)], "ranked")
    results["c1"] = measured(tmp_path / "ranked", scenes, 1, ranked | {"areas": areas})
    details = scene_details(results, cache)
    assert details["rows"][0][1] == details["rows"][0][2]
    assert len(details["rows"]) == len({3, 1, *right["shown_of"].tolist()})
    mious = [caption[2] for caption in details["captions"]]
    assert mious[0].startswith("worst: mIoU ") and mious[1:3] == ["median: mIoU 100.0", "mIoU 100.0"]
    assert details["rows"][0][3] == "" or 3 in right["shown_of"], "c2 has no mask of this scene"
    fewer_scenes = measured(tmp_path / "other", scenes.limited(3), 1, right)
    assert scene_details({"c1": fewer_scenes}, cache) is None, "other scenes than those measured"
    kept = measured_images(scenes, results["c1"].result, "val")
    data = replace(results["c1"].result.data, contents={"val": "other-bytes-now"})
    assert kept is scenes and measured_images(scenes, replace(results["c1"].result, data=data), "val") is None


def test_perfect_detections_look_like_the_labels(tmp_path, cache):
    scenes = open_scenes("tiny-coco:", "val", cache)
    width = max(len(objects) for objects in scenes.listing.objects) + 1
    classes, scores = np.full((len(scenes), width), -1, np.int16), np.zeros((len(scenes), width), np.float32)
    boxes = np.zeros((len(scenes), width, 4), np.float32)
    for index in range(len(scenes)):
        for place, (corners, number) in enumerate(labelled_objects(scenes.listing, index).boxes):
            classes[index, place], scores[index, place], boxes[index, place] = number, 0.9, corners
    right = {"classes": classes, "scores": scores, "boxes": boxes}
    outlines = [[detected["segmentation"] for detected in objects] for objects in scenes.listing.objects]
    detections = [{"scores": row[: len(masks)], "masks": masks} for row, masks in zip(scores, outlines, strict=True)]
    masks = preview_detections(scenes.listing, detections)
    results = {
        "c1": measured(tmp_path, scenes, 1, right | masks),
        "c2": measured(tmp_path, scenes, 2, right | masks | {"boxes": boxes / 2}),
        "c3": measured(tmp_path, scenes, 3, right),
    }
    details = scene_details(results, cache)
    rows_and_scenes = zip(details["rows"], masks["shown_of"], strict=True)
    rows = [row for row, index in rows_and_scenes if scenes.listing.objects[index]]  # of scenes with objects
    assert all(row[1] == row[2] and len(set(row)) == 4 for row in rows) and len(rows) > 4
    assert details["has_objects"] and details["without_masks"] == ["c3"]
    assert "c3: only boxes" in report_page(tmp_path)


def test_classes_differ_in_colour():
    counts = Counter({7: 30, 140: 20, 2: 10})
    colours = class_colours(counts, 150)
    assert len({tuple(colour) for colour in colours[:150].tolist()}) == 150 and not colours[150:].any()
    assert ["#" + bytes(colours[number].tolist()).hex().upper() for number in (7, 140, 2)] == list(FAR_APART[:3])
