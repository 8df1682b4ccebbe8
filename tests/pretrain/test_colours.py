"""Changes of colours: draws of torchvision, and pixels of Pillow bit for bit for a batch."""

import random
from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.utils.data import default_collate
from torchvision import transforms

from checkpoints.spec import Preparation
from imagesets.transforms import image_to_tensor
from pretrain.methods.lut import View2Colours
from pretrain.parts.colours import ADJUSTMENTS, Changes, Colours, coloured_batch, coloured_image
from pretrain.parts.views import Several, crop, view

EVERYTHING = Colours(jitter=(0.8, 0.8, 0.8, 0.4), jitter_chance=0.9, grey=0.3, blur=0.6, solarise=0.4)
KERNEL = replace(EVERYTHING, blur_kernel=9)


def photo(seed: int, width: int = 24, height: int = 24) -> Image.Image:
    """Smooth in its left half, noise in the other, with black and white pixels."""
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, height * (width // 2)).reshape(height, width // 2)
    pixels[:, : width // 2] = ramp[..., None]
    pixels[0, :, :], pixels[-1, :, :] = 0, 255
    return Image.fromarray(pixels)


def batch(images: list[Image.Image], changes: list[Changes]) -> torch.Tensor:
    return coloured_batch(
        torch.stack([image_to_tensor(image) for image in images]), torch.stack([change.row() for change in changes])
    )


class SourceBlur:
    """DINO's blur, with its draws (utils.py:36-54)."""

    def __init__(self, chance: float) -> None:
        self.chance = chance

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.chance:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


JITTER = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8)
SOURCES = {
    "byol": (
        Colours(blur=0.5, solarise=0.2),
        [JITTER, transforms.RandomGrayscale(0.2), SourceBlur(0.5), transforms.RandomSolarize(128, 0.2)],
    ),
    "beit": (
        Colours(jitter=(0.4, 0.4, 0.4, 0.0), jitter_chance=1.0, grey=0.0),
        [transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4)], 1.0)],
    ),
    "lut": (
        View2Colours(grey=0.0),
        [
            JITTER,
            transforms.RandomChoice([transforms.Grayscale(3), transforms.RandomSolarize(128, 1.0), SourceBlur(1.0)]),
        ],
    ),
    "none": (Colours(jitter_chance=0.0, grey=0.0), []),
}


@pytest.mark.parametrize("name", SOURCES)
def test_draws_and_pixels_equal_torchvisions(name):
    colours, steps = SOURCES[name]
    results = []
    for make in (colours, transforms.Compose(steps)):
        torch.manual_seed(3), random.seed(3)
        results.append([np.asarray(make(photo(number))) for number in range(40)] + [torch.rand(1), random.random()])
    for ours, theirs in zip(*results, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", range(len(ADJUSTMENTS)))
def test_one_adjustment_of_a_batch_equals_pillows(kind):
    factors = [-0.5, -0.1, 0.0, 0.03, 0.4999] if kind == 3 else [0.0, 0.2, 0.6001, 1.0, 1.37, 2.9]
    order = (kind, *({0, 1, 2, 3} - {kind}))
    changes = [Changes(order, tuple(factor if number == kind else nan for number in range(4))) for factor in factors]
    images = [photo(number) for number in range(len(factors))]
    expected = [
        image_to_tensor(ADJUSTMENTS[kind](image, factor)) for image, factor in zip(images, factors, strict=True)
    ]
    assert torch.equal(batch(images, changes), torch.stack(expected))


@pytest.mark.parametrize("size", [(24, 24), (5, 3), (1, 8)])
def test_blurs_equal_pillows_at_any_radius(size):
    """Also where the box is wider than the image."""
    radii = [0.01, 0.1, 0.7, 0.99, 1.0, 1.5, 2.0, 3.3, 12.0]
    images = [photo(number, *size) if min(size) > 2 else photo(number).resize(size) for number in range(len(radii))]
    expected = [
        image_to_tensor(image.filter(ImageFilter.GaussianBlur(radius)))
        for image, radius in zip(images, radii, strict=True)
    ]
    changes = [Changes(radius=radius) for radius in radii]
    assert torch.equal(batch(images, changes), torch.stack(expected))


@pytest.mark.parametrize("kernel", [7, 9, 23])
def test_kernels_blur_as_torchvisions(kernel):
    """Other than Pillow's, which has no kernel."""
    for sigma in (0.1, 0.7, 2.0):
        image, pillows = photo(0, 64, 48), photo(0, 64, 48).filter(ImageFilter.GaussianBlur(sigma))
        blurred = np.asarray(coloured_image(image, Changes(radius=sigma, kernel=kernel)))
        assert np.array_equal(blurred, transforms.functional.gaussian_blur(image, kernel, sigma))
        assert not np.array_equal(blurred, pillows)


def test_all_changes_of_a_batch_equal_pillows():
    torch.manual_seed(0), random.seed(0)
    images, changes = [photo(number) for number in range(100)], [EVERYTHING.draw() for _ in range(100)]
    expected = [image_to_tensor(coloured_image(image, change)) for image, change in zip(images, changes, strict=True)]
    coloured = batch(images, changes)
    assert torch.equal(coloured, torch.stack(expected))
    changed = (coloured != torch.stack([image_to_tensor(image) for image in images])).flatten(1).any(1)
    assert 80 < changed.sum() < 100  # and some stay as they are


@pytest.mark.parametrize("last", [EVERYTHING, KERNEL, replace(EVERYTHING, blur=0.0), None])
def test_views_finished_on_the_device_equal_those_of_the_loader(last):
    """Views of one size and different colours, of several images."""
    steps = [*crop(16, (0.2, 1.0)), *([last] if last else [])]
    views = Several([view(steps, Preparation()), view(steps[:1], Preparation(mean=(0.1, 0.2, 0.3)))])
    batches = []
    for make in (views, views.unfinished):
        torch.manual_seed(1), random.seed(1)
        batches.append(default_collate([make(photo(number)) for number in range(8)]))
    expected, unfinished = batches
    finished = unfinished.finished()
    assert finished.shape == (8, 2, 3, 16, 16) and torch.equal(finished, expected)


def test_views_by_other_functions_are_finished_in_the_loader():
    """As a user's method may have."""
    views = Several([view([], Preparation()), lambda image: torch.zeros(3, image.height, image.width)])
    assert torch.equal(views.unfinished(photo(0)), views(photo(0)))
