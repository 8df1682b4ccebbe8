"""95 % intervals of accuracies: how far another draw of as many validation images could have moved the number.

Drawing n images with replacement, of which a share m is right, gives Binomial(n, m) right ones: the bootstrap of 0/1
values is known exactly, so nothing is drawn and no seed is needed. Its percentiles, BCa included, are too narrow near
0 and 100 % (100 images at a true 99 %: they cover 63 %), so it is inverted (Carpenter 1999, test-inversion bootstrap):
the interval holds every rate under which the observed count is in neither outer 2.5 %, the count itself taken half
(mid-P, Lancaster 1961). Values between 0 and 1, such as means over splits, vary less than 0/1 values of the same mean;
they count as the larger number of 0/1 images that varies as little (Korn and Graubard 1998). Means of other values
(seconds, metres) have the interval of bench/statistics/resampled.py.
"""

import numpy as np

from bench.statistics import resampled
from engine import resampling

METHOD = "95 % over validation images: exact binomial bootstrap, inverted (mid-P)"
TAIL = 0.025
STEPS = 50  # of bisection: 2^-50 of a rate is beyond what a float32 accuracy can show
ROUNDING = 1e-5  # of the largest value; those kept as float32 average to the metric within this


def averages_to(values: np.ndarray, metric: float, unit: str) -> bool:
    """Whether `metric` is the mean of `values` (N,), NaN for a skipped image: in "%" of shares from 0 to 1."""
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        return False
    seen = values[~np.isnan(values)].astype(np.float64)
    if not len(seen) or (unit == "%" and (seen.min() < 0 or seen.max() > 1)):
        return False
    scale, largest = (100, 1.0) if unit == "%" else (1, np.abs(seen).max())
    return bool(abs(scale * seen.mean() - metric) <= ROUNDING * scale * largest)


def of_mean(values: np.ndarray, unit: str) -> tuple[tuple[float, float] | None, str]:
    """((low, high), method) in the unit of the mean of values (N,), NaN left out; None for one image of other units."""
    if unit == "%":
        return interval(values), METHOD
    seen = values[~np.isnan(values)].astype(np.float64)
    if len(seen) < 2:
        return None, ""
    means = resampling.resampled(lambda weights: {"mean": weights @ seen / len(seen)}, len(seen))["mean"]
    return resampled.interval(means, len(seen)), resampled.METHOD


def interval(values: np.ndarray) -> tuple[float, float]:
    """(low, high) in percent of the mean of correctness (N,) from 0 to 1; NaN is left out."""
    seen = values[~np.isnan(values)].astype(np.float64)
    low, high = rate_interval(seen.mean(), effective_images(seen))
    return 100 * float(low), 100 * float(high)


def effective_images(seen: np.ndarray) -> float:
    """Number of 0/1 images whose mean would vary as that of `seen` (N,): N for 0/1 values, more for fractions."""
    mean, variance = seen.mean(), seen.var()
    return len(seen) * mean * (1 - mean) / variance if variance > 0 else len(seen)


def rate_interval(rate: np.ndarray | float, images: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Mid-P interval of binomial rates (any shape, 0 to 1) observed on so many images (same shape)."""
    rate, images = np.asarray(rate, np.float64), np.asarray(images, np.float64)
    return _lower(rate * images, images), 1 - _lower((1 - rate) * images, images)


def _lower(count: np.ndarray, images: np.ndarray) -> np.ndarray:
    low, high = np.zeros_like(count), np.ones_like(count)
    for _ in range(STEPS):
        middle = (low + high) / 2
        too_high = _at_least(count, images, middle) > TAIL
        low, high = np.where(too_high, low, middle), np.where(too_high, middle, high)
    return np.where(count > 0, low, 0.0)


def _at_least(count: np.ndarray, images: np.ndarray, rate: np.ndarray) -> np.ndarray:
    # P(X > count) + P(X = count) / 2 for X ~ Binomial(images, rate), continued to fractional counts.
    from scipy.special import betainc

    nothing = np.finfo(np.float64).tiny  # in place of the 0 that the incomplete beta function does not take
    wrong = np.maximum(images - count, nothing)
    return (betainc(np.maximum(count, nothing), wrong + 1, rate) + betainc(count + 1, wrong, rate)) / 2
