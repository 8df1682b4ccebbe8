"""ImageNet-C's fifteen corruptions, generated from clean images (Hendrycks and Dietterich 2019).

The definitions and strengths are those of hendrycks/robustness e0377d4 ImageNet-C/create_c/make_imagenet_c.py, for
images of 224 x 224 pixels. They are computed with other libraries, so that pixels agree up to rounding, and images are
not saved as JPEG. Motion blur is ImageMagick's (MagickCore/effect.c).

Every corruption takes pixels (H, W, 3), float64 from 0 to 1, its strength, and the generator of everything random. It
returns pixels (H, W, 3), float64 that may be outside 0 to 1, or uint8.
"""

import io
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np
from numpy.random import RandomState
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates
from scipy.signal import fftconvolve

from engine.optional import require

Corruption = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
FROSTS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # the source never draws its sixth
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue


def gaussian_noise(pixels: np.ndarray, scale: float, random: RandomState) -> np.ndarray:
    return pixels + random.normal(size=pixels.shape, scale=scale)


def shot_noise(pixels: np.ndarray, photons: float, random: RandomState) -> np.ndarray:
    return random.poisson(pixels * photons) / photons


def impulse_noise(pixels: np.ndarray, share: float, random: RandomState) -> np.ndarray:
    is_noise, is_salt = random.random_sample(pixels.shape) < share, random.random_sample(pixels.shape) < 0.5
    return np.where(is_noise, is_salt, pixels)


def defocus_blur(pixels: np.ndarray, strength: tuple[int, float], random: RandomState) -> np.ndarray:
    """Convolution with a disk. strength: its radius, and the sigma of the Gaussian that smooths its edge."""
    radius, sigma = strength
    reach = max(radius, 8)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = (y**2 + x**2 <= radius**2).astype(float)
    disk = gaussian_filter(disk / disk.sum(), sigma, mode="mirror", radius=1 if radius <= 8 else 2)
    padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    return fftconvolve(padded, disk[:, :, None], mode="valid", axes=(0, 1))


def gaussian_blur(pixels: np.ndarray, sigma: float) -> np.ndarray:
    return gaussian_filter(pixels, (sigma, sigma, 0), mode="nearest")


def glass_blur(pixels: np.ndarray, strength: tuple[float, int, int], random: RandomState) -> np.ndarray:
    """A Gaussian blur; then each pixel, from the last to the first, takes the colour of a random neighbour; then the
    blur again. The source means to swap the two pixels, but its numpy views make it a copy.

    strength: sigma, the largest distance of a neighbour, and the number of rounds.
    """
    sigma, reach, rounds = strength
    height, width, _ = pixels.shape
    blurred = (gaussian_blur(pixels, sigma) * 255).astype(np.uint8)
    steps = random.randint(-reach, reach, size=(rounds, height - 2 * reach, width - 2 * reach, 2))
    rows, columns = np.arange(height - reach, reach, -1), np.arange(width - reach, reach, -1)
    targets = np.broadcast_to(rows[:, None] * width + columns, steps.shape[:3])
    sources = targets + steps[..., 1] * width + steps[..., 0]
    order = list(range(height * width))
    for target, source in zip(targets.ravel().tolist(), sources.ravel().tolist(), strict=True):
        order[target] = order[source]
    return gaussian_blur(blurred.reshape(-1, 3)[order].reshape(pixels.shape) / 255, sigma)


def blur_along_line(values: np.ndarray, radius: int, sigma: float, degrees: float) -> np.ndarray:
    """Average values (H, W, ...) from 0 to 1 along a line with the weights of half a Gaussian -> uint8.

    The edges are repeated. degrees: direction of the line, clockwise from the right.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    blurred = np.zeros_like(values)
    angle = np.deg2rad(degrees)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        down, right = np.ceil(step * np.sin(angle) - 0.5), np.ceil(step * np.cos(angle) - 0.5)
        rows, columns = (
            np.clip(np.arange(side) + int(shift), 0, side - 1)
            for side, shift in zip(values.shape, (down, right), strict=False)
        )
        blurred += weight * values[rows][:, columns]
    return np.rint(255 * blurred).astype(np.uint8)


def motion_blur(pixels: np.ndarray, strength: tuple[int, float], random: RandomState) -> np.ndarray:
    """strength: radius and sigma of the blur."""
    return blur_along_line(pixels, *strength, random.uniform(-45, 45))


def zoom(values: np.ndarray, factor: float) -> np.ndarray:
    """The centre of values (H, W, C), enlarged to (H, W, C), bilinear with aligned corners, as scipy.ndimage.zoom."""
    for axis, side in enumerate(values.shape[:2]):
        kept = int(np.ceil(side / factor))
        size = round(kept * factor)
        positions = (np.arange(side) + (size - side) // 2) * (kept - 1) / (size - 1) + (side - kept) // 2
        low = np.floor(positions).astype(int)
        share = np.expand_dims(positions - low, (1, 2) if axis == 0 else (0, 2))
        values = values.take(low, axis) * (1 - share) + values.take(np.minimum(low + 1, side - 1), axis) * share
    return values


def zoom_blur(pixels: np.ndarray, strength: tuple[float, float], random: RandomState) -> np.ndarray:
    """Mean of the image at increasing zoom factors. strength: upper limit (exclusive) and step of the factors."""
    factors = np.arange(1, *strength).tolist()
    return np.sum([pixels, *(zoom(pixels, factor) for factor in factors)], axis=0) / (len(factors) + 1)


def snow(
    pixels: np.ndarray, strength: tuple[float, float, float, float, int, float, float], random: RandomState
) -> np.ndarray:
    """Flakes on a whitened image: enlarged noise above a threshold, blurred by motion, added in two orientations.

    strength: mean and scale of the noise, factor of its enlargement, threshold, radius and sigma of the motion blur,
    and the image's share in the mix with its whitened version.
    """
    mean, scale, factor, threshold, radius, sigma, share = strength
    flakes = zoom(random.normal(size=pixels.shape[:2], loc=mean, scale=scale)[:, :, None], factor)
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = blur_along_line(np.floor(255 * flakes) / 255, radius, sigma, random.uniform(-135, -45)) / 255
    white = np.maximum(pixels, 1.5 * (pixels @ LUMA)[:, :, None] + 0.5)
    return share * pixels + (1 - share) * white + flakes + np.rot90(flakes, k=2)


@cache
def frost_picture(name: str) -> Image.Image:
    """One of the source's photographs, from the package imagecorruptions-imaug."""
    require("imagecorruptions")
    package = find_spec("imagecorruptions")
    assert package is not None and package.origin is not None  # require has checked it
    return Image.open(os.path.join(os.path.dirname(package.origin), "frost", name)).convert("RGB")


def frost(pixels: np.ndarray, strength: tuple[float, float], random: RandomState) -> np.ndarray:
    """strength: factors of the image and of a random crop of a photograph of frost, which are added."""
    height, width, _ = pixels.shape
    picture = frost_picture(FROSTS[random.randint(len(FROSTS))])
    scale = max(1.0, (height + 1) / picture.height, (width + 1) / picture.width)  # above 1 for images above 300 pixels
    if scale > 1:
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
    top, left = random.randint(0, picture.height - height), random.randint(0, picture.width - width)
    return strength[0] * pixels + strength[1] * np.asarray(picture)[top : top + height, left : left + width] / 255


def plasma(side: int, decay: float, random: RandomState) -> np.ndarray:
    """A fractal height map (side, side) from 0 to 1, by the diamond-square algorithm.

    side: a power of 2. decay: the noise is divided by it at each finer scale.
    """
    heights, step, wobble = np.zeros((side, side)), side, 100.0

    def noisy_mean(total: np.ndarray) -> np.ndarray:
        return total / 4 + wobble * random.uniform(-wobble, wobble, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=0)
        heights[half::step, half::step] = noisy_mean(pairs + np.roll(pairs, -1, axis=1))
        middles = heights[half::step, half::step]
        above = middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        heights[::step, half::step] = noisy_mean(above)
        beside = middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = noisy_mean(beside)
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return heights / heights.max()


def fog(pixels: np.ndarray, strength: tuple[float, float], random: RandomState) -> np.ndarray:
    """strength: density of the fog, and decay of `plasma`."""
    (height, width, _), (density, decay) = pixels.shape, strength
    clouds = plasma(1 << (max(height, width) - 1).bit_length(), decay, random)[:height, :width, None]
    return (pixels + density * clouds) * pixels.max() / (pixels.max() + density)


def brightness(pixels: np.ndarray, increase: float, random: RandomState) -> np.ndarray:
    """Raises HSV's value, the largest channel; hue and saturation stay."""
    value = pixels.max(axis=2, keepdims=True)
    raised = np.clip(value + increase, 0, 1)
    return np.where(value > 0, pixels * raised / np.maximum(value, 1e-12), raised)


def contrast(pixels: np.ndarray, share: float, random: RandomState) -> np.ndarray:
    means = pixels.mean(axis=(0, 1))
    return (pixels - means) * share + means


def sample_bilinear(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray, mode: str) -> np.ndarray:
    """Pixels (H, W, 3) at positions (H, W). mode: scipy's, for positions outside the image."""
    channels = [map_coordinates(channel, (rows, columns), order=1, mode=mode) for channel in np.moveaxis(pixels, 2, 0)]
    return np.stack(channels, axis=2)


def elastic_transform(pixels: np.ndarray, strength: tuple[float, float, float], random: RandomState) -> np.ndarray:
    """A random affine transform, then smooth random displacements.

    strength: factor and sigma of the displacements, and the jitter in pixels of the three points that fix the affine
    transform.
    """
    factor, sigma, jitter = strength
    height, width, _ = pixels.shape
    centre, reach = np.array([height // 2, width // 2]), min(height, width) // 3
    points = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + random.uniform(-jitter, jitter, size=(3, 2))
    inverse = np.linalg.solve(np.column_stack([moved, np.ones(3)]), points)  # (3, 2): (x, y, 1) of the result -> (x, y)
    rows, columns = np.mgrid[:height, :width]
    x, y = np.moveaxis(np.stack([columns, rows, np.ones_like(rows)], axis=2) @ inverse, 2, 0)
    pixels = sample_bilinear(pixels, y, x, "mirror")
    right, down = (
        factor * gaussian_filter(random.uniform(-1, 1, size=(height, width)), sigma, mode="reflect", truncate=3)
        for _ in range(2)
    )
    return sample_bilinear(pixels, rows + down, columns + right, "reflect")


def pixelate(pixels: np.ndarray, share: float, random: RandomState) -> np.ndarray:
    image = Image.fromarray(np.rint(255 * pixels).astype(np.uint8))
    small = image.resize((int(image.width * share), int(image.height * share)), Image.Resampling.BOX)
    return np.asarray(small.resize(image.size, Image.Resampling.BOX))


def jpeg_compression(pixels: np.ndarray, quality: int, random: RandomState) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(np.rint(255 * pixels).astype(np.uint8)).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer).convert("RGB"))


# Strengths at severities 1 to 5.
STRENGTHS: Mapping[Callable[[np.ndarray, Any, RandomState], np.ndarray], tuple[Any, ...]] = {
    gaussian_noise: (0.08, 0.12, 0.18, 0.26, 0.38),
    shot_noise: (60, 25, 12, 5, 3),
    impulse_noise: (0.03, 0.06, 0.09, 0.17, 0.27),
    defocus_blur: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    glass_blur: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    motion_blur: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    zoom_blur: ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    snow: (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    frost: ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    fog: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    brightness: (0.1, 0.2, 0.3, 0.4, 0.5),
    contrast: (0.4, 0.3, 0.2, 0.1, 0.05),
    elastic_transform: (
        (488, 170.8, 24.4),
        (488, 19.52, 48.8),
        (12.2, 2.44, 4.88),
        (17.08, 2.44, 4.88),
        (29.28, 2.44, 4.88),
    ),
    pixelate: (0.6, 0.5, 0.4, 0.3, 0.25),
    jpeg_compression: (25, 18, 15, 10, 7),
}
BY_NAME = {function.__name__: (function, strengths) for function, strengths in STRENGTHS.items()}


def corrupt(image: Image.Image, corruption: Corruption, severity: int, random: RandomState) -> Image.Image:
    """An RGB image with a corruption of severity 1 to 5."""
    function, strengths = BY_NAME[corruption]
    pixels = function(np.asarray(image) / 255.0, strengths[severity - 1], random)
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(pixels)
