"""Scenes of scikit-learn's digits on a noisy ground with the outline of each digit: what tiny sets of things hold.

A scene holds up to five digits, each a 0, 1, 4 or 7; every sixteenth holds none. Digits of training scenes are never
seen in a validation scene.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image

from downstream.data.tiny_scenes import CELL, CELLS, COUNTS, DIGITS, HEIGHT, SHOWN, SIDE, WIDTH, shown_digits
from imagesets.sets import ImageSet, Split, open_set

INK = 96  # least grey value of a digit's inside
BARE = 16  # every so manyth scene


def tiny_objects(split: Split) -> Iterator[tuple[np.ndarray, list[tuple]]]:
    """All scenes of a split, as `drawn_with_outlines` gives them."""
    digits, random = shown_digits(open_set("digits:", split)), np.random.RandomState(COUNTS[split])
    for number in range(1, COUNTS[split] + 1):
        yield drawn_with_outlines(digits, random, 0 if number % BARE == 0 else random.randint(2, DIGITS + 1))


def drawn_with_outlines(digits: ImageSet, random: np.random.RandomState, count: int) -> tuple[np.ndarray, list[tuple]]:
    """One scene: pixels (H, W, 3) uint8, and of each digit its value, top, left and the spans of its rows (h, 2)."""
    grey, own = random.randint(0, 60, size=(HEIGHT, WIDTH)), []
    for cell in random.permutation(len(CELLS))[:count]:
        index = random.randint(len(digits))
        digit = np.asarray(digits.image(index).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        top, left = (int(v) for v in np.array(CELLS[cell]) + random.randint(1, CELL - SIDE, size=2))
        place = (slice(top, top + SIDE), slice(left, left + SIDE))
        grey[place] = np.maximum(grey[place], digit)
        first, rows = spans(digit >= INK)
        own.append((int(digits.labels[index]), top + first, left, rows))
    assert {digit for digit, *_ in own} <= set(SHOWN)
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2), own


def spans(ink: np.ndarray) -> tuple[int, np.ndarray]:
    """Ink (h, w) -> its first row, and first and last-but-one column of each row from there on (h', 2).

    A row without ink takes the span of the row above.
    """
    inked = np.flatnonzero(ink.any(1))
    rows: list[tuple[int, int]] = []
    for row in range(inked[0], inked[-1] + 1):
        columns = np.flatnonzero(ink[row])
        rows.append((int(columns[0]), int(columns[-1]) + 1) if len(columns) else rows[-1])
    return int(inked[0]), np.array(rows)
