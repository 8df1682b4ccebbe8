"""The segmentation tasks end to end on drawn scenes: what they train, report, keep and refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from toy_scenes import SPECS, export_of, refused, workspace

from downstream.data.scenes import tiny_folder
from downstream.metrics.scores import scores
from downstream.models.operators import quiet_libraries
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE
from engine.files import is_locked

pytestmark = pytest.mark.slow

with quiet_libraries():
    from downstream.loop import running

UPERNET = replace(ADE["upernet@smoke"].task, steps=4, warmup=2, batch=4, crop=32, stride=32, channels=8, drop_path=0.2)
LINEAR = replace(
    CITY["segmenter_linear@smoke"].task, images=6, epochs=2, batch=4, crop=32, stride=32, lr=(0.01, 0.1), judge_every=1
)


@pytest.fixture
def trained(monkeypatch):
    """(model, plan) of every training, in order."""
    seen, run = [], running._train
    monkeypatch.setattr(running, "_train", lambda *values: (seen.append((values[0], values[3])), run(*values))[1])
    return seen


@pytest.mark.parametrize("name", SPECS)
def test_upernet_takes_every_architecture(name, tmp_path):
    outcome = UPERNET.run(export_of(SPECS[name]), workspace(tmp_path, "tiny-ade20k:"))
    areas = outcome.arrays["areas"]
    assert areas.shape == (8, 150, 3) and outcome.numbers == scores(areas)
    assert all(metric.resampled is not None for metric in outcome.metrics.values())
    low, high = np.quantile(outcome.metrics["mIoU"].resampled, (0.025, 0.975))
    assert low <= outcome.numbers["mIoU"] <= high
    labelled = areas[..., 2].sum(1)
    assert (labelled > 0.8 * 64 * 96).all() and np.array_equal(labelled, areas[..., 1].sum(1))


def test_training_beats_an_untrained_head(tmp_path):
    """On the frozen network: one step at a rate of nothing leaves the head as drawn."""
    linear = replace(UPERNET, head="linear", lr=2e-2, steps=40, norm=True)
    export = export_of()
    before = replace(linear, steps=1, warmup=0, lr=1e-12).run(export, workspace(tmp_path, "tiny-ade20k:"))
    after = linear.run(export, workspace(tmp_path, "tiny-ade20k:"))
    assert after.numbers["aAcc"] > 60 > before.numbers["aAcc"]
    assert after.numbers["mIoU"] > 2 * before.numbers["mIoU"]


def test_no_rate_keeps_pretrained_weights(tmp_path, trained):
    """Building the Runner and training must not initialise the network again."""
    export = export_of()
    replace(UPERNET, lr=1e-30, weight_decay=0.0).run(export, workspace(tmp_path, "tiny-ade20k:"))
    model, _ = trained[0]
    for name, tensor in export.tensors.items():
        assert torch.allclose(model.get_parameter(f"backbone.vit.trunk.{name}"), tensor, rtol=0, atol=1e-20), name


def test_every_trained_weight_moves_and_the_frozen_do_not(tmp_path, trained):
    export = export_of()
    replace(UPERNET, train_positions=False, drop_path=0.0).run(export, workspace(tmp_path, "tiny-ade20k:"))
    model, _ = trained[0]
    trunk = {name: model.get_parameter(f"backbone.vit.trunk.{name}") for name in export.tensors}
    still = {name for name, tensor in trunk.items() if torch.equal(tensor, export.tensors[name])}
    assert still == {"pos_embed", "norm.weight", "norm.bias"}


def test_accumulation_keeps_the_batch(tmp_path, trained):
    whole, cut = (
        UPERNET.run(export_of(), workspace(tmp_path, "tiny-ade20k:", batch_size=size)).facts["batch"] for size in (4, 3)
    )
    assert (whole["at_once"], whole["accumulated"]) == (4, 1) and (cut["at_once"], cut["accumulated"]) == (2, 2)
    assert (whole["batch_norm_over"], cut["batch_norm_over"]) == (4, 2)
    first, second = (plan for _, plan in trained)
    assert first.batch == second.batch == 4
    assert len(list((tmp_path / "cache").rglob("finished"))) == 2
    sizes = UPERNET.summary(SPECS["plain"], {"train": 8, "val": 8})
    assert sizes == {"crop": 32, "epochs": "2.0", "steps": first.start.steps, "batch": 4, "evaluations": 1}


def test_one_run_at_a_time_does_a_training(tmp_path, monkeypatch):
    held, run, read = [], running._train, running._read_result

    def locked_while(work):
        def wrapped(*values):
            evaluations = next(value for value in values if isinstance(value, running.EvaluationHook))
            held.append(evaluations.folder.with_suffix(".lock"))
            assert is_locked(held[-1])
            return work(*values)

        return wrapped

    monkeypatch.setattr(running, "_train", locked_while(run))
    monkeypatch.setattr(running, "_read_result", locked_while(read))
    UPERNET.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert len(held) == 2 and not is_locked(held[0])


def test_a_finished_training_is_read_and_not_repeated(tmp_path, trained, monkeypatch):
    first = UPERNET.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    monkeypatch.setattr(running, "build_runner", lambda *values: pytest.fail("trained again"))
    second = UPERNET.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert first.facts == second.facts and np.array_equal(first.arrays["areas"], second.arrays["areas"])
    assert not list(tmp_path.rglob("states"))


def test_a_run_is_quiet_and_keeps_a_log(tmp_path, capfd):
    outcome = replace(UPERNET, steps=20).run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    said = capfd.readouterr()
    assert said.out == "" and all(line.startswith(("upernet on tiny", "evaluating")) for line in said.err.splitlines())
    log = next((tmp_path / "cache" / "upernet_ade20k").rglob("*.log")).read_text()
    assert "Iter(train) [10/20]" in log and f"mIoU: {outcome.numbers['mIoU']:.4f}" in log


def test_the_rate_is_searched_on_the_first_split_and_kept(tmp_path, trained):
    outcome = LINEAR.run(export_of(), workspace(tmp_path, "tiny-cityscapes:"))
    labels = [plan.label for _, plan in trained]
    assert [label.rpartition("-")[2] for label in labels] == ["seed12345", "seed12345", "seed23456"]
    best = outcome.facts["learning_rate"]
    found = {each["lr"]: each["mIoU"] for each in outcome.facts["per_learning_rate"]}
    assert found[best] == max(found.values()) and f"lr {best:g}" in labels[2]
    areas = [outcome.arrays[f"areas_{number}"] for number in range(2)]
    assert outcome.numbers["mIoU"] == pytest.approx(np.mean([scores(each)["mIoU"] for each in areas]))
    spread = outcome.metrics["mIoU_std"]
    assert (spread.deviation_of, spread.higher_is_better, spread.resampled) == ("mIoU", None, None)
    assert [len(history) for history in outcome.facts["evaluations"]] == [2, 2]
    assert not any(parameter.requires_grad for parameter in trained[0][0].backbone.parameters())
    sizes = LINEAR.summary(SPECS["plain"], {"train": 8, "val": 8})
    assert (sizes["trainings"], sizes["training images"], sizes["evaluations of each"]) == (len(trained), 6, 2)
    assert {sizes["steps of each"]} == {plan.start.steps for _, plan in trained}
    assert outcome.facts["batch"]["batch_norm_over"] is None and outcome.facts["warnings"] == []


def test_label_ids_give_the_same_numbers(tmp_path):
    task, city = replace(LINEAR, lr=(0.1,), splits=(1,), epochs=1), tiny_folder("cityscapes", tmp_path)
    first = task.run(export_of(), workspace(tmp_path / "a", f"cityscapes:{city}"))
    for path in city.rglob("*_labelTrainIds.png"):
        path.unlink()
    second = task.run(export_of(), workspace(tmp_path / "b", f"cityscapes:{city}"))
    assert dict(first.metrics) == dict(second.metrics)


def test_the_mask_transformer_and_bfloat16(tmp_path, trained):
    task = replace(LINEAR, decoder="mask", lr=(0.03,), splits=(1,), drop_path=0.1, report="best")
    outcome = task.run(export_of(), workspace(tmp_path, "tiny-cityscapes:", precision="bfloat16"))
    head = trained[0][0].decode_head
    assert len(head.layers) == 1 and outcome.facts["chosen_on"] == ["evaluation: validation images"]
    best = max(outcome.facts["evaluations"][0].values(), key=lambda found: found["mIoU"])
    assert outcome.numbers == best and outcome.metrics["mIoU"].chosen_on_val
    weight = trained[0][0].get_parameter("backbone.vit.trunk.blocks.0.mlp.fc1.weight")
    assert weight.dtype == torch.float32 and not torch.equal(weight, export_of().tensors["blocks.0.mlp.fc1.weight"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mask_that_does_not_fit_is_named(tmp_path, workers):
    ade = tiny_folder("ade20k", tmp_path)
    for path in (ade / "annotations" / "training").iterdir():
        Image.fromarray(np.full((64, 96), 151, np.uint8)).save(path)
    said = refused(UPERNET, f"ade20k:{ade}", tmp_path, workers=workers)
    assert (
        said.startswith(f"{ade}/annotations/training/ADE_")
        and "the mask holds the value 151, allowed are 0 to 150, 255" in said
    )


def test_a_loss_that_is_not_finite_stops(tmp_path):
    assert "the loss is nan in step" in refused(replace(UPERNET, lr=1e20), "tiny-ade20k:", tmp_path)
    assert not list(tmp_path.rglob("finished"))


def test_running_out_of_memory_says_what_to_lower(tmp_path, monkeypatch):
    def full(self, runner, batch_idx, data_batch=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(running.IterationHook, "before_train_iter", full)
    said = refused(UPERNET, "tiny-ade20k:", tmp_path)
    assert "out of memory with 4 images at once on cpu: lower --batch-size" in said


def test_one_image_at_once_is_too_few_for_batch_norm(tmp_path):
    assert "give --batch-size 2 or more" in refused(UPERNET, "tiny-ade20k:", tmp_path, batch_size=1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "file", ["images/validation/ADE_val_00000000.jpg", "annotations/training/ADE_train_00000000.png"]
)
def test_an_unreadable_file_is_named(tmp_path, workers, file):
    ade = tiny_folder("ade20k", tmp_path)
    (ade / file).write_bytes((ade / file).read_bytes()[:100])
    task = replace(UPERNET, head="linear", steps=2)
    said = refused(task, f"ade20k:{ade}", tmp_path, workers=workers)
    assert said.startswith(f"{ade}/{file}: cannot be read (") and said.endswith("; replace the file")


def test_options_of_classified_images_are_refused(tmp_path):
    assert "run them without --skip-bad; `bench data check tiny-ade20k:`" in refused(
        UPERNET, "tiny-ade20k:", tmp_path, skip_bad=True
    )
    assert "without --decode fast" in refused(UPERNET, "tiny-ade20k:", tmp_path, decode="fast")


def test_sets_of_another_kind_are_refused(tmp_path):
    assert "this task needs ade20k:ROOT" in refused(UPERNET, "tiny-cityscapes:", tmp_path)
    assert "there are 8 training images, not 100" in refused(replace(LINEAR, images=100), "tiny-cityscapes:", tmp_path)
