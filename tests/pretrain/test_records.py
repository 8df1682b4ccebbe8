"""Weights & Biases: a resumed training continues its run there, a new one starts a new run."""

import sys
from types import ModuleType
from typing import Any

import pytest
from small_trainings import trainer


class FakeWandb(ModuleType):
    """A stand-in for the package. inits: arguments of each init. logged: (run id, step, values)."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits, self.logged = [], []

    def init(self, **arguments: Any) -> "FakeWandb":
        self.inits.append(arguments)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((self.inits[-1]["id"], step, values))

    def finish(self) -> None:
        self.inits[-1]["finished"] = True


@pytest.fixture
def board(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def fail(export, progress) -> dict:
    raise RuntimeError("stopped")


def test_a_resumed_training_continues_its_run(board, tmp_path):
    first = trainer(
        "mae", tmp_path / "one", wandb="project", monitor=lambda export, progress: first.stop() or {}, monitor_every=1
    )
    assert first.train() == "stopped"
    assert trainer("mae", tmp_path / "one", wandb="project", resume=True).train() == "finished"
    assert trainer("mae", tmp_path / "two", wandb="project").train() == "finished"
    ids = [arguments["id"] for arguments in board.inits]
    assert ids[0] == ids[1] != ids[2]
    assert all(arguments["resume"] == "allow" and arguments["finished"] for arguments in board.inits)
    assert (board.inits[0]["project"], board.inits[0]["name"]) == ("project", "one")
    assert board.inits[0]["config"]["method"] == "mae"
    steps = [step for run, step, values in board.logged if run == ids[0] and "loss" in values]
    assert steps == sorted(set(steps)) and steps[-1] == 6


def test_after_a_failure_before_the_first_state_a_new_run_is_started(board, tmp_path):
    failing = trainer("mae", tmp_path, wandb="project", monitor=fail, monitor_every=1)
    with pytest.raises(RuntimeError, match="stopped"):
        failing.train()
    assert trainer("mae", tmp_path, wandb="project", seed=1).train() == "finished"
    assert board.inits[0]["id"] != board.inits[1]["id"]
