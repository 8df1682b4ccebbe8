"""95 % intervals of one metric: how much it would vary over other samples of equally many validation images.

Accuracies are means of per-image scores. Drawing n images with replacement, a fraction m of which is correct, gives
Binomial(n, m) correct ones: the bootstrap distribution of 0/1 values is known exactly and needs neither draws nor a
seed. Its percentiles, even BCa's, are too narrow near 0 and 100 % (for 100 images at a true 99 %, they cover it in 63 %
of cases), so it is inverted (Carpenter 1999, test-inversion bootstrap): the interval contains every rate under which
the observed count lies in neither outer 2.5 %, counting half the probability of the count itself (mid-P, Lancaster
1961). Fractions, such as means over splits, vary less than 0/1 values of the same mean; they are treated as a larger
number of 0/1 images that would vary equally little (Korn and Graubard 1998).

For metrics of a whole set of images, such as mIoU and AP, and for means in other units, such as seconds, the interval
is given by percentiles of the metric on resamples of the images (engine/tasks.py), widened as Student's t is for few
images (Hesterberg 2014, What Teachers Should Know about the Bootstrap, section 4.1.2: expanded percentiles). If only
few images contain a class, centred bootstrap and normal intervals cover less than this (82 and 92 % instead of 95 %,
for mIoU on 24 images).

Shapes: N images, R resamples.
"""

import numpy as np

from engine.tasks import resampled

LEVEL = 0.05  # 1 - the coverage of an interval; also the level of a test
BINOMIAL_METHOD = "95 % over validation images: exact binomial bootstrap, inverted (mid-P)"
BOOTSTRAP_METHOD = "95 % over validation images: bootstrap, expanded percentiles"
STEPS = 50  # of bisection: an error of 2^-50 in a rate is below the resolution of a float32 accuracy
ROUNDING = 1e-5  # relative to the largest value: how closely the mean of values stored as float32 gives the metric


def averages_to(values: np.ndarray, metric: float, unit: str) -> bool:
    """Whether `metric` is the mean of `values` (N,), NaN for a skipped image; for "%", values are from 0 to 1."""
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        return False
    seen = values[~np.isnan(values)].astype(np.float64)
    if not len(seen) or (unit == "%" and (seen.min() < 0 or seen.max() > 1)):
        return False
    scale, largest = (100, 1.0) if unit == "%" else (1, np.abs(seen).max())
    return bool(abs(scale * seen.mean() - metric) <= ROUNDING * scale * largest)


def of_mean(values: np.ndarray, unit: str) -> tuple[tuple[float, float] | None, str]:
    """The interval of the mean of values (N,), without NaN, as ((low, high), method).

    The interval is in percent for the unit "%", whose values are from 0 to 1, else in the unit of the values. It is
    None for a single image in a unit other than "%".
    """
    if unit == "%":
        return accuracy_interval(values), BINOMIAL_METHOD
    seen = values[~np.isnan(values)].astype(np.float64)
    if len(seen) < 2:
        return None, ""
    means = resampled(lambda weights: {"mean": weights @ seen / len(seen)}, len(seen))["mean"]
    return bootstrap_interval(means, len(seen)), BOOTSTRAP_METHOD


def of_resampled(values: np.ndarray, images: int) -> tuple[tuple[float, float] | None, str]:
    """The interval of a metric with values (R,) on resamples of `images` images, as ((low, high), method).

    The interval is None if the metric is defined on a single image.
    """
    defined = defined_images(values, images)
    if defined < 2:
        return None, ""
    return bootstrap_interval(values.astype(np.float64), defined), BOOTSTRAP_METHOD


def defined_images(values: np.ndarray, images: int) -> int:
    """On how many of the resampled `images` a metric is defined, whose values (R,) are NaN on resamples of the others.

    Images without a labelled pixel are such others. If n of N images have labels, (1 - n / N)^N of the resamples have
    none; from ten images on that is nearly never, and the result is N.
    """
    undefined = float(np.isnan(values).mean())
    return round(images * (1 - undefined ** (1 / images))) if undefined else images


def accuracy_interval(values: np.ndarray) -> tuple[float, float]:
    """The interval (low, high), in percent, of the mean of correctness (N,) from 0 to 1, without NaN."""
    seen = values[~np.isnan(values)].astype(np.float64)
    low, high = rate_interval(seen.mean(), effective_images(seen))
    return 100 * float(low), 100 * float(high)


def effective_images(seen: np.ndarray) -> float:
    """Number of 0/1 images whose mean varies as much as that of `seen` (N,): N for 0/1 values, more for fractions."""
    mean, variance = seen.mean(), seen.var()
    return len(seen) * mean * (1 - mean) / variance if variance > 0 else len(seen)


def rate_interval(rate: np.ndarray | float, images: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Mid-P intervals of binomial rates (any shape, 0 to 1), each observed on a number of `images` (same shape)."""
    rate, images = np.asarray(rate, np.float64), np.asarray(images, np.float64)
    return _lower(rate * images, images), 1 - _lower((1 - rate) * images, images)


def _lower(count: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Lower end of the mid-P interval of a rate, by bisection; 0 for a count of 0."""
    low, high = np.zeros_like(count), np.ones_like(count)
    for _ in range(STEPS):
        middle = (low + high) / 2
        too_high = _at_least(count, images, middle) > LEVEL / 2
        low, high = np.where(too_high, low, middle), np.where(too_high, middle, high)
    return np.where(count > 0, low, 0.0)


def _at_least(count: np.ndarray, images: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """P(X > count) + P(X = count) / 2 for X ~ Binomial(images, rate), interpolated to fractional counts."""
    from scipy.special import betainc

    tiny = np.finfo(np.float64).tiny  # instead of 0, for which the incomplete beta function is not defined
    wrong = np.maximum(images - count, tiny)
    return (betainc(np.maximum(count, tiny), wrong + 1, rate) + betainc(count + 1, wrong, rate)) / 2


def bootstrap_interval(values: np.ndarray, images: int) -> tuple[float, float]:
    """The interval (low, high) of a metric with values (R,) on resamples of `images` images, in its unit.

    NaN, from resamples on which the metric is not defined, is ignored.
    """
    from scipy.special import ndtr, stdtrit

    tail = ndtr(_widening(images) * stdtrit(images - 1, LEVEL / 2))
    low, high = np.nanquantile(values, (tail, 1 - tail))
    return float(low), float(high)


def bootstrap_p_value(differences: np.ndarray, images: int) -> float:
    """The two-sided p of a difference with values (R,) on resamples: the level at which its interval touches 0."""
    from scipy.special import ndtri, stdtr

    seen = differences[~np.isnan(differences)]
    tail = (1 + min((seen <= 0).sum(), (seen >= 0).sum())) / (1 + len(seen))
    return min(1.0, 2 * float(stdtr(images - 1, ndtri(tail) / _widening(images)))) if tail < 1 else 1.0


def _widening(images: int) -> float:
    # The bootstrap divides variances by N, where an unbiased estimate divides by N - 1.
    return float(np.sqrt(images / (images - 1)))
