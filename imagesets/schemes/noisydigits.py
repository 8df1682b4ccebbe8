"""noisydigits:, scikit-learn's digits at random places and in random colours on noisy grounds of 48 x 48 pixels.

Real handwriting of which raw pixels say little, as the same digit is elsewhere in the next image: for `bench demo`.
Same pixels on every machine.
"""

import numpy as np

from imagesets.names import PackedNames
from imagesets.schemes import digits
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = ""
SPLITS = ("train", "val")
SEEDS = {"train": 1, "val": 2}
SIDE = 48
DIGIT = 16  # pixels of a digit's side, of 8 in the source
STEP = 4  # pixels between two places, 9 x 9 in all
GROUND = 10  # brightest colour of a ground
INK = 180  # darkest colour of a digit
NOISE = 40  # largest noise of each value


def open_split(place: str, split: Split) -> ImageSet:
    """Draw one split from the same split of `digits:`. Raises ValueError when given a path."""
    if place:
        raise ValueError(f"noisydigits:{place}: the set is drawn in memory and takes no path; write noisydigits:")
    source = digits.open_split("", split)
    random = np.random.RandomState(SEEDS[split])  # frozen streams (NumPy NEP 19)
    return ImageSet(
        url="noisydigits:",
        split=split,
        classes=source.classes,
        labels=source.labels,
        images=MemoryImages(
            names=PackedNames.pack(f"noisydigits:{split}/{number}" for number in range(len(source))),
            pixels=drawn(enlarged(source), random),
        ),
        notes=(f"scikit-learn's {len(source)} {split} digits of `digits:`, each at a random place on a noisy ground",),
    )


def enlarged(source: ImageSet) -> np.ndarray:
    """(N, DIGIT, DIGIT) uint8, 255 where the pen was."""
    size = (DIGIT, DIGIT)
    return np.stack([np.asarray(source.image(index).convert("L").resize(size)) for index in range(len(source))])


def drawn(strokes: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """(N, SIDE, SIDE, 3) uint8: each of the strokes (N, DIGIT, DIGIT) somewhere, in a light colour on a dark one."""
    count = len(strokes)
    rows, columns = STEP * random.randint(0, (SIDE - DIGIT) // STEP + 1, size=(2, count, 1))
    span = np.arange(DIGIT)
    ink = np.zeros((count, SIDE, SIDE, 1), np.int64)
    ink[np.arange(count)[:, None, None], (rows + span)[:, :, None], (columns + span)[:, None, :]] = strokes[..., None]
    ground = random.randint(0, GROUND + 1, size=(count, 1, 1, 3))
    colour = random.randint(INK, 256, size=(count, 1, 1, 3))
    noise = random.randint(-NOISE, NOISE + 1, size=(count, SIDE, SIDE, 3))
    return np.clip(ground + (colour - ground) * ink // 255 + noise, 0, 255).astype(np.uint8)
