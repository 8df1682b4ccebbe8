"""The trainer's folder, signals, damaged states, full disks, and refusals of wrong settings."""

import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elsewhere import CONTEXT, started
from refusals import refusal
from small_trainings import BATCH, EPOCHS, IMAGES, digits, in_shards, same, small_recipe, trainer
from written import contents

from engine.training.states import states
from imagesets.selection import evenly_spaced
from imagesets.sets import SAMPLED_IMAGES, open_set
from pretrain.loop.run_folder import check_resume
from pretrain.schedules import Constant

STEPS = EPOCHS * IMAGES // BATCH


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    training = trainer("mae", tmp_path_factory.mktemp("uninterrupted"))
    assert training.train() == "finished"
    return training


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a stopped training with the states of updates 3 and 4."""
    out = tmp_path_factory.mktemp("stopped")
    first = trainer("mae", out, monitor=lambda export, progress: first.save() or first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped"
    assert [path.name[:14] for path in states(out / "states")] == ["step-000000004", "step-000000003"]
    return out


@pytest.fixture
def stopped_folder(stopped, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)


def training_refusal(name="mae", out=None, **settings) -> str:
    return refusal(lambda: trainer(name, out, **settings).train())


def test_a_signal_before_the_first_update_stops_the_training(tmp_path, monkeypatch):
    @contextmanager
    def listening_with_signal(stop):
        stop()
        yield

    monkeypatch.setattr("pretrain.loop.trainer.listening", listening_with_signal)
    first = trainer("mae", tmp_path)
    assert first.train() == "stopped" and first.step == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_saves_a_state_and_ends_the_training(number, tmp_path):
    """The signal reaches the loader processes too, as a scheduler's does."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = started(long_run, tmp_path, sender)
    wait_for(tmp_path / "log.jsonl", lambda path: path.exists() and path.read_text().count("\n") > 2)
    os.killpg(process.pid, number)
    assert receiver.poll(60)
    ending, step = receiver.recv()
    process.join(60)
    assert process.exitcode == 0 and ending == "stopped"
    assert [path.name[:14] for path in states(tmp_path / "states")] == [f"step-{step:09d}"]


def long_run(out: Path, sender) -> None:
    """Train in a new process group."""
    os.setpgid(0, 0)
    training = trainer("mae", out, recipe={"epochs": 1000}, workers=2)
    sender.send((training.train(), training.step))


def wait_for(path: Path, ready, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready(path):
        assert time.monotonic() < end, f"nothing happened to {path}"
        time.sleep(0.01)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def clear(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_bit, clear])
def test_a_broken_state_is_skipped_for_the_one_before(damage, stopped_folder, uninterrupted, capsys):
    newest, _ = states(stopped_folder / "states")
    damage(newest)
    training = trainer("mae", stopped_folder, resume=True)
    training.load()
    assert training.step == 3
    assert f"warning: {newest} does not hold what was written" in capsys.readouterr().err
    assert training.train() == "finished"
    assert same(training.state().tensors, uninterrupted.state().tensors)
    assert newest not in states(stopped_folder / "states")


def test_a_folder_with_only_broken_states_is_refused(stopped_folder):
    for path in states(stopped_folder / "states"):
        flip_bit(path)
    assert "all 2 training states are broken; delete them" in training_refusal(out=stopped_folder, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0, asked for 1"),
        ({"precision": "bfloat16"}, "precision is float32, asked for bfloat16"),
        ({"recipe": {"epochs": 3}}, "settings.epochs is 2, asked for 3"),
        ({"images": open_set("tiny:", "train").limited(IMAGES)}, "data.fingerprint is "),
        ({"name": "simmim"}, "method is mae, asked for simmim"),
    ],
)
def test_another_training_in_the_folder_is_refused(change, message, stopped_folder):
    for resume in (False, True):
        assert message in training_refusal(out=stopped_folder, resume=resume, **change)


def test_a_training_resumes_with_moved_images_and_a_reworded_source(stopped_folder):
    moved = replace(digits(), url="folder:elsewhere")
    training = trainer("mae", stopped_folder, resume=True, images=moved, recipe={"source": "reworded"})
    assert training.train() == "finished"


def test_a_training_resumes_on_a_copy_of_its_images_but_not_on_overwritten_ones(tmp_path):
    """Names and sizes stay the same. A run of an earlier version, which recorded no contents, resumes on any."""
    folder, out = tmp_path / "images", tmp_path / "run"
    folder.mkdir()
    for index in range(IMAGES):
        digits().image(index).save(folder / f"{index:02}.bmp")
    first = trainer(
        "mae", out, images=open_set(f"images:{folder}", "train"), monitor=lambda *_: first.stop() or {}, monitor_every=1
    )
    assert first.train() == "stopped"
    shutil.copytree(folder, tmp_path / "copy")
    shutil.copytree(out, tmp_path / "earlier")
    copy = open_set(f"images:{tmp_path / 'copy'}", "train")
    assert trainer("mae", shutil.copytree(out, tmp_path / "moved"), images=copy, resume=True).train() == "finished"
    (unsampled, *_) = {*range(IMAGES)} - {*evenly_spaced(IMAGES, SAMPLED_IMAGES).tolist()}
    for index in (unsampled, 0):
        digits().image(IMAGES - 1).save(folder / f"{index:02}.bmp")
        images = open_set(f"images:{folder}", "train")
        assert images.fingerprint == copy.fingerprint
        assert "were overwritten" in training_refusal(out=out, images=images, resume=True)
    run_json = json.loads((tmp_path / "earlier" / "run.json").read_text())
    del run_json["data"]["contents"]
    (tmp_path / "earlier" / "run.json").write_text(json.dumps(run_json))
    assert trainer("mae", tmp_path / "earlier", images=images, resume=True).train() == "finished"


def test_folders_that_hold_something_else_are_refused(stopped_folder, tmp_path_factory):
    assert "add resume=True" in training_refusal(out=stopped_folder)
    other = tmp_path_factory.mktemp("other")
    (other / "thesis.tex").touch()
    assert "holds other files" in training_refusal(out=other)
    (stopped_folder / "run.json").write_text('{"method"')
    assert "run.json: Input data was truncated" in training_refusal(out=stopped_folder, resume=True)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("run_json", [None, "[]", '{"scripts": {"start": "node ."}}'])
def test_a_folder_of_another_program_is_not_changed(run_json, resume, tmp_path):
    for name in (".exports/a", ".export_data/b", ".export.old/c", "export/d", ".start.sh", ".run.json.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    if run_json:
        (tmp_path / "run.json").write_text(run_json)
    before = contents(tmp_path)
    assert training_refusal(out=tmp_path, resume=resume).startswith(str(tmp_path))
    assert contents(tmp_path) == before


def test_after_a_failure_before_the_first_state_another_training_may_use_the_folder(tmp_path, uninterrupted):
    """With and without --resume; files of the failed training are removed."""
    for resume in (False, True):
        failing = trainer("mae", tmp_path, seed=1, resume=resume)
        failing.method.forward = lambda views: 1 / 0
        with pytest.raises(ZeroDivisionError):
            failing.train()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "log.jsonl", "run.json", "start", "tensorboard"}
    (tmp_path / ".run.json.x1").touch()
    training = trainer("mae", tmp_path)
    assert training.train() == "finished" and same(training.state().tensors, uninterrupted.state().tensors)
    assert contents(tmp_path)["run.json"] == contents(uninterrupted.run.out)["run.json"]
    assert len(list(tmp_path.glob("tensorboard/*"))) == 1 and not (tmp_path / ".run.json.x1").exists()


@pytest.mark.slow
def test_only_one_training_at_a_time_may_use_a_folder(tmp_path):
    """With and without states; a loader process that survives a killed training does not lock the folder."""
    process = started(long_run, tmp_path, CONTEXT.Pipe()[1])
    wait_for(tmp_path / "log.jsonl", lambda path: path.exists() and path.read_text().count("\n") > 2)
    before = (tmp_path / "run.json").read_bytes()
    same_training = {"out": tmp_path, "recipe": {"epochs": 1000}, "resume": True}
    assert f"another training is running in {tmp_path}" in training_refusal(**same_training)
    assert f"another training is running in {tmp_path}" in training_refusal(out=tmp_path, seed=1)
    process.kill()
    process.join()
    assert (tmp_path / "run.json").read_bytes() == before
    training = trainer("mae", **same_training)
    training.loop = lambda: None
    assert training.train() == "stopped"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the loader processes, if they still run


@pytest.mark.parametrize(("name", "effect"), [("mae", ""), ("mocov3", ", which changes this method's loss, .*")])
def test_out_of_memory_names_the_option_to_lower(name, effect, tmp_path):
    training = trainer(name, tmp_path, micro_batch=4)

    def forward(views):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    training.method.forward = forward
    message = rf"^out of memory in update 0 on cpu: lower batch_size \(now 4\){effect}; .* stays 8$"
    with pytest.raises(ValueError, match=message):
        training.train()


def test_images_of_a_forward_pass_are_recorded_if_the_loss_depends_on_them(tmp_path):
    first = trainer("moca", tmp_path, monitor=lambda export, progress: first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped"
    message = training_refusal("moca", tmp_path, resume=True, micro_batch=4)
    assert f"forward passes have {BATCH} images, not 4" in message and "give batch_size as before" in message
    submitted = {key: value for key, value in first.identity().items() if key != "forward_images"}  # by --cluster
    assert check_resume(tmp_path, json.loads(json.dumps(submitted)), True, first.recipe.defaults())
    run_json = json.loads((tmp_path / "run.json").read_text())
    assert run_json.pop("forward_images") == BATCH  # runs of an earlier version have none
    (tmp_path / "run.json").write_text(json.dumps(run_json))
    last = trainer("moca", tmp_path, resume=True)
    assert last.train() == "finished" and last.first_export().facts["forward_images"] == BATCH


def test_other_methods_resume_with_other_micro_batches(stopped_folder):
    training = trainer("mae", stopped_folder, resume=True, micro_batch=4)
    assert training.train() == "finished" and "forward_images" not in training.identity()


def test_temporary_files_of_a_killed_training_are_removed(stopped_folder):
    (stopped_folder / ".export.x1").mkdir()
    (stopped_folder / ".log.jsonl.x2").touch()
    trainer("mae", stopped_folder, resume=True).train()
    assert sorted(path.name for path in stopped_folder.iterdir()) == [
        "export",
        "lock",
        "log.jsonl",
        "run.json",
        "start",
        "states",
        "tensorboard",
    ]


def test_an_export_of_an_earlier_epoch_is_replaced_after_a_kill(stopped_folder, uninterrupted):
    """After a kill between the last state and the last export."""
    training = trainer("mae", stopped_folder, resume=True)
    training.load()
    training.export()
    config = stopped_folder / "export/config.json"
    stale = config.read_text()
    training.loop()
    assert config.read_text() == stale
    assert trainer("mae", stopped_folder, resume=True).train() == "finished"
    assert config.read_text() == (uninterrupted.run.out / "export/config.json").read_text()


@contextmanager
def limited_file_size(size: int):
    """Emulate a full disk: no file grows beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_earlier_states(stopped_folder, uninterrupted):
    saved_states = states(stopped_folder / "states")
    with limited_file_size(100_000):
        assert "the training state cannot be written" in training_refusal(out=stopped_folder, resume=True)
    assert states(stopped_folder / "states") == saved_states and len(list((stopped_folder / "states").iterdir())) == 2
    training = trainer("mae", stopped_folder, resume=True)
    assert training.train() == "finished" and same(training.state().tensors, uninterrupted.state().tensors)


@pytest.mark.parametrize(
    ("window", "images", "message"), [(2, digits, "is not stored in shards"), (7, None, "6 shards")]
)
def test_shuffle_windows_that_do_not_fit_the_set_are_refused(window, images, message, tmp_path):
    image_set = images() if images else open_set(in_shards(tmp_path / "shards"), "train")
    with pytest.raises(ValueError, match=f"^a shuffle window of {window} [^\n]*{message}[^\n]*$"):
        trainer("mae", tmp_path / "run", images=image_set, shuffle_window=window)


def test_a_training_in_windows_resumed_within_an_epoch_equals_an_uninterrupted_one(tmp_path):
    """With loader processes too. Another window or other shards are refused."""
    images = open_set(in_shards(tmp_path / "shards"), "train")
    uninterrupted = trainer("mae", tmp_path / "uninterrupted", images=images, shuffle_window=2)
    assert uninterrupted.train() == "finished"
    first = trainer("mae", tmp_path / "run", images=images, shuffle_window=2, workers=1)
    update = first.update

    def stopping(*arguments):
        if first.step == 1:
            first.stop()
        return update(*arguments)

    first.update = stopping
    assert first.train() == "stopped" and first.step == 2
    assert not same(first.method.state_dict(), uninterrupted.method.state_dict())
    other = open_set(in_shards(tmp_path / "other", shards=4), "train")
    assert other.fingerprint == images.fingerprint
    for changes, message in (
        ({"images": images, "shuffle_window": 0}, "shuffle_window is 2, asked for None"),
        ({"images": images, "shuffle_window": 3}, "shuffle_window is 2, asked for 3"),
        ({"images": other, "shuffle_window": 2}, "shards is "),
    ):
        assert message in training_refusal(out=tmp_path / "run", resume=True, **changes)
    second = trainer("mae", tmp_path / "run", images=images, shuffle_window=2, resume=True)
    assert second.train() == "finished" and same(second.method.state_dict(), uninterrupted.method.state_dict())
    assert second.first_export().facts["shuffle_window"] == 2


def test_a_batch_larger_than_the_set_is_refused(tmp_path):
    assert "lower it with settings={'batch': 24}" in training_refusal(out=tmp_path, recipe={"batch": 25})


def test_a_training_whose_updates_all_have_a_rate_of_0_is_refused(tmp_path):
    """Its only update is the first of the warm-up."""
    message = training_refusal(out=tmp_path, recipe={"batch": IMAGES, "epochs": 1})
    assert "schedule.warmup=0.5 with epochs=1 of 1 updates" in message and list(tmp_path.iterdir()) == []
    assert trainer("mae", tmp_path, recipe={"batch": IMAGES, "epochs": 1, "schedule": Constant()}).plan


@pytest.mark.parametrize(
    ("name", "changes", "micro_batch", "start"),
    [
        ("moca", {"new_words": 4}, 2, "new_words=4 needs 4 images in a process's forward pass, but batch=8 in 1 x 4 "),
        ("moca", {"new_words": 16}, None, "new_words=16 needs 16 images in a process's forward pass, but batch=8 "),
        ("lut", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
        ("dino", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
        ("mst", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
    ],
)
def test_too_few_images_in_a_forward_pass_are_refused(name, changes, micro_batch, start, tmp_path):
    settings = replace(small_recipe(name).settings, **changes)
    message = training_refusal(name, tmp_path, micro_batch=micro_batch, recipe={"settings": settings})
    assert message.startswith(start) and "raise batch_size" in message and list(tmp_path.iterdir()) == []


def test_a_micro_batch_that_does_not_divide_the_batch_is_lowered(tmp_path, uninterrupted):
    training = trainer("mae", tmp_path, micro_batch=3)
    assert training.plan.micro_batches == 4 and training.plan.micro_batch_size == 2
    assert training.train() == "finished" and training.step == STEPS
    assert training.updates.losses[-1] == pytest.approx(uninterrupted.updates.losses[-1], rel=1e-5)


def test_exports_and_monitor_run_at_the_set_epochs(tmp_path):
    monitored = []

    def monitor(export, progress):
        monitored.append((progress.epoch, (tmp_path / "export").exists(), export.facts["epochs"]))
        return {"accuracy": 50.0}

    trainer("mae", tmp_path, export_every=1, monitor_every=1, monitor=monitor).train()
    assert monitored == [(1, True, 1.0), (2, True, 2.0)]
    assert (tmp_path / "log.jsonl").read_text().count('"accuracy": 50.0') == 2
