"""Paired tests keep their error rates on equal models, detect real differences and agree with exact formulas."""

from functools import cache

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from bench.statistics import paired
from bench.statistics.paired import (
    bootstrap,
    compare_images,
    discordant_interval,
    holm,
    mcnemar,
    rounded_differences,
)

DRAWS = 1000


def equal_models(images: int, shared: float, seed: int, splits: int = 1) -> np.ndarray:
    """Correctness (2, DRAWS, images) of two equally good models (mean 0.8), averaged over splits.

    shared: how often both err on the same images, from 0 (by chance) to 1 (always).
    """
    generator = np.random.default_rng(seed)
    common = generator.random((splits, 1, DRAWS, images)) < 0.8
    independent = generator.random((splits, 2, DRAWS, images)) < 0.8
    return np.where(generator.random((splits, 1, DRAWS, images)) < shared, common, independent).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("images", [100, 500])
def test_mcnemar_rejects_equal_models_in_at_most_5_percent(images, shared):
    first, second = equal_models(images, shared, seed=4)
    ahead, behind = ((first > second).sum(1), (first < second).sum(1))
    p = np.array([mcnemar(*map(int, counts)) for counts in zip(ahead, behind, strict=True)])
    assert np.mean(p <= 0.05) <= 0.05
    assert shared > 0.5 or np.mean(p <= 0.05) > 0.02, "a test that never rejects is no test"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.7, pytest.param(0.0, marks=pytest.mark.exhaustive)])
def test_bootstrap_rejects_equal_models_averaged_over_splits_in_at_most_5_percent(shared):
    """3000 draws have a standard error of 0.4 %; the rate is near 4 %."""
    p = []
    for seed in (5, 6, 7):
        pairs = zip(*equal_models(100, shared, seed, splits=3), strict=True)
        p += [bootstrap(rounded_differences(*values), 300, seed=draw)[1] for draw, values in enumerate(pairs)]
    assert 0.01 < np.mean(np.array(p) <= 0.05) <= 0.05


def test_holm_keeps_the_familywise_error_rate_at_5_percent():
    """Eight metrics of two equal models: any false rejection in at most 5 % of the draws."""
    counts = np.random.default_rng(6).multinomial(200, [0.16, 0.16, 0.68], size=(DRAWS, 8))
    p_value = cache(mcnemar)
    families = [[p_value(int(ahead), int(behind)) for ahead, behind, _ in family] for family in counts]
    uncorrected = np.mean([min(family) <= 0.05 for family in families])
    corrected = np.mean([min(holm(family)) <= 0.05 for family in families])
    assert corrected <= 0.05 < 0.15 < uncorrected


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.15, 0.05), (0.02, 0.02), (0.05, 0.0)])
def test_coverage_of_the_interval_of_the_difference(rates):
    """Over all outcomes: 93 % or more; more than 97 % only if very few images are discordant."""
    ahead, behind = rates
    counts = np.arange(60)
    chances = binom.pmf(counts, 200, ahead)[:, None] * binom.pmf(counts, 200 - counts[:, None], behind / (1 - ahead))
    covered = 0.0
    for first_only, second_only in zip(*np.nonzero(chances > 1e-6), strict=True):
        low, high = discordant_interval(int(first_only), int(second_only), 200)
        covered += chances[first_only, second_only] * (low <= ahead - behind + 1e-12 and high >= ahead - behind - 1e-12)
    assert covered >= 0.93
    assert covered <= 0.97 or min(rates) * 200 < 5


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (5, 1), (3, 3), (12, 30), (700, 800), (2, 9000)])
def test_mcnemar_equals_the_exact_binomial_test(counts):
    expected = min(1.0, 2 * binom.cdf(min(counts), sum(counts), 0.5)) if sum(counts) else 1.0
    assert mcnemar(*counts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ahead", "behind", "images"),
    [
        *((0, 0, 1), (0, 0, 100), (3, 0, 3), (5, 1, 40), (60, 20, 500)),
        *((900, 100, 1000), (2500, 2600, 50_000), (9, 0, 50_000)),
    ],
)
def test_the_exact_interval_equals_that_of_many_draws(ahead, behind, images):
    """To two images or 2 % of its length: the error of quantiles of 200,000 draws."""
    random, counts = np.random.default_rng(1), np.array([ahead + 1, behind + 1, images - ahead - behind])
    drawn = random.multinomial(images + 2, counts / (images + 2), size=200_000)
    expected = np.quantile((drawn[:, 0] - drawn[:, 1]) / (images + 2), (0.025, 0.975))
    tolerance = max(2 / (images + 2), 0.02 * (expected[1] - expected[0]))
    assert discordant_interval(ahead, behind, images) == pytest.approx(tuple(expected), abs=tolerance)


def test_the_exact_interval_by_hand():
    """One image and two added, none discordant: the sum of three draws from {1, -1, 0} is 3 or -3 with 1/27 each."""
    assert discordant_interval(0, 0, 1) == (-1.0, 1.0)
    assert discordant_interval(0, 0, 2) == (-0.75, 0.75)  # of four: 4 with 1/256, 3 with 4 * 2 / 256


def test_bootstrap_and_mcnemar_agree_on_many_discordant_images():
    differences = np.repeat([1.0, -1.0, 0.0], [140, 100, 760])
    _, p = bootstrap(differences, 20_000)
    assert p == pytest.approx(mcnemar(140, 100), abs=0.006)


def test_a_comparison_of_correct_images_uses_mcnemar():
    first = np.repeat([1, 1, 0, 0], [300, 60, 20, 120]).astype(np.float32)
    second = np.repeat([1, 0, 1, 0], [300, 60, 20, 120]).astype(np.float32)
    comparison = compare_images(first, second)
    assert (comparison.images, comparison.first, comparison.second) == (500, 72.0, 64.0)
    assert (comparison.first_only, comparison.second_only, comparison.test) == (60, 20, "McNemar, exact")
    assert comparison.difference == pytest.approx(8.0)
    assert comparison.effect == 0.25 and comparison.effect_name == "Cohen's g"
    half = 196 * np.sqrt((80 / 500 - 0.08**2) / 500)  # normal approximation, in points
    assert (comparison.low, comparison.high) == pytest.approx((8 - half, 8 + half), abs=0.2)
    assert comparison.p < 1e-4


def test_a_comparison_of_fractions_uses_the_bootstrap():
    generator = np.random.default_rng(8)
    first = (generator.random((3, 400)) < 0.8).mean(0).astype(np.float32)
    second = (generator.random((3, 400)) < 0.7).mean(0).astype(np.float32)
    comparison = compare_images(first, second)
    assert comparison.test == "paired bootstrap" and comparison.effect_name == "Cohen's d_z"
    assert comparison.first_only is comparison.second_only is None
    assert comparison.low < comparison.difference < comparison.high and comparison.p < 0.001


@pytest.mark.parametrize("images", [400, 4000])
def test_resampling_images_and_resampling_values_agree(images):
    """The same images with all different values, and with 20 values."""
    differences = np.random.default_rng(3).integers(-9, 11, images) / 20
    (low, high), p = bootstrap(differences + 1e-9 * np.arange(images), 20_000)
    (same_low, same_high), same_p = bootstrap(differences, 20_000)
    assert (low, high) == pytest.approx((same_low, same_high), abs=0.02 * (high - low))
    assert p == pytest.approx(same_p, abs=0.015)  # three standard errors of 20,000 draws


@pytest.mark.parametrize("t", [0.5, 2.0, 3.0])
def test_many_different_values_are_compared_by_a_paired_t_test(t):
    """6,000 log losses: equals scipy's test, and nearly a bootstrap, which adds two images and draws at random."""
    generator = np.random.default_rng(11)
    first, second = -np.log(generator.beta(4, 1, (2, 6000)))
    first += second.mean() - first.mean() + t * (first - second).std() / np.sqrt(6000)
    comparison = compare_images(first, second, scale=1.0)
    expected = ttest_rel(first, second)
    assert comparison.test == "paired t"
    assert comparison.p == pytest.approx(expected.pvalue, rel=1e-4)
    assert (comparison.low, comparison.high) == pytest.approx(expected.confidence_interval(), rel=1e-4)
    (low, high), p = bootstrap(first - second, 20_000)
    assert (low, high) == pytest.approx((comparison.low, comparison.high), abs=0.03 * (high - low))
    assert p == pytest.approx(comparison.p, abs=0.015)


@pytest.mark.parametrize(("values", "test"), [(48, "paired bootstrap"), (49, "paired t")])
def test_draws_of_many_images_are_never_kept(values, test, monkeypatch):
    monkeypatch.setattr(paired, "_draws_of_images", None)
    assert paired.mean_test(np.resize(np.arange(values) - 20.0, 6000), 100)[0] == test


def test_few_different_values_of_many_images_use_the_bootstrap():
    means = np.random.default_rng(12).binomial(3, 0.8, (2, 8000)) / 3
    assert compare_images(*means, resamples=200).test == "paired bootstrap"


def test_equal_models_have_an_interval_of_the_difference():
    same = np.ones(100)
    comparison = compare_images(same, same)
    assert (comparison.difference, comparison.p, comparison.effect) == (0.0, 1.0, None)
    assert comparison.low < -1 and comparison.high > 1  # in points: one image of 100


def test_the_same_fractions_do_not_differ():
    thirds = np.full(50, 1 / 3, np.float32)
    comparison = compare_images(thirds, thirds)
    assert (comparison.test, comparison.p, comparison.effect) == ("paired bootstrap", 1.0, None)


def test_holm_by_hand():
    """By hand: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1 raised to the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
