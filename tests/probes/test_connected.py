"""k-NN, logistic regression and attentive heads in two connected processes, without `bench run`."""

import json
from pathlib import Path

import pytest
from connected_program import run_probes
from elsewhere import ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("connected_program.py")


@pytest.mark.parametrize(
    "protocols",
    ["knn@dino,lowshot@bench,attentive@smoke", pytest.param("logreg@ibot", marks=pytest.mark.exhaustive)],
)
def test_two_processes_connect_once_and_agree_with_one(protocols, tmp_path):
    lines = [process.end() for process in ranks(2, PROGRAM, tmp_path / "two", protocols)]
    expected = {"connections": 1} | run_probes(tmp_path / "one", protocols)
    assert list(map(json.loads, lines)) == [expected] * 2
