"""Mixup, CutMix and label smoothing equal timm's, with the boxes of timm 0.3.2; distribution of the draws."""

from collections import Counter

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target

from engine.seeding import AUGMENT, seeded
from imagesets.augmentation import draw_mix, mix_batch, smooth_labels

CLASSES, SMOOTHING = 7, 0.1
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.tensor([0, 3, 3, 6])


def by_timm(images: torch.Tensor, draws: list[float], monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    """timm's Mixup with these draws in place of its own, and the boxes of its release 0.3.2."""
    share, boxed, row, column = draws

    def box(shape: torch.Size, share: float, count: int | None = None) -> tuple[int, ...]:
        borders = []
        for side, centre in zip(shape[-2:], (int(row * shape[-2]), int(column * shape[-1])), strict=True):
            cut = int(side * np.sqrt(1 - share))
            borders += [np.clip(centre - cut // 2, 0, side), np.clip(centre + cut // 2, 0, side)]
        return tuple(borders)

    mix = Mixup(0.8, 1.0, label_smoothing=SMOOTHING, num_classes=CLASSES)
    monkeypatch.setattr(mix, "_params_per_batch", lambda: (share, bool(boxed)))
    monkeypatch.setattr("timm.data.mixup.rand_bbox", box)
    return mix(images.clone(), LABELS)


def test_mixing_equals_timms(monkeypatch):
    for draws in [
        [0.3, 0.0, 0.1, 0.2],
        [0.3, 1.0, 0.5, 0.5],
        [0.6, 1.0, 0.0, 0.99],  # cut off by two borders
        [0.81, 1.0, 0.7, 0.05],
        [1.0, 1.0, 0.4, 0.4],
        [0.0, 1.0, 0.9, 0.1],
        [0.999, 0.0, 0.5, 0.5],
    ]:
        for size in [(16, 16), (9, 13)]:
            images = torch.randn(4, 3, *size, generator=GENERATOR)
            ours = mix_batch(images, smooth_labels(LABELS, CLASSES, SMOOTHING), torch.tensor(draws))
            for actual, expected in zip(ours, by_timm(images, draws, monkeypatch), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("classes", [7, 10, 100, 1000])
def test_smoothing_equals_timms_bit_for_bit(classes):
    torch.testing.assert_close(
        smooth_labels(LABELS, classes, SMOOTHING), mixup_target(LABELS, classes, 1.0, SMOOTHING), rtol=0, atol=0
    )


def test_labels_without_smoothing_are_one_hot():
    assert torch.equal(smooth_labels(LABELS, CLASSES, 0.0), torch.eye(CLASSES)[LABELS])


@pytest.mark.parametrize(("mixup", "cutmix", "boxes"), [(0.8, 0.0, 0), (0.0, 1.0, 400), (0.8, 1.0, 200)])
def test_draws_have_the_moments_of_their_distributions(mixup, cutmix, boxes):
    """Beta(0.8, 0.8) has mean 0.5 and variance 1 / 10.4, Beta(1, 1) 1 / 12; either kind is as likely with both."""
    with seeded(AUGMENT, 0):
        draws = torch.stack([draw_mix(mixup, cutmix) for _ in range(400)])
    share, kind, row, column = draws.T
    assert abs(Counter(kind.tolist())[1.0] - boxes) < 40 and set(kind.tolist()) <= {0.0, 1.0}
    for values in (share, row, column):
        assert values.min() >= 0 and values.max() <= 1 and abs(values.mean() - 0.5) < 0.05
    variance = {0: 1 / 10.4, 400: 1 / 12}.get(boxes, (1 / 10.4 + 1 / 12) / 2)
    assert abs(share.var() - variance) < 0.015
