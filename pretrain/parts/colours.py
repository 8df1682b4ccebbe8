"""Random changes of colours, with the bits of Pillow: by Pillow in a loader process, or for a batch on a GPU.

Their random numbers are drawn in the loader either way, so the device changes nothing about a training's images.
Pillow's arithmetic is that of integers and of single steps in float32, which come out the same on any device: blending
rounds down, grey is (19595 R + 38470 G + 7471 B + 32768) / 65536, and the Gaussian is three passes of a box whose
weights have 24 bits (libImaging/Blend.c, Convert.c, BoxBlur.c). Hues are looked up in tables that Pillow makes.

N images, each with its own random numbers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import ColorJitter, functional

SOLARISE_ABOVE = 128
BOX_PASSES = 3  # of Pillow's GaussianBlur
NONE = float("nan")  # a change that is not made
COLOURS = 1 << 24
AT_ONCE = 64  # images: a blur of 224 px takes 5 MB an image


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Chances and strengths of what happens to colours, in this order; BYOL's numbers (Grill et al. 2020, table 6).

    jitter: brightness, contrast, saturation, hue. blur: chance of a Gaussian of `blur_radius` pixels.
    """

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_chance: float = 0.8
    grey: float = 0.2
    blur: float = 0.0
    blur_radius: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0

    def __call__(self, image: Image.Image) -> Image.Image:
        return coloured_image(image, self.draw())

    def draw(self) -> "Changes":
        """Draws what torchvision's transforms draw, and for blur what DINO's does (utils.py:36-54). Nothing is drawn
        for a chance of 0."""
        changes = UNCHANGED
        if self.jitter_chance and torch.rand(1) <= self.jitter_chance:
            jitter = color_jitter(self.jitter)
            order, *factors = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
            changes = Changes(*order.tolist(), *(NONE if factor is None else factor for factor in factors))
        if self.grey and torch.rand(1) < self.grey:
            changes = changes._replace(grey=True)
        if self.blur and random.random() < self.blur:
            changes = changes._replace(radius=random.uniform(*self.blur_radius))
        if self.solarise and torch.rand(1).item() < self.solarise:
            changes = changes._replace(solarise=True)
        return changes


class Changes(NamedTuple):
    """What happens to one image; or to N, each field (N,)."""

    first: Any  # place in ADJUSTMENTS of what comes first
    second: Any
    third: Any
    fourth: Any
    brightness: Any = NONE  # factors
    contrast: Any = NONE
    saturation: Any = NONE
    hue: Any = NONE  # in turns
    grey: Any = False
    radius: Any = NONE  # of a blur, in pixels
    solarise: Any = False


UNCHANGED = Changes(0, 1, 2, 3)
ADJUSTMENTS = (
    functional.adjust_brightness,
    functional.adjust_contrast,
    functional.adjust_saturation,
    functional.adjust_hue,
)


@lru_cache
def color_jitter(strengths: tuple[float, float, float, float]) -> ColorJitter:
    return ColorJitter(*strengths)


def coloured_image(image: Image.Image, changes: Changes) -> Image.Image:
    """An RGB image, changed by Pillow."""
    for kind in changes[:4]:
        factor = changes[4 + int(kind)]
        if factor == factor:  # not NONE
            image = ADJUSTMENTS[int(kind)](image, factor)
    if changes.grey:
        image = functional.rgb_to_grayscale(image, 3)
    if changes.radius == changes.radius:
        image = image.filter(ImageFilter.GaussianBlur(changes.radius))
    return functional.solarize(image, SOLARISE_ABOVE) if changes.solarise else image


def coloured_batch(pixels: Tensor, changes: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 on any device, (N, 11) `Changes` on the CPU -> the pixels of `coloured_image`, in place."""
    for part, of_part in zip(pixels.split(AT_ONCE), changes.split(AT_ONCE), strict=True):
        _colour_(part, Changes(*of_part.unbind(1)))
    return pixels


def _colour_(pixels: Tensor, changes: Changes) -> None:
    def change(which: Tensor, made: Callable[..., Tensor], *numbers: Tensor) -> None:
        """Images which (N,) bool are `made`, of them and their numbers (N,)."""
        if which.any():
            places = which.nonzero()[:, 0].to(pixels.device)
            pixels[places] = made(pixels[places], *(number[which].to(pixels.device) for number in numbers))

    for turn in changes[:4]:
        for kind, made in enumerate((brightened, contrasted, saturated, turned)):
            factor = changes[4 + kind]
            change((turn == kind) & ~factor.isnan(), made, factor)
    change(changes.grey > 0, lambda images: luminance(images).expand(-1, 3, -1, -1))
    is_blurred = ~changes.radius.isnan()
    change(is_blurred, blurred, box_weights(changes.radius).double())
    change(changes.solarise > 0, lambda images: torch.where(images < SOLARISE_ABOVE, images, 255 - images))


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return blended(torch.zeros_like(images), images, factor)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    grey = luminance(images).flatten(1).long()
    mean = (2 * grey.sum(1) + grey.shape[1]) // (2 * grey.shape[1])  # rounded half up
    return blended(mean[:, None, None, None], images, factor)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    return blended(luminance(images), images, factor)


def blended(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """base + factor (images - base), rounded down."""
    base, factor = base.float(), factor.float()[:, None, None, None]
    return (base + factor * (images.float() - base)).clamp(0, 255).to(torch.uint8)


def luminance(images: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 1, H, W) uint8."""
    red, green, blue = images.int().split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8)


def turned(images: Tensor, factor: Tensor) -> Tensor:
    """Hues turned by `factor`, of which 1/255 is a step, rounded to zero as in torchvision's adjust_hue."""
    device = str(images.device)
    red, green, blue = images.int().unbind(1)
    steps = (factor * 255).int()[:, None, None]
    hsv = conversion("RGB", "HSV", device)[red << 16 | green << 8 | blue]
    rgb = conversion("HSV", "RGB", device)[(hsv + (steps << 16)) % COLOURS]  # the hue is the highest byte
    return torch.stack([rgb >> 16, rgb >> 8 & 255, rgb & 255], dim=1).to(torch.uint8)


@lru_cache
def conversion(source: str, target: str, device: str) -> Tensor:
    """(2^24,) int32 on the device: every colour of one of Pillow's modes, three bytes in a number, in another."""
    numbers = np.arange(COLOURS, dtype=">u4").view(np.uint8).reshape(-1, 4)
    image = Image.frombytes(source, (4096, 4096), numbers[:, 1:].tobytes())
    found = np.asarray(image.convert(target)).reshape(-1, 3).astype(np.int32)
    return torch.from_numpy(found[:, 0] << 16 | found[:, 1] << 8 | found[:, 2]).to(device)


def blurred(images: Tensor, weights: Tensor) -> Tensor:
    """Pillow's GaussianBlur. weights: (N, R) of `box_weights`."""
    reach = weights.shape[1] - 1
    for axis in (3, 2):
        size = images.shape[axis]
        places = torch.arange(-reach, size + reach, device=images.device).clamp(0, size - 1)
        for _ in range(BOX_PASSES):
            wide = images.index_select(axis, places).double()  # exact: all sums are below 2^32
            total = torch.full(images.shape, float(1 << 23), dtype=torch.float64, device=images.device)
            for offset in range(-reach, reach + 1):
                total.addcmul_(weights[:, abs(offset), None, None, None], wide.narrow(axis, offset + reach, size))
            images = total.div_(1 << 24).to(torch.uint8)
    return images


def box_weights(radius: Tensor) -> Tensor:
    """Radii (N,) of Gaussians -> (N, R) int64: weights, of 2^24 in all, of pixels at a distance of 0, 1, ... from the
    centre of Pillow's box. In float32 where Pillow is."""
    radius = radius.nan_to_num(0.0).float()
    variance = radius * radius / BOX_PASSES
    length = (12.0 * variance.double() + 1.0).sqrt().float()
    whole = ((length.double() - 1.0) / 2.0).floor().float()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) * (whole + 1)))
    box = whole + part
    reach = box.long()[:, None]
    inside = ((1 << 24) / (box * 2 + 1)).long()[:, None]
    outside = ((1 << 24) - (2 * reach + 1) * inside) // 2
    distances = torch.arange(int(reach.max()) + 2)
    return torch.where(distances <= reach, inside, torch.where(distances == reach + 1, outside, 0))
