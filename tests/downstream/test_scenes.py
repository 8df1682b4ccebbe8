"""Folders of labelled scenes: recognised layouts, refused folders, unreadable files, and the generated sets."""

import hashlib
import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from deep_images import GREY, SCALED, WITHOUT_WHITE
from PIL import ExifTags, Image
from recordings import facts
from refusals import refusal

from downstream.data.listing import IGNORED, Instances, Listing
from downstream.data.reading import ReadImage
from downstream.data.scenes import (
    SceneSet,
    decode_scenes,
    open_scenes,
    scene_depth,
    scene_image,
    scene_mask,
    scene_pair,
    tiny_folder,
)
from downstream.data.tiny_scenes import COUNTS
from downstream.layouts.cityscapes import SEEDS, few_image_split
from engine.extensions import extensions
from imagesets.decoding import decode_rgb, orientation_of, stored_size
from imagesets.sets import image_size

LISTING = Listing(images=("image",), masks=("mask",), classes=("wall",), classes_of=(0,) * 256)


@pytest.fixture
def ade(tmp_path):
    return tiny_folder("ade20k", tmp_path)


@pytest.fixture
def city(tmp_path):
    return tiny_folder("cityscapes", tmp_path)


@pytest.mark.parametrize("layout", ["ade20k", "cityscapes"])
def test_generated_sets_are_complete(layout, tmp_path):
    for split, count in COUNTS.items():
        scenes = open_scenes(f"tiny-{layout}:", split, tmp_path)
        assert len(scenes) == count and not decode_scenes(scenes)[0]
        masks = [scene_mask(scenes, index) for index in range(count)]
        assert set(np.unique(masks)) == {*range(5), IGNORED}
    first = open_scenes(f"tiny-{layout}:", "val", tmp_path / "again")
    assert first.fingerprint == open_scenes(f"tiny-{layout}:", "val", tmp_path).fingerprint


def test_both_generated_layouts_hold_the_same_scenes(ade, city, tmp_path):
    masks_of_layouts = []
    for layout in ("ade20k", "cityscapes"):
        scenes = open_scenes(f"tiny-{layout}:", "val", tmp_path)
        numbers = [int(re.search(r"_(\d{6,8})", scenes.mask_path(index).name)[1]) for index in range(len(scenes))]
        masks_of_layouts.append([scene_mask(scenes, index) for index in np.argsort(numbers)])
    assert np.array_equal(*masks_of_layouts)


def test_label_ids_are_mapped_where_train_ids_are_missing(city, tmp_path):
    before = open_scenes(f"cityscapes:{city}", "train", tmp_path)
    masks = [scene_mask(before, index) for index in range(4)]
    for path in city.rglob("*_labelTrainIds.png"):
        path.unlink()
    after = open_scenes(f"cityscapes:{city}", "train", tmp_path)
    assert after.mask_path(0).name.endswith("_labelIds.png") and "mapped" in after.notes[0]
    for index, mask in enumerate(masks):
        assert np.array_equal(scene_mask(after, index), mask)


def test_moving_a_folder_keeps_the_fingerprint(ade, tmp_path):
    before = open_scenes(f"ade20k:{ade}", "val", tmp_path).fingerprint
    outer = tmp_path / "outer"
    outer.mkdir()
    ade.rename(outer / "ADEChallengeData2016")
    moved = open_scenes(f"ade20k:{outer}", "val", tmp_path)
    assert moved.fingerprint == before != open_scenes(f"ade20k:{outer}", "train", tmp_path).fingerprint


def test_bad_folders(ade, city, tmp_path):
    ade20k, cityscapes = (partial(refusal, open_scenes, url) for url in (f"ade20k:{ade}", f"cityscapes:{city}"))
    next((ade / "annotations" / "training").iterdir()).unlink()
    assert re.search("1 of 64 annotations of train .*annotations/training/ADE_", ade20k("train", tmp_path))
    for path in (ade / "images" / "validation").iterdir():
        path.unlink()
    assert "the val split is empty" in ade20k("val", tmp_path)
    for path in (city / "gtFine" / "val").rglob("*bochum*.png"):
        path.unlink()
    assert re.search("12 of 24 annotations of val .*gtFine/val/bochum/", cityscapes("val", tmp_path))
    assert "ADEChallengeData2016" in refusal(open_scenes, f"ade20k:{city}", "val", tmp_path)
    assert "leftImg8bit/" in refusal(open_scenes, f"cityscapes:{ade}", "val", tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ade:/data", "'ade20k:/data'"),
        ("tiny-ade20k:/data", "takes no path"),
        ("cityscapes:", "give the folder"),
        ("digits:", "no set of labelled scenes"),
    ],
)
def test_bad_urls(url, message, tmp_path):
    assert message in refusal(open_scenes, url, "val", tmp_path)


def test_masks_of_another_size_or_of_unknown_values_are_named(city, tmp_path):
    scenes = open_scenes(f"cityscapes:{city}", "val", tmp_path)
    path, mask = scenes.mask_path(0), np.zeros((4, 6), np.uint8)
    Image.fromarray(mask).save(path)
    assert (scene_mask(scenes, 0, (4, 6)) == mask).all()
    with pytest.raises(ValueError, match=f"{path}: .*4 x 6 .*6 x 4"):
        scene_mask(scenes, 0, (6, 4))
    mask[0, 0], mask[0, 1] = IGNORED, 19
    Image.fromarray(mask).save(path)
    with pytest.raises(ValueError, match=f"{path}: .*value 19, .*0 to 18, 255"):
        scene_mask(scenes, 0, (4, 6))


def test_every_bad_file_is_listed(ade, tmp_path):
    scenes = open_scenes(f"ade20k:{ade}", "val", tmp_path)
    Image.fromarray(np.full((64, 96), 200, np.uint8)).save(scenes.mask_path(0))
    Image.fromarray(np.ones((32, 96), np.uint8)).save(scenes.mask_path(1))
    scenes.image_path(2).write_bytes(b"not a picture")
    Image.fromarray(np.full((64, 96), 200, np.uint16)).save(scenes.mask_path(3))
    scenes.image_path(4).write_bytes(scenes.image_path(4).read_bytes()[:-100])
    scenes.image_path(5).write_bytes(WITHOUT_WHITE["float.tif"])
    problems = (
        (scenes.mask_path(0), "the value 200, allowed are 0 to 150, 255"),
        (scenes.mask_path(1), "32 x 96 pixels and its image 64 x 96"),
        (scenes.image_path(2), "cannot be read"),
        (scenes.mask_path(3), "mode I;16"),
        (scenes.image_path(4), "truncated"),
        (scenes.image_path(5), "mode F"),
    )
    for line, (file, problem) in zip(decode_scenes(scenes)[0].values(), problems, strict=True):
        assert line.startswith(f"{file}: ") and problem in line


@pytest.mark.parametrize("name", [*SCALED, "RGB", "LA", "P"])
def test_opencv_and_pillow_read_the_same_pixels(name, tmp_path):
    from mmcv.transforms import LoadImageFromFile

    path = tmp_path / "image"
    if name in SCALED:
        path.write_bytes(SCALED[name])
    else:
        Image.fromarray(GREY).convert(name).save(path, "PNG")
    pixels = ReadImage(LISTING)({"img_path": str(path)})["img"]
    assert np.array_equal(pixels[..., ::-1], np.asarray(decode_rgb(path.read_bytes(), str(path))))
    if name != "12.tif":  # OpenCV refuses it
        assert np.array_equal(pixels, LoadImageFromFile()({"img_path": str(path)})["img"])


@pytest.mark.parametrize("name", WITHOUT_WHITE)
def test_images_without_a_white_are_refused(name, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(WITHOUT_WHITE[name])
    with pytest.raises(ValueError, match=f"{path}: cannot be read .*PNG"):
        ReadImage(LISTING)({"img_path": str(path)})


@pytest.mark.parametrize("form", ["jpg", "png", "webp", "tif"])
def test_every_reader_gives_the_pixels_as_they_are_stored(form, tmp_path):
    for orientation in range(1, 9):
        pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
        plain, tagged = tmp_path / f"plain.{form}", tmp_path / f"tagged.{form}"
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(pixels).save(plain)
        Image.fromarray(pixels).save(tagged, exif=exif)
        expected = np.asarray(decode_rgb(plain.read_bytes(), str(plain)))
        image = decode_rgb(tagged.read_bytes(), str(tagged))
        assert np.array_equal(np.asarray(image), expected) and orientation_of(image) == orientation
        assert np.array_equal(ReadImage(LISTING)({"img_path": str(tagged)})["img"][..., ::-1], expected)
        assert stored_size(Image.open(tagged)) == (56, 40)


def test_depth_in_tiff_files_is_read_as_it_is_stored(tmp_path):
    folder = tiny_folder("nyu", tmp_path)
    listed = open_scenes(f"nyu:{folder}", "val", tmp_path)
    scenes = replace(listed, root=tmp_path, listing=replace(listed.listing, depths=("depth.tif",)))
    for kind, orientation in product((np.uint16, np.float32), (1, 3, 6)):
        depth = np.asarray(Image.open(folder / listed.listing.depths[0])).astype(kind)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(depth).save(tmp_path / "depth.tif", exif=exif)
        assert np.array_equal(scene_depth(scenes, 0, depth.shape), listed.listing.metres(depth, depth.shape))


def test_a_pair_that_is_no_annotation_is_one_line(tmp_path):
    folder = tiny_folder("spair", tmp_path)
    scenes = open_scenes(f"spair:{folder}", "val", tmp_path)
    path = folder / scenes.listing.pairs[0]
    for text in ("[" * 300_000, '{"other": ' + "[" * 300_000, "\xff", "{}"):
        path.write_bytes(text.encode("latin1"))
        message = refusal(scene_pair, scenes, 0, {})
        assert message.startswith(f"{path}: ") and message.count(str(path)) == 1


def test_files_of_cityscapes_may_end_in_capitals(city, tmp_path):
    before = open_scenes(f"cityscapes:{city}", "val", tmp_path)
    for path in (before.image_path(0), before.mask_path(1)):
        path.rename(path.with_suffix(".PNG"))
    after = open_scenes(f"cityscapes:{city}", "val", tmp_path)
    assert after.image_path(0).suffix == after.mask_path(1).suffix == ".PNG" and not decode_scenes(after).problems
    assert after.listing.images[1:] == before.listing.images[1:]


@pytest.mark.parametrize("layout", sorted(extensions("layouts")))
def test_a_broken_link_is_one_problem_in_every_layout(layout, tmp_path):
    folder = tiny_folder(layout, tmp_path)
    path = open_scenes(f"{layout}:{folder}", "val", tmp_path).image_path(1)
    path.unlink()
    path.symlink_to("/nowhere")
    scenes = open_scenes(f"{layout}:{folder}", "val", tmp_path)
    assert [*scenes.unusable] == [1] and scenes.fingerprint and scenes.contents
    assert str(path) in scenes.unusable[1]


def test_sizes_of_images_without_a_size_in_their_annotation_are_those_stored(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for kind in ("jpg", "tif"):
        Image.new("RGB", (60, 40)).save(tmp_path / f"a.{kind}", exif=exif)
        assert image_size(tmp_path / f"a.{kind}") == (60, 40)


def test_few_image_splits_equal_those_of_french_et_al():
    recorded = facts("cityscapes_splits/french2020_indices.json")
    assert set(recorded["seeds"]) == {str(seed) for seed in SEEDS}
    count = recorded["n_train"]
    for seed, split in recorded["seeds"].items():
        for size in (name for name in split if name.isdigit()):
            assert few_image_split(count, int(size), int(seed)).tolist() == split[size]
            assert few_image_split(count, 100, int(seed)).tolist() == split[size][:100]
        permutation = ",".join(map(str, few_image_split(count, count, int(seed))))
        assert hashlib.sha256(permutation.encode()).hexdigest() == split["sha256_of_full_permutation_csv"]


def test_a_limit_takes_images_from_the_whole_set(tmp_path):
    scenes = open_scenes("tiny-cityscapes:", "train", tmp_path)
    limited = scenes.limited(8)
    assert len(limited) == 8 and limited.url == "tiny-cityscapes:#limited-8"
    assert limited.image_path(7) == scenes.image_path(56)
    assert limited.limited(20) is limited
    with pytest.raises(ValueError, match="a limit of 0 images"):
        scenes.limited(0)


def test_a_set_of_the_wrong_kind_is_refused(tmp_path):
    outlined = Instances(images=("1.jpg",), entries=({},), objects=((),), categories={1: "cat"}, annotations="val.json")
    masked = Listing(images=("1.jpg",), masks=("1.png",), classes=("wall",), classes_of=(0,) * 256)
    scenes = [SceneSet(url="mine:", split="val", root=tmp_path, listing=listing) for listing in (outlined, masked)]
    assert scenes[0].instances is outlined and scenes[1].mask_listing is masked
    with pytest.raises(ValueError, match=r"mine:: .*no masks"):
        scenes[0].mask_path(0)
    with pytest.raises(ValueError, match=r"mine:: .*no outlines"):
        assert scenes[1].instances


def test_an_image_that_cannot_be_read_is_named_once(tmp_path):
    scenes = open_scenes("tiny-ade20k:", "val", tmp_path)
    scenes.image_path(0).write_bytes(b"")
    message = refusal(scene_image, scenes, 0)
    assert "empty file" in message and message.count(str(scenes.image_path(0))) == 1
