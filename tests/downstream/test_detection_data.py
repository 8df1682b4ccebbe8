"""Scenes in the layouts of COCO and Pascal VOC: datasets, augmentation, the generated set, refused files."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as masks
from refusals import refusal

from downstream.data.scenes import decode_scenes, open_scenes, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.detection import trainable_scenes, uses_masks
from downstream.detection_settings import DetectionSettings
from downstream.layouts.coco import decode_run_lengths
from downstream.models.operators import quiet_libraries

with quiet_libraries():
    from mmdet.datasets import CocoDataset

    from downstream.data.detection_data import (
        CocoScenes,
        detection_training_images,
        detection_validation_images,
    )

FILTER = {"filter_empty_gt": True, "min_size": 32}
SETTINGS = DetectionSettings(
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
def scenes_of_splits(coco, tmp_path):
    return {split: open_scenes(f"coco:{coco}", split, tmp_path) for split in COUNTS}


def change_annotations(coco: Path, split: str, change) -> None:
    """Apply `change` to the content of a split's annotation file."""
    path = coco / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_generated_set_is_complete(scenes_of_splits, tmp_path):
    for split, count in COUNTS.items():
        scenes = scenes_of_splits[split]
        objects = [entry for entries in scenes.listing.objects for entry in entries]
        assert len(scenes) == count and not decode_scenes(scenes)[0] and len(scenes.listing.trainable) < count
        assert {entry["category_id"] for entry in objects} == set(scenes.listing.categories) == {2, 3, 44, 90}
        assert {entry["iscrowd"] for entry in objects} == {0, 1}
        for entry in objects:
            outline = entry["segmentation"]
            mask = masks.merge(masks.frPyObjects(outline, 64, 96)) if isinstance(outline, list) else None
            mask = mask or masks.frPyObjects(outline, 64, 96)
            assert masks.area(mask) == entry["area"] > 20 and np.array_equal(masks.toBbox(mask), entry["bbox"])
    reopened = open_scenes("tiny-coco:", "val", tmp_path / "again")
    assert reopened.fingerprint == scenes_of_splits["val"].fingerprint != scenes_of_splits["train"].fingerprint


def test_dataset_equals_mmdets(coco, scenes_of_splits):
    """Also for another order of categories in the file, which would change mmdet's labels."""
    scenes = scenes_of_splits["train"]
    folder, file = str(coco / "train2017"), str(coco / "annotations" / "instances_train2017.json")
    settings = {"pipeline": [], "serialize_data": False, "data_prefix": {"img": folder}}
    with quiet_libraries():
        theirs = CocoDataset(ann_file=file, metainfo={"classes": scenes.classes}, **settings)
        theirs_filtered = CocoDataset(
            ann_file=file, metainfo={"classes": scenes.classes}, filter_cfg=FILTER, **settings
        )
    ours = CocoScenes(scenes, pipeline=[], serialize_data=False)
    assert ours.data_list == theirs.data_list
    trainable = trainable_scenes(scenes, scenes_of_splits["val"])
    numbers = [entry["id"] for entry in trainable.listing.entries]
    assert [entry["img_id"] for entry in theirs_filtered.data_list] == numbers
    change_annotations(coco, "train", lambda content: content["categories"].reverse())
    reopened = open_scenes(scenes.url, "train", coco)
    assert reopened.classes == scenes.classes and reopened.listing == scenes.listing


@pytest.mark.parametrize(("augment", "sides"), [("scales", (48, 96)), ("crops", (48, 96)), ("jitter", (12, 96))])
def test_augmented_images_and_boxes_stay_within_bounds(scenes_of_splits, augment, sides):
    images = detection_training_images(
        trainable_scenes(scenes_of_splits["train"], scenes_of_splits["val"]), replace(SETTINGS, augment=augment)
    )
    np.random.seed(0)
    shapes = set()
    for index in range(24):
        sample = images[index % len(images)]
        height, width = sample["inputs"].shape[-2:]
        instances = sample["data_samples"].gt_instances
        boxes = instances.bboxes.tensor if hasattr(instances.bboxes, "tensor") else instances.bboxes
        assert sides[0] <= min(height, width) and max(height, width) <= sides[1]
        assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert instances.masks.masks.shape == (len(boxes), height, width)
        shapes.add((height, width))
    assert len(shapes) > 1


def test_images_of_another_size_and_unreadable_images_are_named(coco, scenes_of_splits):
    Image.new("RGB", (50, 40)).save(coco / "train2017" / "000000000003.jpg")
    (coco / "val2017" / "000000000002.jpg").write_bytes(b"not a picture")
    (line,) = decode_scenes(scenes_of_splits["train"])[0].values()
    assert line.startswith("train2017/000000000003.jpg: ")
    assert "50 x 40" in line and "annotations/instances_train2017.json says 96 x 64" in line
    assert len(decode_scenes(scenes_of_splits["val"])[0]) == 1
    images = detection_training_images(scenes_of_splits["train"], SETTINGS)
    with pytest.raises(ValueError, match="says 96 x 64"):
        images[2]
    with pytest.raises(ValueError, match=r"val2017/000000000002\.jpg: cannot be read"):
        detection_validation_images(scenes_of_splits["val"], SETTINGS)[1]


def first_annotation(content: dict) -> dict:
    return content["annotations"][0]


def first_crowd(content: dict) -> dict:
    return next(entry for entry in content["annotations"] if entry["iscrowd"])


def set_polygon(content: dict, polygon: list[float]) -> None:
    """Set the outline of the first annotation."""
    first_annotation(content)["segmentation"] = [polygon]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: first_annotation(file).update(category_id=5), "annotation 1 is of category 5"),
        (lambda file: first_annotation(file).update(image_id=999), "annotation 1 is of image 999"),
        (lambda file: file["images"][0].update(id=2), "two of its images have one id"),
        (lambda file: file["images"][0].update(file_name="000000000002.jpg"), "twice, such as 000000000002.jpg"),
        (lambda file: first_annotation(file).pop("bbox"), "field `bbox` - at `$.annotations[0]`"),
        (lambda file: file["images"][0].pop("height"), "field `height` - at `$.images[0]`"),
        (lambda file: file["images"][0].pop("file_name"), "field `file_name` - at `$.images[0]`"),
        (lambda file: first_annotation(file).update(image_id={}), "got `object` - at `$.annotations[0].image_id`"),
        (lambda file: file["images"][0].update(id=[1]), "got `array` - at `$.images[0].id`"),
        (lambda file: file["categories"][0].update(id="2"), "got `str` - at `$.categories[0].id`"),
        (lambda file: file["images"][0].update(width=-3), "at `$.images[0].width`"),
        (lambda file: set_polygon(file, [1e9, -1e9, 1e300, 2, 3, 3]), "annotation 1 holds the coordinate 1e+09"),
        (lambda file: set_polygon(file, [1, 2, math.nan, 3, 4, 5]), "instances_val2017.json: JSON is malformed"),
        (lambda file: set_polygon(file, [1, 2, 193, 3, 4, 5]), "annotation 1 holds the coordinate 193"),
        (lambda file: set_polygon(file, []), "at `$.annotations[0].segmentation"),
        (lambda file: first_annotation(file).update(segmentation=[]), "annotation 1 has a box but no outline"),
        (lambda file: first_crowd(file)["segmentation"].update(counts=[1, 10**9]), "add up to 1000000001"),
        (lambda file: first_crowd(file)["segmentation"].update(counts=[7000, -1000, 144]), "the least is -1000"),
        (lambda file: first_crowd(file)["segmentation"].update(counts="o" * 10**6), "the least is -1"),
        (lambda file: first_crowd(file)["segmentation"].update(counts="zz"), "run lengths of annotation"),
        (
            lambda file: first_crowd(file)["segmentation"].update(size=[96, 64]),
            "[96, 64] pixels and its image [64, 96]",
        ),
        (lambda file: file.pop("annotations"), "field `annotations`"),
        (lambda file: file.pop("images"), "field `images`"),
        (lambda file: file["categories"].clear(), "at `$.categories`"),
        (lambda file: [file[key].clear() for key in ("images", "annotations")], "the val split is empty"),
        (
            lambda file: file["images"][0].update(file_name="x.jpg"),
            "1 of 24 images of val",
        ),
    ],
)
def test_bad_annotation_files_are_refused(coco, tmp_path, change, message):
    change_annotations(coco, "val", change)
    assert message in coco_refusal(coco, tmp_path)


def test_compressed_run_lengths_are_decoded_as_by_pycocotools(coco, tmp_path):
    path = coco / "annotations" / "instances_val2017.json"
    for entry in json.loads(path.read_text())["annotations"]:
        if entry["iscrowd"]:
            assert list(decode_run_lengths(compressed_counts(entry))) == entry["segmentation"]["counts"]

    def compress(content: dict) -> None:
        crowd = first_crowd(content)
        crowd["segmentation"]["counts"] = compressed_counts(crowd)

    change_annotations(coco, "val", compress)
    assert not decode_scenes(open_scenes(f"coco:{coco}", "val", tmp_path))[0]


def compressed_counts(entry: dict) -> str:
    return masks.frPyObjects(entry["segmentation"], 64, 96)["counts"].decode()


def coco_refusal(coco: Path, tmp_path: Path) -> str:
    message = refusal(open_scenes, f"coco:{coco}", "val", tmp_path)
    assert message.startswith(f"coco:{coco}: ")
    return message


def test_bad_folders(coco, tmp_path):
    path = coco / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text()[:100])
    assert "instances_val2017.json: " in coco_refusal(coco, tmp_path)
    path.unlink()
    assert "no file annotations/instances_val2017.json" in coco_refusal(coco, tmp_path)
    path.write_text("[" * 100_000)
    assert "instances_val2017.json: " in coco_refusal(coco, tmp_path)
    path.parent.rename(coco / "elsewhere")
    assert "no folder annotations/" in coco_refusal(coco, tmp_path)


def test_splits_of_different_categories_or_without_objects_are_refused(coco, tmp_path):
    def open_splits():
        return [open_scenes(f"coco:{coco}", split, tmp_path) for split in ("train", "val")]

    change_annotations(coco, "val", lambda content: content["categories"][0].update(name="another"))
    with pytest.raises(ValueError, match="name other categories"):
        trainable_scenes(*open_splits())
    change_annotations(
        coco, "val", lambda content: (content["categories"][0].update(name="digit 0"), content["annotations"].clear())
    )
    with pytest.raises(ValueError, match="no image of val has an object"):
        trainable_scenes(*open_splits())


def test_both_generated_layouts_hold_the_same_boxes(scenes_of_splits, tmp_path):
    """Pascal VOC counts pixels from 1 and includes both ends."""
    for split, count in COUNTS.items():
        voc, coco = open_scenes("tiny-vocboxes:", split, tmp_path), scenes_of_splits[split]
        assert len(voc) == count and not decode_scenes(voc)[0] and voc.classes == coco.classes
        assert not voc.listing.has_outlines and coco.listing.has_outlines
        for of_voc, of_coco in zip(voc.listing.objects, coco.listing.objects, strict=True):
            assert [entry["bbox"] for entry in of_voc] == [entry["bbox"] for entry in of_coco]
            assert all(entry["area"] == entry["bbox"][2] * entry["bbox"][3] for entry in of_voc)
    assert not uses_masks(scenes_of_splits["train"], voc)


XML = "<annotation>{}<object><name>a</name>{}<bndbox>{}</bndbox></object></annotation>"
BOX = "<xmin>3</xmin><ymin>4</ymin><xmax>7</xmax><ymax>9</ymax>"


def write_voc(root: Path, text: str) -> None:
    """Write a set of one image per split, with the annotation file `text`."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        Image.new("RGB", (60, 50)).save(root / "JPEGImages" / f"{split}.png")
        (root / "Annotations" / f"{split}.xml").write_text(text)
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{split}\n")


@pytest.mark.parametrize("size", ["", "<size><width>0</width><height>0</height></size>"])
def test_annotations_of_pascal_voc(size, tmp_path):
    """test.txt as list of val, missing sizes, difficult objects, boxes beyond the border and boxes without an area."""
    write_voc(tmp_path, XML.format(size, "<difficult>1</difficult>", BOX))
    scenes = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    ((entry,),) = scenes.listing.objects
    assert entry["bbox"] == [2, 3, 5, 6] and entry["iscrowd"] == 1 and not decode_scenes(scenes)[0]
    before = scenes.fingerprint
    write_voc(tmp_path, XML.format(size, "", "<xmin>0</xmin><ymin>4.5</ymin><xmax>70</xmax><ymax>90</ymax>"))
    scenes = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    ((entry,),) = scenes.listing.objects
    assert entry["bbox"] == [0, 3.5, 60, 46.5] and entry["iscrowd"] == 0 and scenes.fingerprint != before
    write_voc(tmp_path, XML.format(size, "", "<xmin>80</xmin><ymin>4</ymin><xmax>90</xmax><ymax>9</ymax>"))
    notes = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path).notes
    assert any(note.startswith("1 of 1 objects of val have no area") and "test.xml" in note for note in notes)


def test_two_images_for_one_name_in_a_list_are_refused(tmp_path):
    write_voc(tmp_path, XML.format("", "", BOX))
    Image.new("RGB", (30, 20)).save(tmp_path / "JPEGImages" / "test.jpg")
    with pytest.raises(ValueError, match=r"JPEGImages holds test\.jpg and test\.png"):
        open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    assert len(open_scenes(f"vocboxes:{tmp_path}", "train", tmp_path)) == 1


@pytest.mark.parametrize("place", ["JPEGImages/val.png", "Annotations/val.xml"])
def test_a_named_pipe_is_refused(place, tmp_path):
    """Opening it would block forever."""
    write_voc(tmp_path, XML.format("", "", BOX))
    for path in tmp_path.glob(place.replace("val", "*")):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{place.replace('val.', '(val|test|train).')}.*a pipe"):
        open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "no XML",
        XML.format("", "", BOX.replace("7", "nan")),
        XML.format("", "", BOX.replace("<ymax>9</ymax>", "")),
        XML.format("", "", BOX).replace("<name>a</name>", ""),
        XML.format("<size><width>1e400</width></size>", "", BOX),
        '<!DOCTYPE a [<!ENTITY b "bbbb">]>' + XML.format("", "", BOX),
    ],
)
def test_bad_annotations_of_pascal_voc_are_named(text, tmp_path):
    write_voc(tmp_path, text)
    with pytest.raises(ValueError, match=r"test.xml|train.xml") as error:
        open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    assert "\n" not in str(error.value)


def test_annotations_beside_images_are_read(coco, tmp_path):
    """As in Roboflow's exports, which have no outlines."""
    root = tmp_path / "export"
    for split, folder in (("train", "train"), ("val", "valid")):
        root.mkdir(exist_ok=True)
        (coco / f"{split}2017").rename(root / folder)
        content = json.loads((coco / "annotations" / f"instances_{split}2017.json").read_text())
        for entry in content["annotations"]:
            entry["segmentation"] = []
        (root / folder / "_annotations.coco.json").write_text(json.dumps(content))
    scenes = open_scenes(f"coco:{root}", "val", tmp_path)
    assert len(scenes) == COUNTS["val"] and not decode_scenes(scenes)[0] and not scenes.listing.has_outlines
    assert not any("2017" in note for note in scenes.notes)
