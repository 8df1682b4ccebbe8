"""Fine-tuning killed, stopped by signals, and shared by processes: the numbers are those of an undisturbed run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from elsewhere import program, ranks
from finetune_program import as_json, finetune

from engine.training.interruptions import Stopped
from probes.finetune.trainer import Training

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("finetune_program.py")


# The number of threads is part of the key of a saved state.
THREADS = {"OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return as_json(finetune(tmp_path_factory.mktemp("undisturbed")))


def test_a_training_killed_three_times_resumes_to_the_same_bits(tmp_path, undisturbed, monkeypatch, capsys):
    """Bit for bit: history, losses, and the correctness of every image."""
    saved = int(program(PROGRAM, tmp_path, 2, 5, 10, environment=THREADS).end())
    updates, update = [], Training.update
    monkeypatch.setattr(Training, "update", lambda self, batches: (updates.append(self.step), update(self, batches)))
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    assert as_json(finetune(tmp_path)) == undisturbed
    steps = undisturbed["facts"]["steps"]
    assert f"{steps} of {steps} steps, {steps - saved} of them now, in " in capsys.readouterr().err
    assert saved >= 10 and updates == list(range(saved, steps))


def test_a_training_stopped_by_signals_resumes_to_the_same_bits(tmp_path, undisturbed, monkeypatch):
    """Within an epoch, at its end before the evaluation, and after the last step; no step is repeated."""
    updates, update, stops = [], Training.update, (2, 8, 16)

    def update_after_signal(self, batches):
        if self.step + 1 in stops and len(updates) == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        updates.append(self.step)
        update(self, batches)

    monkeypatch.setattr(Training, "update", update_after_signal)
    for step in stops:
        with pytest.raises(Stopped, match=f"after step {step} of 16 of fine-tuning on digits, state"):
            finetune(tmp_path)
    assert as_json(finetune(tmp_path)) == undisturbed and updates == list(range(16))


def test_two_connected_processes_train_as_one_does(tmp_path, undisturbed):
    """Groups of images and draws of drop path are those of one process, so that only rounding differs. A signal to one
    rank stops both after the same step, and they resume to the same bits."""
    processes = ranks(2, PROGRAM, tmp_path, "stop", environment=THREADS)
    first, second = (json.loads(process.end()) for process in processes)
    assert first == second and "stopped by a signal after step 6 of 16 of fine-tuning" in first["stopped"]
    assert first["continued"] == first["undisturbed"]
    shared, alone = first["continued"]["facts"], undisturbed["facts"]
    assert shared["batch"]["processes"] == 2 and shared["batch"]["accumulated"] * 2 == alone["batch"]["accumulated"]
    losses, losses_alone = ([entry["loss"] for entry in facts["history"]] for facts in (shared, alone))
    assert losses == pytest.approx(losses_alone, rel=1e-4)
