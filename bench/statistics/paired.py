"""Is one checkpoint better than another? Paired tests on the same images, in which an image's own difficulty cancels.

0/1 correctness is tested by McNemar's exact test, the binomial test over the images on which the two differ, however
many these are. It never exceeds its level, unlike the mid-P and chi-square forms (Fagerland et al. 2013). Fractions
(means over splits or seeds) and other numbers are tested by a paired bootstrap, centred and studentised (Efron and
Tibshirani 1993, chapter 16). The interval of the difference is in both cases that of a paired bootstrap; for 0/1
correctness its distribution is known exactly, so it needs no draws. Numbers that differ from image to image, such as
log losses, on more than 5,000 images are tested by the paired t test: on so many images it agrees with the bootstrap
(docs/log.md), and takes milliseconds instead of ten seconds. Every bootstrap of values per image adds two images, one
in favour of either side, as Bonett and Price 2012 add one to each discordant count: without them, the interval for no
difference on 100 images would be [0, 0], and equal models averaged over three splits would differ in 5.4 % of the
draws.

For metrics of a whole set of images, such as mIoU and AP, both checkpoints are evaluated on the same resamples of the
images (engine/tasks.py), so the R differences of their values are a paired bootstrap. The difficulty of images cancels,
and so does most of the metric's own bias on resamples. The interval covers what other images of the same kind would
give for these two trained networks, not what another training would give. p is the level at which that interval touches
0.

Shapes: N images, R resamples.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Literal, TypeVar

import numpy as np

from bench.statistics.intervals import LEVEL, bootstrap_interval, bootstrap_p_value

RESAMPLES = 20_000  # smallest p of a bootstrap test: 5e-5, so that Holm over 1000 comparisons can still reject
DECIMALS = 6  # differences of float32 fractions are rounded to these many places, to be equal if they should be
BLOCK = 2_000_000  # counts in memory at a time: 16 MB
MOST_IMAGES = 5000  # for up to this many images, draws are kept for the next test on equally many: 100 MB
# Up to this many distinct values are drawn as counts of values; 50 take as long as 1,000 images with kept draws.
FEW_VALUES = 50

Tested = TypeVar("Tested", bound=Hashable)  # what identifies a test
Test = Literal["McNemar, exact", "paired bootstrap", "paired t", "bootstrap over images"]


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Two checkpoints on the same images; all differences are first - second."""

    images: int  # or what else was resampled, such as videos
    first: float  # the first checkpoint's metric, in its unit, as are `second`, difference and interval
    second: float
    difference: float
    low: float  # ends of the 95 % interval of the difference
    high: float
    first_only: int | None  # images that only the first has right; None unless values are 0/1
    second_only: int | None
    test: Test
    p: float  # two-sided, not corrected
    effect_name: Literal["Cohen's g", "Cohen's d_z"]
    # Cohen's g: fraction of first_only among the discordant images, minus 1/2 (0.05 small, 0.15 medium, 0.25 large).
    # d_z: mean difference divided by its standard deviation. None if undefined.
    effect: float | None


def compare_images(first: np.ndarray, second: np.ndarray, scale: float = 100, resamples: int = RESAMPLES) -> PairedTest:
    """Compare values (N,) from -1 to 1 on the same N images, without NaN.

    scale: the value 1 in the metric's unit; 100 for correctness and a metric in percent.
    """
    binary = is_binary(first) and is_binary(second)
    test: Test
    first_only = second_only = effect = None
    if binary:
        differences = first - second
        first_only, second_only = discordant(differences)
        test, p = "McNemar, exact", mcnemar(first_only, second_only)
        low, high = discordant_interval(first_only, second_only, len(first))
        if first_only + second_only:
            effect = first_only / (first_only + second_only) - 0.5
    else:
        differences = rounded_differences(first, second)
        test, (low, high), p = mean_test(differences, resamples)
        if spread := float(differences.std()):
            effect = float(differences.mean()) / spread
    return PairedTest(
        images=len(first),
        first=scale * float(first.mean(dtype=np.float64)),
        second=scale * float(second.mean(dtype=np.float64)),
        difference=scale * float(differences.mean()),
        low=scale * low,
        high=scale * high,
        first_only=first_only,
        second_only=second_only,
        test=test,
        p=p,
        effect_name="Cohen's g" if binary else "Cohen's d_z",
        effect=effect,
    )


def compare_resamples(metrics: tuple[float, float], values: Sequence[np.ndarray], images: int) -> PairedTest:
    """Compare two metrics by their values (R,) on the same resamples. d_z is t divided by the root of `images`."""
    differences = values[0] - values[1]
    low, high = bootstrap_interval(differences, images)
    spread = float(np.nanstd(differences) * np.sqrt(images))
    difference = metrics[0] - metrics[1]
    return PairedTest(
        images=images,
        first=metrics[0],
        second=metrics[1],
        difference=difference,
        low=low,
        high=high,
        first_only=None,
        second_only=None,
        test="bootstrap over images",
        p=bootstrap_p_value(differences, images),
        effect_name="Cohen's d_z",
        effect=difference / spread if spread else None,
    )


def rounded_differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """first - second (N,), rounded such that differences below the resolution of float32 are 0."""
    assert first.shape == second.shape and len(first)
    return np.round(first.astype(np.float64) - second.astype(np.float64), DECIMALS)


def discordant(differences: np.ndarray) -> tuple[int, int]:
    """Number of images that only the first, and only the second has right."""
    return int((differences > 0).sum()), int((differences < 0).sum())


def is_binary(values: np.ndarray) -> bool:
    """Whether all values are 0 or 1."""
    return bool(((values == 0) | (values == 1)).all())


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided exact p of McNemar's test from the two discordant counts: twice the tail of Binomial(n, 1/2)."""
    from scipy.special import betainc

    fewer, more = sorted((first_only, second_only))
    # P(X <= fewer) = I_{1/2}(n - fewer, fewer + 1); scipy.stats.binomtest is 1000 times slower.
    return min(1.0, 2 * float(betainc(more, fewer + 1, 0.5))) if more > fewer else 1.0


def discordant_interval(first_only: int, second_only: int, images: int) -> tuple[float, float]:
    """Percentile interval of the mean of `images` differences, after adding one image in favour of either side.

    A resample has X images that only the first has right, and Y that only the second has right; (X, Y) is multinomial.
    X - Y has the characteristic function (1 - p - q + p e^it + q e^-it)^n, whose inverse Fourier transform is its
    distribution.
    """
    ahead, behind, total = first_only + 1, second_only + 1, images + 2
    centre = ahead - behind
    spread = float(np.sqrt(ahead + behind - centre**2 / total))
    # Probability beyond 12 standard deviations wraps around, which is negligible.
    length = 1 << int(min(2 * total + 1, 24 * spread + 80)).bit_length()
    angle = 2 * np.pi * np.arange(length // 2 + 1) / length
    characteristic = 1 + ((ahead + behind) * (np.cos(angle) - 1) + 1j * centre * np.sin(angle)) / total  # of an image
    probabilities = np.fft.irfft(np.conj(characteristic**total * np.exp(-1j * centre * angle)), length)
    cumulative = np.cumsum(np.roll(probabilities, length // 2))  # of X - Y - centre, from -length / 2 on
    ends = np.searchsorted(cumulative, (LEVEL / 2, 1 - LEVEL / 2)) - length // 2 + centre
    return float(ends[0] / total), float(ends[1] / total)


def mean_test(differences: np.ndarray, resamples: int) -> tuple[Test, tuple[float, float], float]:
    """The name of the test for differences (N,), the interval of their mean, and the two-sided p of a mean of 0."""
    if len(differences) > MOST_IMAGES and len(np.unique(differences)) + 2 > FEW_VALUES:  # `bootstrap` adds two
        return "paired t", *paired_t(differences)
    return "paired bootstrap", *bootstrap(differences, resamples)


def paired_t(differences: np.ndarray) -> tuple[tuple[float, float], float]:
    """Student's t interval of the mean of differences (N,), and the two-sided p of a mean of 0."""
    from scipy.special import stdtr, stdtrit

    freedom, mean = len(differences) - 1, float(differences.mean())
    error = float(differences.std(ddof=1)) / sqrt(len(differences))
    half = error * float(stdtrit(freedom, 1 - LEVEL / 2))
    return (mean - half, mean + half), 2 * float(stdtr(freedom, -abs(mean) / error))


def bootstrap(differences: np.ndarray, resamples: int, seed: int = 0) -> tuple[tuple[float, float], float]:
    """Bootstrap percentile interval of the mean of differences (N,), and the two-sided p of a mean of 0.

    p is the fraction of resamples, centred at 0, that reach the observed t. One image in favour of either side is added
    first; interval and p use the same resamples.
    """
    farthest = np.abs(differences).max() or 1.0
    differences = np.append(differences, (farthest, -farthest))  # as large as the largest observed difference
    images, mean = len(differences), differences.mean()
    values, counts = np.unique(differences - mean, return_counts=True)
    if len(values) <= FEW_VALUES:
        draws: Iterable[np.ndarray] = _draws_of_values(counts, resamples, seed)
    else:
        values, draws = differences - mean, _draws_of_images(images, resamples, seed)
    powers = np.stack([values, values**2], axis=1)
    moments = np.concatenate([drawn.astype(np.float64) @ powers for drawn in draws]) / images  # (R, 2) around the mean
    spreads = np.sqrt(np.maximum(moments[:, 1] - moments[:, 0] ** 2, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(moments[:, 0] / spreads)  # t without the factor sqrt(N), like the observed one; equal values: inf
    reached = int((np.nan_to_num(t, nan=0.0, posinf=np.inf) >= abs(mean) / differences.std()).sum())
    low, high = mean + np.quantile(moments[:, 0], (LEVEL / 2, 1 - LEVEL / 2))
    return (float(low), float(high)), (1 + reached) / (1 + resamples)


def _draws_of_values(counts: np.ndarray, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Resamples of images, as counts (r, V) of their V distinct values, which occur `counts` (V,) times."""
    generator, rows = np.random.default_rng(seed), max(1, BLOCK // len(counts))
    for first in range(0, resamples, rows):
        yield generator.multinomial(counts.sum(), counts / counts.sum(), size=min(rows, resamples - first))


@lru_cache(maxsize=1)
def _draws_of_images(images: int, resamples: int, seed: int) -> list[np.ndarray]:
    """Resamples as counts (r, N) of the images, in uint8: of more than 50 images, none is drawn 256 times."""
    generator, rows, blocks = np.random.default_rng(seed), max(1, BLOCK // images), []
    for first in range(0, resamples, rows):
        drawn = generator.integers(images, size=(min(rows, resamples - first), images))
        drawn += images * np.arange(len(drawn))[:, None]  # so that one bincount serves all rows
        blocks.append(np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.uint8))
    return blocks


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for multiple comparisons (Holm 1979), in the order of `p`."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p, np.float64)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected.tolist()


def holm_of_networks(p: Mapping[Tested, float], network: Callable[[Tested], Hashable]) -> dict[Tested, float]:
    """Corrected p of each test. Equal tests of one network, which copies of it under other names have, count as one."""
    distinct = {(network(test), value): value for test, value in p.items()}
    corrected = dict(zip(distinct, holm(list(distinct.values())), strict=True))
    return {test: corrected[network(test), value] for test, value in p.items()}
