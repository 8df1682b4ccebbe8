"""Scores from areas: mmseg's own, and intervals that cover what they should."""

import numpy as np
import pytest
import torch

from downstream.libraries import quiet_libraries
from downstream.scores import intervals, scores

with quiet_libraries():
    from downstream.segmentors import AreasMetric


def test_the_metric_is_mmsegs_and_keeps_areas():
    """Three images by hand: a 255 is not counted, class 3 occurs nowhere."""
    metric = AreasMetric()
    metric.dataset_meta = {"classes": ("a", "b", "c", "d")}
    labels = torch.tensor([[0, 0, 1, 255], [1, 1, 1, 1], [2, 2, 0, 255]])
    predicted = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0], [2, 2, 2, 2]])
    for label, prediction in zip(labels, predicted, strict=True):
        sample = {"pred_sem_seg": {"data": prediction[None]}, "gt_sem_seg": {"data": label[None]}}
        metric.process({}, [sample])
    found = metric.evaluate(3)
    assert found["mIoU"] == pytest.approx(100 * np.mean([1 / 4, 3 / 6, 2 / 4]))
    assert found["aAcc"] == pytest.approx(100 * 6 / 10)
    assert found["mAcc"] == pytest.approx(100 * np.mean([1 / 3, 3 / 5, 1]))
    assert metric.arrays["areas"].shape == (3, 4, 3)
    assert metric.arrays["areas"][0].tolist() == [[1, 1, 2], [1, 2, 1], [0, 0, 0], [0, 0, 0]]


def drawn(images: int, seed: int) -> np.ndarray:
    """Areas of 1000 pixels an image in two equal classes, whose share of right pixels varies between images."""
    share = np.random.RandomState(seed).beta(8, 2, size=(images, 2))
    right = np.rint(500 * share)
    wrong = 500 - right
    return np.stack([right, right + wrong[:, ::-1], np.full((images, 2), 500)], axis=-1).astype(np.int32)


def test_intervals_cover_at_the_stated_rate():
    """Of 100 sets of 80 images each, 95 % +- 3 standard deviations (2.2) hold the accuracy of the whole population."""
    covered = 0
    for seed in range(100):
        low, high = intervals([drawn(80, seed)], seed=seed, resamples=200)["aAcc"]
        covered += low <= 80.0 <= high
    assert 86 <= covered <= 100


def test_an_interval_of_a_mean_over_trainings():
    first, second = drawn(60, 1), drawn(60, 2)
    alone, both = intervals([first], seed=0), intervals([first, second], seed=0)
    middle = np.mean([scores(first)["mIoU"], scores(second)["mIoU"]])
    low, high = both["mIoU"]
    assert low < middle < high and high - low < alone["mIoU"][1] - alone["mIoU"][0]


def test_identical_images_have_no_interval():
    areas = np.repeat(drawn(1, 3), 20, axis=0)
    low, high = intervals([areas], seed=0)["mIoU"]
    assert low == pytest.approx(high) == pytest.approx(scores(areas)["mIoU"])
