"""What dense tasks count for `bench plan`, beside the steps and operations of a training that really runs."""

from dataclasses import replace

import pytest
import torch
from toy_scenes import SPECS, export_of, workspace

from downstream.models.operators import quiet_libraries
from downstream.planning import windows
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASK
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE
from engine.work import Scale, count_flops

pytestmark = pytest.mark.slow

SCALE = Scale(spec=SPECS["plain"], images={"train": 24, "val": 8}, classes=10)
UPERNET = replace(ADE["upernet@smoke"].task, steps=40, batch=4, crop=32, stride=32, channels=8)
SEGMENTER = replace(CITY["segmenter_linear@smoke"].task, images=6, epochs=4, batch=4, lr=(0.1, 1.0), judge_every=2)
MASKRCNN = replace(MASK["maskrcnn@smoke"].task, epochs=4, batch=2, channels=8, hidden=16, proposals=(16, 16))


def counts(task) -> dict[str, float]:
    return {part.kind: part.count for part in task.cost(SCALE).parts}


def test_steps_evaluations_and_states_are_counted():
    assert counts(UPERNET) == {
        "libraries": 1,
        "start": 1,
        "training": 160,
        "states": 20,
        "evaluation": 8,
        "closing": 20_000,
    }
    found = counts(SEGMENTER)  # two rates on the first of two splits
    assert (found["start"], found["training"], found["states"]) == (3, 3 * 4 * 6, 3 * 8)
    assert found["evaluation"] == 3 * 2 * 8
    found = counts(MASKRCNN)
    assert (found["training"], found["states"], found["evaluation"]) == (4 * 24, 24, 8)


def test_windows_of_an_image():
    assert windows(2048, 1024, 768, 512) == 4 * 2  # Cityscapes under Segmenter
    assert windows(683, 512, 512, 341) == 2 and windows(96, 64, 48, 48) == 2 * 2 and windows(30, 20, 32, 16) == 1


@pytest.mark.parametrize(("head", "frozen"), [("upernet", False), ("linear", True)])
def test_operations_of_segmentation_are_those_of_a_step(head, frozen):
    """Forward and back count three times what is trained; a frozen network once."""
    task, export = replace(UPERNET, head=head), export_of()
    found = task.model_flops(export.spec, 10)
    with quiet_libraries():
        model = task.model(export, 10, False, 0).train()
    maps = {}

    def step() -> None:
        maps["found"] = model.extract_feat(torch.zeros(2, 3, 32, 32))
        heads = [model.decode_head, *([model.auxiliary_head] if model.with_auxiliary_head else [])]
        sum(head(maps["found"]).sum() for head in heads).backward()

    operations = count_flops(step)[1] / 2
    # The gradient of the images themselves is not computed, that of the fused attention computes its weights anew.
    assert found["training"] == pytest.approx(operations, rel=0.1)
    assert found["evaluation"] > 0


def test_operations_of_detection_grow_with_the_image_and_the_heads():
    spec = export_of().spec
    small = MASKRCNN.model_flops(spec, 10)
    large = replace(MASKRCNN, short=(128,), long=192, val=(192, 128)).model_flops(spec, 10)
    wide = replace(MASKRCNN, box_convs=4).model_flops(spec, 10)
    assert large["training"] > 1.5 * small["training"] and large["evaluation"] > 1.5 * small["evaluation"]
    assert wide["training"] > small["training"] > small["evaluation"] > 0


def test_a_rehearsal_times_every_kind_of_work_and_leaves_nothing(tmp_path):
    space = workspace(tmp_path, "tiny-ade20k:")
    found = UPERNET.benchmark(export_of(), space)
    assert found.keys() == {"libraries", "closing", "start", "training", "states", "evaluation"}
    assert all(seconds >= 0 for seconds in found.values()) and found["training"] > 0 < found["evaluation"]


def test_a_step_that_takes_too_long_is_not_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setattr("downstream.planning.HEAVY", 0)
    found = UPERNET.benchmark(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert found.keys() == {"libraries", "closing"}
