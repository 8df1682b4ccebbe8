"""Scenes of scikit-learn's digits on a noisy ground: what tiny sets hold, as a class of every pixel or as outlines.

A scene with masks holds five digits, each a 0, 1, 4 or 7; its mask gives each digit's square to that digit, ignores a
frame of a pixel around it, and calls the rest ground. A scene with outlines holds two to five digits, every sixteenth
none. Digits of training scenes are never seen in a validation scene. To tell the classes apart a model has to read the
digits. How a set is written to files is its layout's `write_tiny`.
"""

from collections.abc import Iterable, Iterator
from functools import cache
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
INK = 96  # least grey value of a digit's inside
EMPTY = 16  # every so manyth scene with outlines holds no digit


def tiny_scenes(split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All scenes of a split with masks: pixels (H, W, 3) uint8 and classes (H, W) uint8."""
    random = np.random.RandomState(COUNTS[split])
    for _ in range(COUNTS[split]):
        pixels, digits = _draw_scene(split, random, DIGITS)
        classes = np.full((HEIGHT, WIDTH), GROUND, np.uint8)
        for value, top, left, _ in digits:
            classes[top - 1 : top + SIDE + 1, left - 1 : left + SIDE + 1] = IGNORED
            classes[top : top + SIDE, left : left + SIDE] = SHOWN.index(value) + 1
        yield pixels, classes


def tiny_objects(split: Split) -> Iterator[tuple[np.ndarray, list[tuple]]]:
    """All scenes of a split with outlines: pixels (H, W, 3) uint8, and of each digit its value, top, left and the spans
    (h, 2) of its rows."""
    random = np.random.RandomState(COUNTS[split])
    for number in range(1, COUNTS[split] + 1):
        pixels, digits = _draw_scene(split, random, 0 if number % EMPTY == 0 else random.randint(2, DIGITS + 1))
        outlines = []
        for value, top, left, grey in digits:
            first, rows = _spans(grey >= INK)
            outlines.append((value, top + first, left, rows))
        yield pixels, outlines


def _draw_scene(
    split: Split, random: np.random.RandomState, count: int
) -> tuple[np.ndarray, list[tuple[int, int, int, np.ndarray]]]:
    """Pixels (H, W, 3) uint8 of a scene with `count` digits, and of each its value, top, left and grey values
    (SIDE, SIDE)."""
    source = _digits(split)
    ground, digits = random.randint(0, 60, size=(HEIGHT, WIDTH)), []
    for cell in random.permutation(len(CELLS))[:count]:
        index = random.randint(len(source))
        grey = np.asarray(source.image(index).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        top, left = (int(corner) for corner in np.array(CELLS[cell]) + random.randint(1, CELL - SIDE, size=2))
        place = (slice(top, top + SIDE), slice(left, left + SIDE))
        ground[place] = np.maximum(ground[place], grey)
        digits.append((int(source.labels[index]), top, left, grey))
    return np.repeat(ground.astype(np.uint8)[..., None], 3, axis=2), digits


@cache
def _digits(split: Split) -> ImageSet:
    digits = open_set("digits:", split)
    return digits.subset(np.flatnonzero(np.isin(digits.labels, SHOWN)), "shown")


def _spans(ink: np.ndarray) -> tuple[int, np.ndarray]:
    """Ink (h, w) -> its first row, and first and last-but-one column of each row from there on (h', 2).

    A row without ink takes the span of the row above.
    """
    inked = np.flatnonzero(ink.any(1))
    rows: list[tuple[int, int]] = []
    for row in range(inked[0], inked[-1] + 1):
        columns = np.flatnonzero(ink[row])
        rows.append((int(columns[0]), int(columns[-1]) + 1) if len(columns) else rows[-1])
    return int(inked[0]), np.array(rows)


def save_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text, with the folders above the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def save_image(path: Path, pixels: np.ndarray, quality: int = 75) -> None:
    """Write pixels (H, W[, 3]) uint8, with the folders above the file; its suffix is the format.

    quality: of a JPEG file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=quality)  # 75 is Pillow's own
