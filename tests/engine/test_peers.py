"""Connected processes: when one dies, the others end with one line that names it; a busy one is waited for."""

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


def start_processes(folder: Path, count: int, scenario: str, victim: int) -> tuple[Program, list[int]]:
    """The running program, and the pids of its connected processes by rank."""
    running = program(PROGRAM, folder, count, scenario, victim)
    files = [folder / f"pid{rank}" for rank in range(count)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
        time.sleep(0.02)
    return running, [int(file.read_text()) for file in files]


def errors_in(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("errors*"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "victim"),
    [
        ("collective", 1),
        ("hang", 0),
        pytest.param("collective", 0, marks=pytest.mark.exhaustive),
        pytest.param("hang", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_process_is_named_in_one_line(tmp_path, scenario, victim):
    """Whether the others wait in a collective, which fails, or in a call that would never return."""
    running, pids = start_processes(tmp_path, 3, scenario, victim)
    time.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    codes = json.loads(running.end())
    assert time.monotonic() - killed_at < 10
    errors = "".join(errors_in(tmp_path))
    assert codes == [-signal.SIGKILL if rank == victim else 2 for rank in range(3)], errors
    lines = [line for line in errors.splitlines() if line.startswith("bench: error: ")]
    assert len(lines) == 1, errors
    assert f"process {victim} of 3 (pid {pids[victim]}, host {socket.gethostname()}) was killed by signal 9" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_busy_process_is_not_taken_for_dead(tmp_path):
    running, _ = start_processes(tmp_path, 2, "busy", 1)
    assert json.loads(running.end()) == [0, 0], errors_in(tmp_path)


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others(tmp_path):
    """They print nothing: the process that failed has printed its error."""
    running, _ = start_processes(tmp_path, 2, "error", 1)
    assert json.loads(running.end()) == [2, 1]
    errors = errors_in(tmp_path)
    assert "error of one rank" in errors[1] and not errors[0]


def test_the_signal_that_killed_a_process_is_known_until_its_parent_reaps_it():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGTERM)
    assert signal_of(process.pid) == signal.SIGTERM
    process.wait()
    assert signal_of(process.pid) == 0
