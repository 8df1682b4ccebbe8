"""Resamples of the validation images: the same draws for every outcome on as many images, so that two can be compared.

A metric of a whole set of images, such as mIoU or AP, is no mean over images. Its values on sets that are drawn with
replacement from the images (bootstrap) show how far other images could move it, or the difference of two checkpoints.
N images, R resamples.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

# On 24 images the smallest p of a test is then 0.0009, and Holm over 50 can still reject.
MAX_RESAMPLES = 20_000
DRAWN = 20_000_000  # images in all resamples: 4000 times COCO's 5000, whose AP takes 80 s then, of boxes and of masks
BLOCK = 50  # resamples at once: N x BLOCK weights stay small


Score = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def resamples_of(images: int) -> int:
    """How many resamples of N images are drawn."""
    return min(MAX_RESAMPLES, -(-DRAWN // images))


def resampled(score: Score, images: int, most: int = MAX_RESAMPLES) -> dict[str, np.ndarray]:
    """Name -> (R,) values of `score` on the resamples of N images.

    score: maps weights (r, N) float64, how often each image counts, to name -> (r,). most: resamples.
    """
    counts = _counts(images, min(resamples_of(images), most))
    parts = [score(counts[first : first + BLOCK].astype(np.float64)) for first in range(0, len(counts), BLOCK)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@lru_cache(maxsize=2)
def _counts(images: int, resamples: int) -> np.ndarray:
    # How often each image is in each resample (R, N), at most 20 MB; 256 times in none, where there are so many images.
    generator = np.random.RandomState(0)  # draws the same in every version of numpy, which default_rng may not
    counts = np.empty((resamples, images), np.uint8)
    for first in range(0, resamples, BLOCK):
        rows = counts[first : first + BLOCK]
        rows[:] = generator.multinomial(images, np.full(images, 1 / images), size=len(rows))
    return counts
