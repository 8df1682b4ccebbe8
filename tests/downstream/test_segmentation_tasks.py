"""Segmentation tasks end to end on generated scenes: training, results, reuse, warnings and errors."""

import fcntl
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from slow_clock import slow_clock
from toy_scenes import SPECS, export_of, task_refusal, workspace

from downstream.data.scenes import tiny_folder
from downstream.metrics.scores import scores
from downstream.models.operators import quiet_libraries
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE

pytestmark = pytest.mark.slow

with quiet_libraries():
    from downstream.loop import running

UPERNET = replace(ADE["upernet@smoke"].task, steps=4, warmup=2, batch=4, crop=32, stride=32, channels=8, drop_path=0.2)
LINEAR = replace(
    CITY["segmenter_linear@smoke"].task, images=6, epochs=2, batch=4, crop=32, stride=32, lr=(0.01, 0.1), judge_every=1
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "relative" else pytest.mark.exhaustive) for name in SPECS],
)
def test_upernet_trains_on_every_architecture(name, tmp_path):
    outcome = UPERNET.run(export_of(SPECS[name]), workspace(tmp_path, "tiny-ade20k:"))
    areas = outcome.arrays["areas"]
    assert areas.shape == (8, 150, 3) and outcome.numbers == scores(areas)
    assert all(metric.resampled is not None for metric in outcome.metrics.values())
    low, high = np.quantile(outcome.metrics["mIoU"].resampled, (0.025, 0.975))
    assert low <= outcome.numbers["mIoU"] <= high
    labelled = areas[..., 2].sum(1)
    assert (labelled > 0.8 * 64 * 96).all() and np.array_equal(labelled, areas[..., 1].sum(1))


def test_training_beats_an_untrained_head(tmp_path):
    """On the frozen network. One step at a learning rate near 0 leaves the head at its initialisation."""
    linear = replace(UPERNET, head="linear", lr=2e-2, steps=40, norm=True)
    export = export_of()
    before = replace(linear, steps=1, warmup=0, lr=1e-12).run(export, workspace(tmp_path, "tiny-ade20k:"))
    after = linear.run(export, workspace(tmp_path, "tiny-ade20k:"))
    assert after.numbers["aAcc"] > 60 > before.numbers["aAcc"]
    assert after.numbers["mIoU"] > 2 * before.numbers["mIoU"]


def test_a_learning_rate_near_0_keeps_the_pretrained_weights(tmp_path, trainings):
    """mmengine's Runner must not initialise the network again."""
    export = export_of()
    replace(UPERNET, lr=1e-30, weight_decay=0.0, steps=1, warmup=0).run(export, workspace(tmp_path, "tiny-ade20k:"))
    model, _ = trainings[0]
    for name, tensor in export.tensors.items():
        assert torch.allclose(model.get_parameter(f"backbone.vit.trunk.{name}"), tensor, rtol=0, atol=1e-20), name


def test_all_weights_but_the_frozen_ones_change(tmp_path, trainings):
    export = export_of()
    replace(UPERNET, train_positions=False, drop_path=0.0).run(export, workspace(tmp_path, "tiny-ade20k:"))
    model, _ = trainings[0]
    trunk = {name: model.get_parameter(f"backbone.vit.trunk.{name}") for name in export.tensors}
    unchanged = {name for name, tensor in trunk.items() if torch.equal(tensor, export.tensors[name])}
    assert unchanged == {"pos_embed", "norm.weight", "norm.bias"}


def test_gradient_accumulation_keeps_the_batch_size(tmp_path, trainings):
    task = replace(UPERNET, steps=1, warmup=0)
    at_once, accumulated = (
        task.run(export_of(), workspace(tmp_path, "tiny-ade20k:", batch_size=size)).facts["batch"] for size in (4, 3)
    )
    assert (at_once["at_once"], at_once["accumulated"]) == (4, 1)
    assert (accumulated["at_once"], accumulated["accumulated"]) == (2, 2)
    assert (at_once["batch_norm_over"], accumulated["batch_norm_over"]) == (4, 2)
    first, second = (plan for _, plan in trainings)
    assert first.batch == second.batch == 4
    assert len(list((tmp_path / "cache").rglob("finished"))) == 2
    assert (task.lengths(8).steps, task.lengths(8).evaluations) == (first.start.steps, 1)


def is_locked(path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_training_is_locked_while_it_runs_and_is_read_and_is_not_repeated(tmp_path, monkeypatch, capfd):
    """It prints progress alone, and keeps a log."""
    locks, train, read_result = [], running._train, running._read_result

    def check_lock(function):
        def checked(*arguments):
            evaluations = next(value for value in arguments if isinstance(value, running.EvaluationHook))
            locks.append(evaluations.folder.with_suffix(".lock"))
            assert is_locked(locks[-1])
            return function(*arguments)

        return checked

    monkeypatch.setattr(running, "_train", check_lock(train))
    monkeypatch.setattr(running, "_read_result", check_lock(read_result))
    task = replace(UPERNET, steps=10)
    with slow_clock(file=0.0, pace=6.0):
        first = task.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    printed = capfd.readouterr()
    assert len(locks) == 2 and not is_locked(locks[0])
    assert printed.out == ""
    assert all(line.startswith(("upernet on tiny", "evaluating")) for line in printed.err.splitlines())
    log = next((tmp_path / "cache" / "upernet_ade20k").rglob("*.log")).read_text()
    assert "Iter(train) [10/10]" in log and f"mIoU: {first.numbers['mIoU']:.4f}" in log
    monkeypatch.setattr(running, "build_runner", lambda *values: pytest.fail("trained again"))
    second = task.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert first.facts == second.facts and np.array_equal(first.arrays["areas"], second.arrays["areas"])
    assert not list(tmp_path.rglob("states"))


def test_learning_rate_is_searched_on_the_first_split_alone(tmp_path, trainings):
    outcome = LINEAR.run(export_of(), workspace(tmp_path, "tiny-cityscapes:"))
    labels = [plan.label for _, plan in trainings]
    assert [label.rpartition("-")[2] for label in labels] == ["seed12345", "seed12345", "seed23456"]
    best = outcome.facts["learning_rate"]
    mious = {trial["lr"]: trial["mIoU"] for trial in outcome.facts["per_learning_rate"]}
    assert mious[best] == max(mious.values()) and f"lr {best:g}" in labels[2]
    areas = [outcome.arrays[f"areas_{number}"] for number in range(2)]
    assert outcome.numbers["mIoU"] == pytest.approx(np.mean([scores(of_split)["mIoU"] for of_split in areas]))
    deviation = outcome.metrics["mIoU_std"]
    assert (deviation.deviation_of, deviation.higher_is_better, deviation.resampled) == ("mIoU", None, None)
    assert [len(history) for history in outcome.facts["evaluations"]] == [2, 2]
    assert not any(parameter.requires_grad for parameter in trainings[0][0].backbone.parameters())
    count, steps, _, evaluations = LINEAR.lengths(8)
    assert (count, evaluations) == (len(trainings), 2 * len(trainings))
    assert {steps} == {plan.start.steps for _, plan in trainings}
    assert outcome.facts["batch"]["batch_norm_over"] is None and outcome.facts["warnings"] == []


def test_mask_transformer_trains_in_bfloat16(tmp_path, trainings):
    task = replace(LINEAR, decoder="mask", lr=(0.03,), splits=(1,), drop_path=0.1, report="best")
    outcome = task.run(export_of(), workspace(tmp_path, "tiny-cityscapes:", precision="bfloat16"))
    head = trainings[0][0].decode_head
    assert len(head.layers) == 1 and outcome.facts["chosen_on"] == ["evaluation: validation images"]
    best = max(outcome.facts["evaluations"][0].values(), key=lambda metrics: metrics["mIoU"])
    assert outcome.numbers == best and outcome.metrics["mIoU"].chosen_on_val
    weight = trainings[0][0].get_parameter("backbone.vit.trunk.blocks.0.mlp.fc1.weight")
    assert weight.dtype == torch.float32 and not torch.equal(weight, export_of().tensors["blocks.0.mlp.fc1.weight"])


def test_masks_with_unknown_values_are_named(tmp_path):
    ade = tiny_folder("ade20k", tmp_path)
    for path in (ade / "annotations" / "training").iterdir():
        Image.fromarray(np.full((64, 96), 151, np.uint8)).save(path)
    message = task_refusal(UPERNET, f"ade20k:{ade}", tmp_path, workers=1)
    assert message.startswith(f"{ade}/annotations/training/ADE_")
    assert "value 151, allowed are 0 to 150, 255" in message


def test_a_non_finite_loss_stops_the_training(tmp_path):
    assert "the loss is nan in step" in task_refusal(replace(UPERNET, lr=1e20), "tiny-ade20k:", tmp_path)
    assert not list(tmp_path.rglob("finished"))


def test_weights_that_are_not_finite_are_not_evaluated(tmp_path):
    """A broken last update shows in no loss, and its masks would be class 0 everywhere."""
    model = torch.nn.Linear(1, 1)
    model.weight.data.fill_(float("nan"))
    runner = SimpleNamespace(model=model, iter=4, max_iters=4)
    with pytest.raises(ValueError, match="weights are not finite after iteration 4 of 4; lower lr"):
        running.EvaluationHook(tmp_path, None, every=4, best="").before_val(runner)


def test_running_out_of_memory_names_the_batch_size_option(tmp_path, monkeypatch):
    def out_of_memory(self, runner, batch_idx, data_batch=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(running.IterationHook, "before_train_iter", out_of_memory)
    message = task_refusal(UPERNET, "tiny-ade20k:", tmp_path)
    assert "4 images at once on cpu: lower batch_size" in message


def test_one_image_at_a_time_is_too_few_for_batch_norm(tmp_path):
    assert "batch_size=2 or more" in task_refusal(UPERNET, "tiny-ade20k:", tmp_path, batch_size=1)


@pytest.mark.parametrize(
    ("file", "workers"),
    [("images/validation/ADE_val_00000000.jpg", 1), ("annotations/training/ADE_train_00000000.png", 0)],
)
def test_an_unreadable_file_is_named(tmp_path, workers, file):
    ade = tiny_folder("ade20k", tmp_path)
    (ade / file).write_bytes((ade / file).read_bytes()[:100])
    task = replace(UPERNET, head="linear", steps=2)
    message = task_refusal(task, f"ade20k:{ade}", tmp_path, workers=workers)
    assert message.startswith(f"{ade}/{file}: cannot be read (")


@pytest.mark.parametrize(
    ("settings", "option"), [({"skip_bad": True}, "skip_bad=True"), ({"decode": "fast"}, "decode='fast'")]
)
def test_options_for_classified_images_are_refused(settings, option, tmp_path):
    assert f"without {option}" in task_refusal(UPERNET, "tiny-ade20k:", tmp_path, **settings)


def test_sets_of_another_layout_or_too_few_images_are_refused(tmp_path):
    assert "ade20k:ROOT" in task_refusal(UPERNET, "tiny-cityscapes:", tmp_path)
    too_many = replace(LINEAR, images=100)
    assert "8 training images, not 100" in task_refusal(too_many, "tiny-cityscapes:", tmp_path)
