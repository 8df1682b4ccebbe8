"""noisydigits:, scikit-learn's digits at random positions, in random colours, on noisy images of 48 x 48 pixels.

Real handwriting on which raw pixels score low, because digits of a class are in different places: for `bench demo`. The
pixels are the same on every machine.
"""

from functools import cache

import numpy as np

from imagesets.names import PackedNames
from imagesets.schemes import digits
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = ""
SPLITS = ("train", "val")
SEEDS = {"train": 1, "val": 2}
SIDE = 48  # pixels
DIGIT_SIDE = 16  # pixels; 8 in the source
POSITION_STEP = 4  # pixels between neighbouring positions of a digit; 9 x 9 positions in all
MAX_BACKGROUND = 10  # brightest colour of a background, of 255
MIN_INK = 180  # darkest colour of a digit
MAX_NOISE = 40  # added to or subtracted from each value


@cache
def pixels_of(split: Split) -> np.ndarray:
    """The images (N, SIDE, SIDE, 3) uint8 of a split; drawn once, and read-only."""
    random = np.random.RandomState(SEEDS[split])  # frozen streams (NumPy NEP 19)
    pixels = draw_scenes(enlarge_digits(digits.open_split("", split)), random)
    pixels.flags.writeable = False
    return pixels


def open_split(place: str, split: Split) -> ImageSet:
    """Draw one split from the same split of `digits:`. Raises ValueError if `place` is not empty."""
    if place:
        raise ValueError(f"noisydigits:{place}: the set is drawn in memory and takes no path; write noisydigits:")
    source = digits.open_split("", split)
    return ImageSet(
        url="noisydigits:",
        split=split,
        classes=source.classes,
        labels=source.labels,
        images=MemoryImages(
            names=PackedNames.pack(f"noisydigits:{split}/{index}" for index in range(len(source))),
            pixels=pixels_of(split),
        ),
        notes=(f"scikit-learn's {len(source)} {split} digits of `digits:`, each at a random place on a noisy ground",),
    )


def enlarge_digits(source: ImageSet) -> np.ndarray:
    """Strokes (N, DIGIT_SIDE, DIGIT_SIDE) uint8 of N digits, 255 where the pen was."""
    size = (DIGIT_SIDE, DIGIT_SIDE)
    return np.stack([np.asarray(source.image(index).convert("L").resize(size)) for index in range(len(source))])


def draw_scenes(strokes: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Images (N, SIDE, SIDE, 3) uint8, each with strokes (N, DIGIT_SIDE, DIGIT_SIDE) at a random position.

    Digits have a random light colour on a random dark background, both with noise.
    """
    count = len(strokes)
    rows, columns = POSITION_STEP * random.randint(0, (SIDE - DIGIT_SIDE) // POSITION_STEP + 1, size=(2, count, 1))
    offsets = np.arange(DIGIT_SIDE)
    opacity = np.zeros((count, SIDE, SIDE, 1), np.int64)  # 0..255
    images, rows, columns = np.arange(count)[:, None, None], (rows + offsets)[:, :, None], (columns + offsets)[:, None]
    opacity[images, rows, columns] = strokes[..., None]
    background = random.randint(0, MAX_BACKGROUND + 1, size=(count, 1, 1, 3))
    ink = random.randint(MIN_INK, 256, size=(count, 1, 1, 3))
    noise = random.randint(-MAX_NOISE, MAX_NOISE + 1, size=(count, SIDE, SIDE, 3))
    return np.clip(background + (ink - background) * opacity // 255 + noise, 0, 255).astype(np.uint8)
