"""Processes of one run: when one dies, the others end with one line that names it; a busy one is left alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elsewhere import Program, program

from engine.distributed import signal_of

PROGRAM = Path(__file__).with_name("peers_program.py")


def started(folder: Path, count: int, how: str, victim: int) -> tuple[Program, list[int]]:
    """Connected processes, and their pids by rank."""
    running, files = program(PROGRAM, folder, count, how, victim), [folder / f"pid{rank}" for rank in range(count)]
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end and running.poll() is None, running.communicate()
        time.sleep(0.02)
    return running, [int(file.read_text()) for file in files]


def errors_in(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("errors*"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("collective", 1),
        ("hang", 0),
        pytest.param("collective", 0, marks=pytest.mark.exhaustive),
        pytest.param("hang", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_process_is_named_in_one_line(tmp_path, how, victim):
    """Whether the others wait in a collective, which fails, or in a call that would never return."""
    running, pids = started(tmp_path, 3, how, victim)
    time.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    begun = time.monotonic()
    codes = json.loads(running.end())
    assert time.monotonic() - begun < 10
    said = "".join(errors_in(tmp_path))
    assert codes == [-signal.SIGKILL if rank == victim else 2 for rank in range(3)], said
    lines = [line for line in said.splitlines() if line.startswith("bench: error: ")]
    assert len(lines) == 1, said
    assert f"process {victim} of 3 (pid {pids[victim]}, host {socket.gethostname()}) was killed by signal 9" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_busy_process_is_no_dead_one(tmp_path):
    running, _ = started(tmp_path, 2, "busy", 1)
    assert json.loads(running.end()) == [0, 0], errors_in(tmp_path)


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others(tmp_path):
    """Without a line of theirs: the error has its own."""
    running, _ = started(tmp_path, 2, "error", 1)
    assert json.loads(running.end()) == [2, 1]
    said = errors_in(tmp_path)
    assert "an error of its own" in said[1] and not said[0]


def test_the_signal_that_killed_a_process_is_found_until_its_parent_asks():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGTERM)
    assert signal_of(process.pid) == signal.SIGTERM
    process.wait()
    assert signal_of(process.pid) == 0
