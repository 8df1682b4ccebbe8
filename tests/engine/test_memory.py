"""The allocator setting takes effect inside the process, and can be turned off."""

import subprocess
import sys

import pytest

# Faults while 64 MiB are taken, touched and freed 20 times: 16384 pages each time unless the memory is kept.
CHURN = """
import ctypes, resource
from engine.memory import keep_memory
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


def churn(switch):
    done = subprocess.run(
        [sys.executable, "-c", CHURN], env={"BENCH_KEEP_MEMORY": switch}, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.fixture(scope="module")
def kept():
    applied, faults = churn("1")
    if not applied:
        pytest.skip("the C library is not glibc")
    return faults


def test_freed_memory_is_reused(kept):
    assert kept < 1000


def test_the_switch_turns_it_off(kept):
    applied, faults = churn("0")
    assert not applied
    assert faults > 100 * max(kept, 1)


def test_other_systems_are_left_alone(monkeypatch):
    from engine import memory

    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.keep_memory() is False
