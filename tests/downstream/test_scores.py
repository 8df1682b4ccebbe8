"""Segmentation scores from areas, those of resampled images, and preview masks."""

import numpy as np
import pytest
import torch

from downstream.metrics.previews import preview_masks, thumbnail
from downstream.metrics.scores import scores, weighted_scores
from downstream.models.operators import quiet_libraries

with quiet_libraries():
    from downstream.models.segmentors import AreasMetric


def test_metric_equals_scores_by_hand_and_keeps_areas():
    """Three images: 255 is ignored, class 3 does not occur."""
    metric = AreasMetric()
    metric.dataset_meta = {"classes": ("a", "b", "c", "d")}
    labels = torch.tensor([[0, 0, 1, 255], [1, 1, 1, 1], [2, 2, 0, 255]])
    predicted = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0], [2, 2, 2, 2]])
    for label, prediction in zip(labels, predicted, strict=True):
        sample = {"pred_sem_seg": {"data": prediction[None, None]}, "gt_sem_seg": {"data": label[None, None]}}
        metric.process({}, [sample])
    metrics = metric.evaluate(3)
    assert metrics["mIoU"] == pytest.approx(100 * np.mean([1 / 4, 3 / 6, 2 / 4]))
    assert metrics["aAcc"] == pytest.approx(100 * 6 / 10)
    assert metrics["mAcc"] == pytest.approx(100 * np.mean([1 / 3, 3 / 5, 1]))
    assert metric.arrays["areas"].shape == (3, 4, 3)
    assert metric.arrays["areas"][0].tolist() == [[1, 1, 2], [1, 2, 1], [0, 0, 0], [0, 0, 0]]
    assert metric.arrays["shown_masks"][:, 0, :4].tolist() == predicted.tolist()
    assert metric.arrays["shown_of"].tolist() == [0, 1, 2] and metric.arrays["shown_sizes"].tolist() == [[1, 4]] * 3


def test_previews_are_spread_over_the_images_and_keep_their_aspect():
    masks = [thumbnail(torch.full((300, 400), value)) for value in range(20)]
    previews = preview_masks(masks)
    assert previews["shown_of"].tolist() == [0, 2, 5, 7, 10, 12, 15, 17]
    assert previews["shown_sizes"].tolist() == [[96, 128]] * 8
    assert (previews["shown_masks"][3, :96] == 7).all() and not previews["shown_masks"][:, 96:].any()
    columns = thumbnail(torch.arange(256).repeat(2, 1))
    assert columns.shape == (1, 128) and columns[0, :3].tolist() == [1, 3, 5]


def random_areas(images: int, seed: int) -> np.ndarray:
    """Areas of 1000 pixels per image in two equal classes, with an accuracy that varies between images."""
    accuracy = np.random.RandomState(seed).beta(8, 2, size=(images, 2))
    correct = np.rint(500 * accuracy)
    wrong = 500 - correct
    return np.stack([correct, correct + wrong[:, ::-1], np.full((images, 2), 500)], axis=-1).astype(np.int32)


def test_a_weighted_image_counts_like_that_many_copies():
    first, second = random_areas(12, 1), random_areas(12, 2)
    weights = np.random.RandomState(0).multinomial(12, np.full(12, 1 / 12), size=3)
    weighted = weighted_scores([first, second], weights.astype(np.float64))
    for row, repeats in enumerate(weights):
        copies = [scores(np.repeat(areas, repeats, axis=0)) for areas in (first, second)]
        assert all(weighted[name][row] == pytest.approx(np.mean([copy[name] for copy in copies])) for name in copies[0])
