"""Extraction killed, shared by processes, and run twice at once: the files are those of an undisturbed run."""

import json
from pathlib import Path

import pytest
from elsewhere import program, ranks
from extraction_program import IMAGES, KINDS, extraction_arguments
from written import contents

from probes.features.extract import extract

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("extraction_program.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert extract(*extraction_arguments(folder)).forwards == IMAGES
    return contents(folder)


def test_an_extraction_killed_at_random_moments_resumes_to_the_same_files(tmp_path, undisturbed, monkeypatch, capsys):
    program(PROGRAM, tmp_path, 3).end()
    (journal,) = tmp_path.rglob(f"{KINDS[0].name}.journal")
    saved_batches = len({json.loads(line)["batch"] for line in journal.read_text().splitlines()})
    assert saved_batches, "every run was killed before it had saved anything, so nothing is tested"
    with open(journal, "a") as file:
        file.write('{"batch": 5, "unre')  # a line cut off by a crash of the machine
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    resumed = extract(*extraction_arguments(tmp_path))
    assert 0 < resumed.forwards < IMAGES
    assert f"train: {IMAGES} of {IMAGES} images, {resumed.forwards} of them now, in " in capsys.readouterr().err
    assert contents(tmp_path) == undisturbed


def test_two_connected_processes_share_an_extraction(tmp_path, undisturbed):
    assert [int(process.end()) for process in ranks(2, PROGRAM, tmp_path)] == [IMAGES] * 2
    assert contents(tmp_path) == undisturbed


def test_two_runs_at_once_extract_only_once(tmp_path, undisturbed):
    runs = [program(PROGRAM, tmp_path), program(PROGRAM, tmp_path)]
    assert sorted(int(run.end()) for run in runs) == [0, IMAGES]
    assert contents(tmp_path) == undisturbed
