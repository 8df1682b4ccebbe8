"""Threads do every item once, keep operators to one thread, and stop at the first error."""

import os
import threading

import pytest
import torch

from engine.core_threads import own_cores, run_on_core_threads


@pytest.mark.parametrize("threads", [1, 3, None])
def test_every_item_once(threads):
    done = []
    run_on_core_threads(done.append, range(100), threads)
    assert sorted(done) == list(range(100))


def test_operators_use_one_thread_and_the_caller_keeps_its_own():
    before = torch.get_num_threads()
    seen = set()
    meet = threading.Barrier(2)  # both threads are at work at once

    def work(item):
        meet.wait(timeout=30)
        seen.add((threading.current_thread().name, torch.get_num_threads()))

    run_on_core_threads(work, range(2), threads=2)
    assert len(seen) == 2 and {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == before


def test_the_first_error_stops_all_threads():
    done = []

    def work(item):
        if item == 3:
            raise ValueError("item 3")
        done.append(item)

    with pytest.raises(ValueError, match="item 3"):
        run_on_core_threads(work, range(10_000), threads=2)
    assert len(done) < 9_999


def test_cores_are_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert own_cores() == 16
    for processes, cores in (("8", 2), ("32", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert own_cores() == cores
