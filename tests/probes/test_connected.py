"""k-NN and logistic regressions by two processes of torchrun, outside `bench run`: one connection, the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from connected_program import evaluated

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("connected_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("protocol", ["knn@dino", "lowshot@bench", "logreg@ibot"])
def test_two_processes_connect_once_and_agree_with_one(protocol, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROGRAM.parents[2]}"}
    command = [sys.executable, *TORCHRUN, str(PROGRAM), str(tmp_path / "two"), protocol]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = {"connections": 1} | evaluated(tmp_path / "one", protocol)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2
