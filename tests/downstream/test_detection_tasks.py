"""Detection tasks end to end on generated scenes: training, results, resuming, warnings and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_clock import slow_clock
from torch.nn.functional import fold, interpolate, unfold
from toy_scenes import PLAIN, SPECS, export_of, kill_at_call, task_refusal, workspace

from downstream.data.scenes import tiny_folder
from downstream.metrics.scores import average_precisions
from downstream.models.operators import quiet_libraries
from downstream.tasks.cascade_coco import PROTOCOLS as CASCADE
from downstream.tasks.cascade_coco import Cascade
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASK
from downstream.tasks.maskrcnn_coco import MaskRcnn

pytestmark = pytest.mark.slow

with quiet_libraries():
    from mmengine.config import Config

    from downstream.loop import running
    from downstream.models import detectors

SMALL: dict[str, Any] = {
    "epochs": 2,
    "milestones": (1,),
    "warmup": 2,
    "batch": 4,
    "channels": 8,
    "hidden": 16,
    "proposals": (16, 16),
    "regions": 16,
    "detections": 10,
    "least_score": 0.0,
}
SMOKE = {"maskrcnn": MASK["maskrcnn@smoke"].task, "cascade": CASCADE["cascade@smoke"].task}
TASKS = {name: replace(task, **SMALL) for name, task in SMOKE.items()}
MASKRCNN = TASKS["maskrcnn"]


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        (MaskRcnn(rpn_convs=1), "mask-rcnn_r50_fpn.py"),
        (Cascade(), "cascade-mask-rcnn_r50_fpn.py"),
    ],
)
def test_default_configuration_equals_mmdets(settings, file):
    """All but the box heads, which are iBOT's."""
    base = Config.fromfile(detectors.BASES / file).model
    ours = detectors.detector_config(settings, 80, synchronised=False)
    assert ours.rpn_head.pop("num_convs") == 1
    for config in (ours, base):
        heads = config.roi_head.pop("bbox_head")
        config.coders = [head.bbox_coder for head in (heads if isinstance(heads, list) else [heads])]
    assert ours == base


def test_values_from_mmdets_base_files_are_the_published_ones():
    """A version of mmdet with other values would change the protocols."""
    config = detectors.detector_config(Cascade(), 80, synchronised=False)
    stages, rpn, test = config.train_cfg.rcnn, config.train_cfg.rpn, config.test_cfg
    assert [stage.assigner.pos_iou_thr for stage in stages] == [0.5, 0.6, 0.7]
    assert {(stage.sampler.num, stage.sampler.pos_fraction, stage.mask_size) for stage in stages} == {(512, 0.25, 28)}
    assert (rpn.assigner.pos_iou_thr, rpn.assigner.neg_iou_thr, rpn.sampler.num) == (0.7, 0.3, 256)
    assert (test.rpn.nms.iou_threshold, test.rcnn.nms.iou_threshold, test.rcnn.mask_thr_binary) == (0.7, 0.5, 0.5)
    assert config.roi_head.stage_loss_weights == [1, 0.5, 0.25]


@pytest.mark.parametrize(("name", "kept"), [("extrema", 2000), ("ibot", 2000), ("mae", 1000)])
def test_proposal_counts_equal_the_official_ones(name, kept):
    """CAE configs/_base_/models/mask_rcnn_vit_fpn.py:90-98 and iBOT's base file; mmdet's own 1000 in ViTDet's."""
    config = detectors.detector_config(MASK[f"maskrcnn@{name}"].task, 80, synchronised=False)
    training, testing = config.train_cfg.rpn_proposal, config.test_cfg.rpn
    assert (training.nms_pre, training.max_per_img) == (2000, kept)
    assert (testing.nms_pre, testing.max_per_img) == (1000, 1000)


@pytest.mark.parametrize("task", ["cascade", pytest.param("maskrcnn", marks=pytest.mark.exhaustive)])
def test_detectors_train_and_keep_the_arrays_behind_their_metrics(task, tmp_path, trainings):
    export = export_of()
    with slow_clock(file=0.0, pace=6.0):
        outcome = TASKS[task].run(export, workspace(tmp_path, "tiny-coco:", batch_size=4))
    arrays = outcome.arrays
    shapes = {name: arrays[name].shape for name in ("classes", "boxes", "objects")}
    assert shapes == {"classes": (8, 10), "boxes": (8, 10, 4), "objects": (8, 4)}
    for kind in ("box", "mask"):
        ours = average_precisions(arrays, kind, np.ones((1, 8)))
        for name, values in ours.items():
            assert outcome.numbers[f"{kind}_{name}"] == pytest.approx(values[0], abs=1e-9)
    assert all(metric.resampled is not None for metric in outcome.metrics.values())
    assert outcome.facts["batch"]["batch_norm_over"] == 4 and outcome.facts["warnings"] == []
    model, plan = trainings[0]
    assert (plan.start.steps, plan.start.steps_per_epoch, plan.schedule.schedule.milestones) == (4, 2, (1,))
    lengths = TASKS[task].lengths(8)
    assert (lengths.steps, lengths.evaluations) == (4, len(outcome.facts["evaluations"][0]))
    trunk = {name: model.get_parameter(f"backbone.vit.trunk.{name}") for name in export.tensors}
    unchanged = {name for name, tensor in trunk.items() if torch.equal(tensor, export.tensors[name])}
    assert unchanged == {"norm.weight", "norm.bias"}
    assert outcome.facts["train"]["images"] == 8 and outcome.facts["val"]["images"] == 8


@pytest.mark.parametrize("task", ["maskrcnn", pytest.param("cascade", marks=pytest.mark.exhaustive)])
def test_detectors_train_on_boxes_without_masks_and_on_fewer_images_at_once(task, tmp_path, trainings, capfd):
    """Both are warned of in the result, and batch norms over fewer images than the recipe's before the training."""
    short = replace(TASKS[task], epochs=1, milestones=())
    outcome = short.run(export_of(), workspace(tmp_path, "tiny-vocboxes:", limit=4, batch_size=2))
    printed, warnings = capfd.readouterr().err, outcome.facts["warnings"]
    assert outcome.facts["batch"]["batch_norm_over"] == 2 and len(warnings) == 2
    assert [printed.count(line) for line in warnings if "only boxes" not in line] == [1]
    assert {*outcome.metrics} == {"box_AP", "box_AP50", "box_AP75"}
    assert outcome.facts["floor"]["prediction"] == "nothing"
    assert not any("mask" in name for name in outcome.arrays) and outcome.arrays["box_hits"].shape[0] == 4
    assert any("only boxes" in line for line in warnings)
    assert not trainings[0][0].with_mask


@pytest.mark.exhaustive
def test_training_learns_to_detect_objects(tmp_path):
    """The average precision of guesses is near 0."""
    task = replace(SMOKE["maskrcnn"], epochs=1, milestones=())
    numbers = task.run(export_of(), workspace(tmp_path, "tiny-coco:", limit=40)).numbers
    assert numbers["box_AP50"] > 10 and numbers["mask_AP50"] > 10


@pytest.mark.exhaustive  # a segmentation trains in bfloat16 by default; test_backbone.py has all networks
@pytest.mark.parametrize("name", ["relative", "class attention"])
def test_other_architectures_train_in_bfloat16(name, tmp_path):
    task = replace(MASKRCNN, epochs=1, milestones=(), augment="crops", crop_short=(48,), crop=(24, 40))
    outcome = task.run(export_of(SPECS[name]), workspace(tmp_path, "tiny-coco:", precision="bfloat16", limit=4))
    assert outcome.facts["detections"] > 0 and np.isfinite(list(outcome.numbers.values())).all()


def train_cascade(folder: Path, **settings):
    return replace(TASKS["cascade"], drop_path=0.3).run(export_of(), workspace(folder, "tiny-coco:", **settings))


@pytest.mark.exhaustive
def test_killed_training_resumes_with_the_same_bits(tmp_path, monkeypatch):
    uninterrupted = train_cascade(tmp_path / "uninterrupted")
    kill_at_call(running.IterationHook, "before_train_iter", 6, lambda: train_cascade(tmp_path / "killed"))
    iterations, original = [], running.IterationHook.before_train_iter

    def recording(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        iterations.append(batch_idx)

    monkeypatch.setattr(running.IterationHook, "before_train_iter", recording)
    resumed = train_cascade(tmp_path / "killed")
    assert iterations == [4, 5, 6, 7]
    assert resumed.facts == uninterrupted.facts and dict(resumed.metrics) == dict(uninterrupted.metrics)
    assert all(np.array_equal(values, uninterrupted.arrays[name]) for name, values in resumed.arrays.items())


def test_diverged_trainings_and_unsuitable_inputs_are_refused(tmp_path):
    assert "the loss is nan in step" in task_refusal(replace(MASKRCNN, lr=1e20, warmup=0), "tiny-coco:", tmp_path)
    assert "coco:ROOT" in task_refusal(MASKRCNN, "tiny-ade20k:", tmp_path)
    longer = replace(MASKRCNN, warmup=1000)
    assert "warmup=1000" in task_refusal(longer, "tiny-coco:", tmp_path, limit=None)
    odd = replace(PLAIN, patch_size=48, image_size=96)
    assert "patches of 48 px" in task_refusal(MASKRCNN, "tiny-coco:", tmp_path, odd)


def test_patches_of_14_are_resized_to_16_and_the_result_says_so(tmp_path):
    export = export_of(replace(PLAIN, patch_size=14, image_size=56))
    backbone = MASKRCNN.model(export, 2, False, 0).backbone.eval()
    assert backbone.vit.spec.patch_size == 16 and backbone.vit.spec.size == (64, 64)
    image = torch.randn(1, 3, 56, 56)
    patches = unfold(image, 14, stride=14).view(3, 14, 14, 16).permute(3, 0, 1, 2)
    larger = interpolate(patches, (16, 16), mode="bicubic", antialias=True)
    larger = fold(larger.permute(1, 2, 3, 0).reshape(1, -1, 16), 64, 16, stride=16)
    with torch.no_grad():
        resized, original = backbone(larger)[-1], export.build()(image, norm=False)[0]
    assert (resized.flatten(2).transpose(1, 2) - original[:, 1:]).abs().max() < 1e-4 * original.abs().max()
    outcome = replace(MASKRCNN, epochs=1, milestones=()).run(export, workspace(tmp_path, "tiny-coco:", limit=4))
    assert outcome.facts["patches"] == "resized from 14 to 16 px"
    assert any("14 to 16 px" in warning for warning in outcome.facts["warnings"])


def test_classes_without_an_object_to_learn_from_are_warned_of(tmp_path):
    """As when the tools of two people write the names of classes in another case."""
    folder = tiny_folder("vocboxes", tmp_path)
    task = replace(MASKRCNN, epochs=1, milestones=())
    for name in (folder / "ImageSets/Main/val.txt").read_text().split():
        path = folder / f"Annotations/{name}.xml"
        path.write_text(path.read_text().replace("digit 7", "Digit 7"))
    space = workspace(tmp_path, f"vocboxes:{folder}")
    (warning,) = (text for text in task.run(export_of(), space).facts["warnings"] if "have none in train" in text)
    assert "1 of 4 classes" in warning and "Digit 7" in warning
