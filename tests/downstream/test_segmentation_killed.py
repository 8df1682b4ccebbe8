"""A training killed with SIGKILL and begun again: the bits of an uninterrupted one."""

import hashlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_scenes import export_of, workspace

from downstream import training
from downstream.tasks.upernet_ade20k import PROTOCOLS
from downstream.training import Training
from engine.tasks import Outcome
from engine.training.interruptions import Stopped
from engine.training.schedules import MultipliedWarmup, Polynomial, TrainProgress
from engine.training.states import DIGITS, load_state

pytestmark = pytest.mark.slow

TASK = replace(
    PROTOCOLS["upernet@smoke"].task,
    steps=8,
    warmup=2,
    batch=4,
    crop=32,
    stride=32,
    channels=8,
    drop_path=0.3,
    judge_every=4,
)


def outcome(folder: Path) -> Outcome:
    """Two images at once, so that each step accumulates."""
    return TASK.run(export_of(), workspace(folder, "tiny-ade20k:", batch_size=2))


def killed(folder: Path, method: str, count: int) -> None:
    """Run in a process that dies at the `count`th call of a method of the training, before it does anything."""
    child = os.fork()
    if not child:
        calls, original = [], getattr(Training, method)

        def dying(self, *values, **settings):
            calls.append(1)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *values, **settings)

        setattr(Training, method, dying)
        outcome(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("quiet"))


@pytest.fixture
def rates(monkeypatch):
    """Rates of the last group, by pass, of the trainings in this process."""
    seen, original = {}, Training.loss_of

    def recording(self, batch):
        seen[self.done] = self.optimiser.param_groups[-1]["lr"]
        return original(self, batch)

    monkeypatch.setattr(Training, "loss_of", recording)
    return seen


@pytest.mark.parametrize(
    ("method", "count", "resumed"),
    [
        ("train_on", 6, 4),  # within a step, after the state of pass 4
        # Before the state of a step is written; the first evaluation, known and not yet on disk.
        pytest.param("keep", 11, 10, marks=pytest.mark.exhaustive),
        pytest.param("record", 1, 8, marks=pytest.mark.exhaustive),
        ("record", 2, 16),  # the last one, with the training over
    ],
)
def test_killed_and_continued(tmp_path, quiet, rates, capfd, monkeypatch, method, count, resumed):
    killed(tmp_path, method, count)
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    again = outcome(tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""  # mmengine would say what it loads
    assert (f"8 of 8 steps, {8 - resumed // 2} of them now, in " in printed.err) == (resumed < 16)
    assert sorted(rates) == list(range(resumed, 16))
    schedule = MultipliedWarmup(schedule=Polynomial(), updates=TASK.warmup)
    start = TrainProgress(step=0, steps_per_epoch=1, epochs=TASK.steps)
    assert all(rate == schedule.at(TASK.lr, replace(start, step=i // 2)) for i, rate in rates.items())
    assert again.facts == quiet.facts and dict(again.metrics) == dict(quiet.metrics)
    assert np.array_equal(again.arrays["areas"], quiet.arrays["areas"])


def test_stopped_by_a_signal_and_continued(tmp_path, quiet, rates, monkeypatch):
    """Within a step, whose iterations are then all made; before an evaluation; and in the last one."""
    original, recorded = Training.loss_of, Training.record

    def signalled(self, batch):
        if self.done in (4, 7):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    def signalled_at_the_end(self, metrics):
        recorded(self, metrics)
        if self.done == 16:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Training, "loss_of", signalled)
    monkeypatch.setattr(Training, "record", signalled_at_the_end)
    for step in (3, 4, 8):
        with pytest.raises(Stopped, match=f"stopped by a signal after step {step} of 8 of upernet on tiny-ade20k:"):
            outcome(tmp_path)
        assert sorted(rates) == list(range(2 * step))
    again = outcome(tmp_path)
    assert again.facts == quiet.facts and dict(again.metrics) == dict(quiet.metrics)


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_a_second_signal_drops_the_step_in_work(step, tmp_path, quiet, rates, capfd, monkeypatch):
    """And the training that goes on has the same bits, batch statistics too."""
    original = Training.loss_of

    def signalled(self, batch):
        if self.done == 2 * step:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
        return original(self, batch)

    monkeypatch.setattr(training, "SAME_SIGNAL", 0.001)
    monkeypatch.setattr(Training, "loss_of", signalled)
    with pytest.raises(Stopped, match=f"stopped by a signal after step {step} of 8 of upernet"):
        outcome(tmp_path)
    assert sorted(rates) == list(range(2 * step + 1))
    said = capfd.readouterr().err
    assert f"waits for step {step + 1} of 8" in said and "0 of 2 passes done" in said
    assert f"drops step {step + 1}" in said and f"after step {step}" in said
    if step:  # the state of the step before has the same digest as it was and as it was gone back to
        newest, older = sorted(tmp_path.rglob("states/*.safetensors"), reverse=True)
        assert any("running_mean" in name for name in load_state(newest).tensors)
        assert newest.name.startswith("step-000000006-") and older.name.startswith("step-000000004-")
    monkeypatch.setattr(Training, "loss_of", original)
    again = outcome(tmp_path)
    assert again.facts == quiet.facts and dict(again.metrics) == dict(quiet.metrics)
    assert np.array_equal(again.arrays["areas"], quiet.arrays["areas"])


def test_a_broken_state_is_passed_over(tmp_path, quiet):
    """The one before it serves."""
    killed(tmp_path, "train_on", 6)
    newest = max(tmp_path.rglob("states/step-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    assert dict(outcome(tmp_path).metrics) == dict(quiet.metrics)


def test_a_state_of_mmengines_runner_goes_on(tmp_path, quiet, rates):
    """Earlier versions trained by it: the weights under "state_dict", the optimiser's own dictionary beside them."""
    killed(tmp_path, "train_on", 6)
    for path in tmp_path.rglob("states/step-*.safetensors"):
        state, entries = load_state(path), {}
        for name, tensor in state.under("optimizer.").items():
            place, _, kind = name.partition(".")
            entries.setdefault(int(place), {})[kind] = tensor
        content = {
            "meta": {"iter": 4, "epoch": 0, "cfg": "", "seed": 0},
            "state_dict": state.under("model."),
            "message_hub": {},
            "optimizer": {"state": entries, "param_groups": [{"lr": 0.0, "params": [*entries]}]},
        }
        torch.save(content, tmp_path / "old.pth")
        digest = hashlib.sha256((tmp_path / "old.pth").read_bytes()).hexdigest()[:DIGITS]
        (tmp_path / "old.pth").rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{digest}.pth"))
        path.unlink()
    again = outcome(tmp_path)
    assert sorted(rates) == list(range(4, 16))
    assert dict(again.metrics) == dict(quiet.metrics) and np.array_equal(again.arrays["areas"], quiet.arrays["areas"])
