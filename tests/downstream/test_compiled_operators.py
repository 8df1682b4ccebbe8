"""The stand-in for mmcv._ext against mmcv's compiled operators, alone and inside whole detectors.

Needs an mmcv with operators, or MMCV_EXT, the path of a shared object that holds them: compile_operators.py makes one.
Scores are kept distinct: of equal ones the compiled NMS keeps whichever its unstable sort puts first. `pytest -s`
prints the largest differences.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from torch import Tensor
from toy_scenes import export_of

from downstream.data.scenes import open_scenes
from downstream.detection import Detection
from downstream.models import operators
from downstream.models.operators import quiet_libraries
from downstream.tasks.cascade_coco import PROTOCOLS as CASCADE
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASK

with quiet_libraries():
    from mmcv.ops import nms, roi_align


def compiled() -> ModuleType | None:
    """mmcv's own operators, if there are any here."""
    if operators.which() == "compiled":
        return sys.modules[operators.NAME]
    if "MMCV_EXT" not in os.environ:
        return None
    spec = spec_from_file_location("_ext", os.environ["MMCV_EXT"])
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILED = compiled()
if COMPILED is None:
    pytest.skip("no compiled operators: see compile_operators.py and MMCV_EXT", allow_module_level=True)
DETECTORS = {
    "maskrcnn": replace(MASK["maskrcnn@smoke"].task, least_score=0.0, drop_path=0.1),
    "cascade": replace(CASCADE["cascade@smoke"].task, least_score=0.0, drop_path=0.1),
    "maskrcnn l1": replace(MASK["maskrcnn@smoke"].task, least_score=0.0, box_loss="l1", proposals=(200, 200)),
}


@pytest.fixture
def with_both(monkeypatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Work done through mmcv's functions twice: on the stand-in, and on the compiled operators."""

    def done(work: Callable[[], Any]) -> tuple[Any, Any]:
        found = []
        for module in (operators, COMPILED):
            for user in ("mmcv.ops.nms", "mmcv.ops.roi_align"):
                monkeypatch.setattr(sys.modules[user], "ext_module", module)
            found.append(work())
        return found[0], found[1]

    return done


def boxes_of(count: int, seed: int, side: float) -> Tensor:
    """(count, 4) random boxes with corners in order."""
    corners = np.random.RandomState(seed).uniform(0, side, (count, 2, 2))
    return torch.from_numpy(np.concatenate([corners.min(1), corners.max(1)], axis=1)).float()


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)) if len(theirs) else 0.0


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("offset", [0, 1])
def test_nms(with_both, offset, threshold):
    for seed in range(10):
        boxes = boxes_of(1000, seed, side=100.0).round() if seed % 2 else boxes_of(1000, seed, side=100.0)
        scores = torch.randperm(1000, generator=torch.Generator().manual_seed(seed)) / 1000
        ours, theirs = with_both(lambda boxes=boxes, scores=scores: nms(boxes, scores, threshold, offset))
        assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[0], theirs[0])


def test_an_overlap_of_just_the_threshold(with_both):
    boxes = torch.tensor([[0.0, 0, 5, 1], [0, 0, 3, 1]])
    ours, theirs = with_both(lambda: nms(boxes, torch.tensor([0.9, 0.8]), 0.6)[1].tolist())
    assert ours == theirs == [0, 1]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roi_align_forward_and_backward(with_both, aligned, sampling, dtype):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 16, 50, 40, generator=generator, dtype=dtype)
    regions = torch.cat([torch.arange(200)[:, None] % 2, boxes_of(200, seed=3, side=180.0)], dim=1).to(dtype)
    weights = torch.randn(200, 16, 7, 7, generator=generator, dtype=dtype)

    def work() -> tuple[Tensor, Tensor]:
        own = features.clone().requires_grad_()
        pooled = roi_align(own, regions, (7, 7), 0.25, sampling, "avg", aligned)
        (pooled * weights).sum().backward()
        return pooled.detach(), own.grad

    ours, theirs = with_both(work)
    forward, backward = (apart(a, b) for a, b in zip(ours, theirs, strict=True))
    print(f"RoIAlign {dtype}, aligned {aligned}, sampling {sampling}: forward {forward:.1e}, backward {backward:.1e}")
    assert forward == 0 and backward < 1e-6


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detectors_losses_gradients_and_predictions(with_both, tmp_path, name):
    """Toy weights in float32, two drawn scenes: whatever is random is drawn from one seed on both sides.

    Weights as they are drawn give proposals the same score now and then; thirty times as large ones do not.
    """
    train, val = (open_scenes("tiny-coco:", split, tmp_path) for split in ("train", "val"))
    task = DETECTORS[name]
    *images, _ = task.plan(export_of(), train, val, 0).objects()
    batch, unseen = (pseudo_collate([each[index] for index in (1, 2)]) for each in images)
    ours, theirs = with_both(lambda: run(task, batch, unseen))
    losses = max(abs(ours[0][key] / value - 1) for key, value in theirs[0].items())
    gradients = max(apart(ours[1][key], value) for key, value in theirs[1].items())
    boxes, scores = (max(apart(a[key], b[key]) for a, b in zip(ours[2], theirs[2], strict=True)) for key in (0, 1))
    pixels = sum(int((a[3] != b[3]).sum()) for a, b in zip(ours[2], theirs[2], strict=True))
    print(
        f"{name}: loss {theirs[0]['loss']:.4f}, {len(theirs[0])} losses apart by {losses:.1e}, "
        f"{len(theirs[1])} gradients by {gradients:.1e}, {sum(len(each[1]) for each in theirs[2])} detections: "
        f"boxes by {boxes:.1e}, scores by {scores:.1e}, {pixels} mask pixels"
    )
    assert ours[0].keys() == theirs[0].keys() and ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(a[2], b[2]) and len(a[2]) > 10 for a, b in zip(ours[2], theirs[2], strict=True))
    assert losses < 1e-5 and gradients < 1e-5 and boxes < 1e-5 and scores < 1e-5 and pixels == 0


def run(task: Detection, batch: Any, unseen: Any) -> tuple[dict[str, float], dict[str, Tensor], list[tuple]]:
    """Losses; gradients by name; of each unseen image boxes, scores, labels and masks."""
    with quiet_libraries():
        model = task.model(export_of(), 4, synchronised=False, seed=0).train()
    model.rpn_head.rpn_cls.weight.data.mul_(30)
    torch.manual_seed(0), np.random.seed(0)
    losses = model(**model.data_preprocessor(batch, True), mode="loss")
    total, logs = model.parse_losses(losses)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        found = model.eval()(**model.data_preprocessor(unseen, False), mode="predict")
    kept = [each.pred_instances for each in found]
    answers = [(each.bboxes, each.scores, each.labels, torch.as_tensor(each.masks)) for each in kept]
    return {name: value.item() for name, value in logs.items() if "loss" in name}, gradients, answers
