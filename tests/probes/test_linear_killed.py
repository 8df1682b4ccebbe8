"""A linear probe killed at random moments, stopped by signals, and continued: the numbers of one quiet run."""

import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest
from elsewhere import program
from linear_program import evaluated, numbers, tasks_of

from engine.training.interruptions import Stopped
from engine.training.states import load_state, states
from probes.linear.heads import Heads

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("linear_program.py")
PROTOCOLS = ("linear_sgd@extrema_code", pytest.param("linear_sgd@ibot_base_cached", marks=pytest.mark.exhaustive))
SIGNALS = (signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Protocol -> the numbers of a run that nobody disturbed."""
    return cache(lambda name: numbers(evaluated(tmp_path_factory.mktemp("quiet"), name)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_killed_at_random_moments_and_continued(protocol, tmp_path, quiet, monkeypatch, capsys):
    program(PROGRAM, tmp_path, protocol, 2).end()
    (folder,) = (path for path in (tmp_path / "cache" / "linear").iterdir() if path.is_dir())
    state = load_state(states(folder)[0]).facts
    (task,) = tasks_of(protocol).values()
    before = 2 * state["epoch"] + state["iteration"]
    assert 0 < before < 2 * task.epochs, "no run was killed in the middle: the test shows nothing"
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    assert numbers(evaluated(tmp_path, protocol)) == quiet(protocol)
    shown = re.search(r"(\d+) of (\d+) steps, (\d+) of them now", capsys.readouterr().err)
    done, whole, now = map(int, shown.groups())
    assert done == whole == 2 * task.epochs and now == whole - before


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stopped_by_a_signal_and_continued(protocol, number, tmp_path, quiet, monkeypatch):
    """In the middle of an epoch, before anything was evaluated, and after the last step."""
    expected = quiet(protocol)  # before steps are counted
    (task,), steps, step = tasks_of(protocol).values(), [], Heads.step

    def signalled(self, *batch):
        steps.append(step(self, *batch))
        if len(steps) in (1, 4, 2 * task.epochs):
            os.kill(os.getpid(), number)
        return steps[-1]

    monkeypatch.setattr(Heads, "step", signalled)
    for earliest in (1, 4, 2 * task.epochs):
        with pytest.raises(Stopped) as stopped:
            evaluated(tmp_path, protocol)
        done = len(steps)
        assert earliest <= done <= earliest + 1, "the handler runs in the main thread, soon"
        assert str(stopped.value).startswith(
            f"stopped by a signal after step {done} of {2 * task.epochs} of linear heads on"
        )
    assert numbers(evaluated(tmp_path, protocol)) == expected and len(steps) == 2 * task.epochs
