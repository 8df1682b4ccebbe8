"""Scores from areas: mmseg's own, and those of resampled images, which cover what they should."""

import numpy as np
import pytest
import torch

from downstream.metrics.previews import preview_masks, thumbnail
from downstream.metrics.scores import scores, weighted_scores
from downstream.models.operators import quiet_libraries

with quiet_libraries():
    from downstream.models.segmentors import AreasMetric


def test_the_metric_is_mmsegs_and_keeps_areas():
    """Three images by hand: a 255 is not counted, class 3 occurs nowhere."""
    metric = AreasMetric()
    metric.dataset_meta = {"classes": ("a", "b", "c", "d")}
    labels = torch.tensor([[0, 0, 1, 255], [1, 1, 1, 1], [2, 2, 0, 255]])
    predicted = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0], [2, 2, 2, 2]])
    for label, prediction in zip(labels, predicted, strict=True):
        sample = {"pred_sem_seg": {"data": prediction[None, None]}, "gt_sem_seg": {"data": label[None, None]}}
        metric.process({}, [sample])
    found = metric.evaluate(3)
    assert found["mIoU"] == pytest.approx(100 * np.mean([1 / 4, 3 / 6, 2 / 4]))
    assert found["aAcc"] == pytest.approx(100 * 6 / 10)
    assert found["mAcc"] == pytest.approx(100 * np.mean([1 / 3, 3 / 5, 1]))
    assert metric.arrays["areas"].shape == (3, 4, 3)
    assert metric.arrays["areas"][0].tolist() == [[1, 1, 2], [1, 2, 1], [0, 0, 0], [0, 0, 0]]
    assert metric.arrays["shown_masks"][:, 0, :4].tolist() == predicted.tolist()
    assert metric.arrays["shown_of"].tolist() == [0, 1, 2] and metric.arrays["shown_sizes"].tolist() == [[1, 4]] * 3


def test_small_masks_are_of_images_spread_over_all_and_keep_their_aspect():
    masks = [thumbnail(torch.full((300, 400), number)) for number in range(20)]
    found = preview_masks(masks)
    assert found["shown_of"].tolist() == [0, 2, 5, 7, 10, 12, 15, 17]
    assert found["shown_sizes"].tolist() == [[96, 128]] * 8
    assert (found["shown_masks"][3, :96] == 7).all() and not found["shown_masks"][:, 96:].any()
    columns = thumbnail(torch.arange(256).repeat(2, 1))
    assert columns.shape == (1, 128) and columns[0, :3].tolist() == [1, 3, 5]


def drawn(images: int, seed: int) -> np.ndarray:
    """Areas of 1000 pixels an image in two equal classes, whose share of right pixels varies between images."""
    share = np.random.RandomState(seed).beta(8, 2, size=(images, 2))
    right = np.rint(500 * share)
    wrong = 500 - right
    return np.stack([right, right + wrong[:, ::-1], np.full((images, 2), 500)], axis=-1).astype(np.int32)


def test_a_weight_is_so_many_copies_of_an_image():
    first, second = drawn(12, 1), drawn(12, 2)
    weights = np.random.RandomState(0).multinomial(12, np.full(12, 1 / 12), size=3)
    found = weighted_scores([first, second], weights.astype(np.float64))
    for row, each in enumerate(weights):
        copies = [scores(np.repeat(areas, each, axis=0)) for areas in (first, second)]
        assert all(found[name][row] == pytest.approx(np.mean([each[name] for each in copies])) for name in copies[0])
