"""Colour augmentation, by Pillow in a loader process or, bit for bit the same, for a batch on a GPU.

The random numbers are drawn in the loader either way, so the device does not change the images of a training. Pillow
computes with integers and single operations in float32, which give the same results on any device: blending rounds
down, grey is (19595 R + 38470 G + 7471 B + 32768) / 65536, and the Gaussian blur is three passes of a box whose weights
have 24 bits (libImaging/Blend.c, Convert.c, BoxBlur.c). Hues are looked up in tables made by Pillow.

N images, each with its own random numbers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isnan, nan
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import ColorJitter, functional

SOLARISE_THRESHOLD = 128  # pixel values from which solarisation inverts
BOX_PASSES = 3  # box filters that make up Pillow's GaussianBlur
BlurKernel = Literal[0, 7, 9, 23]  # the sources' kernels
RGB_COLOURS = 1 << 24  # number of 8-bit RGB colours
MAX_IMAGES_AT_ONCE = 64  # computed together; the blur takes 5 MB per image of 224 px


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Random colour augmentation: jitter, greyscale, blur and solarisation, in this order. The defaults are BYOL's
    (Grill et al. 2020, table 6), without blur and solarisation."""

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # of brightness, contrast, saturation, hue
    jitter_chance: float = 0.8  # probability
    grey: float = 0.2  # probability
    blur: float = 0.0  # probability
    blur_radius: tuple[float, float] = (0.1, 2.0)  # least and largest radius of the Gaussian, in pixels
    blur_kernel: BlurKernel = 0  # side of the kernel of torchvision's blur, in pixels; 0: Pillow's blur
    solarise: float = 0.0  # probability

    def __call__(self, image: Image.Image) -> Image.Image:
        return coloured_image(image, self.draw())

    def draw(self) -> "Changes":
        """Draw the changes of one image as torchvision's transforms do, and as DINO's for blur (utils.py:36-54).

        Nothing is drawn for a probability of 0.
        """
        changes = Changes()
        if self.jitter_chance and torch.rand(1) <= self.jitter_chance:
            jitter = color_jitter(self.jitter)
            order, *factors = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
            changes = Changes(tuple(order.tolist()), tuple(nan if factor is None else factor for factor in factors))
        if self.grey and torch.rand(1) < self.grey:
            changes = changes._replace(grey=True)
        if self.blur and random.random() < self.blur:
            changes = changes._replace(radius=random.uniform(*self.blur_radius), kernel=self.blur_kernel)
        if self.solarise and torch.rand(1).item() < self.solarise:
            changes = changes._replace(solarise=True)
        return changes


class Changes(NamedTuple):
    """The colour changes of one image."""

    order: tuple[int, ...] = (0, 1, 2, 3)  # in which ADJUSTMENTS are applied
    # of brightness, contrast and saturation, and the shift of the hue in turns of the colour wheel; NaN: unchanged
    factors: tuple[float, ...] = (nan,) * 4
    grey: bool = False
    radius: float = nan  # of the blur, in pixels; NaN: none
    solarise: bool = False
    kernel: int = 0  # of the blur, see `Colours.blur_kernel`; without one, all changes can be left to a GPU

    def row(self) -> Tensor:
        """All values but the kernel as a tensor (11,) float64, in this order."""
        return torch.tensor([*self.order, *self.factors, self.grey, self.radius, self.solarise], dtype=torch.float64)


ADJUSTMENTS = (
    functional.adjust_brightness,
    functional.adjust_contrast,
    functional.adjust_saturation,
    functional.adjust_hue,
)


@lru_cache
def color_jitter(strengths: tuple[float, float, float, float]) -> ColorJitter:
    """torchvision's ColorJitter; cached, as every image needs one."""
    return ColorJitter(*strengths)


def coloured_image(image: Image.Image, changes: Changes) -> Image.Image:
    """Apply changes to an RGB image, by Pillow; a blur with a kernel by torchvision."""
    for kind in changes.order:
        if not isnan(changes.factors[kind]):
            image = ADJUSTMENTS[kind](image, changes.factors[kind])
    if changes.grey:
        image = functional.rgb_to_grayscale(image, 3)
    if changes.kernel and not isnan(changes.radius):
        image = functional.gaussian_blur(image, changes.kernel, changes.radius)
    elif not isnan(changes.radius):
        image = image.filter(ImageFilter.GaussianBlur(changes.radius))
    return functional.solarize(image, SOLARISE_THRESHOLD) if changes.solarise else image


def coloured_batch(pixels: Tensor, changes: Tensor) -> Tensor:
    """Apply changes to images, in place and bit for bit like `coloured_image`.

    pixels: (N, 3, H, W) uint8, on any device. changes: (N, 11), rows of `Changes`, on the CPU.
    """
    for pixels_part, changes_part in zip(
        pixels.split(MAX_IMAGES_AT_ONCE), changes.split(MAX_IMAGES_AT_ONCE), strict=True
    ):
        _apply_changes_(pixels_part, changes_part)
    return pixels


def _apply_changes_(pixels: Tensor, changes: Tensor) -> None:
    """Apply changes (N, 11) to pixels (N, 3, H, W), each kind to all images that get it next, in place."""
    order, factors, (grey, radius, solarise) = changes[:, :4], changes[:, 4:8], changes[:, 8:].unbind(1)

    def apply(change: Callable[..., Tensor], selected: Tensor, *arguments: Tensor) -> None:
        """Apply `change` to the selected images. selected: (N,) bool. arguments: of `change`, (N, ...)."""
        if selected.any():
            rows = selected.nonzero()[:, 0].to(pixels.device)
            pixels[rows] = change(pixels[rows], *(argument[selected].to(pixels.device) for argument in arguments))

    for kinds in order.unbind(1):  # (N,), the kind of adjustment that each image gets next
        for kind, change in enumerate((brightened, contrasted, saturated, hue_shifted)):
            factor = factors[:, kind]
            apply(change, (kinds == kind) & ~factor.isnan(), factor)
    apply(lambda images: luminance(images).expand(-1, 3, -1, -1), grey > 0)
    apply(blurred, ~radius.isnan(), box_weights(radius).double())
    apply(lambda images: torch.where(images < SOLARISE_THRESHOLD, images, 255 - images), solarise > 0)


# In the functions below, images are (N, 3, H, W) uint8, and factors (N,) float64.


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return blended(torch.zeros_like(images), images, factor)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    grey = luminance(images).flatten(1).long()
    mean = (2 * grey.sum(1) + grey.shape[1]) // (2 * grey.shape[1])  # rounded half up
    return blended(mean[:, None, None, None], images, factor)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    return blended(luminance(images), images, factor)


def blended(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """base + factor * (images - base), clamped to 0 to 255 and rounded down."""
    base, factor = base.float(), factor.float()[:, None, None, None]
    return (base + factor * (images.float() - base)).clamp(0, 255).to(torch.uint8)


def luminance(images: Tensor) -> Tensor:
    """Grey values (N, 1, H, W) uint8."""
    red, green, blue = images.int().split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8)


def hue_shifted(images: Tensor, factor: Tensor) -> Tensor:
    """Images with hues shifted by factor * 255 steps, rounded towards zero as in torchvision's adjust_hue."""
    device = str(images.device)
    red, green, blue = images.int().unbind(1)
    steps = (factor * 255).int()[:, None, None]
    hsv = conversion("RGB", "HSV", device)[red << 16 | green << 8 | blue]
    rgb = conversion("HSV", "RGB", device)[(hsv + (steps << 16)) % RGB_COLOURS]  # the hue is the highest byte
    return torch.stack([rgb >> 16, rgb >> 8 & 255, rgb & 255], dim=1).to(torch.uint8)


@lru_cache
def conversion(source: str, target: str, device: str) -> Tensor:
    """A table (2^24,) int32 on the device that converts colours, three bytes in one number, between two of
    Pillow's modes."""
    if device != "cpu":
        return conversion(source, target, "cpu").to(device)
    numbers = np.arange(RGB_COLOURS, dtype=">u4").view(np.uint8).reshape(-1, 4)
    image = Image.frombytes(source, (4096, 4096), numbers[:, 1:].tobytes())
    converted = np.asarray(image.convert(target)).reshape(-1, 3).astype(np.int32)
    return torch.from_numpy(converted[:, 0] << 16 | converted[:, 1] << 8 | converted[:, 2])


def blurred(images: Tensor, weights: Tensor) -> Tensor:
    """Pillow's GaussianBlur. weights: (N, R), from `box_weights`."""
    reach = weights.shape[1] - 1
    for axis in (3, 2):
        size = images.shape[axis]
        indices = torch.arange(-reach, size + reach, device=images.device).clamp(0, size - 1)  # repeats edge pixels
        for _ in range(BOX_PASSES):
            padded = images.index_select(axis, indices).double()  # exact: all sums are below 2^32
            total = torch.full(images.shape, float(1 << 23), dtype=torch.float64, device=images.device)
            for offset in range(-reach, reach + 1):
                total.addcmul_(weights[:, abs(offset), None, None, None], padded.narrow(axis, offset + reach, size))
            images = total.div_(1 << 24).to(torch.uint8)
    return images


def box_weights(radius: Tensor) -> Tensor:
    """Radii of Gaussians (N,) -> weights of Pillow's box (N, R) int64, for pixels at a distance of 0, 1, ... R-1 from
    its centre; they sum to about 2^24 over the box. Uses float32 for the same steps as Pillow."""
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
