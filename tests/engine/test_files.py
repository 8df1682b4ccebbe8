"""Folders that are written whole or not at all: kills, replacements, and file systems that lack something."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import files
from engine.files import folder_atomic, is_locked, locked, locked_or_refused

KILLED = """
import os, sys
from engine import files
if sys.argv[2] == "between":
    files._exchange = lambda one, other: False
    replace = os.replace
    os.replace = lambda one, other: os.kill(os.getpid(), 9) if str(other) == sys.argv[1] else replace(one, other)
with files.folder_atomic(sys.argv[1]) as folder:
    (folder / "new").touch()
    if sys.argv[2] == "inside":
        os.kill(os.getpid(), 9)
"""


def written(path: Path, name: str) -> None:
    with folder_atomic(path) as folder:
        (folder / name).touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(path: Path, when: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, path, when], cwd=Path(files.__file__).parents[1])
    assert done.returncode == -9


@pytest.mark.parametrize("when", ["inside", "between"])
def test_what_a_kill_leaves_is_removed_by_the_next(when, tmp_path):
    written(tmp_path / "rec", "old")
    (tmp_path / ".rec.settings").mkdir()
    killed(tmp_path / "rec", when)
    assert len(names(tmp_path)) > 2
    with folder_atomic(tmp_path / "rec"):
        assert names(tmp_path / "rec") == ["old"], "moved back where the kill was between two renames"
    assert names(tmp_path) == [".rec.settings", "rec"] and names(tmp_path / "rec") == []


def test_what_another_process_writes_is_left_alone(tmp_path):
    with folder_atomic(tmp_path / "rec") as first:
        written(tmp_path / "rec", "second")
        assert first.is_dir()
        (first / "first").touch()
    assert names(tmp_path) == ["rec"] and names(tmp_path / "rec") == ["first"]


@pytest.mark.parametrize("lacking", ["", "_exchange", "flock"])
def test_a_folder_is_replaced(lacking, tmp_path, monkeypatch):
    """Also where two names cannot be exchanged, and where there are no locks."""
    if lacking == "_exchange":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    if lacking == "flock":
        monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    for name in ("old", "new"):
        written(tmp_path / "rec", name)
    assert names(tmp_path) == ["rec"] and names(tmp_path / "rec") == ["new"]
    with pytest.raises(ZeroDivisionError), folder_atomic(tmp_path / "rec"):
        _ = 1 / 0
    assert names(tmp_path) == ["rec"] and names(tmp_path / "rec") == ["new"]


def test_there_is_no_moment_without_the_folder(tmp_path):
    written(tmp_path / "rec", "0")
    if not files._exchange(tmp_path / "rec", tmp_path / "rec"):
        pytest.skip("this file system cannot exchange two names")
    absent, over = [], threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                os.close(os.open(tmp_path / "rec", os.O_RDONLY))
            except FileNotFoundError:
                absent.append(True)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(200):
            written(tmp_path / "rec", str(number))
    finally:
        over.set()
        reader.join()
    assert not absent and names(tmp_path) == ["rec"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_used(number, tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)
    with locked(tmp_path / "lock", "it works"), locked_or_refused(tmp_path / "other", "no"):
        assert not is_locked(tmp_path / "lock")
    assert capsys.readouterr().err.count("without locks") == 3
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.open(tmp_path / "nothing" / "there", os.O_RDONLY))
    with pytest.raises(FileNotFoundError), locked(tmp_path / "lock", "it works"):
        pass


WAITS = """
import sys, time
from engine.files import locked
with locked(sys.argv[1], "it waits"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_waits_goes_on_when_the_other_is_killed(tmp_path):
    command = [sys.executable, "-c", WAITS, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
            assert "waiting for another run: it waits" in second.stderr.readline()
            first.kill()
            assert second.stdout.readline() == "held\n"
            second.kill()
