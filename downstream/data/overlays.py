"""Masks of classes drawn over their images: the colours of the classes, and the overlay."""

import colorsys
from collections import Counter

import numpy as np
from PIL import Image

from downstream.data.listing import IGNORED

TINT = 0.6  # share of a class's colour in its pixels
# Colours of the most frequent classes: Okabe and Ito's for colour-blind readers, yellow first, far apart in lightness.
FAR_APART = ("#F0E442", "#0072B2", "#D55E00", "#56B4E9", "#CC79A7", "#009E73", "#E69F00")


def class_colours(counts: Counter[int], classes: int) -> np.ndarray:
    """Colours (256 or more, 3) uint8 of classes by number. counts: frequency of each class.

    The most frequent classes get FAR_APART in this order; the others hues that are far apart for neighbouring numbers,
    light and dark in turn.
    """
    hues = np.arange(classes) * 0.618034 % 1.0  # multiples of the golden ratio are spread evenly over the circle
    values = np.where(np.arange(classes) % 2, 0.65, 1.0)
    colours = np.zeros((max(256, classes), 3), np.uint8)
    rgb = [colorsys.hsv_to_rgb(hue, 0.85, value) for hue, value in zip(hues, values, strict=True)]
    colours[:classes] = np.rint(255 * np.array(rgb).reshape(-1, 3))
    most_frequent = counts.most_common(len(FAR_APART))
    for (number, _), colour in zip(most_frequent, FAR_APART[: len(most_frequent)], strict=True):
        colours[number] = list(bytes.fromhex(colour[1:]))
    return colours


def tinted(image: Image.Image, mask: np.ndarray, colours: np.ndarray, untinted: int = IGNORED) -> Image.Image:
    """An image mixed with the colours (256, 3) of its classes, of a mask (h, w) uint8; class `untinted` stays bare."""
    classes = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image, np.float64)
    mixed = np.where((classes == untinted)[..., None], pixels, (1 - TINT) * pixels + TINT * colours[classes])
    return Image.fromarray(mixed.round().astype(np.uint8))
