"""Work that dense tasks count for `bench plan`, against steps and FLOPs of real trainings."""

from dataclasses import replace

import pytest
import torch
from toy_scenes import SPECS, export_of

from checkpoints.flops import forward_flops
from downstream.models.operators import quiet_libraries
from downstream.segmentation import window_count
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASK
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE
from engine.work import Scale, count_flops

pytestmark = pytest.mark.slow

SCALE = Scale(spec=SPECS["plain"], images={"train": 24, "val": 8}, classes=10)
UPERNET = replace(ADE["upernet@smoke"].task, steps=40, batch=4, crop=32, stride=32, channels=8)
SEGMENTER = replace(CITY["segmenter_linear@smoke"].task, images=6, epochs=4, batch=4, lr=(0.1, 1.0), judge_every=2)
MASKRCNN = replace(MASK["maskrcnn@smoke"].task, epochs=4, batch=2, channels=8, hidden=16, proposals=(16, 16))


def work_counts(task) -> dict[str, float]:
    return {part.kind: part.count for part in task.cost(SCALE).parts}


def test_trainings_and_evaluations_are_counted():
    assert work_counts(UPERNET) == {"start": 1, "training": 160, "updates": 40, "evaluation": 8}
    parts = work_counts(SEGMENTER)  # two learning rates on the first of two splits, one on the other
    assert (parts["start"], parts["training"]) == (3, 3 * 4 * 6)
    assert parts["evaluation"] == 3 * 2 * 8
    parts = work_counts(MASKRCNN)
    assert (parts["training"], parts["evaluation"]) == (4 * 24, 8)


def test_window_count():
    assert window_count(2048, 1024, 768, 512) == 4 * 2  # Cityscapes under Segmenter
    assert window_count(683, 512, 512, 341) == 2
    assert window_count(96, 64, 48, 48) == 2 * 2
    assert window_count(30, 20, 32, 16) == 1


@pytest.mark.parametrize(("head", "frozen"), [("upernet", False), ("linear", True)])
def test_segmentation_flops_are_those_of_a_step(head, frozen):
    """Forward and backward pass cost three times the forward pass; a frozen network only has the latter."""
    task, export = replace(UPERNET, head=head), export_of()
    flops = task.model_flops(export.spec, 10)
    with quiet_libraries():
        model = task.model(export, 10, False, 0).train()

    def step() -> None:
        maps = model.extract_feat(torch.zeros(2, 3, 32, 32))
        heads = [model.decode_head, *([model.auxiliary_head] if model.with_auxiliary_head else [])]
        sum(head(maps).sum() for head in heads).backward()

    measured = count_flops(step)[1] / 2
    # Not exact: images need no gradient, and the backward pass of fused attention recomputes its weights.
    assert flops["training"] == pytest.approx(measured, rel=0.1)
    assert (flops["training"] < 3 * forward_flops(export.spec)) == frozen


def test_flops_of_a_linear_head_are_those_of_its_product():
    """One linear layer from the concatenated four maps (4 D) to K classes, at each of 4 x 4 patches."""
    task, spec = replace(UPERNET, head="linear"), export_of().spec
    flops, windows = task.model_flops(spec, 10), window_count(*task.val_size, 32, 32)
    head, backbone = 2 * 16 * 4 * spec.width * 10, pytest.approx(forward_flops(spec), rel=0.01)
    assert flops["training"] - 3 * head == backbone and flops["evaluation"] / windows - head == backbone


def test_flops_of_box_and_mask_heads_grow_with_the_regions():
    """Box head: 7 x 7 cells of C channels, a 3 x 3 convolution, H hidden units, classes and boxes."""
    spec, regions, channels, hidden, classes = export_of().spec, MASKRCNN.regions, 8, 16, 10
    with_twice_the_regions = replace(MASKRCNN, regions=2 * regions).model_flops(spec, classes)["training"]
    box = 2 * 49 * 9 * channels**2 + 2 * 49 * channels * hidden + 2 * hidden * (classes + 1 + 4 * classes)
    mask_cells = 14 * 14
    mask = 2 * mask_cells * 9 * channels**2 + 2 * mask_cells * 4 * channels**2 + 2 * 4 * mask_cells * channels * classes
    with_regions = MASKRCNN.model_flops(spec, classes)["training"]
    assert with_twice_the_regions - with_regions == 3 * (regions * box + regions // 4 * mask)
