"""Scenes of scikit-learn's digits on a noisy ground, with the class of every pixel: what tiny sets of scenes hold.

A scene holds five digits, each a 0, 1, 4 or 7; its mask gives each digit's square to that digit, ignores a frame of a
pixel around it, and calls the rest ground. Digits of training scenes are never seen in a validation scene. To tell the
classes apart a model has to read the digits. How a set is written to files is its layout's `write_tiny`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from downstream.data.listing import IGNORED
from imagesets.sets import ImageSet, Split, open_set

HEIGHT, WIDTH = 64, 96
CELL, SIDE, DIGITS = 24, 18, 5  # pixels, pixels, a scene's number
CELLS = [(row, column) for row in (4, 36) for column in range(0, WIDTH, CELL)]  # corners of what may hold a digit
COUNTS = {"train": 64, "val": 24}
SHOWN = (0, 1, 4, 7)  # few and unlike each other: all ten take minutes to learn
GROUND = 0  # class of the ground; the digits' follow in this order


def tiny_scenes(split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All scenes of a split, as `drawn_with_classes` gives them."""
    digits, random = shown_digits(open_set("digits:", split)), np.random.RandomState(COUNTS[split])
    for _ in range(COUNTS[split]):
        yield drawn_with_classes(digits, random)


def shown_digits(digits: ImageSet) -> ImageSet:
    """The digits that scenes hold."""
    return digits.subset(np.flatnonzero(np.isin(digits.labels, SHOWN)), "shown")


def drawn_with_classes(digits: ImageSet, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """One scene: pixels (H, W, 3) uint8 and classes (H, W) uint8."""
    grey = random.randint(0, 60, size=(HEIGHT, WIDTH))
    classes = np.full((HEIGHT, WIDTH), GROUND, np.uint8)
    for cell in random.permutation(len(CELLS))[:DIGITS]:
        index = random.randint(len(digits))
        digit = digits.image(index).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        top, left = np.array(CELLS[cell]) + random.randint(1, CELL - SIDE, size=2)
        place = (slice(top, top + SIDE), slice(left, left + SIDE))
        grey[place] = np.maximum(grey[place], np.asarray(digit))
        classes[top - 1 : top + SIDE + 1, left - 1 : left + SIDE + 1] = IGNORED
        classes[place] = SHOWN.index(digits.labels[index]) + 1
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2), classes


def save_image(path: Path, pixels: np.ndarray, quality: int = 75) -> None:
    """Write pixels (H, W[, 3]) uint8, with the folders above the file; its suffix is the format.

    quality: of a JPEG file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=quality)  # 75 is Pillow's own
