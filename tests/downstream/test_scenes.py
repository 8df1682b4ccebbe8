"""Folders of labelled scenes: what is recognised, what is refused and how that is said, and the drawn sets."""

import hashlib
import re

import numpy as np
import pytest
from deep_images import BY_HEADER, GREY, SCALED, WITHOUT_WHITE
from PIL import Image
from recordings import facts
from refusals import refusal

from downstream.data.listing import IGNORED, Instances, Listing
from downstream.data.reading import ReadImage
from downstream.data.scenes import SceneSet, decode_scenes, open_scenes, scene_image, scene_mask, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.layouts.cityscapes import SEEDS, few_image_split
from imagesets.decoding import decode_rgb

LISTING = Listing(images=("image",), masks=("mask",), classes=("wall",), classes_of=(0,) * 256)


@pytest.fixture
def ade(tmp_path):
    return tiny_folder("ade20k", tmp_path)


@pytest.fixture
def city(tmp_path):
    return tiny_folder("cityscapes", tmp_path)


@pytest.mark.parametrize("layout", ["ade20k", "cityscapes"])
def test_drawn_sets_are_whole(layout, tmp_path):
    for split, count in COUNTS.items():
        scenes = open_scenes(f"tiny-{layout}:", split, tmp_path)
        assert len(scenes) == count and not decode_scenes(scenes)[0]
        masks = [scenes.listing.to_classes(np.asarray(Image.open(scenes.mask_path(i)))) for i in range(count)]
        assert set(np.unique(masks)) == {*range(5), IGNORED}
    first = open_scenes(f"tiny-{layout}:", "val", tmp_path / "again")
    assert first.fingerprint == open_scenes(f"tiny-{layout}:", "val", tmp_path).fingerprint


def test_the_two_drawings_hold_the_same_scenes(ade, city, tmp_path):
    found = []
    for layout in ("ade20k", "cityscapes"):
        scenes = open_scenes(f"tiny-{layout}:", "val", tmp_path)
        number = {int(re.search(r"_(\d{6,8})", scenes.mask_path(i).name)[1]): i for i in range(len(scenes))}
        found.append(
            [scenes.listing.to_classes(np.asarray(Image.open(scenes.mask_path(number[i])))) for i in range(len(scenes))]
        )
    assert np.array_equal(*found)


def test_label_ids_alone_are_mapped(city, tmp_path):
    before = open_scenes(f"cityscapes:{city}", "train", tmp_path)
    masks = [before.listing.to_classes(np.asarray(Image.open(before.mask_path(i)))) for i in range(4)]
    for path in city.rglob("*_labelTrainIds.png"):
        path.unlink()
    after = open_scenes(f"cityscapes:{city}", "train", tmp_path)
    assert after.mask_path(0).name.endswith("_labelIds.png") and "mapped" in after.notes[0]
    for index, mask in enumerate(masks):
        assert np.array_equal(after.listing.to_classes(np.asarray(Image.open(after.mask_path(index)))), mask)


def test_moving_a_folder_keeps_the_fingerprint(ade, tmp_path):
    here = open_scenes(f"ade20k:{ade}", "val", tmp_path).fingerprint
    outer = tmp_path / "outer"
    (outer).mkdir()
    ade.rename(outer / "ADEChallengeData2016")
    there = open_scenes(f"ade20k:{outer}", "val", tmp_path)
    assert there.fingerprint == here != open_scenes(f"ade20k:{outer}", "train", tmp_path).fingerprint


def test_bad_folders(ade, city, tmp_path):
    next((ade / "annotations" / "training").iterdir()).unlink()
    assert "1 of 64 annotations of train are not there, such as annotations/training/ADE_" in refusal(
        open_scenes, f"ade20k:{ade}", "train", tmp_path
    )
    for path in (ade / "images" / "validation").iterdir():
        path.unlink()
    assert "the val split is empty" in refusal(open_scenes, f"ade20k:{ade}", "val", tmp_path)
    for path in (city / "gtFine" / "val").rglob("*bochum*.png"):
        path.unlink()
    assert "12 of 24 annotations of val are not there, such as gtFine/val/bochum/" in refusal(
        open_scenes, f"cityscapes:{city}", "val", tmp_path
    )
    assert "unpacked ADEChallengeData2016" in refusal(open_scenes, f"ade20k:{city}", "val", tmp_path)
    assert "no folder leftImg8bit/" in refusal(open_scenes, f"cityscapes:{ade}", "val", tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ade:/data", "did you mean 'ade20k:/data'? there are: ade20k:"),
        ("tiny-ade20k:/data", "takes no path"),
        ("cityscapes:", "give the folder"),
        ("digits:", "no set of labelled scenes"),
    ],
)
def test_bad_urls(url, said, tmp_path):
    assert said in refusal(open_scenes, url, "val", tmp_path)


def test_masks_that_do_not_fit(city, tmp_path):
    scenes = open_scenes(f"cityscapes:{city}", "val", tmp_path)
    path, mask = scenes.mask_path(0), np.zeros((4, 6), np.uint8)
    Image.fromarray(mask).save(path)
    assert (scene_mask(scenes, 0, (4, 6)) == mask).all()
    with pytest.raises(ValueError, match=f"{path}: the mask is 4 x 6 pixels and its image 6 x 4"):
        scene_mask(scenes, 0, (6, 4))
    mask[0, 0], mask[0, 1] = IGNORED, 19
    Image.fromarray(mask).save(path)
    with pytest.raises(ValueError, match=f"{path}: the mask holds the value 19, allowed are 0 to 18, 255; is this"):
        scene_mask(scenes, 0, (4, 6))


def test_problems_are_listed(ade, tmp_path):
    scenes = open_scenes(f"ade20k:{ade}", "val", tmp_path)
    Image.fromarray(np.full((64, 96), 200, np.uint8)).save(scenes.mask_path(0))
    Image.fromarray(np.ones((32, 96), np.uint8)).save(scenes.mask_path(1))
    scenes.image_path(2).write_bytes(b"not a picture")
    Image.fromarray(np.full((64, 96), 200, np.uint16)).save(scenes.mask_path(3))
    scenes.image_path(4).write_bytes(scenes.image_path(4).read_bytes()[:-100])
    scenes.image_path(5).write_bytes(WITHOUT_WHITE["float.tif"])
    said = (
        "the mask holds the value 200, allowed are 0 to 150, 255; is this",
        "the mask is 32 x 96 pixels and its image 64 x 96; take",
        "cannot be read (not an image that Pillow knows); replace",
        "cannot be read (a mask of Pillow's mode I;16; save",
        "cannot be read (image file is truncated",
        "cannot be read (floating-point pixels, Pillow's mode F: nothing",
    )
    files = [*map(scenes.mask_path, (0, 1)), scenes.image_path(2), scenes.mask_path(3), *map(scenes.image_path, (4, 5))]
    for problem, file, what in zip(decode_scenes(scenes)[0].values(), files, said, strict=True):
        assert problem.startswith(f"{file}: {what}")


@pytest.mark.parametrize("name", [*SCALED, "RGB", "LA", "P"])
def test_opencv_reads_what_pillow_reads(name, tmp_path):
    from mmcv.transforms import LoadImageFromFile

    path = tmp_path / "image"
    if name in SCALED:
        path.write_bytes(SCALED[name])
    else:
        Image.fromarray(GREY).convert(name).save(path, "PNG")
    if name == "12.tif":  # which OpenCV refuses
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            ReadImage(LoadImageFromFile(), LISTING)({"img_path": str(path)})
        return
    found = ReadImage(LoadImageFromFile(), LISTING)({"img_path": str(path)})["img"]
    assert np.array_equal(found[..., ::-1], np.asarray(decode_rgb(path.read_bytes(), str(path))))


@pytest.mark.parametrize("name", [*WITHOUT_WHITE, *BY_HEADER])
def test_what_opencv_reads_otherwise_is_refused(name, tmp_path):
    path = tmp_path / "image"
    path.write_bytes((WITHOUT_WHITE | BY_HEADER)[name])
    reading = ReadImage(lambda results: pytest.fail("it was read"), LISTING)
    with pytest.raises(ValueError, match=f"{path}: cannot be read .* as 8-bit PNG|save it as PNG.*; replace the file"):
        reading({"img_path": str(path)})


def test_the_splits_are_those_of_french_et_al():
    recorded = facts("cityscapes_splits/french2020_indices.json")
    assert set(recorded["seeds"]) == {str(seed) for seed in SEEDS}
    count = recorded["n_train"]
    for seed, split in recorded["seeds"].items():
        for size in (name for name in split if name.isdigit()):
            assert few_image_split(count, int(size), int(seed)).tolist() == split[size]
            assert few_image_split(count, 100, int(seed)).tolist() == split[size][:100]
        everything = ",".join(map(str, few_image_split(count, count, int(seed))))
        assert hashlib.sha256(everything.encode()).hexdigest() == split["sha256_of_full_permutation_csv"]


def test_limits_and_subsets(tmp_path):
    scenes = open_scenes("tiny-cityscapes:", "train", tmp_path)
    some = scenes.limited(8)
    assert len(some) == 8 and some.url == "tiny-cityscapes:#limited-8" and some.image_path(7) == scenes.image_path(56)
    assert some.limited(20) is some
    with pytest.raises(ValueError, match="a limit of 0 images"):
        scenes.limited(0)


def test_a_set_of_the_wrong_kind_is_refused(tmp_path):
    outlined = Instances(images=("1.jpg",), entries=({},), objects=((),), categories={1: "cat"}, annotations="val.json")
    masked = Listing(images=("1.jpg",), masks=("1.png",), classes=("wall",), classes_of=(0,) * 256)
    scenes = [SceneSet(url="mine:", split="val", root=tmp_path, listing=listing) for listing in (outlined, masked)]
    assert scenes[0].instances is outlined and scenes[1].mask_listing is masked
    with pytest.raises(ValueError, match="mine:: it holds outlines of objects, no masks; give"):
        scenes[0].mask_path(0)
    with pytest.raises(ValueError, match="mine:: it holds masks, no outlines of objects; give"):
        assert scenes[1].instances


def test_an_image_that_cannot_be_read_is_named_once(tmp_path):
    scenes = open_scenes("tiny-ade20k:", "val", tmp_path)
    scenes.image_path(0).write_bytes(b"")
    told = refusal(scene_image, scenes, 0)
    assert "empty file" in told and told.count(str(scenes.image_path(0))) == 1
