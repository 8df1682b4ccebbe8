"""Foreign text (names of classes, files and tensors, facts, messages) is escaped wherever it is printed or written."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_results import harmless
from PIL import Image

from checkpoints.export import ViTExport

EVIL = "\x1b[2J\x1b]0;owned\x07red\nFORGED\r\u202e\u2028|<b>"  # as a name of a file or a class
SHOWN = "\\x1b[2J\\x1b]0;owned\\x07red\\nFORGED\\r\\u202e\\u2028|<b>"


@pytest.fixture
def pictures(tmp_path) -> Path:
    """An ImageFolder of two classes: one class and an image of each have hostile names, another image's is no UTF-8."""
    random = np.random.RandomState(0)
    for split in ("train", "val"):
        for name in ("ant", EVIL):
            (tmp_path / split / name).mkdir(parents=True)
            for file_name in (b"1.png", b"2" + EVIL.encode() + b".png", b"3\xff.png"):
                path = os.path.join(os.fsencode(tmp_path / split / name), file_name)
                with open(path, "wb") as file:
                    Image.fromarray(random.randint(0, 256, (16, 16, 3)).astype(np.uint8)).save(file, "PNG")
    return tmp_path


def break_images(pictures: Path) -> None:
    """Empty the images of the class with the hostile name."""
    for path in (pictures / "train" / EVIL).iterdir():
        path.write_bytes(b"")


def test_names_of_classes_and_files_are_escaped_by_a_check_of_images(bench, pictures):
    break_images(pictures)
    code, out, err = bench("data", "check", f"folder:{pictures}")
    assert code == 1 and f"smallest class {SHOWN}: 3" in harmless(out, err) and "3\\udcff.png (empty file" in out
    shutil.rmtree(pictures / "val" / EVIL)
    code, out, err = bench("data", "check", f"folder:{pictures}")
    assert code == 1 and SHOWN in harmless(out, err)


def test_names_of_files_are_escaped_by_a_run_and_its_leaderboard(bench, exports, pictures, tmp_path):
    break_images(pictures)
    out = tmp_path / "out"
    words = ("run", "--checkpoint", exports[0], "--suite", "knn@dino", "--data", f"x=folder:{pictures}", "--out", out)
    code, output, err = bench(*words)
    assert code == 1 and "\\x1b[2J\\x1b]0;owned\\x07" in harmless(output, err)
    (log,) = out.rglob("*.log")
    assert "\\x1b]0;owned" in harmless(log.read_text())
    harmless((out / "leaderboard.md").read_text(), (out / "leaderboard.csv").read_text())
    assert "owned" in harmless(*bench(*words, "--debug")[1:], *bench("leaderboard", "--out", out)[1:])


def test_facts_of_an_export_are_escaped(bench, exports, tmp_path):
    export = ViTExport.load(exports[0])
    facts = dict(export.facts) | dict.fromkeys(("method", "branch", "source_file", "data"), EVIL)
    facts["dropped"] = {EVIL: 3}
    folder = replace(export, facts=facts).save(tmp_path / "export")
    code, out, err = bench("inspect", folder)
    assert code == 0 and harmless(out, err).count(SHOWN) == 5
    run = ("run", "--checkpoint", folder, "--suite", "knn", "--data", "x=digits:", "--out", tmp_path / "out")
    assert SHOWN in harmless(*bench(*run, "--dry-run")[1:])


def test_names_of_tensors_are_escaped(bench, tmp_path):
    torch.save({"model": {EVIL: torch.ones(2), f"blocks.0.{EVIL}": torch.ones(2)}}, tmp_path / "evil.pth")
    for source in (tmp_path / "evil.pth", f"dino:{tmp_path / 'evil.pth'}", tmp_path / EVIL.replace("/", "")):
        code, out, err = bench("import", source, "--out", tmp_path / "export")
        assert code == 2 and harmless(out, err).count("\n") == 1
