"""The scenes of tiny sets: scikit-learn's digits on a noisy background, with masks or with outlines.

A scene with a mask shows five digits, each a 0, 1, 4 or 7. The square of each digit has the digit's class, a frame of
one pixel around it is ignored, and the rest is background. A scene with outlines shows two to five digits, every
sixteenth scene none. Training and validation scenes show different images of digits, so a model must read the digits to
tell the classes apart. `write_tiny` of each layout writes the scenes to files.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from downstream.data.listing import IGNORED
from imagesets.sets import ImageSet, Split, open_set

HEIGHT, WIDTH = 64, 96  # of a scene, in pixels
CELL, SIDE = 24, 18  # sides in pixels of a cell, which holds at most one digit, and of a digit
CELL_CORNERS = [(row, column) for row in (4, 36) for column in range(0, WIDTH, CELL)]
DIGITS_PER_SCENE = 5  # in a scene with a mask; the maximum in one with outlines
COUNTS = {"train": 64, "val": 24}  # scenes of a split, which are also the seed of its random numbers
DIGIT_VALUES = (0, 1, 4, 7)  # few and unlike each other: learning all ten takes minutes
GROUND = 0  # class of the background; the digits follow as classes 1 to 4
MIN_INK = 96  # lowest grey value of the inside of a digit
EMPTY_PERIOD = 16  # one of so many scenes with outlines shows no digit


def tiny_scenes(split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All scenes of a split with masks: pixels (H, W, 3) uint8 and classes (H, W) uint8."""
    random = np.random.RandomState(COUNTS[split])
    for _ in range(COUNTS[split]):
        pixels, digits = _draw_scene(split, random, DIGITS_PER_SCENE)
        classes = np.full((HEIGHT, WIDTH), GROUND, np.uint8)
        for value, top, left, _ in digits:
            classes[top - 1 : top + SIDE + 1, left - 1 : left + SIDE + 1] = IGNORED
            classes[top : top + SIDE, left : left + SIDE] = DIGIT_VALUES.index(value) + 1
        yield pixels, classes


def tiny_objects(split: Split) -> Iterator[tuple[np.ndarray, list[tuple]]]:
    """All scenes of a split with outlines: pixels (H, W, 3) uint8, and the digits.

    A digit is its value, its top and left edge in pixels, and the first and the end column of each of its rows, (h, 2)
    relative to the left edge.
    """
    random = np.random.RandomState(COUNTS[split])
    for number in range(1, COUNTS[split] + 1):
        count = 0 if number % EMPTY_PERIOD == 0 else random.randint(2, DIGITS_PER_SCENE + 1)
        pixels, digits = _draw_scene(split, random, count)
        outlines = []
        for value, top, left, grey in digits:
            first_row, rows = _row_spans(grey >= MIN_INK)
            outlines.append((value, top + first_row, left, rows))
        yield pixels, outlines


def _draw_scene(
    split: Split, random: np.random.RandomState, count: int
) -> tuple[np.ndarray, list[tuple[int, int, int, np.ndarray]]]:
    """Pixels (H, W, 3) uint8 of a scene with `count` digits; value, top, left and grey values (SIDE, SIDE) of each."""
    images = _digit_images(split)
    scene, digits = random.randint(0, 60, size=(HEIGHT, WIDTH)), []
    for cell in random.permutation(len(CELL_CORNERS))[:count]:
        index = random.randint(len(images))
        grey = np.asarray(images.image(index).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        corner = np.array(CELL_CORNERS[cell]) + random.randint(1, CELL - SIDE, size=2)
        top, left = (int(edge) for edge in corner)
        square = (slice(top, top + SIDE), slice(left, left + SIDE))
        scene[square] = np.maximum(scene[square], grey)
        digits.append((int(images.labels[index]), top, left, grey))
    return np.repeat(scene.astype(np.uint8)[..., None], 3, axis=2), digits


@cache
def _digit_images(split: Split) -> ImageSet:
    digits = open_set("digits:", split)
    return digits.subset(np.flatnonzero(np.isin(digits.labels, DIGIT_VALUES)), "shown")


def _row_spans(ink: np.ndarray) -> tuple[int, np.ndarray]:
    """The first row with ink, and the first and the end column (h', 2) of the ink in each row from there to the last.

    ink: (h, w), True inside of the digit. A row without ink gets the span of the row above.
    """
    inked_rows = np.flatnonzero(ink.any(1))
    spans: list[tuple[int, int]] = []
    for row in range(inked_rows[0], inked_rows[-1] + 1):
        columns = np.flatnonzero(ink[row])
        spans.append((int(columns[0]), int(columns[-1]) + 1) if len(columns) else spans[-1])
    return int(inked_rows[0]), np.array(spans)


def save_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def save_image(path: Path, pixels: np.ndarray, quality: int = 75) -> None:
    """Write pixels (H, W) or (H, W, 3) uint8 in the format of the file's suffix, and create the folders above it.

    quality: of a JPEG file; 75 is Pillow's default.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=quality)
