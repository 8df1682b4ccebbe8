"""Scenes in the layouts of COCO and Pascal VOC: datasets, augmentation, the generated set, refused files."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from pycocotools import mask as masks
from refusals import refusal
from toy_scenes import workspace

from bench.commands.data import check_scenes
from bench.run.prepare import open_data
from downstream.data.listing import Instances, unread_files
from downstream.data.scenes import SceneSet, decode_scenes, open_scenes, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.detection import trainable_scenes, uses_masks
from downstream.detection_settings import DetectionSettings
from downstream.layouts.coco import decode_run_lengths
from downstream.models.operators import quiet_libraries
from imagesets.sets import cache_folder, contents_differ

with quiet_libraries():
    from mmdet.datasets import CocoDataset

    from downstream.data.detection_data import (
        CocoScenes,
        detection_training_images,
        detection_validation_images,
    )
    from downstream.metrics.detection_metric import evaluate

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


@contextmanager
def changed_annotations(coco: Path, change) -> Iterator[None]:
    """A block in which the annotation file of val is changed."""
    path = coco / "annotations" / "instances_val2017.json"
    before = path.read_bytes()
    change_annotations(coco, "val", change)
    yield
    path.write_bytes(before)


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


BAD_FILES = [
    (lambda file: first_annotation(file).update(category_id=5), "annotation 1 is of category 5"),
    (lambda file: first_annotation(file).update(image_id=999), "annotation 1 is of image 999"),
    (lambda file: file["images"][0].update(id=2), "two of its images have one id"),
    (lambda file: file["images"][0].update(file_name="000000000002.jpg"), "twice, such as 000000000002.jpg"),
    (lambda file: first_annotation(file).pop("bbox"), "field `bbox` - at `$.annotations[0]`"),
    (lambda file: file["categories"][0].update(id="2"), "got `str` - at `$.categories[0].id`"),
    (lambda file: file["images"][0].update(width=-3), "at `$.images[0].width`"),
    (lambda file: set_polygon(file, [1e9, -1e9, 1e300, 2, 3, 3]), "annotation 1 holds the coordinate 1e+09"),
    (lambda file: set_polygon(file, [1, 2, math.nan, 3, 4, 5]), "instances_val2017.json: JSON is malformed"),
    (lambda file: first_annotation(file).update(segmentation=[]), "annotation 1 has a box but no outline"),
    (lambda file: first_crowd(file)["segmentation"].update(counts=[1, 10**9]), "add up to 1000000001"),
    (lambda file: first_crowd(file)["segmentation"].update(counts=[7000, -1000, 144]), "the least is -1000"),
    (lambda file: first_crowd(file)["segmentation"].update(counts="zz"), "run lengths of annotation"),
    (
        lambda file: first_crowd(file)["segmentation"].update(size=[96, 64]),
        "[96, 64] pixels and its image [64, 96]",
    ),
    (lambda file: [file[key].clear() for key in ("images", "annotations")], "the val split is empty"),
    (
        lambda file: file["images"][0].update(file_name="x.jpg"),
        "1 of 24 images of val",
    ),
]


def test_bad_annotation_files_are_refused(coco, tmp_path):
    for change, message in BAD_FILES:
        with changed_annotations(coco, change):
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
    change_annotations(coco, "val", lambda content: content["categories"][0].update(name="digit 0"))
    trainable_scenes(*open_splits())
    for change in (
        lambda content: [entry.update(iscrowd=1) for entry in content["annotations"]],
        lambda content: content["annotations"].clear(),
    ):
        change_annotations(coco, "val", change)
        with pytest.raises(ValueError, match=r"no image of val has an object.*\(crowds and difficult objects do not"):
            trainable_scenes(*open_splits())


def test_one_class_with_two_categories_is_refused_if_both_have_objects(coco, tmp_path):
    def use():
        return trainable_scenes(*(open_scenes(f"coco:{coco}", split, tmp_path) for split in ("train", "val")))

    for split in ("train", "val"):  # as Roboflow lists a class and a group of that name, which has no objects
        change_annotations(coco, split, lambda content: content["categories"].append({"id": 0, "name": "digit 0"}))
    use()
    for split in ("train", "val"):
        change_annotations(coco, split, lambda content: content["categories"][1].update(name="digit 0"))
    assert "categories 2 and 3 are both digit 0" in refusal(use)


@pytest.mark.parametrize("layout", ["vocboxes", "yolo"])
def test_generated_layouts_hold_the_same_boxes(layout, scenes_of_splits, tmp_path):
    """Pascal VOC counts pixels from 1 and includes both ends. YOLO's boxes are shares of the sides."""
    for split, count in COUNTS.items():
        voc, coco = open_scenes(f"tiny-{layout}:", split, tmp_path), scenes_of_splits[split]
        assert len(voc) == count and not decode_scenes(voc)[0] and voc.classes == coco.classes
        assert not voc.listing.has_outlines and coco.listing.has_outlines
        for of_voc, of_coco in zip(voc.listing.objects, coco.listing.objects, strict=True):
            of_both = [np.array([entry["bbox"] for entry in entries]) for entries in (of_voc, of_coco)]
            assert np.allclose(*of_both, rtol=0, atol=1e-9 if layout == "yolo" else 0)
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
    (warning,) = open_scenes(f"vocboxes:{tmp_path}", "val", tmp_path).listing.warnings
    assert "1 of 1 objects in val with no area" in warning and "test.xml" in warning and "xmin, ymin, xmax" in warning


def with_each(kind: str, change: Callable[[int, dict], object]) -> Callable[[dict], None]:
    """A change of each entry of a kind, from its index and itself."""

    def change_file(file: dict) -> None:
        for index, entry in enumerate(file[kind]):
            change(index, entry)

    return change_file


def change_box(index: int, change: Callable[[list[float]], list[float]]) -> Callable[[dict], None]:
    def change_file(file: dict) -> None:
        annotation = file["annotations"][index]
        annotation["bbox"] = change(annotation["bbox"])

    return change_file


# A change of the fourth object, how many objects it takes away, and a part of the note.
UNUSUAL = [
    (change_box(3, lambda box: [4, 4, 0, 0]), 1, "no area"),
    (change_box(3, lambda box: [box[0] + box[2], box[1] + box[3], -box[2], -box[3]]), 1, "no area"),
    (change_box(3, lambda box: [200, 200, 9, 9]), 1, "no area"),
    (change_box(3, lambda box: [*box[:2], 300, 300]), 0, "parts beyond the image"),
    (change_box(3, lambda box: [-1e300, 0, 1e308, 1e308]), 0, "parts beyond the image"),
    (change_box(3, lambda box: [box[0], (box[1] + 30) % 50, *box[2:]]), 0, "a box elsewhere than their outline"),
    (lambda file: file["annotations"][3].update(segmentation=[[1, 2, 3, 4]]), 1, "no polygon of three points"),
    (lambda file: file["annotations"][3].update(segmentation=[[1, 2]]), 1, "no polygon of three points"),
    (lambda file: file["annotations"][3].update(ignore=1), 0, "the mark 'ignore'"),
    (lambda file: file["annotations"].append(dict(file["annotations"][3])), 0, "the class and box of another"),
]


def test_unusual_objects_count_the_same_in_training_and_score(coco, tmp_path):
    """The dataset of mmdet would leave out some that the score counts."""
    change_annotations(coco, "val", lambda file: file["annotations"][3].update(iscrowd=0))
    before = open_scenes(f"coco:{coco}", "val", tmp_path)
    for change, left_out, note in UNUSUAL:
        with changed_annotations(coco, change):
            check_unusual(open_scenes(f"coco:{coco}", "val", tmp_path), before, left_out, note)


def check_unusual(scenes: SceneSet, before: SceneSet, left_out: int, note: str) -> None:
    notes = [line for line in scenes.notes if line not in before.notes]
    assert any(note in line and "1 of 7" in line and "annotation 4" in line for line in notes), notes
    expected = [len(objects) for objects in before.listing.objects]
    image = next(row for row, own in enumerate(before.listing.objects) if own[-1:] and sum(expected[: row + 1]) > 3)
    expected[image] += ("another" in note) - left_out
    assert [len(objects) for objects in scenes.listing.objects] == expected
    trained = CocoScenes(scenes, pipeline=[], serialize_data=False).data_list
    for sample, objects in zip(trained, scenes.listing.objects, strict=True):
        assert [instance["ignore_flag"] for instance in sample["instances"]] == [entry["iscrowd"] for entry in objects]
        for x1, y1, x2, y2 in (instance["bbox"] for instance in sample["instances"]):
            assert -1 <= x1 < x2 <= 97 and -1 <= y1 < y2 <= 65


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("layout", ["yolo", "vocboxes"])
def test_a_turned_image_without_a_stated_size_is_refused(layout, form, tmp_path, capsys, on_terminal):
    if layout == "yolo":
        write_yolo(tmp_path, "images/train", "labels/train")
        write_yolo(tmp_path, "images/val", "labels/val")
        (tmp_path / "classes.txt").write_text("a\nb\n")
        path = tmp_path / "images/val/a.png"
    else:
        write_voc(tmp_path, XML.format("", "", BOX))
        path = tmp_path / "JPEGImages/test.png"
    url, exif = f"{layout}:{tmp_path}", Image.Exif()
    exif[ExifTags.Base.Orientation] = 8
    Image.effect_noise((500, 400), 99).convert("RGB").save(path, form, exif=exif)
    message = refusal(open_data, "objects", url, workspace(tmp_path, url))
    assert f"{path.relative_to(tmp_path)} has the EXIF orientation 8" in message and "exiftran" in message
    assert check_scenes(url, read_all=True) == 1
    assert "EXIF orientation 8" in capsys.readouterr().out
    if layout == "yolo":  # without a box, nothing is misplaced
        (tmp_path / "labels/val/a.txt").rename(tmp_path / "labels/a.txt")
        assert len(open_scenes(url, "val", tmp_path)) == 2
        (tmp_path / "labels/a.txt").rename(tmp_path / "labels/val/a.txt")
    exif[ExifTags.Base.Orientation] = 1
    Image.new("RGB", (60, 50)).save(path, form, exif=exif)
    assert open_scenes(url, "val", tmp_path).listing.entries[0]["width"] == 60
    if layout == "vocboxes":  # boxes that fit the stored size, or not the image
        exif[ExifTags.Base.Orientation] = 8
        Image.new("RGB", (60, 50)).save(path, form, exif=exif)
        size = "<size><width>60</width><height>50</height></size>"
        (tmp_path / "Annotations/test.xml").write_text(XML.format(size, "", BOX))
        assert not decode_scenes(open_scenes(url, "val", tmp_path)).problems


OTHER_FORMS = {  # change of a box x, y, width, height -> part of the warning
    "x1, y1, x2, y2": (lambda x, y, w, h: [x, y, x + w, y + h], "parts beyond the image, which are cut off"),
    "shares": (lambda x, y, w, h: [x / 96, y / 64, w / 96, h / 64], "a side below one pixel"),
    "negative sides": (lambda x, y, w, h: [x, y, -w, -h], "no area within the image"),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_boxes_in_another_form_are_refused_by_the_check_and_warned_of_in_a_run(
    form, coco, tmp_path, capsys, on_terminal
):
    change, remark = OTHER_FORMS[form]

    def change_file(content: dict) -> None:
        for entry in content["annotations"]:
            entry.update(bbox=change(*entry["bbox"]), segmentation=[], iscrowd=0)

    change_annotations(coco, "val", change_file)
    (warning,) = open_data("objects", f"coco:{coco}", workspace(tmp_path, f"coco:{coco}")).warnings
    assert remark in warning and "instances_val2017.json" in warning and "x, y, width, height in pixels" in warning
    assert check_scenes(f"coco:{coco}", read_all=False) == 1
    assert f"FIX: {warning}" in capsys.readouterr().out


def test_thin_boxes_are_scored_as_by_pycocotools_and_not_trained_on_as_by_mmdet(coco, tmp_path):
    change_annotations(coco, "val", change_box(3, lambda box: [*box[:2], 0.5, box[3]]))
    scenes = open_scenes(f"coco:{coco}", "val", tmp_path)
    assert any(
        "1 of 7" in note and "a side below one pixel: scored, but not trained on" in note for note in scenes.notes
    )
    trained = CocoScenes(scenes, pipeline=[], serialize_data=False).data_list
    boxes = [instance["bbox"] for sample in trained for instance in sample["instances"]]
    assert len(boxes) == sum(map(len, scenes.listing.objects)) - 1
    assert all(min(x2 - x1, y2 - y1) >= 1 for x1, y1, x2, y2 in boxes)


def perfect_detections(listing: Instances) -> list[dict]:
    """The objects of each image as detections."""
    labels, detections = {category: label for label, category in enumerate(listing.categories)}, []
    for own in listing.objects:
        boxes = np.array([entry["bbox"] for entry in own], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        detected = {"bboxes": boxes, "scores": np.linspace(0.9, 0.5, len(own), dtype=np.float32)}
        detections.append(detected | {"labels": np.array([labels[entry["category_id"]] for entry in own], int)})
    return detections


# Of ids: from 0, negative, equal, missing and texts; negative ids of images and of categories.
OTHER_IDS = [
    with_each("annotations", lambda index, entry: entry.update(id=index)),
    with_each("annotations", lambda index, entry: entry.update(id=index - 9)),
    with_each("annotations", lambda index, entry: entry.update(id=7)),
    with_each("annotations", lambda index, entry: entry.pop("id")),
    with_each("annotations", lambda index, entry: entry.update(id=2**52 + index if index % 2 else "x")),
    lambda file: (
        with_each("images", lambda index, entry: entry.update(id=entry["id"] - 9))(file),
        with_each("annotations", lambda index, entry: entry.update(image_id=entry["image_id"] - 9))(file),
    ),
    lambda file: (
        with_each("categories", lambda index, entry: entry.update(id=entry["id"] - 3))(file),
        with_each("annotations", lambda index, entry: entry.update(category_id=entry["category_id"] - 3))(file),
    ),
]


def test_perfect_detections_have_an_ap_of_100_with_any_ids(coco, tmp_path):
    for number, change in enumerate(OTHER_IDS):
        with changed_annotations(coco, change):
            listing = open_scenes(f"coco:{coco}", "val", tmp_path).instances
        assert evaluate(listing, perfect_detections(listing), 20)[0]["box_AP"] == pytest.approx(100), number


def test_a_list_that_is_not_read_is_noted_and_an_image_listed_twice_refused(tmp_path):
    voc = tmp_path / "voc"
    write_voc(voc, XML.format("", "", BOX))
    (voc / "ImageSets/Main/val.txt").write_text("train\n")
    notes = open_scenes(f"vocboxes:{voc}", "val", tmp_path).notes
    assert any(line.startswith("test.txt, with 1 images, is not read") for line in notes)
    (voc / "ImageSets/Main/val.txt").write_text("train\ntrain\n")
    with pytest.raises(ValueError, match=r"val\.txt.*twice, such as train"):
        open_scenes(f"vocboxes:{voc}", "val", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "no XML",
        XML.format("", "", BOX.replace("7", "nan")),
        XML.format("", "", BOX.replace("<ymax>9</ymax>", "")),
        XML.format("", "", BOX).replace("<name>a</name>", ""),
        XML.format("<size><width>1e400</width></size>", "", BOX),
        '<!DOCTYPE a [<!ENTITY b "bbbb">]>' + XML.format("", "", BOX),
        "<a>" * 300_000 + "</a>" * 300_000,  # deleting such a tree would crash the process
        "<annotation>" + "<part>" * 300_000,
        '<?xml version="1.0" encoding="none"?>' + XML.format("", "", BOX),
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


@pytest.mark.parametrize("layout", ["coco", "vocboxes", "spair", "yolo"])
def test_annotations_corrected_in_place_are_other_contents(layout, tmp_path, monkeypatch):
    """Of the same size, with the same times, and in none of the files whose bytes are sampled."""
    monkeypatch.setattr("imagesets.sets.SAMPLED_IMAGES", 1)
    root = tiny_folder(layout, tmp_path)
    before = open_scenes(f"{layout}:{root}", "val", tmp_path)
    folder = cache_folder(tmp_path, {}, [before])
    for path in {root / name for name in before.listing.files if name.endswith((".json", ".xml", ".txt"))}:
        status, text = path.stat(), path.read_bytes()
        path.write_bytes(text.translate(bytes.maketrans(b"12", b"21")))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = replace(before, url=before.url)  # whatever was computed from the files is computed again
    assert contents_differ(before.contents, after.contents) and cache_folder(tmp_path, {}, [after]) != folder
    earlier = after.contents.rpartition("-")[0]  # as recorded before annotations counted
    assert not contents_differ(earlier, after.contents)


def write_yolo(root: Path, images: str, labels: str, text: str = "1 0.5 0.5 0.25 0.5\n") -> None:
    """Write one image of 80 x 40 pixels with labels, and one without."""
    for folder in (images, labels):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("a.png", "b.JPG"):
        Image.new("RGB", (80, 40)).save(root / images / name)
    (root / labels / "a.txt").write_text(text)


@pytest.mark.parametrize(
    ("folders", "file", "names"),
    [
        ("images/{0} labels/{0}", "data.yaml", "path: /nowhere\ntrain: ../../etc\nnc: 2\nnames: [no, 2e3]\n"),
        ("images/{0}2017 labels/{0}2017", "data.yml", "names:\n  1: 2e3\n  0: no\n"),
        ("{0}/images {0}/labels", "classes.txt", "\ufeffno\n2e3\n"),
        ("images/{0} labels/{0}", "labels/classes.txt", "no\n2e3\n"),
    ],
)
def test_boxes_of_yolo(folders, file, names, tmp_path):
    for split in ("train", "valid" if "{0}/images" in folders else "val"):
        write_yolo(tmp_path, *folders.format(split).split())
    (tmp_path / file).write_text(names)
    scenes = open_scenes(f"yolo:{tmp_path}", "val", tmp_path)
    assert scenes.classes == ("no", "2e3") and not decode_scenes(scenes)[0]
    (entry,), background = scenes.listing.objects
    assert entry["bbox"] == [30, 10, 20, 20] and scenes.listing.categories[entry["category_id"]] == "2e3"
    assert background == () and len(trainable_scenes(open_scenes(scenes.url, "train", tmp_path), scenes)) == 1
    labels, before = tmp_path / scenes.listing.annotations, scenes.fingerprint
    (labels / "a.txt").write_text("0 1 0.5 0.5 0.5\n\n1 0.5 0.5 0 0.5\n")
    (labels / "other.txt").write_text("0 1 0.5 0.5 0.5\n")
    changed = open_scenes(scenes.url, "val", tmp_path)
    assert changed.listing.objects[0][0]["bbox"] == [60, 10, 20, 20] and changed.fingerprint != before
    for text in ("parts beyond", "no area"):
        assert any(text in line and "CLASS X Y WIDTH HEIGHT" in line for line in changed.warnings), text
    (unread,) = unread_files(
        tmp_path, [*changed.listing.files, *open_scenes(scenes.url, "train", tmp_path).listing.files]
    )
    assert f"1 .txt in {scenes.listing.annotations}" in unread


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 0.5 0.5 0.25 0.5", "class 2"),
        ("nan 0.5 0.5 0.25 0.5", "class nan"),
        ("0 50 50 25 50", "shares"),
        ("0 0.5 0.5 0.25", "4 numbers"),
        ("0 0.1 0.1 0.5 0.1 0.5 0.5", "7 numbers of a polygon"),
        ("cat 0.5 0.5 0.25 0.5", "no number"),
    ],
)
def test_bad_rows_of_yolo_are_named(line, message, tmp_path):
    write_yolo(tmp_path, "images/val", "labels/val", f"0 0.5 0.5 0.5 0.5\n{line}\n")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    text = refusal(open_scenes, f"yolo:{tmp_path}", "val", tmp_path)
    assert "labels/val/a.txt, line 2: " in text and message in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: {0: cat, 2: dog}", "data.yaml has no list of names"),
        ("nc: 3\nnames: [cat, dog]", "data.yaml has 2 names and another nc"),
        ("names: [cat, cat]", "classes of data.yaml occur twice, such as cat"),
        ("names: [cat", "data.yaml is no YAML"),
        ("names: " + "[" * 3000, "data.yaml is no YAML"),
        ("names: !!python/object/apply:os.getcwd []", "data.yaml has no list of names"),
    ],
)
def test_bad_class_names_of_yolo_are_refused(text, message, tmp_path):
    write_yolo(tmp_path, "images/val", "labels/val")
    (tmp_path / "data.yaml").write_text(text)
    assert message in refusal(open_scenes, f"yolo:{tmp_path}", "val", tmp_path)


def test_bad_files_of_yolo_are_refused(tmp_path):
    def refused() -> str:
        return refusal(open_scenes, f"yolo:{tmp_path}", "val", tmp_path)

    assert "no images/train with labels/train" in refused()
    write_yolo(tmp_path, "images/train", "labels/train")
    assert "no images/val with labels/val" in refused()
    write_yolo(tmp_path, "images/val", "labels/val")
    assert "no data.yaml and no classes.txt" in refused()
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "images/val/a.jpg").write_bytes((tmp_path / "images/val/a.png").read_bytes())
    assert "images/val" in refused() and "such as a;" in refused()
    (tmp_path / "images/val/a.png").write_bytes(b"none")
    (tmp_path / "images/val/a.jpg").unlink()
    problems = decode_scenes(open_scenes(f"yolo:{tmp_path}", "val", tmp_path)).problems
    assert any("images/val/a.png: cannot be read" in problem for problem in problems.values())
    write_yolo(tmp_path, "images/val", "labels/val")
    (tmp_path / "labels/val/a.txt").unlink()
    os.mkfifo(tmp_path / "labels/val/a.txt")
    assert "labels/val/a.txt: a pipe" in refused()
    (tmp_path / "labels/val/a.txt").unlink()
    (tmp_path / "labels/val/a.txt").symlink_to("nowhere")
    assert "labels/val/a.txt" in refused()
