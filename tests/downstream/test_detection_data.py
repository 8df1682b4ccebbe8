"""Folders of COCO's layout: what is recognised, what is refused and how that is said, the drawn set, the dataset."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as masks

from downstream.data.scenes import open_scenes, problems_of, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.detection import learnable
from downstream.detection_settings import DetectionSettings
from downstream.models.libraries import quiet_libraries

with quiet_libraries():
    from mmdet.datasets import CocoDataset

    from downstream.data.detection_data import (
        CocoScenes,
        detection_training_images,
        detection_validation_images,
    )

SIZES = DetectionSettings(
    augment="crops",
    short=(48, 64),
    long=96,
    crop_short=(40, 56),
    crop=(24, 40),
    jitter=(0.5, 2.0),
    flip=0.5,
    val=(96, 64),
)


@pytest.fixture
def coco(tmp_path):
    return tiny_folder("coco", tmp_path)


@pytest.fixture
def opened(coco, tmp_path):
    return {split: open_scenes(f"coco:{coco}", split, tmp_path) for split in COUNTS}


def changed(coco: Path, split: str, change) -> None:
    """Apply `change` to what a split's file says."""
    path = coco / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_drawn_set_is_whole(opened, tmp_path):
    for split, count in COUNTS.items():
        scenes = opened[split]
        objects = [thing for own in scenes.listing.objects for thing in own]
        assert len(scenes) == count and problems_of(scenes) == [] and len(scenes.listing.learnable) < count
        assert {thing["category_id"] for thing in objects} == set(scenes.listing.categories) == {2, 3, 44, 90}
        assert {thing["iscrowd"] for thing in objects} == {0, 1}
        for thing in objects:
            outline = thing["segmentation"]
            found = masks.merge(masks.frPyObjects(outline, 64, 96)) if isinstance(outline, list) else None
            found = found or masks.frPyObjects(outline, 64, 96)
            assert masks.area(found) == thing["area"] > 20 and np.array_equal(masks.toBbox(found), thing["bbox"])
    again = open_scenes("tiny-coco:", "val", tmp_path / "again")
    assert again.fingerprint == opened["val"].fingerprint != opened["train"].fingerprint


def test_the_dataset_is_mmdets(coco, opened):
    """Also where a file names its categories in another order, which mmdet itself takes for another labelling."""
    scenes = opened["train"]
    folder, file = str(coco / "train2017"), str(coco / "annotations" / "instances_train2017.json")
    settings = {"pipeline": [], "serialize_data": False, "data_prefix": {"img": folder}}
    with quiet_libraries():
        wanted = CocoDataset(ann_file=file, metainfo={"classes": scenes.classes}, **settings)
        kept = CocoDataset(ann_file=file, metainfo={"classes": scenes.classes}, filter_cfg=FILTER, **settings)
    ours = CocoScenes(scenes, pipeline=[], serialize_data=False)
    assert ours.data_list == wanted.data_list
    trained = learnable(scenes, opened["val"])
    assert [each["img_id"] for each in kept.data_list] == [entry["id"] for entry in trained.listing.entries]
    changed(coco, "train", lambda content: content["categories"].reverse())
    again = open_scenes(scenes.url, "train", coco)
    assert again.classes == scenes.classes and again.listing == scenes.listing


FILTER = {"filter_empty_gt": True, "min_size": 32}


@pytest.mark.parametrize(("augment", "sides"), [("scales", (48, 96)), ("crops", (48, 96)), ("jitter", (12, 96))])
def test_augmented_images_stay_in_their_bounds(opened, augment, sides):
    images = detection_training_images(learnable(opened["train"], opened["val"]), replace(SIZES, augment=augment))
    np.random.seed(0)
    shapes = set()
    for index in range(24):
        sample = images[index % len(images)]
        height, width = sample["inputs"].shape[-2:]
        found = sample["data_samples"].gt_instances
        boxes = found.bboxes.tensor if hasattr(found.bboxes, "tensor") else found.bboxes
        assert sides[0] <= min(height, width) and max(height, width) <= sides[1]
        assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert found.masks.masks.shape == (len(boxes), height, width)
        shapes.add((height, width))
    assert len(shapes) > 1


def test_an_image_of_another_size_is_named(coco, opened):
    Image.new("RGB", (50, 40)).save(coco / "train2017" / "000000000003.jpg")
    (coco / "val2017" / "000000000002.jpg").write_bytes(b"not a picture")
    problem = (
        "train2017/000000000003.jpg: the image is 40 x 50 pixels and annotations/instances_train2017.json says 64 x 96"
    )
    assert [found.startswith(problem) for found in problems_of(opened["train"])] == [True]
    assert len(problems_of(opened["val"])) == 1
    images = detection_training_images(opened["train"], SIZES)
    with pytest.raises(ValueError, match="says 64 x 96"):
        images[2]
    with pytest.raises(ValueError, match=r"val2017/000000000002.jpg: cannot be read \(.*\); replace the file"):
        detection_validation_images(opened["val"], SIZES)[1]


def first(content: dict) -> dict:
    return content["annotations"][0]


def crowd(content: dict) -> dict:
    return next(thing for thing in content["annotations"] if thing["iscrowd"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: first(content).update(category_id=5), "annotation 1 is of category 5, which is none of its 4"),
        (lambda content: first(content).update(image_id=999), "annotation 1 is of image 999, which it does not list"),
        (lambda content: first(content).update(id=2), "two of its annotations have one id"),
        (lambda content: content["images"][0].update(id=2), "two of its images have one id"),
        (lambda content: first(content).pop("bbox"), "an entry of annotations (1) has no 'bbox'"),
        (lambda content: content["images"][0].pop("height"), "an entry of images (1) has no 'height'"),
        (
            lambda content: crowd(content)["segmentation"].update(size=[96, 64]),
            "is [96, 64] pixels and its image [64, 96]",
        ),
        (lambda content: content.pop("annotations"), "has no list 'annotations'"),
        (lambda content: content["categories"].clear(), "names no categories"),
        (lambda content: [content[key].clear() for key in ("images", "annotations")], "the val split is empty"),
        (
            lambda content: content["images"][0].update(file_name="x.jpg"),
            "1 of 24 images of val are not there, such as val",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(coco, tmp_path, change, said):
    changed(coco, "val", change)
    assert said in refused(coco, tmp_path)


def refused(coco: Path, tmp_path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        open_scenes(f"coco:{coco}", "val", tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"coco:{coco}: ")
    return str(caught.value)


def test_bad_folders(coco, tmp_path):
    path = coco / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text()[:100])
    assert "instances_val2017.json is no JSON" in refused(coco, tmp_path)
    path.unlink()
    assert "there is no file annotations/instances_val2017.json" in refused(coco, tmp_path)
    path.parent.rename(coco / "elsewhere")
    assert "no folder annotations/ there" in refused(coco, tmp_path)


def test_splits_that_nothing_can_be_learnt_or_measured_on(coco, tmp_path):
    def pair():
        return [open_scenes(f"coco:{coco}", split, tmp_path) for split in ("train", "val")]

    changed(coco, "val", lambda content: content["categories"][0].update(name="another"))
    with pytest.raises(ValueError, match="name other categories"):
        learnable(*pair())
    changed(
        coco, "val", lambda content: (content["categories"][0].update(name="digit 0"), content["annotations"].clear())
    )
    with pytest.raises(ValueError, match="no image of val has an object"):
        learnable(*pair())
