"""tiny:, four classes of coloured shapes on noisy grey, 32 x 32 pixels, drawn in memory: for smoke tests.

Each class has its own colour, so nearly any features separate them. The pixels are the same on every machine.
"""

import numpy as np

from imagesets.names import PackedNames
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = ""
SPLITS = ("train", "val")
SIDE = 32  # pixels
COUNTS = {"train": 64, "val": 32}  # images
COLOURS = {
    "blue_triangle": (50, 80, 220),
    "green_square": (40, 180, 60),
    "red_disc": (220, 50, 40),
    "yellow_cross": (230, 210, 40),
}


def open_split(place: str, split: Split) -> ImageSet:
    """Draw one split. Raises ValueError if `place` is not empty."""
    if place:
        raise ValueError(f"tiny:{place}: the tiny set is drawn in memory and takes no path; write tiny:")
    labels = np.arange(COUNTS[split]) % len(COLOURS)
    random = np.random.RandomState(len(labels))  # frozen streams (NumPy NEP 19); a different seed for each split
    return ImageSet(
        url="tiny:",
        split=split,
        classes=tuple(COLOURS),
        labels=labels,
        images=MemoryImages(
            names=PackedNames.pack(f"tiny:{split}/{number}" for number in range(len(labels))),
            pixels=np.stack([draw_image(list(COLOURS)[label], random) for label in labels]),
        ),
        notes=("synthetic shapes: proves that the machinery works, says nothing about a model",),
    )


def draw_image(class_name: str, random: np.random.RandomState) -> np.ndarray:
    """One image (32, 32, 3) uint8 with the shape of a class at a random position and size."""
    radius = random.randint(7, 12)
    row, column = random.randint(radius, SIDE - radius, size=2)
    pixels = random.randint(90, 150, size=(SIDE, SIDE, 1)).repeat(3, axis=2).astype(np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    _, shape = class_name.split("_")
    pixels[shape_mask(shape, rows - row, columns - column, radius)] = COLOURS[class_name]
    return pixels


def shape_mask(shape: str, down: np.ndarray, right: np.ndarray, radius: int) -> np.ndarray:
    """Mask (32, 32), True for pixels of the shape. down, right: (32, 32) offsets from its centre in pixels."""
    box = (abs(down) <= radius) & (abs(right) <= radius)
    if shape == "disc":
        return down**2 + right**2 <= radius**2
    if shape == "square":
        return box
    if shape == "triangle":
        return box & (2 * abs(right) <= down + radius)
    return box & ((abs(down) <= radius // 3) | (abs(right) <= radius // 3))
