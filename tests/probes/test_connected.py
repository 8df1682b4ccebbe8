"""k-NN, logistic regressions and attentive heads by two processes of torchrun, outside `bench run`: one connection,
the same numbers."""

import json
from pathlib import Path

import pytest
from connected_program import evaluated
from elsewhere import ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("connected_program.py")


@pytest.mark.parametrize("protocol", ["knn@dino", "lowshot@bench", "logreg@ibot", "attentive@smoke"])
def test_two_processes_connect_once_and_agree_with_one(protocol, tmp_path):
    lines = [each.end() for each in ranks(2, PROGRAM, tmp_path / "two", protocol)]
    expected = {"connections": 1} | evaluated(tmp_path / "one", protocol)
    assert list(map(json.loads, lines)) == [expected] * 2
