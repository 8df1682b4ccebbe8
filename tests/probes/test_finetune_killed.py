"""Fine-tuning killed at several moments, and divided between processes: the numbers of one quiet run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from elsewhere import program, ranks
from finetune_program import described, outcome

from engine.training.interruptions import Stopped
from probes.finetune.trainer import Training

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("finetune_program.py")


# As many threads as here: they are part of what a saved state belongs to.
THREADS = {"OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return described(outcome(tmp_path_factory.mktemp("quiet")))


def test_killed_three_times_and_continued(tmp_path, quiet, monkeypatch, capsys):
    """History and losses to the last bit, and every image's correctness."""
    saved = int(program(PROGRAM, tmp_path, 2, 5, 10, environment=THREADS).end())
    updates, update = [], Training.update
    monkeypatch.setattr(Training, "update", lambda self, batches: (updates.append(self.step), update(self, batches)))
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    assert described(outcome(tmp_path)) == quiet
    steps = quiet["facts"]["steps"]
    assert f"{steps} of {steps} steps, {steps - saved} of them now, in " in capsys.readouterr().err
    assert saved >= 10 and updates == list(range(saved, steps))


def test_stopped_by_a_signal_and_continued(tmp_path, quiet, monkeypatch):
    """Within an epoch, at its end before the evaluation, and after the last step: every step is made once."""
    updates, update, stops = [], Training.update, (2, 8, 16)

    def signalled(self, batches):
        if self.step + 1 in stops and len(updates) == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        updates.append(self.step)
        update(self, batches)

    monkeypatch.setattr(Training, "update", signalled)
    for step in stops:
        with pytest.raises(Stopped, match=f"after step {step} of 16 of fine-tuning on digits, state"):
            outcome(tmp_path)
    assert described(outcome(tmp_path)) == quiet and updates == list(range(16))


def test_two_connected_processes_do_the_same_training(tmp_path, quiet):
    """The same groups of images and the same draws of drop path, so that only rounding differs. A signal to one stops
    both after the same step, and they go on to the same bits."""
    running = ranks(2, PROGRAM, tmp_path, "stop", environment=THREADS)
    first, second = (json.loads(each.end()) for each in running)
    assert first == second and "stopped by a signal after step 6 of 16 of fine-tuning" in first["stopped"]
    assert first["continued"] == first["undisturbed"]
    first = first["continued"]
    found, alone = first["facts"], quiet["facts"]
    assert found["batch"]["processes"] == 2 and found["batch"]["accumulated"] * 2 == alone["batch"]["accumulated"]
    losses = [[entry["loss"] for entry in facts["history"]] for facts in (found, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
