"""The random resized crop: windows, pixels and draws of torchvision and timm, to the bit, and MAE's rule."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from PIL import Image, ImageFilter, ImageOps
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", SCALES)
def test_torchvisions_pixels_and_draws(scale, mode):
    """And the generator stands where torchvision leaves it."""
    ours = RandomResizedCrop(size=24, scale=scale, interpolation=mode, draws=TorchDraws())
    theirs = transforms.RandomResizedCrop(24, scale=scale, interpolation=MODES[mode], antialias=True)
    for number, image in enumerate(picture(*size) for size in SIZES * 8):
        found = []
        for crop in (ours, theirs):
            seed(number)
            found.append((np.asarray(crop(image)), torch.rand(1).item()))
        assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1], image.size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", SCALES)
def test_timms_pixels_and_draws(scale, mode):
    ours = RandomResizedCrop(size=24, scale=scale, interpolation=mode, draws=PythonDraws())
    theirs = RandomResizedCropAndInterpolation(24, scale=scale, interpolation=mode)
    for number, image in enumerate(picture(*size) for size in SIZES * 8):
        found = []
        for crop in (ours, theirs):
            seed(number)
            found.append((np.asarray(crop(image)), random.random()))
        assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1], image.size


def crop_of(rule: str, number: int) -> RandomResizedCrop:
    return RandomResizedCrop(
        size=8, interpolation="bilinear", rule=rule, draws=GeneratorDraws(RandomState([0, number]))
    )


def windows(rule: str, width: int, height: int, count: int = 2000) -> np.ndarray:
    return np.array([crop_of(rule, number).window(width, height) for number in range(count)])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (40, 300), (8, 8)])
def test_windows_of_maes_rule_lie_inside(width, height):
    left, top, right, bottom = windows("mae", width, height, 500).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    assert (right > left).all() and (bottom > top).all()


def test_own_draws_are_distributed_as_torchvisions():
    ours = windows("torchvision", 500, 375)
    torch.manual_seed(0)
    image = Image.new("RGB", (500, 375))
    theirs = np.array([transforms.RandomResizedCrop.get_params(image, AREA, RATIO) for _ in range(len(ours))])
    wide, high = (ours[:, 2:] - ours[:, :2]).T
    left, top = ours[:, :2].T
    for mine, other in zip((top, left, high, wide), theirs.T, strict=True):
        error = np.sqrt((mine.var() + other.var()) / len(mine))
        assert abs(mine.mean() - other.mean()) < 4 * error
        assert mine.std() == pytest.approx(other.std(), rel=0.1)


def test_no_window_of_an_allowed_ratio_fits():
    """torchvision then takes the largest central one, MAE one that is cut off at the image's border."""
    assert crop_of("torchvision", 0).window(3, 400) == (0, 198, 3, 202)
    assert crop_of("torchvision", 0).window(400, 3) == (198, 0, 202, 3)
    left, top, right, bottom = windows("mae", 3, 400, 200).T
    assert (right - left == 3).all() and (bottom - top > 4).all()


# Recorded of the linear probes' crops when they had an implementation of their own.
RECORDED = {
    "torchvision": [(3, 5, 39, 34), (1, 0, 36, 33), (5, 133, 40, 164), (1, 269, 38, 297)],
    "mae": [(0, 184, 40, 240), (0, 27, 40, 75), (5, 133, 40, 164), (0, 26, 40, 82)],
}


@pytest.mark.parametrize("rule", RECORDED)
def test_a_linear_probe_sees_the_windows_that_it_always_saw(rule):
    assert [crop_of(rule, number).window(40, 300) for number in range(4)] == RECORDED[rule]


def test_a_scale_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"scale=\(0\.5, 0\.2\)"):
        RandomResizedCrop(size=8, scale=(0.5, 0.2), interpolation="bilinear", draws=TorchDraws())


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(("size", "shrink"), [((200, 160), 1), (100, 2), (24, 8)])
def test_fast_crops_show_the_exact_windows(tmp_path, encode, mode, size, shrink, monkeypatch):
    """At full size within torchvision's rounding; from a smaller decoded JPEG within what its DCT leaves out."""
    (tmp_path / "train/ant").mkdir(parents=True)
    file = tmp_path / "train/ant/a.jpg"
    file.write_bytes(encode(mode=mode, width=400, height=300, quality=95))
    images, shrinks = open_set(f"folder:{tmp_path}", "train"), []
    monkeypatch.setattr(imagesets.transforms, "decode_rgb", lambda *by: (shrinks.extend(by[2:]), decode_rgb(*by))[1])
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


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_transform_takes_a_photo_that_is_decoded_fast(tmp_path, encode, mode, monkeypatch):
    """Decoded once, and by a random crop's own way where it comes first."""
    (tmp_path / "train/ant").mkdir(parents=True)
    (tmp_path / "train/ant/a.jpg").write_bytes(encode(mode=mode, width=60, height=45, quality=95))
    photo, decoded, by_pillow = Photo(open_set(f"folder:{tmp_path}", "train"), 0), [], Image.Image.resize
    monkeypatch.setattr("imagesets.transforms.decode_fast", lambda *file: (decoded.append(file), decode_fast(*file))[1])
    image, exact = photo.pil_image("fast"), photo.pil_image("exact")
    assert (image.mode, image.size, decoded) == ("RGB", (60, 45), [])
    resized = []
    monkeypatch.setattr(Image.Image, "resize", lambda *given: (resized.append(given), by_pillow(*given))[1])
    crop = RandomResizedCrop(size=40, interpolation="bicubic", draws=GeneratorDraws(RandomState(0)))
    assert torch.equal(pil_to_tensor(crop(image)), replace(crop, draws=GeneratorDraws(RandomState(0))).crop_fast(photo))
    assert not resized
    for transform in (
        *(transforms.Resize(20), transforms.RandomCrop(30, padding=2), transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)),
        *(transforms.ToTensor(), ImageOps.flip, Image.Image.copy, lambda given: given.filter(ImageFilter.BLUR)),
        lambda given: given.crop((3, 4, 50, 40)),
    ):
        ours, theirs = ((seed(0), np.asarray(transform(given)))[1] for given in (image, exact))
        assert np.array_equal(ours, theirs)
    assert len(decoded) == 1
