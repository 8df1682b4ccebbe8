"""Resamples of the validation images: the same draws for every outcome on as many images, so that two can be compared.

A metric of a whole set of images, such as mIoU or AP, is no mean over images. How far other images could move it, and
the difference of two checkpoints on them, follows from its values on sets drawn with replacement from the images
(bootstrap). N images, R resamples.
"""

from collections.abc import Callable, Mapping

import numpy as np

RESAMPLES = 2000  # smallest p of a test from them: 0.001, so that Holm over 50 comparisons can still reject
BLOCK = 50  # resamples at once: N x BLOCK weights stay small


def resampled(score: Callable[[np.ndarray], Mapping[str, np.ndarray]], images: int) -> dict[str, np.ndarray]:
    """Name -> (R,) values of `score` on the resamples of N images.

    score: weights (r, N) float64, how often each image counts -> name -> (r,).
    """
    generator = np.random.RandomState(0)  # draws the same in every version of numpy, which default_rng may not
    parts = []
    for first in range(0, RESAMPLES, BLOCK):
        rows = min(BLOCK, RESAMPLES - first)
        weights = generator.multinomial(images, np.full(images, 1 / images), size=rows)
        parts.append(score(weights.astype(np.float64)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
