"""Generated corruptions against imagecorruptions, OpenCV or a closed form."""

import os

import numpy as np
import pytest
from numpy.random import RandomState
from PIL import Image
from scipy.ndimage import gaussian_filter

from probes.corruptions import CORRUPTIONS, FROSTS, corrupt
from probes.shifted import BENCHMARK

SMOOTH = Image.fromarray(RandomState(0).randint(0, 255, (14, 14, 3)).astype(np.uint8))
IMAGE = SMOOTH.resize((224, 224), Image.Resampling.BICUBIC)
# The package differs in these: other draws in scikit-image; enlarged frost of six pictures, not five; other parameters
# of the elastic transform.
DIFFERENT_IN_PACKAGE = ("impulse_noise", "frost", "elastic_transform")
NOT_MONOTONIC = ("glass_blur", "snow", "frost", "fog", "elastic_transform")  # by the source's own parameters


def pixels(corruption, severity, seed=3, image=IMAGE):
    return np.asarray(corrupt(image, corruption, severity, RandomState(seed)), int)


def test_corruptions_grow_with_severity_and_are_reproducible():
    for corruption in CORRUPTIONS:
        image = IMAGE.crop((0, 0, 96, 64))  # of any shape
        levels = [pixels(corruption, severity, 1, image) for severity in range(1, 6)]
        distances = [np.square(level - np.asarray(image, int)).mean() for level in levels]
        assert min(distances) > 0 and (corruption in NOT_MONOTONIC or distances == sorted(distances))
        assert np.array_equal(levels[4], pixels(corruption, 5, 1, image)) and levels[0].shape == (64, 96, 3)


@pytest.mark.parametrize("corruption", [name for name in CORRUPTIONS if name not in DIFFERENT_IN_PACKAGE])
def test_pixels_equal_those_of_imagecorruptions_up_to_rounding(corruption, monkeypatch):
    package = pytest.importorskip("imagecorruptions.corruptions")
    shuffle = "_shuffle_pixels_njit_glass_blur"
    monkeypatch.setattr(package, shuffle, getattr(package, shuffle).py_func)  # compiling takes seconds
    for severity in (1, 5):
        np.random.seed(3)
        seed = dict(seed=3) if corruption == "glass_blur" else {}
        theirs = np.asarray(getattr(package, corruption)(IMAGE, severity, **seed)).clip(0, 255).astype(np.uint8)
        difference = np.abs(pixels(corruption, severity) - theirs)
        assert difference.max() <= 2 and difference.mean() < 0.55  # rounding, and trimmed flakes of snow


def test_the_fraction_of_impulses_is_the_papers():
    changed = pixels("impulse_noise", 4, image=Image.new("RGB", (224, 224), (99, 99, 99))).ravel() != 99
    assert changed.mean() == pytest.approx(0.17, abs=5 * (0.17 * 0.83 / changed.size) ** 0.5)


def test_frost_blends_in_a_photograph():
    package = pytest.importorskip("imagecorruptions")
    random, folder = RandomState(3), os.path.join(os.path.dirname(package.__file__), "frost")
    picture = np.asarray(Image.open(os.path.join(folder, FROSTS[random.randint(5)])).convert("RGB"))
    top, left = random.randint(0, len(picture) - 224), random.randint(0, picture.shape[1] - 224)
    frozen = 0.6 * np.asarray(IMAGE, float) + 0.75 * picture[top : top + 224, left : left + 224]
    assert np.abs(pixels("frost", 5) - frozen.clip(0, 255)).max() <= 1
    assert pixels("frost", 1, image=Image.new("RGB", (600, 400))).shape == (
        400,
        600,
        3,
    )  # larger than all pictures of frost


@pytest.mark.parametrize("severity", [1, 2, 5])
def test_elastic_transforms_equal_opencvs(severity):
    cv2 = pytest.importorskip("cv2")
    strength, sigma, jitter = {1: (488, 170.8, 24.4), 2: (488, 19.52, 48.8), 5: (29.28, 2.44, 4.88)}[severity]
    random, corners = RandomState(3), np.float32([[186, 186], [186, 38], [38, 38]])
    moved = corners + random.uniform(-jitter, jitter, size=(3, 2)).astype(np.float32)
    image = np.asarray(IMAGE, np.float32)
    warped = cv2.warpAffine(
        image, cv2.getAffineTransform(corners, moved), (224, 224), borderMode=cv2.BORDER_REFLECT_101
    )
    right, down = (
        gaussian_filter(random.uniform(-1, 1, (224, 224)), sigma, mode="reflect", truncate=3) * strength for _ in "xy"
    )
    rows, columns = np.mgrid[:224, :224].astype(np.float32)
    theirs = cv2.remap(
        warped, np.float32(columns + right), np.float32(rows + down), cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT
    )
    difference = np.abs(pixels("elastic_transform", severity) - theirs)
    assert difference.mean() < 1 and np.quantile(difference, 0.999) < 4  # OpenCV rounds positions to 1/32 of a pixel


def test_all_corruptions_of_the_benchmark_are_generated_in_its_order():
    assert CORRUPTIONS == BENCHMARK
