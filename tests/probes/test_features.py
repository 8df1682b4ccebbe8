"""Extraction of features: values, reuse of stored ones, changed and unreadable images, and errors."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from toy_exports import workspace

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import OpenedSets
from imagesets.decoding import UnreadableImage
from imagesets.selection import evenly_spaced
from imagesets.sets import contents_differ, open_set
from probes.features.extract import extract, transform_of
from probes.features.kinds import FeatureKind
from probes.features.store import Store
from probes.shifted import alter_images
from probes.tasks.finetune import SMOKE

CLS, AVG, EARLY = FeatureKind("cls"), FeatureKind("avg"), FeatureKind("cls", layer=0, norm=False)


@pytest.fixture
def digits():
    return open_set("digits:", "val").limited(50)


def overwrite(path: Path, seed: int = 1, time: int = 0) -> None:
    """Write other pixels to an image of the same size, with a modification time that is later by `time` ns."""
    before = path.stat()
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + time))


@pytest.fixture
def bitmaps(photos, tmp_path):
    """The photos as BMP files, which all have the same size."""
    for path in (tmp_path / "photos").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".bmp"))
        path.unlink()
    return tmp_path / "photos"


@pytest.fixture
def photos(tmp_path):
    """The URL of 20 image files, 10 per class."""
    random = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "photos" / "val" / f"class{number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(path)
    shutil.copytree(tmp_path / "photos" / "val", tmp_path / "photos" / "train")
    return f"folder:{tmp_path / 'photos'}"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_features_equal_those_of_the_backbone(export, digits, tmp_path, precision):
    features = extract(export, digits, [CLS, AVG, EARLY], workspace(tmp_path, "digits:", precision=precision))
    transform = transform_of(export, workspace(tmp_path, "digits:"))
    backbone = Backbone(export, "cpu", precision)
    images = backbone.prepare(torch.stack([transform(digits, i) for i in range(len(digits))]))
    layers = backbone.views(images, [(-1, True), (0, False)])
    last, early = layers[-1, True], layers[0, False]
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for kind, expected in ((CLS, last.cls), (AVG, last.avg), (EARLY, early.cls)):
        assert features[kind].dtype == np.float32 and isinstance(features[kind], np.memmap)
        np.testing.assert_allclose(features[kind], expected.numpy(), atol=tolerance)
    np.testing.assert_array_equal(features.labels, digits.labels)
    assert features.indices.tolist() == list(range(50)) and not features.unreadable


def test_stored_features_are_not_computed_again(export, digits, tmp_path):
    space = workspace(tmp_path, "digits:")
    assert extract(export, digits, [CLS, EARLY], space).forwards == 50
    assert extract(export, digits, [EARLY], space).forwards == 0
    assert extract(export, digits, [CLS, EARLY, AVG], space).forwards == 50  # for the new kind alone
    together = extract(export, digits, [CLS, AVG], replace(space, cache=tmp_path / "other"))
    again = extract(export, digits, [CLS, AVG], space)
    assert again.forwards == 0
    for kind in (CLS, AVG):
        np.testing.assert_array_equal(together[kind], again[kind])


def with_flipped_bit(export):
    tensors = {name: tensor.clone() for name, tensor in export.tensors.items()}
    name = min(tensors)
    tensors[name].view(torch.int32).view(-1)[0] ^= 1  # the least significant bit of one weight
    return ViTExport.make(export.spec, export.preparation, tensors)


def test_any_change_of_input_or_precision_is_computed_anew(export, digits, tmp_path):
    space = workspace(tmp_path, "digits:")
    extract(export, digits, [CLS], space)
    plain = transform_of(export, space)
    for other in (replace(plain, crop=0.8), replace(plain, interpolation="bilinear"), replace(plain, decode="fast")):
        assert extract(export, digits, [CLS], space, other).forwards == 50
    assert extract(with_flipped_bit(export), digits, [CLS], space).forwards == 50
    assert extract(export, open_set("digits:", "val").limited(40), [CLS], space).forwards == 40
    pixels = digits.images.pixels.copy()
    pixels[3, 2, 1, 0] ^= 1
    changed = replace(digits, images=replace(digits.images, pixels=pixels))
    assert extract(export, changed, [CLS], space).forwards == 50
    for setting in ({"precision": "bfloat16"}, {"batch_size": 8}):
        assert extract(export, digits, [CLS], replace(space, **setting)).forwards == 50
    assert extract(export, digits, [CLS], replace(space, workers=3, seed=7)).forwards == 0


def test_the_number_of_threads_changes_no_bit(export, digits, tmp_path):
    arrays = [
        extract(export, digits, [CLS], workspace(tmp_path / str(threads), "digits:", workers=threads))[CLS]
        for threads in (1, 2, 5)
    ]
    for array in arrays[1:]:
        np.testing.assert_array_equal(array, arrays[0])


def folder_of(url):
    return Path(url.removeprefix("folder:"))


def break_image(url, name, content):
    (path,) = (folder_of(url) / "val").rglob(name)
    path.write_bytes(content)
    return path


def test_an_unreadable_image_is_an_error_and_earlier_batches_are_kept(export, photos, tmp_path):
    path = break_image(photos, "19.png", b"\x89PNG no more")
    images, space = open_set(photos, "val"), workspace(tmp_path, photos, workers=1)
    with pytest.raises(UnreadableImage, match=str(path)):
        extract(export, images, [CLS], space)
    resumed = extract(export, images, [CLS], replace(space, skip_bad=True))
    assert resumed.forwards == 6  # of three batches (7, 7, 6) the last one
    assert resumed.unreadable.keys() == {19} and resumed.indices.tolist() == list(range(19))
    assert len(resumed.labels) == len(resumed[CLS]) == 19
    assert list(resumed.facts["skipped"]) == [str(path)]
    assert extract(export, images, [CLS], replace(space, skip_bad=True)).forwards == 0
    with pytest.raises(UnreadableImage, match=str(path)):
        extract(export, images, [CLS], space)


def test_skipping_an_image_does_not_change_the_other_rows(export, photos, tmp_path):
    complete = extract(export, open_set(photos, "val"), [AVG], workspace(tmp_path, photos))[AVG].copy()
    break_image(photos, "04.png", b"")
    skipped = extract(export, open_set(photos, "val"), [AVG], workspace(tmp_path, photos, skip_bad=True))
    np.testing.assert_array_equal(skipped[AVG], np.delete(complete, list(skipped.unreadable), axis=0))


def test_a_set_without_a_readable_image_is_refused(export, photos, tmp_path):
    for path in (folder_of(photos) / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 20 images of val can be read"):
        extract(export, open_set(photos, "val"), [CLS], workspace(tmp_path, photos, skip_bad=True))


def test_an_error_names_layer_and_image_of_features_that_are_not_finite(export, digits, tmp_path):
    tensors = dict(export.tensors) | {"norm.weight": torch.full_like(export.tensors["norm.weight"], 3e38)}
    broken = replace(export, tensors=tensors)
    with pytest.raises(ValueError, match=r"digits:val/\d+: features of layer -1 \(cls-layer-1-norm\) are not finite"):
        extract(broken, digits, [CLS], workspace(tmp_path, "digits:"))


def test_a_missing_class_token_is_an_error_that_names_the_option(export, digits, tmp_path):
    spec = replace(export.spec, class_token=False, class_position=False, pool="avg")
    pooled = ViTExport.from_vit(ViT(spec), Preparation())
    with pytest.raises(ValueError, match=r"no class token at layer -1: .*pool=avg"):
        extract(pooled, digits, [CLS], workspace(tmp_path, "digits:"))
    assert extract(pooled, digits, [AVG], workspace(tmp_path, "digits:"))[AVG].shape == (50, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "float16"}, "over 100 times slower: choose float32 or bfloat16"),
        ({"precision": "int8"}, "choose float32 or bfloat16"),
        ({"batch_size": 0}, "batch size 0"),
    ],
)
def test_invalid_settings_are_refused(export, digits, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        extract(export, digits, [CLS], workspace(tmp_path, "digits:", **settings))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path, 100), flip_a_bit], ids=["truncated", "a flipped bit"]
)
def test_a_damaged_store_is_computed_again(export, digits, tmp_path, damage):
    space = workspace(tmp_path, "digits:")
    before = extract(export, digits, [CLS], space)[CLS].copy()
    (path,) = tmp_path.rglob("*.f32")
    damage(path)
    store = Store(folder=path.parent, count=50, batch=8, width=export.spec.width)
    assert not store.is_finished(CLS.name) and path.with_suffix(".json").exists(), "a look removes nothing"
    again = extract(export, digits, [CLS], space)
    assert again.forwards == 50
    np.testing.assert_array_equal(again[CLS], before)


def test_kinds_that_other_tasks_want_and_the_model_lacks_are_skipped(tmp_path, digits):
    spec = dict(architecture="vit_tiny_patch16_224", image_size=16, patch_size=8, width=16, depth=1, heads=2)
    torch.manual_seed(0)
    without_class_token = ViTSpec(**spec, mlp_hidden=32, class_token=False, class_position=False, pool="avg")
    export = ViTExport.from_vit(ViT(without_class_token), Preparation())
    space = workspace(tmp_path, "digits:", limit=20)
    transform = transform_of(export, space)
    space = replace(space, wanted={transform.name: (FeatureKind("cls"), FeatureKind("avg", norm=False))})
    features = extract(export, digits, [FeatureKind("avg")], space, transform)
    assert set(features.arrays) == {FeatureKind("avg"), FeatureKind("avg", norm=False)}


def open_val(root: Path):
    return open_set(f"folder:{root}", "val")


def class_tokens(export, images) -> np.ndarray:
    """Class tokens (N, D), computed without a store."""
    transform = transform_of(export, workspace(Path(), "digits:"))
    backbone = Backbone(export, "cpu", "float32")
    pixels = backbone.prepare(torch.stack([transform(images, index) for index in range(len(images))]))
    return backbone.views(pixels, [(-1, True)])[-1, True].cls.numpy()


@pytest.mark.parametrize("time", [0, 1])
def test_overwritten_images_of_the_same_size_are_read_again(export, bitmaps, tmp_path, time):
    space = workspace(tmp_path, "", batch_size=2)
    before = open_val(bitmaps)
    extract(export, before, [CLS], space)
    for seed, path in enumerate(sorted((bitmaps / "val").rglob("*.bmp"))):
        overwrite(path, seed, time)  # with time=0 the modification time does not show the change
    images = open_val(bitmaps)
    assert images.fingerprint == before.fingerprint and contents_differ(before.contents, images.contents)
    features = extract(export, images, [CLS], space)
    assert features.forwards == 20
    np.testing.assert_allclose(features[CLS], class_tokens(export, images), atol=1e-5)


def test_only_batches_with_overwritten_images_are_read_again(export, bitmaps, tmp_path):
    space = workspace(tmp_path, "", batch_size=2)
    before = open_val(bitmaps)
    sampled = {before.path(index) for index in evenly_spaced(20, 16)}
    extract(export, before, [CLS, AVG], space)
    path = next(path for path in map(before.path, range(20)) if path not in sampled)
    overwrite(Path(path), time=1)
    images = open_val(bitmaps)
    assert contents_differ(before.contents, images.contents)
    features = extract(export, images, [CLS, AVG], space)
    assert features.forwards == 2
    np.testing.assert_allclose(features[CLS], class_tokens(export, images), atol=1e-5)
    assert extract(export, open_val(bitmaps), [CLS, AVG], space).forwards == 0


def test_nothing_computed_from_overwritten_images_is_used_again(export, bitmaps, tmp_path):
    """Features of altered images are those of their files; a training, even a finished one, starts again."""
    space, task = workspace(tmp_path, f"folder:{bitmaps}", batch_size=2), replace(SMOKE, batch=10)
    before = task.run(export, space)

    def altered_features(space) -> np.ndarray:
        images = alter_images(open_val(bitmaps), "as-they-are", lambda source, index: source.image(index))
        return extract(export, images, [CLS], space)[CLS].copy()

    altered_features(space)
    shutil.copytree(bitmaps, tmp_path / "copy")
    sampled = {open_val(bitmaps).path(index) for index in evenly_spaced(20, 16)}
    others = [path for path in sorted((bitmaps / "val").rglob("*.bmp")) if str(path) not in sampled]
    for path in others:
        overwrite(path, time=1)
    anew = replace(space, opened=OpenedSets())
    elsewhere = replace(anew, cache=tmp_path / "other")
    assert np.array_equal(altered_features(anew), altered_features(elsewhere))
    after, fresh = (task.run(export, replace(other, opened=OpenedSets())) for other in (space, elsewhere))
    assert after.numbers == fresh.numbers != before.numbers
    of_copy = task.run(export, replace(space, data=f"folder:{tmp_path / 'copy'}", opened=OpenedSets()))
    assert of_copy.numbers == before.numbers and len(list((tmp_path / "cache/finetune").glob("*.contents"))) == 1
    for path in others:
        overwrite(tmp_path / "copy" / path.relative_to(bitmaps), time=1)
    of_changed_copy = task.run(export, replace(space, data=f"folder:{tmp_path / 'copy'}", opened=OpenedSets()))
    assert of_changed_copy.numbers == fresh.numbers


@pytest.mark.parametrize("copy_file", [shutil.copy2, shutil.copyfile], ids=["old times", "new times"])
def test_a_copy_of_the_image_set_reuses_its_features(export, bitmaps, tmp_path, copy_file):
    space = workspace(tmp_path, "", batch_size=2)
    first = extract(export, open_val(bitmaps), [CLS], space)
    shutil.copytree(bitmaps, tmp_path / "copy", copy_function=copy_file)
    copy = open_val(tmp_path / "copy")
    assert not contents_differ(open_val(bitmaps).contents, copy.contents)
    assert first.forwards == 20 and extract(export, copy, [CLS], space).forwards == 0
