"""The trainer's folder, its signals, and what a user can do wrong: every refusal is one line that says what to do."""

import errno
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
from small_trainings import BATCH, EPOCHS, IMAGES, digits, in_shards, same, small_recipe, trainer

from engine.training.states import states
from imagesets.sets import open_set

STEPS = EPOCHS * IMAGES // BATCH


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    training = trainer("mae", tmp_path_factory.mktemp("quiet"))
    assert training.train() == "finished"
    return training


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a training with the states of updates 3 and 4."""
    out = tmp_path_factory.mktemp("stopped")
    first = trainer("mae", out, monitor=lambda export, progress: first.save() or first.stop() or {}, monitor_every=1)
    assert first.train() == "stopped"
    assert [path.name[:14] for path in states(out / "states")] == ["step-000000004", "step-000000003"]
    return out


@pytest.fixture
def saved_twice(stopped, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)


def refusal(name="mae", out=None, **settings) -> str:
    with pytest.raises(ValueError) as refused:
        trainer(name, out, **settings).train()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_signal_before_the_first_update_is_heard(tmp_path, monkeypatch):
    @contextmanager
    def signalled(stop):
        stop()
        yield

    monkeypatch.setattr("pretrain.loop.trainer.listening", signalled)
    first = trainer("mae", tmp_path)
    assert first.train() == "stopped" and first.step == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_saves_and_leaves(number, tmp_path):
    """It goes to the loader processes too, as a scheduler's does."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = started(long_run, tmp_path, theirs)
    wait_for(tmp_path / "log.jsonl", lambda path: path.exists() and path.read_text().count("\n") > 2)
    os.killpg(process.pid, number)
    assert ours.poll(60)
    ending, step = ours.recv()
    process.join(60)
    assert process.exitcode == 0 and ending == "stopped"
    assert [path.name[:14] for path in states(tmp_path / "states")] == [f"step-{step:09d}"]


def long_run(out: Path, answer) -> None:
    """In a process group of its own."""
    os.setpgid(0, 0)
    training = trainer("mae", out, recipe={"epochs": 1000}, workers=2)
    answer.send((training.train(), training.step))


def wait_for(path: Path, ready, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready(path):
        assert time.monotonic() < end, f"nothing happened to {path}"
        time.sleep(0.01)


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [shortened, flipped, emptied])
def test_a_broken_state_is_passed_over(damage, saved_twice, quiet, capsys):
    newest, _ = states(saved_twice / "states")
    damage(newest)
    training = trainer("mae", saved_twice, resume=True)
    training.load()
    assert training.step == 3
    assert f"warning: {newest} does not hold what was written" in capsys.readouterr().err
    assert training.train() == "finished"
    assert same(training.state().tensors, quiet.state().tensors)
    assert newest not in states(saved_twice / "states")


def test_all_states_broken(saved_twice):
    for path in states(saved_twice / "states"):
        flipped(path)
    assert "all 2 training states are broken; delete them" in refusal(out=saved_twice, resume=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed is 0, asked for 1"),
        ({"precision": "bfloat16"}, "precision is float32, asked for bfloat16"),
        ({"recipe": {"epochs": 3}}, "settings.epochs is 2, asked for 3"),
        ({"images": open_set("tiny:", "train").limited(IMAGES)}, "data.fingerprint is "),
        ({"name": "simmim"}, "method is mae, asked for simmim"),
    ],
)
def test_another_training_in_the_folder(change, told, saved_twice):
    for resume in (False, True):
        assert told in refusal(out=saved_twice, resume=resume, **change)


def test_another_training_is_told_briefly(saved_twice):
    told = refusal("simmim", out=saved_twice, images=open_set("tiny:", "train").limited(IMAGES))
    assert "method is mae, asked for simmim" in told and "more; choose another --out" in told and len(told) < 500


def test_images_that_moved_and_a_new_wording_are_no_other_training(saved_twice):
    moved = replace(digits(), url="folder:elsewhere")
    assert trainer("mae", saved_twice, resume=True, images=moved, recipe={"source": "reworded"}).train() == "finished"


def test_a_folder_is_not_taken_by_accident(saved_twice, tmp_path_factory):
    assert "add --resume" in refusal(out=saved_twice)
    other = tmp_path_factory.mktemp("other")
    (other / "thesis.tex").touch()
    assert "holds other files" in refusal(out=other)
    (saved_twice / "run.json").write_text('{"method"')
    assert "run.json is broken" in refusal(out=saved_twice, resume=True)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("run_json", [None, "[]", '{"scripts": {"start": "node ."}}'])
def test_another_programs_folder_stays_as_it_is(run_json, resume, tmp_path):
    for name in (".exports/a", ".export_data/b", ".export.old/c", "export/d", ".start.sh", ".run.json.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    if run_json:
        (tmp_path / "run.json").write_text(run_json)
    before = files_in(tmp_path)
    assert refusal(out=tmp_path, resume=resume).startswith(str(tmp_path))
    assert files_in(tmp_path) == before


def test_another_programs_run_json_alone(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    for resume in (False, True):
        assert "holds another run, method is None, asked for mae" in refusal(out=tmp_path, resume=resume)
    assert files_in(tmp_path) == {"run.json": b"{}"}


def test_a_failure_before_the_first_state_leaves_the_folder_free(tmp_path, quiet):
    """For another setting, with and without --resume; what it wrote does not mix with the new run's."""
    for resume in (False, True):
        failing = trainer("mae", tmp_path, seed=1, resume=resume)
        failing.method.forward = lambda views: 1 / 0
        with pytest.raises(ZeroDivisionError):
            failing.train()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "log.jsonl", "run.json", "start", "tensorboard"}
    (tmp_path / ".run.json.x1").touch()
    training = trainer("mae", tmp_path)
    assert training.train() == "finished" and same(training.state().tensors, quiet.state().tensors)
    assert files_in(tmp_path)["run.json"] == files_in(quiet.run.out)["run.json"]
    assert len(list(tmp_path.glob("tensorboard/*"))) == 1 and not (tmp_path / ".run.json.x1").exists()


@pytest.mark.slow
def test_one_training_at_a_time_in_a_folder(tmp_path):
    """Before its first state and after; a loader process that outlives a killed training does not count."""
    process = started(long_run, tmp_path, CONTEXT.Pipe()[1])
    wait_for(tmp_path / "log.jsonl", lambda path: path.exists() and path.read_text().count("\n") > 2)
    before = (tmp_path / "run.json").read_bytes()
    again = {"out": tmp_path, "recipe": {"epochs": 1000}, "resume": True}
    assert f"another training is running in {tmp_path}" in refusal(**again)
    assert f"another training is running in {tmp_path}" in refusal(out=tmp_path, seed=1)
    process.kill()
    process.join()
    assert (tmp_path / "run.json").read_bytes() == before
    training = trainer("mae", **again)
    training.loop = lambda: None
    assert training.train() == "stopped"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the loader processes, if they are still there


def test_out_of_memory_says_what_to_lower(tmp_path):
    training = trainer("mae", tmp_path, micro_batch=4)

    def forward(views):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    training.method.forward = forward
    with pytest.raises(
        ValueError, match=r"^out of memory in update 0 on cpu: lower --micro-batch \(now 4\); .* stays 8$"
    ):
        training.train()


def test_what_a_kill_left_beside_its_place_goes(saved_twice):
    (saved_twice / ".export.x1").mkdir()
    (saved_twice / ".log.jsonl.x2").touch()
    trainer("mae", saved_twice, resume=True).train()
    assert sorted(path.name for path in saved_twice.iterdir()) == [
        "export",
        "lock",
        "log.jsonl",
        "run.json",
        "start",
        "states",
        "tensorboard",
    ]


def test_an_export_of_an_earlier_epoch_is_replaced_after_a_kill(saved_twice, quiet):
    """Killed between the last state and the last export."""
    training = trainer("mae", saved_twice, resume=True)
    training.load()
    training.export()
    stale = (saved_twice / "export" / "config.json").read_text()
    training.loop()
    assert (saved_twice / "export" / "config.json").read_text() == stale
    assert trainer("mae", saved_twice, resume=True).train() == "finished"
    assert (saved_twice / "export" / "config.json").read_text() == (quiet.run.out / "export/config.json").read_text()


@contextmanager
def files_of_at_most(size: int):
    """What a full disk is like: no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(saved_twice, quiet):
    kept = states(saved_twice / "states")
    with files_of_at_most(100_000):
        assert "the training state cannot be written" in refusal(out=saved_twice, resume=True)
    assert states(saved_twice / "states") == kept and len(list((saved_twice / "states").iterdir())) == 2
    training = trainer("mae", saved_twice, resume=True)
    assert training.train() == "finished" and same(training.state().tensors, quiet.state().tensors)


def test_a_full_disk_at_the_last_export(saved_twice):
    training = trainer("mae", saved_twice, resume=True)
    training.load()
    training.loop()
    with files_of_at_most(100_000):
        assert "the export cannot be written" in refusal(out=saved_twice, resume=True)
    assert trainer("mae", saved_twice, resume=True).train() == "finished"


def test_a_full_disk_for_the_log(tmp_path):
    with files_of_at_most(100), pytest.raises(OSError) as refused:
        trainer("mae", tmp_path).train()
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize(("window", "images", "told"), [(2, digits, "is not stored in shards"), (7, None, "6 shards")])
def test_what_cannot_be_shuffled_in_windows(window, images, told, tmp_path):
    chosen = images() if images else open_set(in_shards(tmp_path / "shards"), "train")
    with pytest.raises(ValueError, match=f"^a shuffle window of {window} [^\n]*{told}[^\n]*$"):
        trainer("mae", tmp_path / "run", images=chosen, shuffle_window=window)


def test_a_training_in_windows_resumes_in_the_midst_of_an_epoch(tmp_path):
    """With the same bits, with loader processes too; another order, and other shards, are other trainings."""
    images = open_set(in_shards(tmp_path / "shards"), "train")
    whole = trainer("mae", tmp_path / "whole", images=images, shuffle_window=2)
    assert whole.train() == "finished"
    first = trainer("mae", tmp_path / "run", images=images, shuffle_window=2, workers=1)
    update = first.update

    def stopping(*given):
        if first.step == 1:
            first.stop()
        return update(*given)

    first.update = stopping
    assert first.train() == "stopped" and first.step == 2
    assert same(first.method.state_dict(), whole.method.state_dict()) is False
    other = open_set(in_shards(tmp_path / "other", shards=4), "train")
    assert other.fingerprint == images.fingerprint
    for changed, told in (
        ({"images": images, "shuffle_window": 0}, "shuffle_window is 2, asked for None"),
        ({"images": images, "shuffle_window": 3}, "shuffle_window is 2, asked for 3"),
        ({"images": other, "shuffle_window": 2}, "shards is "),
    ):
        assert told in refusal(out=tmp_path / "run", resume=True, **changed)
    second = trainer("mae", tmp_path / "run", images=images, shuffle_window=2, resume=True)
    assert second.train() == "finished" and same(second.method.state_dict(), whole.method.state_dict())
    assert second.first_export().facts["shuffle_window"] == 2


def test_what_cannot_be_cut(tmp_path):
    assert "lower it with --set batch=24" in refusal(out=tmp_path, recipe={"batch": 25})


@pytest.mark.parametrize(
    ("name", "changes", "micro_batch", "told"),
    [
        ("moca", {"new_words": 4}, 2, "new_words=4 needs 4 images in a process's forward pass, but batch=8 in 1 x 4 "),
        ("moca", {"new_words": 16}, None, "new_words=16 needs 16 images in a process's forward pass, but batch=8 "),
        ("lut", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
        ("dino", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
        ("mst", {"head_norm": "bn"}, 1, "head_norm=bn needs 2 images"),
    ],
)
def test_too_few_images_in_a_forward_pass(name, changes, micro_batch, told, tmp_path):
    settings = replace(small_recipe(name).settings, **changes)
    message = refusal(name, tmp_path, micro_batch=micro_batch, recipe={"settings": settings})
    assert message.startswith(told) and "raise --micro-batch" in message and list(tmp_path.iterdir()) == []


def test_moca_with_one_new_word_has_enough_with_one_image(tmp_path):
    settings = replace(small_recipe("moca").settings, new_words=1)
    recipe = {"settings": settings, "epochs": 1}
    assert trainer("moca", tmp_path, micro_batch=1, images=digits(BATCH), recipe=recipe).train() == "finished"


def test_parts_fit_the_memory(tmp_path, quiet):
    training = trainer("mae", tmp_path, micro_batch=3)
    assert training.plan.micro_batches == 4 and training.plan.micro_batch_size == 2
    assert training.train() == "finished" and training.step == STEPS
    assert training.updates.losses[-1] == pytest.approx(quiet.updates.losses[-1], rel=1e-5)


def test_exports_and_monitor_come_when_they_are_due(tmp_path):
    seen = []

    def monitor(export, progress):
        seen.append((progress.epoch, (tmp_path / "export").exists(), export.facts["epochs"]))
        return {"accuracy": 50.0}

    trainer("mae", tmp_path, export_every=1, monitor_every=1, monitor=monitor).train()
    assert seen == [(1, True, 1.0), (2, True, 2.0)]
    assert (tmp_path / "log.jsonl").read_text().count('"accuracy": 50.0') == 2
