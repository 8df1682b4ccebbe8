"""Tests of mIoU and AP: two equal models are called different no more often than promised, real differences found."""

from functools import partial

import numpy as np
import pytest

from bench.statistics.intervals import bootstrap_interval, bootstrap_p_value
from bench.statistics.paired import compare_resamples
from downstream.metrics import scores
from engine.tasks import resampled

pytestmark = pytest.mark.slow

CLASSES, MOST = 8, 12


def drawn_areas(generator: np.random.Generator, images: int, shared: float, better: float = 0.0) -> list[np.ndarray]:
    """Areas (N, K, 3) of two models on the same images, in which frequent and rare classes occur in any size.

    shared: of what makes a class hard in an image, the part that both models meet; better: the first is by so much.
    """
    there = generator.random((images, CLASSES)) < 0.6 ** np.arange(CLASSES) + 0.05
    labelled = np.where(there, generator.gamma(1.0, 1000.0, there.shape), 0).astype(int)
    hard, models = generator.normal(size=there.shape), []
    for ahead in (better, 0.0):
        easy = np.sqrt(shared) * hard + np.sqrt(1 - shared) * generator.normal(size=there.shape) + 0.8 + ahead
        right = (labelled / (1 + np.exp(-1.5 * easy))).astype(int)
        taken = generator.permuted(labelled - right, axis=1)  # wrong pixels are taken for other classes of the image
        models.append(np.stack([right, right + np.where(there.any(1)[:, None], taken, 0), labelled], axis=-1))
    return models


def drawn_detections(generator: np.random.Generator, images: int, shared: float, better: float = 0.0) -> list[dict]:
    """What an outcome keeps of two detectors on the same images: up to five objects, of four classes, in each."""
    models = [
        {
            "classes": np.full((images, MOST), scores.NO_DETECTION, np.int16),
            "scores": np.zeros((images, MOST), np.float32),
            "objects": np.zeros((images, 4), np.uint16),
            **{f"{kind}_{what}": np.zeros((images, MOST), np.uint16) for kind in KINDS for what in ("hits", "passed")},
        }
        for _ in range(2)
    ]
    for image in range(images):
        classes = generator.integers(0, 4, generator.integers(0, 6))
        hard = generator.normal(size=len(classes))
        for model, ahead in zip(models, (better, 0.0), strict=True):
            np.add.at(model["objects"][image], classes, 1)
            easy = np.sqrt(shared) * hard + np.sqrt(1 - shared) * generator.normal(size=len(classes)) + ahead
            found = np.flatnonzero(easy > -1.5)
            false = generator.integers(0, 4, min(generator.poisson(3), MOST - len(found)))
            sure = np.concatenate([easy[found], generator.normal(-0.7, 0.5, len(false))])
            reached = np.clip(5 + 3.5 * easy[found], 0, 10).astype(int)  # thresholds of overlap
            rows = (np.append(classes[found], false), np.append((1 << reached) - 1, np.zeros(len(false), int)), sure)
            order = np.argsort(-sure)
            for name, values in zip(("classes", "box_hits", "scores"), rows, strict=True):
                model[name][image, : len(order)] = values[order]
    return models


KINDS = ("box", "mask")


def metrics_of(values: list, kind: str) -> tuple:
    """Number and values on resamples of two models in mIoU or box AP."""
    if kind == "mIoU":
        score, images = [partial(scores.weighted_scores, [areas]) for areas in values], len(values[0])
    else:
        score, images = [partial(of_boxes, arrays) for arrays in values], len(values[0]["classes"])
    now = tuple(float(each(np.ones((1, images)))[kind][0]) for each in score)
    return now, tuple(resampled(each, images)[kind] for each in score), images


def of_boxes(arrays: dict, weights: np.ndarray) -> dict[str, np.ndarray]:
    return scores.average_precisions(arrays, "box", weights)


DRAWN = {"mIoU": drawn_areas, "AP": drawn_detections}


@pytest.mark.parametrize(
    ("kind", "images", "draws"),
    [("mIoU", 24, 150), ("mIoU", 100, 150), pytest.param("AP", 24, 50, marks=pytest.mark.exhaustive)],
)
def test_equal_models_differ_about_as_often_as_promised(kind, images, draws, monkeypatch):
    """5 % of the draws, and three standard deviations more; docs/results.md has the figures of many draws."""
    assert rejected(kind, images, draws, monkeypatch) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)


def rejected(kind: str, images: int, draws: int, monkeypatch, shared: float = 0.5) -> float:
    monkeypatch.setattr("engine.tasks.MAX_RESAMPLES", 200)
    generator, found = np.random.default_rng(images), []
    for _ in range(draws):
        found.append(compare_resamples(*metrics_of(DRAWN[kind](generator, images, shared), kind)))
        low, high = found[-1].low, found[-1].high
        assert abs(found[-1].p - 0.05) < 0.03 or (low <= 0 <= high) == (found[-1].p > 0.05)
    return float(np.mean([each.p <= 0.05 for each in found]))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_real_difference_is_found(kind, monkeypatch):
    monkeypatch.setattr("engine.tasks.MAX_RESAMPLES", 2000)
    values = metrics_of(DRAWN[kind](np.random.default_rng(1), 60, shared=0.8, better=1.0), kind)
    found = compare_resamples(*values)
    assert found.difference == pytest.approx(found.first - found.second) and 3 < found.low < found.difference
    assert found.p < 0.01 and found.effect > 0.2 and found.images == 60
    assert found.test == "bootstrap over images" and found.first_only is found.odds_ratio is None
    turned = compare_resamples(values[0][::-1], values[1][::-1], 60)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low)) and turned.p == found.p


def test_the_same_images_make_the_difference_sharp():
    """Drawn for each alone, the resamples would leave the difference of two alike models as wide as the numbers."""
    _, values, images = metrics_of(drawn_areas(np.random.default_rng(2), 60, shared=0.95, better=0.3), "mIoU")
    alone = np.random.default_rng(0).permutation(values[1])
    low, high = bootstrap_interval(values[0] - values[1], images)
    wide = bootstrap_interval(values[0] - alone, images)
    assert low > 0 > wide[0] and high - low < (wide[1] - wide[0]) / 2
    assert bootstrap_p_value(values[0] - values[1], images) < 0.05 < bootstrap_p_value(values[0] - alone, images)


def test_normal_values_have_students_interval():
    """Means of 12 normal numbers: what Student's t says of them, where plain percentiles are a tenth narrower."""
    numbers = np.random.default_rng(3).normal(size=12)
    numbers = (numbers - numbers.mean()) / numbers.std(ddof=1)
    values = resampled(lambda weights: {"mean": weights @ numbers / 12}, 12)["mean"]
    low, high = bootstrap_interval(values, 12)
    assert (high - low) / 2 == pytest.approx(2.201 / np.sqrt(12), rel=0.05)


def test_equal_values_do_not_differ_and_empty_resamples_are_left_out():
    values = np.random.default_rng(4).normal(50, 3, 300)
    same = compare_resamples((50.0, 50.0), (values, values), 24)
    assert (same.difference, same.low, same.high, same.p, same.effect) == (0.0, 0.0, 0.0, 1.0, None)
    holes = np.append(values, [np.nan] * 20)
    assert bootstrap_interval(holes, 24) == bootstrap_interval(values, 24)
    assert bootstrap_p_value(holes, 24) == bootstrap_p_value(values, 24)
