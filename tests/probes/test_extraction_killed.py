"""Extraction killed, divided between processes, and run twice at once: always the bytes of one quiet run."""

import json
from pathlib import Path

import pytest
from elsewhere import program, ranks
from extraction_program import IMAGES, KINDS, prepared

from probes.features.extract import extract

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("extraction_program.py")


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file of the feature store."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet")
    assert extract(*prepared(folder)).forwards == IMAGES
    return contents(folder)


def test_killed_at_random_moments_and_continued(tmp_path, quiet, monkeypatch, capsys):
    program(PROGRAM, tmp_path, 3).end()
    (journal,) = tmp_path.rglob(f"{KINDS[0].name}.journal")
    done = len({json.loads(line)["batch"] for line in journal.read_text().splitlines()})
    assert done, "every run was killed before it had done anything: the test shows nothing"
    with open(journal, "a") as file:
        file.write('{"batch": 5, "unre')  # a line that a crash of the machine cut off
    monkeypatch.setattr("engine.progress.SILENT_FOR", 0.0)
    last = extract(*prepared(tmp_path))
    assert 0 < last.forwards < IMAGES
    assert f"train: {IMAGES} of {IMAGES} images, {last.forwards} of them now, in " in capsys.readouterr().err
    assert contents(tmp_path) == quiet


def test_two_connected_processes_share_the_work(tmp_path, quiet):
    assert [int(each.end()) for each in ranks(2, PROGRAM, tmp_path)] == [IMAGES] * 2
    assert contents(tmp_path) == quiet


def test_two_runs_at_once_do_the_work_once(tmp_path, quiet):
    runs = [program(PROGRAM, tmp_path), program(PROGRAM, tmp_path)]
    assert sorted(int(run.end()) for run in runs) == [0, IMAGES]
    assert contents(tmp_path) == quiet
