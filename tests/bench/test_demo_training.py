"""The demo: a stopped one resumes, another recipe or seed is trained anew, and it ends with tests and a report."""

import re
from pathlib import Path

import pytest
from written import rows_of

from bench import demo
from bench.commands import demo as command
from bench.demo import CHANGES, METHOD, pretrained
from imagesets.sets import open_set
from pretrain.loop.trainer import Trainer

TINY = ("epochs=1", "batch=128", "schedule.warmup=0", "width=16", "depth=1", "heads=1")


@pytest.fixture
def few_images(monkeypatch):
    """128 training images."""
    monkeypatch.setattr(demo, "open_set", lambda url, split: open_set(url, split).limited(128))


@pytest.fixture
def training_folders(monkeypatch, few_images) -> list[Path]:
    """Folders of the trainings that were started; each stops at once, as if by a signal."""
    folders = []
    monkeypatch.setattr(Trainer, "train", lambda trainer: folders.append(trainer.run.out) or "stopped")
    return folders


def test_a_stopped_demo_resumes_in_its_folder(training_folders, tmp_path):
    assert [command.run(command.Options(out=tmp_path)) for _ in range(2)] == [75, 75]
    first, second = training_folders
    assert first == second


def test_another_recipe_or_seed_is_trained_anew(training_folders, tmp_path, monkeypatch):
    for changes in (CHANGES, (*CHANGES, "lr=1e-4")):
        monkeypatch.setattr(demo, "CHANGES", changes)
        for seed in (0, 1):
            pretrained(tmp_path, seed)
    assert len(set(training_folders)) == 4


@pytest.mark.slow
def test_the_demo_ends_with_tests_and_a_report(tmp_path, monkeypatch, few_images, capsys, on_terminal):
    """Shortened to trainings of one update, and to 100 images of each split."""
    monkeypatch.setattr(demo, "CHANGES", (*CHANGES, *TINY))
    monkeypatch.setattr(demo, "LIMIT", 100)
    monkeypatch.setattr(demo, "PROTOCOLS", {"knn@dino": ("k-NN", "top1_k10")})
    assert command.run(command.Options(out=tmp_path)) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{METHOD}-trained.* raw-pixels .*, p [=<] 0\.\d+ after Holm over 2", printed)
    assert f"{METHOD}-initial" in printed
    assert f"open {tmp_path / 'report.html'}\n" in printed
    text, learned = (tmp_path / "report.html").read_text(), printed.splitlines()[-1]
    assert f"<p>{learned}</p>" in text and re.search(r"k-NN accuracy from [\d.]+ to [\d.]+ % .* raw pixels", learned)
    assert 'src="data:image/jpeg' in text and "raw-pixels (floor)" in text and "initial weights" in text
    assert {row["name"] for row in rows_of(tmp_path)} == {"raw-pixels", f"{METHOD}-initial", f"{METHOD}-trained"}
    monkeypatch.delattr(Trainer, "train")
    assert command.run(command.Options(out=tmp_path)) == 0, "a second demo trains nothing"
    assert "\n0 done" in capsys.readouterr().out
