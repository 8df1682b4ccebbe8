"""Scores on shifted and cleaned test sets of ImageNet: their own label rules, and ImageNet-C's mCE.

N images, C classes of the head.
"""

from collections.abc import Mapping, Sequence

import numpy as np

LEVELS = 5  # severities of a corruption
# ImageNet-C's corruptions with AlexNet's top-1 errors, by severity: Hendrycks and Dietterich 2019, the values as in
# facebookresearch/dinov3 eval/metrics/imagenet_c.py:23-156. The first 15 are the benchmark's.
ALEXNET = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
    "speckle_noise": (0.66192, 0.74440, 0.90246, 0.94548, 0.97268),
    "gaussian_blur": (0.54732, 0.70444, 0.82574, 0.89864, 0.95940),
    "spatter": (0.47196, 0.62194, 0.75052, 0.84132, 0.90182),
    "saturate": (0.59342, 0.65514, 0.51174, 0.70834, 0.82260),
}
BENCHMARK = tuple(ALEXNET)[:15]


def mce(errors: Mapping[str, Sequence[float]]) -> float:
    """Mean corruption error in percent, of errors by severity from 0 to 1: of each corruption the mean error by
    AlexNet's mean error, and their mean. A ratio of means, not a mean of ratios."""
    ratios = [np.mean(values) / np.mean(ALEXNET[corruption]) for corruption, values in errors.items()]
    return 100.0 * float(np.mean(ratios))


def any_match(ranked: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether one of the ranked classes (N, k) is among an image's labels (N, m), padded with -1 -> (N,) float, NaN
    for an image without a label."""
    right = (ranked[:, :, None] == labels[:, None, :]) & (labels >= 0)[:, None, :]
    return np.where((labels >= 0).any(axis=1), right.any(axis=(1, 2)), np.nan)


def mapped(ranked: np.ndarray, counterpart: Mapping[int, int]) -> np.ndarray:
    """Ranked classes (N, k) as those of another set, -1 where they have no counterpart: such a guess is wrong."""
    table = np.full(max(int(ranked.max(initial=0)), *counterpart) + 1, -1)
    table[list(counterpart)] = list(counterpart.values())
    return table[ranked]
