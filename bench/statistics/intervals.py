"""95 % intervals of one metric: how far another draw of as many validation images could have moved the number.

Accuracies, the mean of what each image scored. Drawing n images with replacement, of which a share m is right, gives
Binomial(n, m) right ones: the bootstrap of 0/1 values is known exactly, so it needs no draws and no seed. Its
percentiles, BCa included, are too narrow near 0 and 100 % (100 images at a true 99 %: they cover 63 %), so it is
inverted (Carpenter 1999, test-inversion bootstrap): the interval holds every rate under which the observed count lies
in neither outer 2.5 %, with half the probability of the count itself (mid-P, Lancaster 1961). Fractions, such as means
over splits, vary less than 0/1 values of the same mean; they count as the larger number of 0/1 images that varies as
little (Korn and Graubard 1998).

Metrics of a whole set of images, such as mIoU and AP, and means in other units, such as seconds: percentiles of the
metric on resamples of the images (engine/tasks.py), moved outwards as Student's t asks of few images (Hesterberg
2014, What Teachers Should Know about the Bootstrap, section 4.1.2: expanded percentiles). Where few images hold a
class, neither a centred bootstrap nor a normal interval covers as well (82 and 92 % of 95, mIoU on 24 images).

N images, R resamples.
"""

import numpy as np

from engine.tasks import resampled

LEVEL = 0.05  # 1 - the coverage of an interval; also the level of a test
BINOMIAL_METHOD = "95 % over validation images: exact binomial bootstrap, inverted (mid-P)"
BOOTSTRAP_METHOD = "95 % over validation images: bootstrap, expanded percentiles"
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
        return accuracy_interval(values), BINOMIAL_METHOD
    seen = values[~np.isnan(values)].astype(np.float64)
    if len(seen) < 2:
        return None, ""
    means = resampled(lambda weights: {"mean": weights @ seen / len(seen)}, len(seen))["mean"]
    return bootstrap_interval(means, len(seen)), BOOTSTRAP_METHOD


def of_resampled(values: np.ndarray, images: int) -> tuple[tuple[float, float] | None, str]:
    """((low, high), method) of a metric with values (R,) on resamples of so many images; None where that is one."""
    if images < 2:
        return None, ""
    return bootstrap_interval(values, images), BOOTSTRAP_METHOD


def accuracy_interval(values: np.ndarray) -> tuple[float, float]:
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
        too_high = _at_least(count, images, middle) > LEVEL / 2
        low, high = np.where(too_high, low, middle), np.where(too_high, middle, high)
    return np.where(count > 0, low, 0.0)


def _at_least(count: np.ndarray, images: np.ndarray, rate: np.ndarray) -> np.ndarray:
    # P(X > count) + P(X = count) / 2 for X ~ Binomial(images, rate), continued to fractional counts.
    from scipy.special import betainc

    nothing = np.finfo(np.float64).tiny  # in place of the 0 that the incomplete beta function does not take
    wrong = np.maximum(images - count, nothing)
    return (betainc(np.maximum(count, nothing), wrong + 1, rate) + betainc(count + 1, wrong, rate)) / 2


def bootstrap_interval(values: np.ndarray, images: int) -> tuple[float, float]:
    """(low, high) of a metric with values (R,) on resamples of so many images, in its unit.

    NaN, from a resample that holds nothing to measure, is left out.
    """
    from scipy.special import ndtr, stdtrit

    tail = ndtr(_widening(images) * stdtrit(images - 1, LEVEL / 2))
    low, high = np.nanquantile(values, (tail, 1 - tail))
    return float(low), float(high)


def bootstrap_p_value(differences: np.ndarray, images: int) -> float:
    """The level at which the interval of a difference touches 0: its two-sided p, from its values (R,)."""
    from scipy.special import ndtri, stdtr

    seen = differences[~np.isnan(differences)]
    tail = (1 + min((seen <= 0).sum(), (seen >= 0).sum())) / (1 + len(seen))
    return min(1.0, 2 * float(stdtr(images - 1, ndtri(tail) / _widening(images)))) if tail < 1 else 1.0


def _widening(images: int) -> float:
    # The bootstrap divides a variance by N where it should be N - 1.
    return float(np.sqrt(images / (images - 1)))
