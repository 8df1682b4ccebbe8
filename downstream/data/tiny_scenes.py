"""Tiny ADE20K and Cityscapes: scenes of scikit-learn's digits on a noisy ground, in the layouts of the real sets.

A scene holds five digits, each a 0, 1, 4 or 7; its mask gives each digit's square to that digit, ignores a frame of a
pixel around it, and calls the rest ground. Digits of training scenes are never seen in a validation scene. To tell the
classes apart a model has to read the digits.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from downstream.data import cityscapes
from downstream.data.listing import IGNORED
from engine.files import folder_atomic
from imagesets.sets import ImageSet, open_set

VERSION = 1  # raise it when the same names would hold other pixels
HEIGHT, WIDTH = 64, 96
CELL, SIDE, DIGITS = 24, 18, 5  # pixels, pixels, a scene's number
CELLS = [(row, column) for row in (4, 36) for column in range(0, WIDTH, CELL)]  # corners of what may hold a digit
COUNTS = {"train": 64, "val": 24}
SHOWN = (0, 1, 4, 7)  # few and unlike each other: all ten take minutes to learn
GROUND = 0  # class of the ground; the digits' follow in this order


def written(layout: str, cache: Path) -> Path:
    """The folder of a tiny set, drawn at its first use."""
    folder = cache / f"tiny-{layout}-{VERSION}"
    if not folder.is_dir():
        with folder_atomic(folder) as root:
            for split, count in COUNTS.items():
                digits, random = shown(open_set("digits:", split)), np.random.RandomState(count)
                for number in range(count):
                    WRITERS[layout](root, split, number, *drawn(digits, random))
    return folder


def shown(digits: ImageSet) -> ImageSet:
    """The digits that scenes hold."""
    return digits.subset(np.flatnonzero(np.isin(digits.labels, SHOWN)), "shown")


def drawn(digits: ImageSet, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """One scene: pixels (H, W, 3) uint8 and classes (H, W) uint8."""
    grey = random.randint(0, 60, size=(HEIGHT, WIDTH))
    classes = np.full((HEIGHT, WIDTH), GROUND, np.uint8)
    for cell in random.permutation(len(CELLS))[:DIGITS]:
        index = random.randint(len(digits))
        digit = digits.image(index).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        top, left = np.array(CELLS[cell]) + random.randint(1, CELL - SIDE, size=2)
        place = (slice(top, top + SIDE), slice(left, left + SIDE))
        grey[place] = np.maximum(grey[place], digit)
        classes[top - 1 : top + SIDE + 1, left - 1 : left + SIDE + 1] = IGNORED
        classes[place] = SHOWN.index(digits.labels[index]) + 1
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2), classes


def _save(path: Path, pixels: np.ndarray, **options: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def _write_ade20k(root: Path, split: str, number: int, pixels: np.ndarray, classes: np.ndarray) -> None:
    folder, name = {"train": "training", "val": "validation"}[split], f"ADE_{split}_{number:08d}"
    _save(root / "images" / folder / f"{name}.jpg", pixels, quality=95)
    _save(root / "annotations" / folder / f"{name}.png", np.where(classes == IGNORED, 0, classes + 1).astype(np.uint8))


def _write_cityscapes(root: Path, split: str, number: int, pixels: np.ndarray, classes: np.ndarray) -> None:
    city = ("aachen", "bochum")[number % 2]
    name = f"{split}/{city}/{city}_{number:06d}_000019"
    _save(root / "leftImg8bit" / f"{name}_leftImg8bit.png", pixels)
    _save(root / "gtFine" / f"{name}_gtFine_labelTrainIds.png", classes)
    identities = np.zeros(256, np.uint8)  # 0 is unlabelled
    identities[: len(cityscapes.CLASS_IDS)] = list(cityscapes.CLASS_IDS.values())
    _save(root / "gtFine" / f"{name}_gtFine_labelIds.png", identities[classes])


WRITERS: dict[str, Callable[..., None]] = {"ade20k": _write_ade20k, "cityscapes": _write_cityscapes}
