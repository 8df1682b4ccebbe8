"""Tests of mIoU and AP by resampling keep their error rates on equal models and detect real differences."""

from functools import partial

import numpy as np
import pytest

from bench.statistics.intervals import bootstrap_interval, bootstrap_p_value, defined_images, of_resampled
from bench.statistics.paired import compare_resamples
from downstream.metrics import scores
from downstream.tasks.dense_knn import Hummingbird
from engine.tasks import resampled

pytestmark = pytest.mark.slow

CLASSES, MAX_DETECTIONS = 8, 12
HITS = ("box_hits", "box_passed", "mask_hits", "mask_passed")


def drawn_areas(generator: np.random.Generator, images: int, shared: float, better: float = 0.0) -> list[np.ndarray]:
    """Areas (N, K, 3) of two models on the same images, with frequent and rare classes of all sizes.

    shared: the part of the difficulty that both models share; better: the advantage of the first model.
    """
    present = generator.random((images, CLASSES)) < 0.6 ** np.arange(CLASSES) + 0.05
    labelled = np.where(present, generator.gamma(1.0, 1000.0, present.shape), 0).astype(int)
    difficulty, models = generator.normal(size=present.shape), []
    for ahead in (better, 0.0):
        skill = np.sqrt(shared) * difficulty + np.sqrt(1 - shared) * generator.normal(size=present.shape) + 0.8 + ahead
        correct = (labelled / (1 + np.exp(-1.5 * skill))).astype(int)
        confused = generator.permuted(labelled - correct, axis=1)  # wrong pixels become other classes
        models.append(np.stack([correct, correct + np.where(present.any(1)[:, None], confused, 0), labelled], axis=-1))
    return models


def drawn_detections(generator: np.random.Generator, images: int, shared: float, better: float = 0.0) -> list[dict]:
    """Arrays of the outcomes of two detectors on the same images, with up to five objects of four classes in each."""
    models = [
        {
            "classes": np.full((images, MAX_DETECTIONS), scores.NO_DETECTION, np.int16),
            "scores": np.zeros((images, MAX_DETECTIONS), np.float32),
            "objects": np.zeros((images, 4), np.uint16),
            **{name: np.zeros((images, MAX_DETECTIONS), np.uint16) for name in HITS},
        }
        for _ in range(2)
    ]
    for image in range(images):
        classes = generator.integers(0, 4, generator.integers(0, 6))
        difficulty = generator.normal(size=len(classes))
        for model, ahead in zip(models, (better, 0.0), strict=True):
            np.add.at(model["objects"][image], classes, 1)
            skill = np.sqrt(shared) * difficulty + np.sqrt(1 - shared) * generator.normal(size=len(classes)) + ahead
            detected = np.flatnonzero(skill > -1.5)
            false_classes = generator.integers(0, 4, min(generator.poisson(3), MAX_DETECTIONS - len(detected)))
            confidences = np.concatenate([skill[detected], generator.normal(-0.7, 0.5, len(false_classes))])
            thresholds = np.clip(5 + 3.5 * skill[detected], 0, 10).astype(int)  # thresholds of overlap
            rows = (
                np.append(classes[detected], false_classes),
                np.append((1 << thresholds) - 1, np.zeros(len(false_classes), int)),
                confidences,
            )
            order = np.argsort(-confidences)
            for name, values in zip(("classes", "box_hits", "scores"), rows, strict=True):
                model[name][image, : len(order)] = values[order]
    return models


def metrics_of(values: list, kind: str) -> tuple:
    """mIoU or box AP of two models: numbers, values on resamples, and the number of images."""
    if kind == "mIoU":
        score, images = [partial(scores.weighted_scores, [areas]) for areas in values], len(values[0])
    else:
        score, images = [partial(of_boxes, arrays) for arrays in values], len(values[0]["classes"])
    numbers = tuple(float(score_of(np.ones((1, images)))[kind][0]) for score_of in score)
    return numbers, tuple(resampled(score_of, images)[kind] for score_of in score), images


def of_boxes(arrays: dict, weights: np.ndarray) -> dict[str, np.ndarray]:
    return scores.average_precisions(arrays, "box", weights)


DRAWN = {"mIoU": drawn_areas, "AP": drawn_detections}


@pytest.mark.parametrize(
    ("kind", "images", "draws"),
    [("mIoU", 24, 150), ("mIoU", 100, 150), pytest.param("AP", 24, 50, marks=pytest.mark.exhaustive)],
)
def test_equal_models_are_rejected_in_about_5_percent(kind, images, draws, monkeypatch):
    """Up to three standard deviations, and not never; docs/results.md has the rates of many more draws."""
    assert 0 < rejected(kind, images, draws, monkeypatch) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)


def rejected(kind: str, images: int, draws: int, monkeypatch, shared: float = 0.5) -> float:
    monkeypatch.setattr("engine.tasks.MAX_RESAMPLES", 200)
    generator, comparisons = np.random.default_rng(images), []
    for _ in range(draws):
        comparisons.append(compare_resamples(*metrics_of(DRAWN[kind](generator, images, shared), kind)))
        low, high = comparisons[-1].low, comparisons[-1].high
        assert abs(comparisons[-1].p - 0.05) < 0.03 or (low <= 0 <= high) == (comparisons[-1].p > 0.05)
    return float(np.mean([comparison.p <= 0.05 for comparison in comparisons]))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_real_difference_is_detected(kind, monkeypatch):
    monkeypatch.setattr("engine.tasks.MAX_RESAMPLES", 2000)
    values = metrics_of(DRAWN[kind](np.random.default_rng(1), 60, shared=0.8, better=1.0), kind)
    comparison = compare_resamples(*values)
    assert (
        comparison.difference == pytest.approx(comparison.first - comparison.second)
        and 3 < comparison.low < comparison.difference
    )
    assert comparison.p < 0.01 and comparison.effect > 0.2 and comparison.images == 60
    assert comparison.test == "bootstrap over images" and comparison.first_only is None
    reversed_comparison = compare_resamples(values[0][::-1], values[1][::-1], 60)
    assert (reversed_comparison.low, reversed_comparison.high) == pytest.approx(
        (-comparison.high, -comparison.low)
    ) and reversed_comparison.p == comparison.p


def test_pairing_by_images_narrows_the_interval():
    """Independent resamples of two similar models would not detect their difference."""
    _, values, images = metrics_of(drawn_areas(np.random.default_rng(2), 60, shared=0.95, better=0.3), "mIoU")
    unpaired = np.random.default_rng(0).permutation(values[1])
    low, high = bootstrap_interval(values[0] - values[1], images)
    wide = bootstrap_interval(values[0] - unpaired, images)
    assert low > 0 > wide[0] and high - low < (wide[1] - wide[0]) / 2
    assert bootstrap_p_value(values[0] - values[1], images) < 0.05 < bootstrap_p_value(values[0] - unpaired, images)


def test_normal_values_have_students_interval():
    """Of means of 12 normal numbers, for which plain percentiles are a tenth narrower."""
    numbers = np.random.default_rng(3).normal(size=12)
    numbers = (numbers - numbers.mean()) / numbers.std(ddof=1)
    values = resampled(lambda weights: {"mean": weights @ numbers / 12}, 12)["mean"]
    low, high = bootstrap_interval(values, 12)
    assert (high - low) / 2 == pytest.approx(2.201 / np.sqrt(12), rel=0.05)


def test_equal_values_do_not_differ_and_nan_resamples_are_left_out():
    values = np.random.default_rng(4).normal(50, 3, 300)
    same = compare_resamples((50.0, 50.0), (values, values), 24)
    assert (same.difference, same.low, same.high, same.p, same.effect) == (0.0, 0.0, 0.0, 1.0, None)
    holes = np.append(values, [np.nan] * 20)
    assert bootstrap_interval(holes, 24) == bootstrap_interval(values, 24)
    assert bootstrap_p_value(holes, 24) == bootstrap_p_value(values, 24)


@pytest.mark.parametrize(
    "score", [lambda areas, weights: scores.weighted_scores([areas], weights), Hummingbird().weighted_metrics]
)
def test_images_without_labels_make_no_interval_narrower(score):
    labelled = np.array([[[6, 8, 7], [2, 3, 4]], [[1, 4, 5], [6, 10, 9]], [[9, 9, 9], [0, 1, 1]]])
    for count in (1, 2, 3):
        among_others = np.concatenate([labelled[:count], np.zeros((27, 2, 3), np.int64)])
        for name, values in resampled(partial(score, among_others), len(among_others)).items():
            assert defined_images(values, len(among_others)) == count
            interval, _ = of_resampled(values, len(among_others))
            if count == 1:
                assert interval is None
                continue
            alone = resampled(partial(score, labelled[:count]), count)[name]
            assert interval == pytest.approx(of_resampled(alone, count)[0], rel=0.02), f"{name} of {count} images"
