"""Our replacement for mmcv._ext, called by mmcv's functions, against a simple NMS and torchvision's autograd."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torchvision.ops import roi_align as reference_roi_align

from downstream.models import operators
from downstream.models.operators import quiet_libraries

with quiet_libraries():
    from mmcv.ops import RoIAlign, batched_nms, nms, roi_align
    from mmcv.ops.nms import soft_nms

COMPILED = operators.operators_in_use() == "compiled"


def boxes_of(count: int, seed: int, side: float = 40.0) -> torch.Tensor:
    """(count, 4) random boxes with corners in order."""
    corners = np.random.RandomState(seed).uniform(0, side, (count, 2, 2))
    return torch.from_numpy(np.concatenate([corners.min(1), corners.max(1)], axis=1)).float()


def reference_nms(boxes: np.ndarray, scores: np.ndarray, threshold: float, offset: int) -> list[int]:
    """Greedy suppression in float64; of equal scores the earlier box first."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        ious = []
        for other in kept:
            low, high = np.maximum(boxes[index, :2], boxes[other, :2]), np.minimum(boxes[index, 2:], boxes[other, 2:])
            intersection = np.prod(np.maximum(high - low + offset, 0))
            areas = [np.prod(boxes[i, 2:] - boxes[i, :2] + offset) for i in (index, other)]
            ious.append(intersection / (sum(areas) - intersection))
        if not ious or max(ious) <= threshold:
            kept.append(int(index))
    return kept


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("levels", [1000, 3])  # of scores: hardly any ties, and almost only ties
def test_nms_keeps_the_boxes_of_the_reference(offset, levels):
    boxes = boxes_of(120, seed=levels)
    scores = torch.from_numpy(np.random.RandomState(1).randint(1, levels + 1, 120) / levels).float()
    detections, kept = nms(boxes, scores, iou_threshold=0.5, offset=offset)
    assert kept.tolist() == reference_nms(boxes.double().numpy(), scores.numpy(), 0.5, offset)
    assert torch.equal(detections, torch.cat([boxes, scores[:, None]], dim=1)[kept])


def test_nms_keeps_a_box_whose_iou_equals_the_threshold():
    """3 of 5 pixels: computed in float32, this IoU is larger than the float64 threshold 0.6."""
    boxes = torch.tensor([[0.0, 0, 5, 1], [0, 0, 3, 1]])
    assert nms(boxes, torch.tensor([0.9, 0.8]), 0.6)[1].tolist() == [0, 1]


def test_nms_is_done_within_each_class():
    boxes, scores = boxes_of(60, seed=2), torch.rand(60, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(60) % 3
    _, kept = batched_nms(boxes, scores, classes, {"type": "nms", "iou_threshold": 0.4})
    expected = []
    for label in range(3):
        rows = torch.where(classes == label)[0].numpy()
        kept_rows = reference_nms(boxes.double().numpy()[rows], scores.numpy()[rows], 0.4, 0)
        expected += rows[kept_rows].tolist()
    assert sorted(kept.tolist()) == sorted(expected)


def test_nms_of_no_boxes_is_empty():
    assert nms(torch.zeros(0, 4), torch.zeros(0), 0.5)[1].tolist() == []


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling", [0, 2])
def test_roi_align_equals_torchvisions_forward_and_backward(aligned, sampling):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 12, 10, generator=generator, requires_grad=True)
    regions = torch.cat([torch.arange(9)[:, None] % 2, boxes_of(9, seed=3)], dim=1).float()
    twin = features.detach().clone().requires_grad_()
    ours = roi_align(features, regions, (4, 5), 0.25, sampling, "avg", aligned)
    theirs = reference_roi_align(twin, regions, (4, 5), 0.25, sampling, aligned)
    weights = torch.randn(ours.shape, generator=generator)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(features.grad, twin.grad)


@pytest.mark.skipif(COMPILED, reason="a compiled mmcv has these operators")
def test_unsupported_operators_are_named():
    boxes = boxes_of(3, seed=4)
    with pytest.raises(NotImplementedError, match="softnms"):
        soft_nms(boxes, torch.rand(3))
    with pytest.raises(NotImplementedError, match="pool_mode='max'"):
        RoIAlign((2, 2), pool_mode="max")(torch.randn(1, 1, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))


def test_compiled_operators_are_not_replaced(monkeypatch):
    module = ModuleType(operators.EXTENSION)
    monkeypatch.setitem(sys.modules, operators.EXTENSION, module)
    assert operators.install_operators() == "compiled" and sys.modules[operators.EXTENSION] is module
