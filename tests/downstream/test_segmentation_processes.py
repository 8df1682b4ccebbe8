"""A training shared by two processes of torchrun: the numbers of one process, and one end for both."""

import json
from pathlib import Path
from typing import Any

import pytest
from elsewhere import ranks
from PIL import Image
from segmentation_program import metrics

from downstream.data.scenes import tiny_folder

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("segmentation_program.py")


def by_two(*values: object) -> list[dict[str, Any]]:
    """What both processes say."""
    return [json.loads(each.end()) for each in ranks(2, PROGRAM, *values)]


def test_two_processes_do_the_same_training(tmp_path):
    """The same images in every step, so that only rounding differs; none of the head's layers looks across images. A
    signal to one process stops both after the same step, and they go on to the same numbers."""
    first, second = by_two(tmp_path / "2", "stop")
    alone = metrics(tmp_path / "1")
    assert first["undisturbed"] == pytest.approx(alone, abs=0.05) and alone["aAcc"] > 20
    assert first == second and first["stopped"].startswith("stopped by a signal after step 3 of 6 of linear on tiny-")
    assert first["continued"] == first["undisturbed"]


def test_what_one_process_cannot_read_stops_both(tmp_path):
    """With one line, the same, and long before anything times out; which files are refused is tested in one process."""
    ade, file = tiny_folder("ade20k", tmp_path), "annotations/validation/ADE_val_00000000.png"
    Image.open(ade / file).resize((48, 32)).save(ade / file)
    first, second = by_two(tmp_path / "run", f"ade20k:{ade}")
    assert first == second and "\n" not in first["error"]
    assert first["error"].startswith(str(ade / file))
    assert "the mask is 32 x 48 pixels and its image 64 x 96" in first["error"]
