"""A linear probe killed at random moments or stopped by signals resumes to the numbers of an undisturbed run."""

import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest
from elsewhere import program
from linear_program import numbers_json, run_probes, tasks_of

from engine.training.interruptions import Stopped
from engine.training.states import load_state, states
from probes.linear.heads import Heads

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("linear_program.py")
PROTOCOLS = ("linear_sgd@extrema_code", pytest.param("linear_sgd@ibot_base_cached", marks=pytest.mark.exhaustive))
SIGNALS = (signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function of a protocol that returns the numbers of an undisturbed run, computed once."""
    return cache(lambda name: numbers_json(run_probes(tmp_path_factory.mktemp("undisturbed"), name)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_probe_killed_at_random_moments_resumes_to_the_same_numbers(
    protocol, tmp_path, undisturbed, monkeypatch, capsys
):
    program(PROGRAM, tmp_path, protocol, 2).end()
    (folder,) = (path for path in (tmp_path / "cache" / "linear").iterdir() if path.is_dir())
    state = load_state(states(folder)[0]).facts
    (task,) = tasks_of(protocol).values()
    saved = 2 * state["epoch"] + state["iteration"]
    assert 0 < saved < 2 * task.epochs, "no run was killed in the middle, so nothing is tested"
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    assert numbers_json(run_probes(tmp_path, protocol)) == undisturbed(protocol)
    report = re.search(r"(\d+) of (\d+) steps, (\d+) of them now", capsys.readouterr().err)
    done, total, now = map(int, report.groups())
    assert done == total == 2 * task.epochs and now == total - saved


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_probe_stopped_by_signals_resumes_to_the_same_numbers(protocol, number, tmp_path, undisturbed, monkeypatch):
    """In the middle of an epoch, before the first evaluation, and after the last step."""
    expected = undisturbed(protocol)  # before Heads.step is patched
    (task,), steps, step = tasks_of(protocol).values(), [], Heads.step

    def step_then_signal(self, *batch):
        steps.append(step(self, *batch))
        if len(steps) in (1, 4, 2 * task.epochs):
            os.kill(os.getpid(), number)
        return steps[-1]

    monkeypatch.setattr(Heads, "step", step_then_signal)
    for signalled in (1, 4, 2 * task.epochs):
        with pytest.raises(Stopped) as stopped:
            run_probes(tmp_path, protocol)
        done = len(steps)
        assert signalled <= done <= signalled + 1, "the handler runs in the main thread, maybe a step later"
        assert f"step {done} of {2 * task.epochs} of linear heads" in str(stopped.value)
    assert numbers_json(run_probes(tmp_path, protocol)) == expected and len(steps) == 2 * task.epochs
