"""Exports, training states, results and feature caches that an earlier version wrote are read by this one."""

import json
import shutil
from pathlib import Path

import pytest
from written import lines_of

from bench.__main__ import main
from checkpoints.export import ViTExport
from pretrain.loop.trainer import Trainer

KEPT = Path(__file__).parent / "golden" / "kept"
STOPPED = 75  # exit code of a training that was stopped and can be resumed
OPTIONS = ["epochs=16", "width=16", "depth=1", "heads=1", "decoder_width=16", "decoder_depth=1", "decoder_heads=1"]


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """A copy of the kept files, in the working folder."""
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(*words: str) -> int:
    options = ["--data", "digits=digits:", "--limit", "40", "--out", "out"]
    return main(["run", "--checkpoint", "run", "--name", "kept", "--suite", "knn@dino", *options, *words])


def test_a_result_of_an_earlier_version_is_not_made_again(kept, capsys):
    assert evaluate() == 0
    assert "exists, skipped" in capsys.readouterr().out
    assert "kept" in (kept / "out" / "leaderboard.csv").read_text()


def test_features_of_an_earlier_version_are_not_extracted_again(kept):
    assert evaluate("--set", "knn.k=5") == 0
    (path,) = set(kept.glob("out/results/**/*.json")) - {kept / path.relative_to(KEPT) for path in KEPT.rglob("*.json")}
    result = json.loads(path.read_text())
    assert result["status"] == "ok" and result["cost"]["forwards"] == 0


def test_an_export_of_an_earlier_version_computes_what_it_recorded(kept):
    assert ViTExport.load(kept / "run" / "start").verify() == []


def test_a_training_of_an_earlier_version_goes_on(kept, monkeypatch):
    """From step 163 of 320; ten updates are enough."""
    update = Trainer.update

    def update_and_stop(trainer, *arguments):
        if trainer.step == 172:
            trainer.stop()
        return update(trainer, *arguments)

    monkeypatch.setattr(Trainer, "update", update_and_stop)
    words = ["mae", "--recipe", "smoke", "--images", "digits:", "--out", "run", "--workers", "0", "--resume"]
    assert main(["pretrain", *words, "--set", *OPTIONS]) == STOPPED
    steps = [line["step"] for line in lines_of(kept / "run")]
    assert steps == sorted(steps) and steps[-1] == 173
