"""Whole detectors with our replacement for mmcv._ext and with mmcv's compiled ones. Each operator: test_operators.py.

Needs an mmcv with operators, or MMCV_EXT, the path of a shared object with them, built by compile_operators.py.
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


def compiled_operators() -> ModuleType | None:
    """mmcv's own operators, or None."""
    if operators.install_operators() == "compiled":
        return sys.modules[operators.EXTENSION]
    if "MMCV_EXT" not in os.environ:
        return None
    spec = spec_from_file_location("_ext", os.environ["MMCV_EXT"])
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILED = compiled_operators()
if COMPILED is None:
    pytest.skip("no compiled operators: see compile_operators.py and MMCV_EXT", allow_module_level=True)
DETECTORS = {
    "maskrcnn": replace(MASK["maskrcnn@smoke"].task, least_score=0.0, drop_path=0.1),
    "cascade": replace(CASCADE["cascade@smoke"].task, least_score=0.0, drop_path=0.1),
    "maskrcnn l1": replace(MASK["maskrcnn@smoke"].task, least_score=0.0, box_loss="l1", proposals=(200, 200)),
}


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)) if len(theirs) else 0.0


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_have_the_same_losses_gradients_and_predictions(tmp_path, monkeypatch, name):
    """Toy weights in float32 and two generated scenes; both sides draw random numbers from the same seed."""
    train, val = (open_scenes("tiny-coco:", split, tmp_path) for split in ("train", "val"))
    task = DETECTORS[name]
    *datasets, _ = task.plan(export_of(), train, val, 0).build_data()
    batch, unseen = (pseudo_collate([images[index] for index in (1, 2)]) for images in datasets)
    runs = []
    for module in (operators, COMPILED):
        for user in ("mmcv.ops.nms", "mmcv.ops.roi_align"):
            monkeypatch.setattr(sys.modules[user], "ext_module", module)
        runs.append(run_detector(task, batch, unseen))
    ours, theirs = runs
    losses = max(abs(ours[0][key] / value - 1) for key, value in theirs[0].items())
    gradients = max(relative_difference(ours[1][key], value) for key, value in theirs[1].items())
    boxes, scores = (
        max(relative_difference(a[key], b[key]) for a, b in zip(ours[2], theirs[2], strict=True)) for key in (0, 1)
    )
    pixels = sum(int((a[3] != b[3]).sum()) for a, b in zip(ours[2], theirs[2], strict=True))
    detections = sum(len(prediction[1]) for prediction in theirs[2])
    print(
        f"{name}: loss {theirs[0]['loss']:.4f}, {len(theirs[0])} losses differ by {losses:.1e}, "
        f"{len(theirs[1])} gradients by {gradients:.1e}, {detections} detections: "
        f"boxes by {boxes:.1e}, scores by {scores:.1e}, {pixels} mask pixels"
    )
    assert ours[0].keys() == theirs[0].keys() and ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(a[2], b[2]) and len(a[2]) > 10 for a, b in zip(ours[2], theirs[2], strict=True))
    assert losses < 1e-5 and gradients < 1e-5 and boxes < 1e-5 and scores < 1e-5 and pixels == 0


def run_detector(task: Detection, batch: Any, unseen: Any) -> tuple[dict[str, float], dict[str, Tensor], list[tuple]]:
    """Losses, gradients by name, and for each unseen image its boxes, scores, labels and masks."""
    with quiet_libraries():
        model = task.model(export_of(), 4, synchronised=False, seed=0).train()
    model.rpn_head.rpn_cls.weight.data.mul_(30)  # at the initial scale some proposals have equal scores
    torch.manual_seed(0), np.random.seed(0)
    losses = model(**model.data_preprocessor(batch, True), mode="loss")
    total, logs = model.parse_losses(losses)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        samples = model.eval()(**model.data_preprocessor(unseen, False), mode="predict")
    instances = [sample.pred_instances for sample in samples]
    predictions = [(image.bboxes, image.scores, image.labels, torch.as_tensor(image.masks)) for image in instances]
    return {name: value.item() for name, value in logs.items() if "loss" in name}, gradients, predictions
