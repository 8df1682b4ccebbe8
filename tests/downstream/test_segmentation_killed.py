"""A training killed with SIGKILL and begun again: the bits of an uninterrupted one."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_scenes import export_of, workspace

from checkpoints.reading import read_foreign
from downstream.models.operators import quiet_libraries
from downstream.tasks.upernet_ade20k import PROTOCOLS
from engine.tasks import Outcome
from engine.training.interruptions import Stopped
from engine.training.schedules import MultipliedWarmup, Polynomial, TrainProgress

pytestmark = pytest.mark.slow

with quiet_libraries():
    from downstream.loop import running

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


def killed(folder: Path, hook: type, method: str, count: int) -> None:
    """Run in a process that dies at the `count`th call of a hook's method, before it does anything."""
    child = os.fork()
    if not child:
        calls, original = [], getattr(hook, method)

        def dying(self, *values, **settings):
            calls.append(1)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *values, **settings)

        setattr(hook, method, dying)
        outcome(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("quiet"))


@pytest.fixture
def rates(monkeypatch):
    """Rates of the last group, by iteration, of the trainings in this process."""
    seen, original = {}, running.IterationHook.before_train_iter

    def recording(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        seen[batch_idx] = runner.optim_wrapper.optimizer.param_groups[-1]["lr"]

    monkeypatch.setattr(running.IterationHook, "before_train_iter", recording)
    return seen


@pytest.mark.parametrize(
    ("hook", "method", "count", "resumed"),
    [
        ("IterationHook", "before_train_iter", 6, 4),  # within a step, after the state of iteration 4
        # Before the state of a step is written; the first evaluation, known and not yet on disk.
        pytest.param("StateHook", "after_train_iter", 11, 10, marks=pytest.mark.exhaustive),
        pytest.param("EvaluationHook", "after_val_epoch", 1, 8, marks=pytest.mark.exhaustive),
        ("EvaluationHook", "after_val_epoch", 2, 16),  # the last one, with the training over
    ],
)
def test_killed_and_continued(tmp_path, quiet, rates, capfd, monkeypatch, hook, method, count, resumed):
    killed(tmp_path, getattr(running, hook), method, count)
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
    original, evaluated = running.IterationHook.before_train_iter, running.EvaluationHook.after_val_epoch

    def signalled(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        if batch_idx in (4, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    def signalled_at_the_end(self, runner, metrics=None):
        evaluated(self, runner, metrics)
        if runner.iter == 16:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running.IterationHook, "before_train_iter", signalled)
    monkeypatch.setattr(running.EvaluationHook, "after_val_epoch", signalled_at_the_end)
    for step in (3, 4, 8):
        with pytest.raises(Stopped, match=f"stopped by a signal after step {step} of 8 of upernet on tiny-ade20k:"):
            outcome(tmp_path)
        assert sorted(rates) == list(range(2 * step))
    again = outcome(tmp_path)
    assert again.facts == quiet.facts and dict(again.metrics) == dict(quiet.metrics)


def weights_in(state: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in read_foreign(state).tensors.items() if name.startswith("state_dict.")}


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_a_second_signal_drops_the_step_in_work(step, tmp_path, quiet, rates, capfd, monkeypatch):
    """And the training that goes on has the same bits, batch statistics too."""
    original = running.IterationHook.before_train_iter

    def signalled(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        if batch_idx == 2 * step:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

    monkeypatch.setattr(running, "SAME_SIGNAL_SECONDS", 0.001)
    monkeypatch.setattr(running.IterationHook, "before_train_iter", signalled)
    with pytest.raises(Stopped, match=f"stopped by a signal after step {step} of 8 of upernet"):
        outcome(tmp_path)
    assert sorted(rates) == list(range(2 * step + 1))
    said = capfd.readouterr().err
    assert f"waits for step {step + 1} of 8" in said and "0 of 2 passes done" in said
    assert f"drops step {step + 1}" in said and f"after step {step}" in said
    if step:  # the state of the step before is there twice: as it was, and as it was gone back to
        whole, back = (weights_in(path) for path in tmp_path.rglob("states/*.pth"))
        assert any("running_mean" in name for name in whole) and whole.keys() == back.keys()
        assert all(torch.equal(tensor, back[name]) for name, tensor in whole.items())
    monkeypatch.setattr(running.IterationHook, "before_train_iter", original)
    again = outcome(tmp_path)
    assert again.facts == quiet.facts and dict(again.metrics) == dict(quiet.metrics)
    assert np.array_equal(again.arrays["areas"], quiet.arrays["areas"])


def test_a_broken_state_is_passed_over(tmp_path, quiet):
    """The one before it serves."""
    killed(tmp_path, running.IterationHook, "before_train_iter", 6)
    newest = max(tmp_path.rglob("states/step-*.pth"))
    newest.write_bytes(newest.read_bytes()[:100])
    assert dict(outcome(tmp_path).metrics) == dict(quiet.metrics)
