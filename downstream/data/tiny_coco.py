"""A tiny COCO: scikit-learn's digits on a noisy ground, with boxes, outlines and crowds in the layout of COCO 2017.

A scene holds up to five digits, each a 0, 1, 4 or 7; every sixteenth holds none, and in every eighth the last digit is
marked as a crowd. An outline follows a digit's outer edge; crowds are run lengths, all others polygons. Digits of
training scenes are never seen in a validation scene.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from downstream.data.coco import IMAGES
from downstream.data.tiny_scenes import CELL, CELLS, DIGITS, HEIGHT, SHOWN, SIDE, WIDTH, shown
from engine.files import folder_atomic
from imagesets.sets import ImageSet, open_set

VERSION = 1  # raise it when the same names would hold other pixels
COUNTS = {"train": 64, "val": 24}
CATEGORIES = {0: 2, 1: 3, 4: 44, 7: 90}  # of the digits: with gaps, as in COCO
INK = 96  # least grey value of a digit's inside
BARE, CROWDED = 16, 8  # every so manyth scene


def written(cache: Path) -> Path:
    """The folder of the set, drawn at its first use."""
    folder = cache / f"tiny-coco-{VERSION}"
    if not folder.is_dir():
        with folder_atomic(folder) as root:
            (root / "annotations").mkdir()
            for split, count in COUNTS.items():
                _write(root, split, count)
    return folder


def _write(root: Path, split: str, count: int) -> None:
    (root / IMAGES[split]).mkdir()
    digits, random = shown(open_set("digits:", split)), np.random.RandomState(count)
    images, objects = [], []
    for number in range(1, count + 1):
        pixels, own = drawn(digits, random, 0 if number % BARE == 0 else random.randint(2, DIGITS + 1))
        name = f"{number:012d}.jpg"
        Image.fromarray(pixels).save(root / IMAGES[split] / name, quality=95)
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        for place, (digit, top, left, rows) in enumerate(own):
            crowd = number % CROWDED == 1 and place == len(own) - 1
            facts = {"id": len(objects) + 1, "image_id": number, "category_id": CATEGORIES[digit]}
            objects.append(facts | _outline(rows, top, left, crowd))
    categories = [{"id": value, "name": f"digit {digit}"} for digit, value in CATEGORIES.items()]
    content = {"images": images, "annotations": objects, "categories": categories}
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def drawn(digits: ImageSet, random: np.random.RandomState, count: int) -> tuple[np.ndarray, list[tuple]]:
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


def _outline(rows: np.ndarray, top: int, left: int, crowd: bool) -> dict[str, Any]:
    """bbox, area, iscrowd and segmentation, as in COCO's file."""
    edges = rows + left
    low, high = int(edges[:, 0].min()), int(edges[:, 1].max())
    return {
        "bbox": [low, top, high - low, len(rows)],
        "area": int((rows[:, 1] - rows[:, 0]).sum()),
        "iscrowd": int(crowd),
        "segmentation": _run_lengths(edges, top) if crowd else [_polygon(edges, top)],
    }


def _polygon(edges: np.ndarray, top: int) -> list[int]:
    """x1, y1, x2, y2, ...: down the right edge and up the left one."""
    right = [point for row, (_, x) in enumerate(edges, top) for point in ((x, row), (x, row + 1))]
    left = [point for row, (x, _) in enumerate(edges, top) for point in ((x, row), (x, row + 1))]
    return [int(value) for point in (*right, *reversed(left)) for value in point]


def _run_lengths(edges: np.ndarray, top: int) -> dict[str, Any]:
    """Lengths of runs of 0 and 1 in turn, down one column after the other."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    for row, (low, high) in enumerate(edges, top):
        mask[row, low:high] = True
    column = np.concatenate([[False], mask.ravel(order="F")])
    changes = np.flatnonzero(np.diff(column))
    return {"size": [HEIGHT, WIDTH], "counts": np.diff([0, *changes, mask.size]).tolist()}
