"""Bootstrap resamples: drawn with replacement, and the same for all outcomes on as many images."""

import numpy as np
import pytest

from engine import tasks
from engine.tasks import resampled


def test_draws_are_with_replacement_and_repeatable():
    blocks = []
    values = resampled(lambda weights: blocks.append(weights) or {"first": weights[:, 0]}, 7)["first"]
    weights = np.concatenate(blocks)
    assert weights.shape == (tasks.MAX_RESAMPLES, 7) and (weights.sum(1) == 7).all() and (values == weights[:, 0]).all()
    assert values.var() == pytest.approx(6 / 7, rel=0.1)  # of Binomial(7, 1 / 7)
    assert np.array_equal(values, resampled(lambda weights: {"first": weights[:, 0]}, 7)["first"])


def test_draws_equal_those_of_stored_results():
    """Stored results are compared with later ones in pairs, which other draws would break."""
    draws = []
    resampled(lambda weights: draws.append(weights[0].astype(int).tolist()) or {"first": weights[:, 0]}, 10)
    assert draws[0] == [1, 1, 1, 1, 1, 1, 1, 2, 1, 0]


def test_more_images_have_fewer_resamples(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_DRAWN_IMAGES", 1000)
    counts = [len(resampled(lambda weights: {"first": weights[:, 0]}, images)["first"]) for images in (30, 1000)]
    assert counts == [34, 1]


def test_a_score_without_a_name_is_refused():
    with pytest.raises(ValueError, match="returned ndarray"):
        resampled(lambda weights: weights[:, 0], 7)
