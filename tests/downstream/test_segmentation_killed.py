"""A killed or stopped training resumes with the same bits as an uninterrupted one."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_scenes import export_of, kill_at_call, workspace

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


def run_upernet(folder: Path) -> Outcome:
    """Two images at a time, so that each step accumulates gradients."""
    return TASK.run(export_of(), workspace(folder, "tiny-ade20k:", batch_size=2))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_upernet(tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture
def learning_rates(monkeypatch):
    """Learning rates of the last parameter group, by iteration, of the trainings in this process."""
    rate_of_iteration, original = {}, running.IterationHook.before_train_iter

    def recording(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        rate_of_iteration[batch_idx] = runner.optim_wrapper.optimizer.param_groups[-1]["lr"]

    monkeypatch.setattr(running.IterationHook, "before_train_iter", recording)
    return rate_of_iteration


@pytest.mark.parametrize(
    ("hook", "method", "count", "iteration"),
    [
        # Within a step, after the state of iteration 4 was saved.
        ("IterationHook", "before_train_iter", 6, 4),
        # Before the state of a step is saved.
        pytest.param("StateHook", "after_train_iter", 11, 10, marks=pytest.mark.exhaustive),
        # Before the first evaluation is saved.
        pytest.param("EvaluationHook", "after_val_epoch", 1, 8, marks=pytest.mark.exhaustive),
        # Before the last evaluation, after the end of the training, is saved.
        pytest.param("EvaluationHook", "after_val_epoch", 2, 16, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_training_resumes_with_the_same_bits(
    tmp_path, uninterrupted, learning_rates, capfd, monkeypatch, hook, method, count, iteration
):
    kill_at_call(getattr(running, hook), method, count, lambda: run_upernet(tmp_path))
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    resumed = run_upernet(tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""  # without mmengine's messages about loaded states
    assert (f"8 of 8 steps, {8 - iteration // 2} of them now, in " in printed.err) == (iteration < 16)
    assert sorted(learning_rates) == list(range(iteration, 16))
    schedule = MultipliedWarmup(schedule=Polynomial(), updates=TASK.warmup)
    start = TrainProgress(step=0, steps_per_epoch=1, epochs=TASK.steps)
    assert all(rate == schedule.at(TASK.lr, replace(start, step=i // 2)) for i, rate in learning_rates.items())
    assert resumed.facts == uninterrupted.facts and dict(resumed.metrics) == dict(uninterrupted.metrics)
    assert np.array_equal(resumed.arrays["areas"], uninterrupted.arrays["areas"])


def test_training_stopped_by_a_signal_resumes_with_the_same_metrics(
    tmp_path, uninterrupted, learning_rates, monkeypatch
):
    """Signals within a step, which is completed first; before an evaluation; and within the last evaluation."""
    before_iteration, after_evaluation = running.IterationHook.before_train_iter, running.EvaluationHook.after_val_epoch

    def signal_in_iteration(self, runner, batch_idx, data_batch=None):
        before_iteration(self, runner, batch_idx, data_batch)
        if batch_idx in (4, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    def signal_in_last_evaluation(self, runner, metrics=None):
        after_evaluation(self, runner, metrics)
        if runner.iter == 16:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running.IterationHook, "before_train_iter", signal_in_iteration)
    monkeypatch.setattr(running.EvaluationHook, "after_val_epoch", signal_in_last_evaluation)
    for step in (3, 4, 8):
        with pytest.raises(Stopped, match=f"after step {step} of 8 of upernet on tiny-ade20k:"):
            run_upernet(tmp_path)
        assert sorted(learning_rates) == list(range(2 * step))
    resumed = run_upernet(tmp_path)
    assert resumed.facts == uninterrupted.facts and dict(resumed.metrics) == dict(uninterrupted.metrics)


def weights_in(state: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in read_foreign(state).tensors.items() if name.startswith("state_dict.")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [0, 3])
def test_a_second_signal_drops_the_current_step(step, tmp_path, uninterrupted, learning_rates, capfd, monkeypatch):
    """The resumed training has the same bits, batch statistics included."""
    original = running.IterationHook.before_train_iter

    def send_two_signals(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        if batch_idx == 2 * step:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

    monkeypatch.setattr(running, "SAME_SIGNAL_SECONDS", 0.001)
    monkeypatch.setattr(running.IterationHook, "before_train_iter", send_two_signals)
    with pytest.raises(Stopped, match=f"after step {step} of 8"):
        run_upernet(tmp_path)
    assert sorted(learning_rates) == list(range(2 * step + 1))
    errors = capfd.readouterr().err
    assert f"waits for step {step + 1} of 8" in errors and "0 of 2 passes done" in errors
    assert f"drops step {step + 1}" in errors and f"after step {step}" in errors
    if step:  # two states of the step before: saved after it, and restored when the next was dropped
        saved, restored = (weights_in(path) for path in tmp_path.rglob("states/*.pth"))
        assert any("running_mean" in name for name in saved) and saved.keys() == restored.keys()
        assert all(torch.equal(tensor, restored[name]) for name, tensor in saved.items())
    monkeypatch.setattr(running.IterationHook, "before_train_iter", original)
    resumed = run_upernet(tmp_path)
    assert resumed.facts == uninterrupted.facts and dict(resumed.metrics) == dict(uninterrupted.metrics)
    assert np.array_equal(resumed.arrays["areas"], uninterrupted.arrays["areas"])


def test_training_resumes_from_the_state_before_a_broken_one(tmp_path, uninterrupted):
    kill_at_call(running.IterationHook, "before_train_iter", 6, lambda: run_upernet(tmp_path))
    newest = max(tmp_path.rglob("states/step-*.pth"))
    newest.write_bytes(newest.read_bytes()[:100])
    assert dict(run_upernet(tmp_path).metrics) == dict(uninterrupted.metrics)
