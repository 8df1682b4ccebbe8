"""Confidence intervals of accuracies have their nominal coverage, for 0/1 values and for fractions."""

import numpy as np
import pytest
from scipy.stats import binom, binomtest, sem, t

from bench.statistics.intervals import accuracy_interval, averages_to, effective_images, of_mean, rate_interval

DRAWS = 1000


@pytest.mark.parametrize("images", [100, 500, 2000])
def test_coverage_over_all_rates(images):
    """Exact, as a sum over all counts: 95 % on average over rates. Near 100 %, the percentiles of the bootstrap would
    cover only 10 to 87 %."""
    correct = np.arange(images + 1)
    low, high = rate_interval(correct / images, np.full(images + 1, images))
    rates = np.append(np.linspace(0.05, 0.95, 181), [0.99, 0.999])
    covered = np.array([binom.pmf(correct, images, rate)[(low <= rate) & (rate <= high)].sum() for rate in rates])
    assert covered[:-2].min() > 0.93 and covered[:-2].max() < 0.97 and covered[-2:].min() > 0.925
    assert abs(covered[:-2].mean() - 0.95) < 0.003


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_coverage_of_means_over_three_splits(rate):
    """Images differ in difficulty, so the splits agree more often than independent ones."""
    generator = np.random.default_rng(3)
    ease = generator.beta(8 * rate, 8 * (1 - rate), (DRAWS, 200))
    means = (generator.random((3, DRAWS, 200)) < ease).mean(0)
    images = np.array([effective_images(row) for row in means])
    assert images.min() > 200
    low, high = rate_interval(means.mean(1), images)
    assert 0.93 <= np.mean((low <= rate) & (rate <= high)) <= 0.97


@pytest.mark.parametrize(("right", "images"), [(50, 100), (410, 500), (38000, 50000)])
def test_interval_is_close_to_wilson_and_to_the_bootstrap(right, images):
    values = np.arange(images) < right
    wilson = binomtest(right, images).proportion_ci(method="wilson")
    drawn = np.random.default_rng(0).multinomial(images, [right / images, 1 - right / images], 20000)[:, 0] / images
    one_image = 100 / images
    for expected in ((100 * wilson.low, 100 * wilson.high), 100 * np.quantile(drawn, (0.025, 0.975))):
        assert accuracy_interval(values) == pytest.approx(expected, abs=1.1 * one_image if images < 5000 else 0.02)


def test_interval_of_perfect_accuracy_is_not_empty():
    """0.05^(1/n): the rate at which half the probability of n correct images is 2.5 %."""
    assert accuracy_interval(np.ones(100)) == pytest.approx((100 * 0.05**0.01, 100))
    assert accuracy_interval(np.zeros(100)) == pytest.approx((0, 100 - 100 * 0.05**0.01))


def test_skipped_images_do_not_count():
    values = np.array([1, 0, 1, 1, np.nan, np.nan], np.float32)
    assert accuracy_interval(values) == accuracy_interval(np.array([1, 0, 1, 1]))


RIGHT = np.array([1, 1, 1, 0], np.float32)


@pytest.mark.parametrize(
    ("values", "metric", "unit", "expected"),
    [
        (RIGHT, 75.0, "%", True),
        (RIGHT, 60.0, "%", False),  # a mean over classes
        (50 * RIGHT, 3750.0, "%", False),  # not between 0 and 1
        (np.ones((4, 4)), 100.0, "%", False),
        (RIGHT * np.nan, 0.0, "%", False),
        (50 * RIGHT, 37.5, "s", True),
        (50 * RIGHT, 3750.0, "s", False),
        (np.array([-2.0, 1.0, np.nan]), -0.5, "", True),
        (np.zeros(3), 0.0, "MB", True),
    ],
)
def test_averages_to_checks_that_a_metric_is_the_mean_of_its_values(values, metric, unit, expected):
    assert averages_to(values, metric, unit) == expected


def test_float32_thirds_average_to_the_metric():
    thirds = np.tile(np.array([1 / 3, 1, 2 / 3], np.float32), 20001)
    assert averages_to(thirds, 200 / 3, "%")
    assert not averages_to(thirds, 200 / 3 + 0.01, "%")


def test_mean_of_skewed_values_has_nearly_students_interval():
    """Seconds of 200 images, some of them skipped; a single image has no interval."""
    seconds = np.random.default_rng(5).gamma(4.0, 0.001, 200)
    evaluated = seconds[:-20]
    ends, method = of_mean(np.where(np.arange(200) < 180, seconds, np.nan), "s")
    student = t.interval(0.95, len(evaluated) - 1, evaluated.mean(), sem(evaluated))
    assert ends == pytest.approx(student, abs=0.1 * (student[1] - student[0])) and "bootstrap" in method
    assert of_mean(seconds[:1], "s") == (None, "")
    assert of_mean(RIGHT, "%")[0] == accuracy_interval(RIGHT)
