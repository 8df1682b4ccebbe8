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

BROKEN = "annotations/validation/ADE_val_00000000.png"
PROGRAM = Path(__file__).with_name("segmentation_program.py")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory) -> list[dict[str, Any]]:
    """What both processes say; of the scenes of the last run one mask does not fit its image."""
    folder = tmp_path_factory.mktemp("two")
    ade = tiny_folder("ade20k", folder)
    Image.open(ade / BROKEN).resize((48, 32)).save(ade / BROKEN)
    return [json.loads(each.end()) for each in ranks(2, PROGRAM, folder / "run", f"ade20k:{ade}")]


def test_two_processes_do_the_same_training(by_two, tmp_path):
    """The same images in every step, so that only rounding differs; none of the head's layers looks across images. A
    signal to one process stops both after the same step, and they go on to the same numbers."""
    first, second = by_two
    alone = metrics(tmp_path)
    assert first["undisturbed"] == pytest.approx(alone, abs=0.05) and alone["aAcc"] > 20
    assert first == second and first["stopped"].startswith("stopped by a signal after step 3 of 6 of linear on tiny-")
    assert first["continued"] == first["undisturbed"]


def test_what_one_process_cannot_read_stops_both(by_two):
    """With one line, the same, and long before anything times out; which files are refused is tested in one process."""
    first, second = (each["error"] for each in by_two)
    assert first == second and "\n" not in first["said"]
    assert first["said"].partition(": ")[0].endswith(BROKEN)
    assert "the mask is 32 x 48 pixels and its image 64 x 96" in first["said"]
