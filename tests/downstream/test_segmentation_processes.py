"""Training in two processes of torchrun: the results of one process, and errors and signals that stop both."""

import json
from pathlib import Path
from typing import Any

import pytest
from elsewhere import ranks
from PIL import Image
from segmentation_program import train

from downstream.data.scenes import tiny_folder

pytestmark = pytest.mark.slow

BROKEN = "annotations/validation/ADE_val_00000000.png"
PROGRAM = Path(__file__).with_name("segmentation_program.py")


@pytest.fixture(scope="module")
def results_of_two(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of each process; in the last run one mask does not fit its image."""
    folder = tmp_path_factory.mktemp("two")
    ade = tiny_folder("ade20k", folder)
    Image.open(ade / BROKEN).resize((48, 32)).save(ade / BROKEN)
    return [json.loads(process.end()) for process in ranks(2, PROGRAM, folder / "run", f"ade20k:{ade}")]


def test_two_processes_train_like_one(results_of_two, tmp_path):
    """Every step has the same images, and no layer of the head mixes images, so only rounding differs.

    A signal to one process stops both after the same step; the resumed run ends with the same metrics.
    """
    first, second = results_of_two
    single_process = train(tmp_path)
    assert first["uninterrupted"] == pytest.approx(single_process, abs=0.05) and single_process["aAcc"] > 20
    assert first == second and "after step 3 of 6" in first["stopped"]
    assert first["resumed"] == first["uninterrupted"]


def test_a_file_that_one_process_cannot_read_stops_both(results_of_two):
    """With the same one-line error, long before a timeout. Which files are refused is tested in one process."""
    first, second = (result["error"] for result in results_of_two)
    assert first == second and "\n" not in first["message"]
    assert first["message"].partition(": ")[0].endswith(BROKEN)
    assert "32 x 48" in first["message"] and "64 x 96" in first["message"]
