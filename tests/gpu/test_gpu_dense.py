"""Dense tasks on a GPU: training, evaluation, and non-maximum suppression."""

from dataclasses import replace

import pytest
import torch
from emulated import KIND
from toy_scenes import export_of, workspace

from downstream.models.operators import quiet_libraries

with quiet_libraries():
    import test_detection_tasks as detection
    import test_segmentation_tasks as segmentation

    from downstream.models.operators import nms

ONE_TRAINING = replace(segmentation.LINEAR, splits=segmentation.LINEAR.splits[:1], lr=(0.1,))
TASKS = {"upernet": segmentation.UPERNET, "segmenter": ONE_TRAINING, **detection.TASKS}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TASKS)
def test_dense_tasks_give_the_cpus_metrics(name, tmp_path, on_gpu):
    """On a real GPU rounding may change a few pixels or boxes, and thereby metrics by a few points."""
    task = TASKS[name]
    on_cpu = task.run(export_of(), workspace(tmp_path / "cpu", f"tiny-{task.LAYOUT}:"))
    with on_gpu() as device:
        on_device = task.run(export_of(), workspace(tmp_path / "gpu", f"tiny-{task.LAYOUT}:", device=device, workers=0))
    assert on_device.numbers == pytest.approx(on_cpu.numbers, abs=5.0 if KIND == "cuda" else 1e-9)


@pytest.mark.gpu
def test_nms_keeps_the_cpus_boxes():
    torch.manual_seed(0)
    corners = torch.rand(200, 2) * 50
    boxes, scores = torch.cat([corners, corners + 10], dim=1), torch.rand(200)
    assert torch.equal(nms(boxes.cuda(), scores.cuda(), 0.5, 0).cpu(), nms(boxes, scores, 0.5, 0))
