"""Weights & Biases: a resumed training goes on in its own run there, a new one in a new run."""

import sys
from types import ModuleType
from typing import Any

import pytest
from small_trainings import trainer


class Board(ModuleType):
    """What the package is to a training. begun: arguments of each init. logged: (run id, step, values)."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun, self.logged = [], []

    def init(self, **arguments: Any) -> "Board":
        self.begun.append(arguments)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((self.begun[-1]["id"], step, values))

    def finish(self) -> None:
        self.begun[-1]["finished"] = True


@pytest.fixture
def board(monkeypatch):
    made = Board()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def stopped(export, progress) -> dict:
    raise RuntimeError("stopped")


def test_a_resumed_training_goes_on_in_its_run(board, tmp_path):
    first = trainer(
        "mae", tmp_path / "one", wandb="project", monitor=lambda export, progress: first.stop() or {}, monitor_every=1
    )
    assert first.train() == "stopped"
    assert trainer("mae", tmp_path / "one", wandb="project", resume=True).train() == "finished"
    assert trainer("mae", tmp_path / "two", wandb="project").train() == "finished"
    ids = [arguments["id"] for arguments in board.begun]
    assert ids[0] == ids[1] != ids[2]
    assert all(arguments["resume"] == "allow" and arguments["finished"] for arguments in board.begun)
    assert (board.begun[0]["project"], board.begun[0]["name"]) == ("project", "one")
    assert board.begun[0]["config"]["method"] == "mae"
    steps = [step for run, step, values in board.logged if run == ids[0] and "loss" in values]
    assert steps == sorted(set(steps)) and steps[-1] == 6


def test_a_training_that_failed_before_its_first_state_gives_way_to_a_new_run(board, tmp_path):
    failing = trainer("mae", tmp_path, wandb="project", monitor=stopped, monitor_every=1)
    with pytest.raises(RuntimeError, match="stopped"):
        failing.train()
    assert trainer("mae", tmp_path, wandb="project", seed=1).train() == "finished"
    assert board.begun[0]["id"] != board.begun[1]["id"]
