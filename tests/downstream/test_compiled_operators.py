"""Whole detectors on the stand-in for mmcv._ext and on mmcv's compiled operators. Each operator: test_operators.py.

Needs an mmcv with operators, or MMCV_EXT, the path of a shared object that holds them: compile_operators.py makes one.
`pytest -s` prints the largest differences.
"""

import os
import sys
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


def compiled() -> ModuleType | None:
    """mmcv's own operators, if there are any here."""
    if operators.operators_in_use() == "compiled":
        return sys.modules[operators.EXTENSION]
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


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)) if len(theirs) else 0.0


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detectors_losses_gradients_and_predictions(tmp_path, monkeypatch, name):
    """Toy weights in float32, two drawn scenes: whatever is random is drawn from one seed on both sides.

    Weights as they are drawn give proposals the same score now and then; thirty times as large ones do not.
    """
    train, val = (open_scenes("tiny-coco:", split, tmp_path) for split in ("train", "val"))
    task = DETECTORS[name]
    *images, _ = task.plan(export_of(), train, val, 0).build_data()
    batch, unseen = (pseudo_collate([each[index] for index in (1, 2)]) for each in images)
    found = []
    for module in (operators, COMPILED):
        for user in ("mmcv.ops.nms", "mmcv.ops.roi_align"):
            monkeypatch.setattr(sys.modules[user], "ext_module", module)
        found.append(run(task, batch, unseen))
    ours, theirs = found
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
