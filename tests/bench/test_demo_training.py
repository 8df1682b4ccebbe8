"""The demo's networks are trained once, and anew where anything that makes them has changed."""

from pathlib import Path

import pytest

from bench.pretraining import demo_training
from bench.pretraining.demo_training import pretrain
from pretrain.loop.trainer import Trainer

QUICK = ("epochs=1", "batch=512", "schedule.warmup=0")


@pytest.fixture
def begun(monkeypatch) -> list[Path]:
    """Folders of the trainings that began; none of them trains, and each is stopped by a signal."""
    found = []
    monkeypatch.setattr(Trainer, "train", lambda trainer: found.append(trainer.run.out) or "stopped")
    monkeypatch.setattr(demo_training, "CHANGES", QUICK)
    return found


@pytest.mark.slow
def test_the_same_demo_is_trained_once(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_training, "CHANGES", QUICK)
    folder = pretrain(tmp_path, 0)
    assert all((folder / name / "model.safetensors").exists() for name in ("start", "export"))
    monkeypatch.delattr(Trainer, "train")
    assert pretrain(tmp_path, 0) == folder


def test_a_demo_that_was_stopped_goes_on_in_its_folder(begun, tmp_path):
    assert pretrain(tmp_path, 0) is None
    assert pretrain(tmp_path, 0) is None
    assert begun[0] == begun[1]


def test_another_recipe_or_seed_is_trained_anew(begun, tmp_path, monkeypatch):
    for seed in (0, 1):
        pretrain(tmp_path, seed)
    monkeypatch.setattr(demo_training, "CHANGES", (*QUICK, "lr=1e-4"))
    pretrain(tmp_path, 0)
    assert len(set(begun)) == 3
