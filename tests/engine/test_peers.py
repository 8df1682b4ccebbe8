"""Processes of one run: when one dies, the others end with one line that names it; a busy one is left alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.peers import signal_of

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, os, sys, time
from engine.distributed import start_world
rank, how = int(os.environ["RANK"]), sys.argv[1]
victim = int(sys.argv[2])
with start_world("cpu") as world:
    open(f"{sys.argv[3]}/{rank}", "w").write(str(os.getpid()))
    world.barrier()
    if how == "busy":  # in C, with Python's lock held, while the others wait in a collective
        rank == victim and ctypes.PyDLL(None).sleep(3)
    elif how == "error":
        if rank == victim:
            raise ValueError("an error of its own")
        time.sleep(60)
    elif rank == victim or how == "hang":
        time.sleep(60)  # as in a collective of NCCL whose other side has gone
    world.barrier()
"""


@pytest.fixture
def processes(tmp_path):
    """Start connected processes of PROGRAM; those that are left at the end are killed."""
    started = []

    def call(count: int, *words: object) -> list[subprocess.Popen]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        for rank in range(count):
            command = [sys.executable, "-c", PROGRAM, *map(str, words), str(tmp_path)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=shared | {"RANK": str(rank)}, **pipes))
        end = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < count and time.monotonic() < end:
            time.sleep(0.05)
        return started

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "victim"), [("collective", 1), ("collective", 0), ("hang", 1), ("hang", 0)])
def test_a_killed_process_is_named_in_one_line(processes, how, victim):
    """Whether the others wait in a collective, which fails, or in a call that would never return."""
    running = processes(3, how, victim)
    time.sleep(0.5)
    running[victim].kill()
    started = time.monotonic()
    left = [process for rank, process in enumerate(running) if rank != victim]
    said = "".join(process.communicate(timeout=30)[1] for process in left)
    assert time.monotonic() - started < 10
    assert [process.returncode for process in left] == [2, 2], said
    lines = [line for line in said.splitlines() if line.startswith("bench: error: ")]
    assert len(lines) == 1, said
    assert (
        f"process {victim} of 3 (pid {running[victim].pid}, host {socket.gethostname()}) was killed by signal 9" in said
    )
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_busy_process_is_no_dead_one(processes):
    running = processes(2, "busy", 1)
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others(processes):
    """Without a line of theirs: the error has its own."""
    running = processes(2, "error", 1)
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [2, 1]
    assert "an error of its own" in said[1] and not said[0]


def test_the_signal_that_killed_a_process_is_found_until_its_parent_asks():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGTERM)
    assert signal_of(process.pid) == signal.SIGTERM
    process.wait()
    assert signal_of(process.pid) == 0
