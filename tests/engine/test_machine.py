"""One thread per core, waiting threads that sleep, freed memory that is kept; BENCH_KEEP_MEMORY turns the last off."""

import os
import re
import subprocess
import sys
import threading

import pytest
import torch

from engine import machine
from engine.machine import own_cores, run_on_core_threads


@pytest.mark.parametrize("threads", [1, 3, None])
def test_every_item_is_processed_once(threads):
    done = []
    run_on_core_threads(done.append, range(100), threads)
    assert sorted(done) == list(range(100))


def test_workers_use_one_torch_thread_each_and_the_callers_number_is_restored():
    threads_before = torch.get_num_threads()
    threads_seen = set()
    barrier = threading.Barrier(2)  # both threads work at the same time

    def work(item):
        barrier.wait(timeout=30)
        threads_seen.add((threading.current_thread().name, torch.get_num_threads()))

    run_on_core_threads(work, range(2), threads=2)
    assert len(threads_seen) == 2 and {threads for _, threads in threads_seen} == {1}
    assert torch.get_num_threads() == threads_before


def test_the_first_error_stops_all_threads():
    done = []

    def work(item):
        if item == 3:
            raise ValueError("item 3")
        done.append(item)

    with pytest.raises(ValueError, match="item 3"):
        run_on_core_threads(work, range(10_000), threads=2)
    assert len(done) < 9_999


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert own_cores() == 16
    for processes, cores in (("8", 2), ("32", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert own_cores() == cores


# Faults while 64 MiB are taken, touched and freed 20 times: 16384 pages each time unless the memory is kept.
CHURN = """
import ctypes, resource
from engine.machine import keep_memory
print(keep_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
size = 64 << 20
def churn():
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run_churn(switch):
    """Whether the setting was applied, and the page faults."""
    process = subprocess.run(
        [sys.executable, "-c", CHURN], env={"BENCH_KEEP_MEMORY": switch}, capture_output=True, text=True, check=True
    )
    kept, faults = process.stdout.split()
    return kept == "True", int(faults)


@pytest.fixture(scope="module")
def faults_when_kept():
    applied, faults = run_churn("1")
    if not applied:
        pytest.skip("the C library is not glibc")
    return faults


def test_freed_memory_is_reused(faults_when_kept):
    assert faults_when_kept < 1000


def test_memory_reuse_can_be_turned_off(faults_when_kept):
    applied, faults = run_churn("0")
    assert not applied
    assert faults > 100 * max(faults_when_kept, 1)


def test_other_operating_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.keep_memory() is False


def test_waiting_threads_sleep_unless_the_user_chooses(monkeypatch):
    program = "from engine.machine import sleep_at_barriers; sleep_at_barriers(); import torch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["OMP_DISPLAY_ENV"] = "true"  # OpenMP prints its settings when torch loads it
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search("OMP_WAIT_POLICY.*PASSIVE", process.stderr)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    machine.sleep_at_barriers()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
