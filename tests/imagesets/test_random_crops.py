"""The random resized crop equals torchvision's and timm's in windows, pixels and draws; MAE's rule; fast decoding."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from PIL import ExifTags, Image, ImageFilter, ImageOps
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor

import imagesets.transforms
from imagesets.decoding import UnreadableImage, decode_rgb
from imagesets.random_crops import AREA, RATIO, GeneratorDraws, PythonDraws, RandomResizedCrop, TorchDraws
from imagesets.sets import open_set
from imagesets.transforms import Photo, decode_fast

MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
# Landscape, portrait, square, so narrow that no window of an allowed ratio fits, and smaller than the crop.
SIZES = [(60, 45), (45, 60), (50, 50), (3, 90), (90, 3), (7, 9), (24, 24)]
SCALES = [AREA, (0.2, 1.0), (0.67, 1.0), (0.05, 0.4), (1.0, 1.0)]


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(RandomState(width * height).randint(0, 256, (height, width, 3), np.uint8))


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def assert_same_crops(ours, theirs, draw) -> None:
    """Equal pixels, and equal states of the generator afterwards: `draw` gives its next number."""
    for number, image in enumerate(picture(*size) for size in SIZES * 2):
        seed(number)
        pixels, next_draw = np.asarray(ours(image)), draw()
        seed(number)
        assert np.array_equal(pixels, np.asarray(theirs(image))) and next_draw == draw(), image.size


def test_pixels_and_draws_equal_torchvisions():
    for scale in SCALES:
        for mode in MODES:
            ours = RandomResizedCrop(size=24, scale=scale, interpolation=mode, draws=TorchDraws())
            theirs = transforms.RandomResizedCrop(24, scale=scale, interpolation=MODES[mode], antialias=True)
            assert_same_crops(ours, theirs, lambda: torch.rand(1).item())


def test_pixels_and_draws_equal_timms():
    for scale in SCALES:
        for mode in MODES:
            ours = RandomResizedCrop(size=24, scale=scale, interpolation=mode, draws=PythonDraws())
            theirs = RandomResizedCropAndInterpolation(24, scale=scale, interpolation=mode)
            assert_same_crops(ours, theirs, random.random)


def crop_of(rule: str, number: int) -> RandomResizedCrop:
    return RandomResizedCrop(
        size=8, interpolation="bilinear", rule=rule, draws=GeneratorDraws(RandomState([0, number]))
    )


def windows(rule: str, width: int, height: int, count: int = 2000) -> np.ndarray:
    return np.array([crop_of(rule, number).window(width, height) for number in range(count)])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (40, 300), (8, 8)])
def test_windows_of_maes_rule_lie_inside_the_image(width, height):
    left, top, right, bottom = windows("mae", width, height, 500).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    assert (right > left).all() and (bottom > top).all()


def test_draws_of_a_generator_are_distributed_as_torchvisions():
    ours = windows("torchvision", 500, 375)
    torch.manual_seed(0)
    image = Image.new("RGB", (500, 375))
    theirs = np.array([transforms.RandomResizedCrop.get_params(image, AREA, RATIO) for _ in range(len(ours))])
    width, height = (ours[:, 2:] - ours[:, :2]).T
    left, top = ours[:, :2].T
    for our_values, their_values in zip((top, left, height, width), theirs.T, strict=True):
        error = np.sqrt((our_values.var() + their_values.var()) / len(our_values))
        assert abs(our_values.mean() - their_values.mean()) < 4 * error
        assert our_values.std() == pytest.approx(their_values.std(), rel=0.1)


def test_the_fallback_where_no_window_of_an_allowed_ratio_fits():
    """torchvision then takes the largest central one, MAE one that is cut off at the image's border."""
    assert crop_of("torchvision", 0).window(3, 400) == (0, 198, 3, 202)
    assert crop_of("torchvision", 0).window(400, 3) == (198, 0, 202, 3)
    left, top, right, bottom = windows("mae", 3, 400, 200).T
    assert (right - left == 3).all() and (bottom - top > 4).all()


# Recorded when the linear probes had a separate implementation of these crops.
RECORDED = {
    "torchvision": [(3, 5, 39, 34), (1, 0, 36, 33), (5, 133, 40, 164), (1, 269, 38, 297)],
    "mae": [(0, 184, 40, 240), (0, 27, 40, 75), (5, 133, 40, 164), (0, 26, 40, 82)],
}


@pytest.mark.parametrize("rule", RECORDED)
def test_windows_of_linear_probes_equal_the_recorded_ones(rule):
    assert [crop_of(rule, number).window(40, 300) for number in range(4)] == RECORDED[rule]


def test_a_reversed_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale=\(0\.5, 0\.2\)"):
        RandomResizedCrop(size=8, scale=(0.5, 0.2), interpolation="bilinear", draws=TorchDraws())


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(("size", "shrink"), [((200, 160), 1), (100, 2), (24, 8)])
def test_fast_crops_show_the_same_windows_as_exact_ones(tmp_path, encode, mode, size, shrink, monkeypatch):
    """Within torchvision's rounding at full size; within the error of the DCT for a JPEG decoded at a smaller size."""
    (tmp_path / "train/ant").mkdir(parents=True)
    file = tmp_path / "train/ant/a.jpg"
    file.write_bytes(encode(mode=mode, width=400, height=300, quality=95))
    images, shrinks = open_set(f"folder:{tmp_path}", "train"), []

    def noting_decode(data, path, *shrink):
        shrinks.extend(shrink)
        return decode_rgb(data, path, *shrink)

    monkeypatch.setattr(imagesets.transforms, "decode_rgb", noting_decode)
    for number in range(8):
        exact, fast = (
            RandomResizedCrop(
                size=size, scale=(0.9, 1.0), interpolation="bicubic", draws=GeneratorDraws(RandomState(number))
            )
            for _ in range(2)
        )
        gap = (pil_to_tensor(exact(images.image(0))).int() - fast.crop_fast(Photo(images, 0)).int()).abs().float()
        assert gap.max() <= (2 if shrink == 1 else 8) and gap.mean() < (0.3 if shrink == 1 else 1)
    assert set(shrinks) == ({shrink} if shrink > 1 else set())
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(UnreadableImage, match="truncated"):
        fast.crop_fast(Photo(images, 0))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_fast_crops_of_images_that_viewers_turn_show_the_pixels_as_stored(tmp_path, encode, kind):
    (tmp_path / "train/ant").mkdir(parents=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    options = {"lossless": True} if kind == "WEBP" else {}
    (tmp_path / f"train/ant/a.{kind.lower()}").write_bytes(encode(kind, width=90, height=40, exif=exif, **options))
    images = open_set(f"folder:{tmp_path}", "train")
    crop = RandomResizedCrop(size=24, scale=(0.3, 1.0), interpolation="bicubic", draws=GeneratorDraws(RandomState(0)))
    again = RandomResizedCrop(size=24, scale=(0.3, 1.0), interpolation="bicubic", draws=GeneratorDraws(RandomState(0)))
    for _ in range(4):
        gap = pil_to_tensor(crop(images.image(0))).int() - again.crop_fast(Photo(images, 0)).int()
        assert gap.abs().max() <= 2
    assert Photo(images, 0).pil_image("fast").size == images.image(0).size == (90, 40)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_transform_accepts_a_photo_that_is_decoded_fast(tmp_path, encode, mode, monkeypatch):
    """It is decoded once; a random crop that comes first uses its own fast path."""
    (tmp_path / "train/ant").mkdir(parents=True)
    (tmp_path / "train/ant/a.jpg").write_bytes(encode(mode=mode, width=60, height=45, quality=95))
    photo, decoded, pillow_resize = Photo(open_set(f"folder:{tmp_path}", "train"), 0), [], Image.Image.resize
    monkeypatch.setattr("imagesets.transforms.decode_fast", lambda *file: (decoded.append(file), decode_fast(*file))[1])
    image, exact = photo.pil_image("fast"), photo.pil_image("exact")
    assert (image.mode, image.size, decoded) == ("RGB", (60, 45), [])
    resized = []
    monkeypatch.setattr(
        Image.Image, "resize", lambda *arguments: (resized.append(arguments), pillow_resize(*arguments))[1]
    )
    crop = RandomResizedCrop(size=40, interpolation="bicubic", draws=GeneratorDraws(RandomState(0)))
    assert torch.equal(pil_to_tensor(crop(image)), replace(crop, draws=GeneratorDraws(RandomState(0))).crop_fast(photo))
    assert not resized
    for transform in (
        *(transforms.Resize(20), transforms.RandomCrop(30, padding=2), transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)),
        *(transforms.ToTensor(), ImageOps.flip, Image.Image.copy, lambda image: image.filter(ImageFilter.BLUR)),
        lambda image: image.crop((3, 4, 50, 40)),
    ):
        ours, theirs = ((seed(0), np.asarray(transform(version)))[1] for version in (image, exact))
        assert np.array_equal(ours, theirs)
    assert len(decoded) == 1
