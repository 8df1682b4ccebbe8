"""Folders of COCO's layout: what is recognised, what is refused and how that is said, the drawn set, the dataset."""

import json
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
        assert len(scenes) == count and not decode_scenes(scenes)[0] and len(scenes.listing.trainable) < count
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
    trained = trainable_scenes(scenes, opened["val"])
    assert [each["img_id"] for each in kept.data_list] == [entry["id"] for entry in trained.listing.entries]
    changed(coco, "train", lambda content: content["categories"].reverse())
    again = open_scenes(scenes.url, "train", coco)
    assert again.classes == scenes.classes and again.listing == scenes.listing


FILTER = {"filter_empty_gt": True, "min_size": 32}


@pytest.mark.parametrize(("augment", "sides"), [("scales", (48, 96)), ("crops", (48, 96)), ("jitter", (12, 96))])
def test_augmented_images_stay_in_their_bounds(opened, augment, sides):
    images = detection_training_images(
        trainable_scenes(opened["train"], opened["val"]), replace(SIZES, augment=augment)
    )
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
        "train2017/000000000003.jpg: the image is 50 x 40 pixels (width x height) and "
        "annotations/instances_train2017.json says 96 x 64"
    )
    assert [found.startswith(problem) for found in decode_scenes(opened["train"])[0].values()] == [True]
    assert len(decode_scenes(opened["val"])[0]) == 1
    images = detection_training_images(opened["train"], SIZES)
    with pytest.raises(ValueError, match="says 96 x 64"):
        images[2]
    with pytest.raises(ValueError, match=r"val2017/000000000002.jpg: cannot be read \(.*\); replace the file"):
        detection_validation_images(opened["val"], SIZES)[1]


NAN = float("nan")


def outlined(content: dict, polygon: list[float]) -> None:
    """Give the first thing an outline."""
    first(content)["segmentation"] = [polygon]


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
        (lambda content: first(content).pop("bbox"), "field `bbox` - at `$.annotations[0]`"),
        (lambda content: content["images"][0].pop("height"), "field `height` - at `$.images[0]`"),
        (lambda content: content["images"][0].pop("file_name"), "field `file_name` - at `$.images[0]`"),
        (lambda content: first(content).update(id=[1]), "got `array` - at `$.annotations[0].id`"),
        (lambda content: first(content).update(image_id={}), "got `object` - at `$.annotations[0].image_id`"),
        (lambda content: content["images"][0].update(id=[1]), "got `array` - at `$.images[0].id`"),
        (lambda content: content["categories"][0].update(id="2"), "got `str` - at `$.categories[0].id`"),
        (lambda content: content["images"][0].update(width=-3), "at `$.images[0].width`"),
        (lambda content: first(content).update(bbox=[0, 0, 1e300, 1]), "annotation 1 holds the coordinate 1e+300"),
        (lambda content: outlined(content, [1e9, -1e9, 1e300, 2, NAN, 3]), "annotation 1 holds the coordinate 1e+09"),
        (lambda content: outlined(content, [1, 2, NAN, 3, 4, 5]), "annotation 1 holds the coordinate nan"),
        (lambda content: outlined(content, [1, 2, 193, 3, 4, 5]), "annotation 1 holds the coordinate 193"),
        (lambda content: outlined(content, []), "at `$.annotations[0].segmentation"),
        (lambda content: first(content).update(segmentation=[]), "annotation 1 has a box but no outline"),
        (lambda content: crowd(content)["segmentation"].update(counts=[1, 10**9]), "add up to 1000000001"),
        (lambda content: crowd(content)["segmentation"].update(counts=[7000, -1000, 144]), "the least is -1000"),
        (lambda content: crowd(content)["segmentation"].update(counts="o" * 10**6), "the least is -1"),
        (lambda content: crowd(content)["segmentation"].update(counts="zz"), "run lengths of annotation"),
        (
            lambda content: crowd(content)["segmentation"].update(size=[96, 64]),
            "is [96, 64] pixels and its image [64, 96]",
        ),
        (lambda content: content.pop("annotations"), "field `annotations`"),
        (lambda content: content.pop("images"), "has no list 'images'"),
        (lambda content: content["categories"].clear(), "at `$.categories`"),
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


def test_run_lengths_in_text_are_pycocotools(coco, tmp_path):
    """What COCO's own tools write for a crowd is taken, and means the same."""
    path = coco / "annotations" / "instances_val2017.json"
    for thing in json.loads(path.read_text())["annotations"]:
        if thing["iscrowd"]:
            text = masks.frPyObjects(thing["segmentation"], 64, 96)["counts"].decode()
            assert list(decode_run_lengths(text)) == thing["segmentation"]["counts"]
    changed(coco, "val", lambda content: crowd(content)["segmentation"].update(counts=text_of(crowd(content))))
    assert not decode_scenes(open_scenes(f"coco:{coco}", "val", tmp_path))[0]


def text_of(thing: dict) -> str:
    return masks.frPyObjects(thing["segmentation"], 64, 96)["counts"].decode()


def refused(coco: Path, tmp_path: Path) -> str:
    told = refusal(open_scenes, f"coco:{coco}", "val", tmp_path)
    assert told.startswith(f"coco:{coco}: ")
    return told


def test_bad_folders(coco, tmp_path):
    path = coco / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text()[:100])
    assert "instances_val2017.json is no JSON" in refused(coco, tmp_path)
    path.unlink()
    assert "there is no file annotations/instances_val2017.json" in refused(coco, tmp_path)
    path.write_text("[" * 100_000)
    assert "instances_val2017.json is no JSON" in refused(coco, tmp_path)
    path.parent.rename(coco / "elsewhere")
    assert "no folder annotations/ there" in refused(coco, tmp_path)


def test_splits_that_nothing_can_be_learnt_or_measured_on(coco, tmp_path):
    def pair():
        return [open_scenes(f"coco:{coco}", split, tmp_path) for split in ("train", "val")]

    changed(coco, "val", lambda content: content["categories"][0].update(name="another"))
    with pytest.raises(ValueError, match="name other categories"):
        trainable_scenes(*pair())
    changed(
        coco, "val", lambda content: (content["categories"][0].update(name="digit 0"), content["annotations"].clear())
    )
    with pytest.raises(ValueError, match="no image of val has an object"):
        trainable_scenes(*pair())


def test_boxes_of_pascal_voc_are_those_of_the_same_scenes(opened, tmp_path):
    """As whole numbers from 1 on, both ends within; names in the order of the alphabet, as the digits are."""
    for split, count in COUNTS.items():
        ours, theirs = open_scenes("tiny-vocboxes:", split, tmp_path), opened[split]
        assert len(ours) == count and not decode_scenes(ours)[0] and ours.classes == theirs.classes
        assert not ours.listing.has_outlines and theirs.listing.has_outlines
        for own, wanted in zip(ours.listing.objects, theirs.listing.objects, strict=True):
            assert [thing["bbox"] for thing in own] == [thing["bbox"] for thing in wanted]
            assert all(thing["area"] == thing["bbox"][2] * thing["bbox"][3] for thing in own)
    assert not uses_masks(opened["train"], ours)


XML = "<annotation>{}<object><name>a</name>{}<bndbox>{}</bndbox></object></annotation>"
BOX = "<xmin>3</xmin><ymin>4</ymin><xmax>7</xmax><ymax>9</ymax>"


def written(root: Path, text: str) -> None:
    """A set of one image a split, whose files say `text`."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        Image.new("RGB", (60, 50)).save(root / "JPEGImages" / f"{split}.png")
        (root / "Annotations" / f"{split}.xml").write_text(text)
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{split}\n")


@pytest.mark.parametrize("size", ["", "<size><width>0</width><height>0</height></size>"])
def test_annotations_of_pascal_voc(size, tmp_path):
    """A list test.txt for val.txt, sizes that the image says, difficult things, boxes over the border or empty."""
    written(tmp_path, XML.format(size, "<difficult>1</difficult>", BOX))
    scenes = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    ((thing,),) = scenes.listing.objects
    assert thing["bbox"] == [2, 3, 5, 6] and thing["iscrowd"] == 1 and not decode_scenes(scenes)[0]
    before = scenes.fingerprint
    written(tmp_path, XML.format(size, "", "<xmin>0</xmin><ymin>4.5</ymin><xmax>70</xmax><ymax>90</ymax>"))
    scenes = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    ((thing,),) = scenes.listing.objects
    assert thing["bbox"] == [0, 3.5, 60, 46.5] and thing["iscrowd"] == 0 and scenes.fingerprint != before
    written(tmp_path, XML.format(size, "", "<xmin>80</xmin><ymin>4</ymin><xmax>90</xmax><ymax>9</ymax>"))
    assert any(
        "of val without an area are left out: 1, the first in" in note
        for note in open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path).notes
    )


def test_two_images_with_the_name_in_a_list_are_refused(tmp_path):
    """The order of the folder would decide which one is read."""
    written(tmp_path, XML.format("", "", BOX))
    Image.new("RGB", (30, 20)).save(tmp_path / "JPEGImages" / "test.jpg")
    with pytest.raises(ValueError, match=r"JPEGImages holds test\.jpg and test\.png"):
        open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    assert len(open_scenes(f"vocboxes:{tmp_path}", "train", tmp_path)) == 1


@pytest.mark.parametrize("place", ["JPEGImages/val.png", "Annotations/val.xml"])
def test_a_pipe_among_images_and_annotations_is_named(place, tmp_path):
    """Opened like a file, it would be waited for without end."""
    written(tmp_path, XML.format("", "", BOX))
    for path in tmp_path.glob(place.replace("val", "*")):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{place.replace('val.', '(val|test|train).')}.*a pipe, device or socket"):
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
    written(tmp_path, text)
    with pytest.raises(ValueError, match=r"test.xml|train.xml") as caught:
        open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path)
    assert "\n" not in str(caught.value)


def test_annotations_beside_their_images(coco, tmp_path):
    """As Roboflow exports COCO's format, without outlines."""
    root = tmp_path / "export"
    for split, folder in (("train", "train"), ("val", "valid")):
        root.mkdir(exist_ok=True)
        (coco / f"{split}2017").rename(root / folder)
        content = json.loads((coco / "annotations" / f"instances_{split}2017.json").read_text())
        for thing in content["annotations"]:
            thing["segmentation"] = []
        (root / folder / "_annotations.coco.json").write_text(json.dumps(content))
    scenes = open_scenes(f"coco:{root}", "val", tmp_path)
    assert len(scenes) == COUNTS["val"] and not decode_scenes(scenes)[0] and not scenes.listing.has_outlines
    assert not any("2017" in note for note in scenes.notes)
