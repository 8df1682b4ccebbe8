"""A training shared by two processes of torchrun: the numbers of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from segmentation_program import metrics

PROGRAM = Path(__file__).with_name("segmentation_program.py")


def test_two_processes_do_the_same_training(tmp_path):
    """The same images in every step, so that only rounding differs; none of the head's layers looks across images."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(PROGRAM), str(tmp_path / "2")]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    alone = metrics(tmp_path / "1")
    shared = json.loads(done.stdout.strip().splitlines()[-1])
    assert shared == pytest.approx(alone, abs=0.05) and alone["aAcc"] > 20
