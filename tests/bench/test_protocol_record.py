"""`python -m tools.protocols` records protocols; settings changed under the same version are refused."""

import json
from pathlib import Path

import pytest

from engine.extensions import FOLDERS, source_files
from tools.protocols import PAGE, RECORD, ROOT, main, own_tasks, read_record, update_record

NOW = {"knn@a": (2, "new"), "knn@b": (1, "same")}


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / RECORD).parent.mkdir(parents=True)
    return tmp_path


def write_record(checkout: Path, protocols: dict) -> None:
    (checkout / RECORD).write_text(json.dumps(protocols))


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (NOW, []),
        ({"knn@b": [1, "same"]}, ["new: knn@a, version 2"]),
        (NOW | {"knn@c": [3, "x"]}, ["gone: knn@c, version 3"]),
        (NOW | {"knn@a": [1, "old"]}, ["changed: knn@a, version 1 -> 2, other settings"]),
        (NOW | {"knn@a": [1, "new"]}, ["changed: knn@a, version 1 -> 2, the same settings"]),
    ],
)
def test_changes_are_listed_and_recorded(checkout, before, lines):
    write_record(checkout, before)
    assert update_record(checkout, NOW) == lines
    assert read_record(checkout) == NOW


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ({"knn@a": [2, "old"], "knn@b": [1, "old"]}, "settings of knn@a, knn@b changed and the version did not"),
        ({"knn@a": [3, "old"], "knn@b": [1, "same"]}, "versions only rise: set that of knn@a to 3 or more"),
    ],
)
def test_changed_settings_under_the_same_version_are_refused(checkout, before, message):
    write_record(checkout, before)
    with pytest.raises(ValueError, match=message):
        update_record(checkout, NOW)
    assert json.loads((checkout / RECORD).read_text()) == before


def test_the_command_writes_the_record_and_the_page(checkout, monkeypatch, capsys):
    tasks, current = own_tasks(), read_record(ROOT)
    monkeypatch.setattr("tools.protocols.own_tasks", lambda: tasks)
    monkeypatch.setattr("tools.protocols.ROOT", checkout)
    write_record(checkout, {name: entry for name, entry in current.items() if name != "knn@dino"})
    main()
    assert capsys.readouterr().out.splitlines() == [
        "new: knn@dino, version 1",
        f"written: {RECORD}, {PAGE}, bench/index.json",
    ]
    assert (checkout / RECORD).read_text() == (ROOT / RECORD).read_text()
    assert (checkout / PAGE).read_text() == (ROOT / PAGE).read_text()


def test_the_record_covers_this_projects_tasks_alone(toys):
    """All task files of its folders, and none from other installed packages."""
    files = [
        path for kind in ("probes", "downstream") for path in ROOT.glob(f"{FOLDERS[kind].replace('.', '/')}/[!_]*")
    ]
    assert "toy" in source_files("probes")
    assert sorted(own_tasks()) == sorted(path.stem for path in files)
