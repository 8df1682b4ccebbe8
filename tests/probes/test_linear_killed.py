"""A linear probe killed at random moments and continued, and under torchrun: the numbers of one quiet run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from linear_program import EPOCHS, evaluated
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("linear_program.py")
PROTOCOLS = ("linear_sgd@ibot_base_cached",)


def ended(*arguments, launcher=()) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROGRAM.parents[2]}"}
    command = [sys.executable, *launcher, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(outcome) -> dict:
    return json.loads(json.dumps({"metrics": outcome.metrics, "grid": outcome.facts["grid"]}))


@pytest.fixture(scope="module", params=PROTOCOLS)
def quiet(request, tmp_path_factory):
    return request.param, numbers(evaluated(tmp_path_factory.mktemp("quiet"), request.param))


def test_killed_at_random_moments_and_continued(tmp_path, quiet):
    protocol, expected = quiet
    ended(tmp_path, protocol, 3)
    (state,) = (tmp_path / "cache" / "linear").glob("*.safetensors")
    epoch = int(load_file(state)["progress"][0])
    assert 0 < epoch < EPOCHS, "no run was killed in the middle: the test shows nothing"
    assert json.loads(ended(tmp_path, protocol)) == expected


def test_two_processes_of_torchrun_agree(tmp_path, quiet):
    protocol, expected = quiet
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert [json.loads(line) for line in ended(tmp_path, protocol, launcher=torchrun).splitlines()] == [expected] * 2
