"""Atomic folders and locks: kills, concurrent writers, and file systems that lack exchanges of names or locks."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import files
from engine.files import (
    folder_atomic,
    locked,
    locked_or_refused,
    read_json,
    read_json_lines,
    read_text,
    refuse_irregular_files,
    reserve,
)

KILLED_WRITE = """
import os, sys
from engine import files
if sys.argv[2] == "between":
    files._exchange = lambda source, target: False
    replace = os.replace
    os.replace = lambda old, new: os.kill(os.getpid(), 9) if str(new) == sys.argv[1] else replace(old, new)
with files.folder_atomic(sys.argv[1]) as folder:
    (folder / "new").touch()
    if sys.argv[2] == "inside":
        os.kill(os.getpid(), 9)
"""


def write_folder(path: Path, name: str) -> None:
    with folder_atomic(path) as folder:
        (folder / name).touch()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_while_writing(path: Path, when: str) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED_WRITE, path, when], cwd=Path(files.__file__).parents[1])
    assert process.returncode == -9


@pytest.mark.parametrize("when", ["inside", "between"])
def test_the_next_write_cleans_up_after_a_killed_one(when, tmp_path):
    write_folder(tmp_path / "rec", "old")
    (tmp_path / ".rec.settings").mkdir()
    kill_while_writing(tmp_path / "rec", when)
    assert len(names_in(tmp_path)) > 2
    with folder_atomic(tmp_path / "rec"):
        assert names_in(tmp_path / "rec") == ["old"], "a folder moved aside before the kill was not moved back"
    assert names_in(tmp_path) == [".rec.settings", "rec"] and names_in(tmp_path / "rec") == []


def test_concurrent_writes_do_not_disturb_each_other(tmp_path):
    with folder_atomic(tmp_path / "rec") as first:
        write_folder(tmp_path / "rec", "second")
        assert first.is_dir()
        (first / "first").touch()
    assert names_in(tmp_path) == ["rec"] and names_in(tmp_path / "rec") == ["first"]


@pytest.mark.parametrize("lacking", ["", "_exchange", "flock"])
def test_a_folder_is_replaced(lacking, tmp_path, monkeypatch):
    """Also on a file system that cannot exchange two names, or has no locks."""
    if lacking == "_exchange":
        monkeypatch.setattr(files, "_exchange", lambda source, target: False)
    if lacking == "flock":
        monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    for name in ("old", "new"):
        write_folder(tmp_path / "rec", name)
    assert names_in(tmp_path) == ["rec"] and names_in(tmp_path / "rec") == ["new"]
    with pytest.raises(ZeroDivisionError), folder_atomic(tmp_path / "rec"):
        _ = 1 / 0
    assert names_in(tmp_path) == ["rec"] and names_in(tmp_path / "rec") == ["new"]


def test_an_old_folder_that_cannot_be_removed_yet_is_removed_by_the_next_write(tmp_path, monkeypatch):
    """As on NFS, where an open file keeps its folder from being empty."""
    monkeypatch.setattr(files, "_exchange", lambda source, target: False)
    write_folder(tmp_path / "rec", "old")
    with monkeypatch.context() as nfs:
        nfs.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
        write_folder(tmp_path / "rec", "new")
    assert names_in(tmp_path / "rec") == ["new"] and len(names_in(tmp_path)) == 2
    write_folder(tmp_path / "rec", "newest")
    assert names_in(tmp_path) == ["rec"] and names_in(tmp_path / "rec") == ["newest"]


def test_readers_find_the_folder_at_every_moment(tmp_path):
    write_folder(tmp_path / "rec", "0")
    if not files._exchange(tmp_path / "rec", tmp_path / "rec"):
        pytest.skip("this file system cannot exchange two names")
    missing, finished = [], threading.Event()

    def watch() -> None:
        while not finished.is_set():
            try:
                os.close(os.open(tmp_path / "rec", os.O_RDONLY))
            except FileNotFoundError:
                missing.append(True)

    reader = threading.Thread(target=watch)
    reader.start()
    try:
        for number in range(200):
            write_folder(tmp_path / "rec", str(number))
    finally:
        finished.set()
        reader.join()
    assert not missing and names_in(tmp_path) == ["rec"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_warning(number, tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)
    with locked(tmp_path / "lock", "it works"), locked_or_refused(tmp_path / "other", "no"):
        pass
    assert capsys.readouterr().err.count("without locks") == 2
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.open(tmp_path / "missing" / "file", os.O_RDONLY))
    with pytest.raises(FileNotFoundError), locked(tmp_path / "lock", "it works"):
        pass


HOLD_LOCK = """
import sys, time
from engine.files import locked
with locked(sys.argv[1], "it waits"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_waiting_run_continues_when_the_lock_holder_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
            assert "waiting for another run: it waits" in second.stderr.readline()
            first.kill()
            assert second.stdout.readline() == "held\n"
            second.kill()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "too deep"),
        (b'{"a": NaN}', "invalid"),
        (b"\xff\xfe[1]", "invalid"),
        (b"", "truncated"),
    ],
)
def test_json_from_outside_is_refused_with_its_file(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        read_json(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_from_outside_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_text(path) == "[1]"
    assert read_json(path, type=list[int]) == [1]


@pytest.mark.parametrize("read", [read_text, read_json])
def test_pipes_and_long_files_are_refused_without_waiting(read: Callable, tmp_path: Path) -> None:
    pipe, sparse = tmp_path / "pipe", tmp_path / "sparse"
    os.mkfifo(pipe)
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    for path in (pipe, sparse):
        with pytest.raises(ValueError, match=str(path)):
            read(path)
    sparse.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=str(sparse)):
        read(sparse)


def test_lines_that_a_kill_cut_short_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    deep = "[" * 100_000
    path.write_text(f'{{"step": 1}}\n{{"step": 2, "x": "\\udcff"}}\n[3]\n{{"x": {deep}\n{{"step"')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2, "x": "\udcff"}]


def test_names_of_files_that_are_not_utf_8_survive_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"url": os.fsdecode(b"images:/data/\xff")}))
    assert os.fsencode(read_json(path)["url"]) == b"images:/data/\xff"


def test_pipes_below_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "image.PNG")
    refuse_irregular_files(tmp_path, (".png",))
    os.mkfifo(tmp_path / "a" / "pipe")
    with pytest.raises(ValueError, match=f"{tmp_path / 'a/pipe'}: a pipe"):
        refuse_irregular_files(tmp_path, (".png",))


def test_reserved_files_have_space_of_their_own_and_keep_what_they_hold(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with open(old, "wb") as file:
        file.write(b"abc")
        file.truncate(1 << 20)  # a sparse file
    assert old.stat().st_blocks * 512 < 1 << 20
    reserve({old: 1 << 20, new: 3 << 20})
    for path, size in ((old, 1 << 20), (new, 3 << 20)):
        assert path.stat().st_size == size <= path.stat().st_blocks * 512
    assert old.read_bytes()[:4] == b"abc\0" and not any(new.read_bytes())


def test_a_full_disk_is_one_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=f"5.0 MiB in {tmp_path}, where 1.0 MiB are free"):
        reserve({tmp_path / "one": 1 << 20, tmp_path / "two": 4 << 20})
    assert names_in(tmp_path) == []
