"""Resamples of images: drawn with replacement, and the same ones for every outcome on as many images."""

import numpy as np
import pytest

from engine import tasks
from engine.tasks import resampled


def test_draws_are_with_replacement_and_the_same_each_time():
    seen = []
    values = resampled(lambda weights: seen.append(weights) or {"first": weights[:, 0]}, 7)["first"]
    weights = np.concatenate(seen)
    assert weights.shape == (tasks.MAX_RESAMPLES, 7) and (weights.sum(1) == 7).all() and (values == weights[:, 0]).all()
    assert values.var() == pytest.approx(6 / 7, rel=0.1)  # of Binomial(7, 1 / 7)
    assert np.array_equal(values, resampled(lambda weights: {"first": weights[:, 0]}, 7)["first"])


def test_the_draws_are_those_that_kept_results_rest_on():
    """Values kept with results are compared with later ones: other draws would unpair them."""
    first = []
    resampled(lambda weights: first.append(weights[0].astype(int).tolist()) or {"of": weights[:, 0]}, 10)
    assert first[0] == [1, 1, 1, 1, 1, 1, 1, 2, 1, 0]


def test_many_images_are_resampled_less_often(monkeypatch):
    monkeypatch.setattr(tasks, "DRAWN", 1000)
    assert [len(resampled(lambda weights: {"first": weights[:, 0]}, images)["first"]) for images in (30, 1000)] == [
        34,
        1,
    ]


def test_a_score_without_a_name_is_refused():
    with pytest.raises(ValueError, match="returned ndarray; return name"):
        resampled(lambda weights: weights[:, 0], 7)
