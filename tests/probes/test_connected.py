"""k-NN, logistic regression and attentive heads in two connected processes, without `bench run`."""

import json
from pathlib import Path

import pytest
from connected_program import run_probe
from elsewhere import ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("connected_program.py")


@pytest.mark.parametrize(
    "protocol",
    ["knn@dino", "lowshot@bench", pytest.param("logreg@ibot", marks=pytest.mark.exhaustive), "attentive@smoke"],
)
def test_two_processes_connect_once_and_agree_with_one(protocol, tmp_path):
    lines = [process.end() for process in ranks(2, PROGRAM, tmp_path / "two", protocol)]
    expected = {"connections": 1} | run_probe(tmp_path / "one", protocol)
    assert list(map(json.loads, lines)) == [expected] * 2
