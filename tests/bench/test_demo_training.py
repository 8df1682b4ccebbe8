"""The demo: a stopped one resumes, another seed is trained anew, and it ends with tests and a report."""

import re
from pathlib import Path

import pytest
from written import rows_of

from bench.commands import demo
from bench.commands.demo import METHOD, SETTINGS
from engine.training.interruptions import Stopped
from pretrain.loop.trainer import Trainer

TINY = {"epochs": 1, "batch": 128, "schedule.warmup": 0, "width": 16, "depth": 1, "heads": 1}


@pytest.fixture
def training_folders(monkeypatch) -> list[Path]:
    """Folders of the trainings that were started; each stops at once, as if by a signal."""
    folders = []
    monkeypatch.setattr(Trainer, "train", lambda trainer, **_: folders.append(trainer.run.out) or "stopped")
    return folders


def test_a_stopped_demo_resumes_in_its_folder_and_another_seed_is_trained_anew(training_folders, tmp_path):
    for seed in (0, 0, 1):
        with pytest.raises(Stopped):
            demo.run(demo.Options(out=tmp_path, seed=seed))
    first, again, other = training_folders
    assert first == again != other


@pytest.mark.slow
def test_the_demo_ends_with_tests_and_a_report(tmp_path, monkeypatch, capsys, on_terminal):
    """Shortened to a training of one epoch of few images, and to 100 images of each split."""
    monkeypatch.setattr(demo, "SETTINGS", SETTINGS | TINY)
    monkeypatch.setattr(demo, "LIMIT", 100)
    monkeypatch.setattr(demo, "PROTOCOLS", {"knn@dino": ("k-NN", "top1_k10")})
    assert demo.run(demo.Options(out=tmp_path)) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{METHOD}-trained.* raw-pixels .*, p [=<] 0\.\d+ after Holm over 2", printed)
    assert f"{METHOD}-initial" in printed
    assert f"open {tmp_path / 'report.html'}\n" in printed
    text, learned = (tmp_path / "report.html").read_text(), printed.splitlines()[-1]
    assert f"<p>{learned}</p>" in text and re.search(r"k-NN accuracy from [\d.]+ to [\d.]+ % .* raw pixels", learned)
    assert 'src="data:image/jpeg' in text and "raw-pixels (floor)" in text and "initial weights" in text
    assert {row["name"] for row in rows_of(tmp_path)} == {"raw-pixels", f"{METHOD}-initial", f"{METHOD}-trained"}
    (log,) = tmp_path.glob("pretraining/*/log.jsonl")
    logged = log.read_text()
    assert demo.run(demo.Options(out=tmp_path)) == 0, "a second demo trains nothing"
    assert "\n0 done" in capsys.readouterr().out and log.read_text() == logged
