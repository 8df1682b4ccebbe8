"""Fine-tuning killed at several moments, and divided between processes: the numbers of one quiet run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from finetune_program import described, outcome

from engine.training.interruptions import Stopped
from probes.finetune.trainer import Training

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("finetune_program.py")


def output_of(*arguments, launcher=()) -> str:
    # As many threads as here: they are part of what a saved state belongs to.
    settings = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": f"{PROGRAM.parents[2]}"}
    command = [sys.executable, *launcher, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return described(outcome(tmp_path_factory.mktemp("quiet")))


def test_killed_three_times_and_continued(tmp_path, quiet, monkeypatch, capsys):
    """History and losses to the last bit, and every image's correctness."""
    saved = int(output_of(tmp_path, 2, 5, 10))
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
        with pytest.raises(Stopped, match=f"after step {step} of 16 of fine-tuning on digits:"):
            outcome(tmp_path)
    assert described(outcome(tmp_path)) == quiet and updates == list(range(16))


def test_two_processes_of_torchrun_do_the_same_training(tmp_path, quiet):
    """The same groups of images and the same draws of drop path, so that only rounding differs. A signal to one stops
    both after the same step, and they go on to the same bits."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first, second = map(json.loads, output_of(tmp_path, "stop", launcher=torchrun).splitlines())
    assert first == second and "stopped by a signal after step 6 of 16 of fine-tuning" in first["stopped"]
    assert first["continued"] == first["undisturbed"]
    first = first["continued"]
    found, alone = first["facts"], quiet["facts"]
    assert found["batch"]["processes"] == 2 and found["batch"]["accumulated"] * 2 == alone["batch"]["accumulated"]
    losses = [[entry["loss"] for entry in facts["history"]] for facts in (found, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
