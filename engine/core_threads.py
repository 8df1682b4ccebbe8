"""The cores of this process; and many independent items on all of them: a thread for each core, whose tensor operators
use that core alone.

Where items are many, this beats running one item after the other on all cores: no operator ends in a barrier that
waits for the slowest core, and a core that reads or decodes does not keep the others waiting. It also makes results
independent of the number of cores, since every item is computed by one.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def own_cores() -> int:
    """Cores that this process may use, shared with the others that torchrun started on its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def run_on_core_threads(work: Callable[[Item], None], items: Sequence[Item], threads: int | None = None) -> None:
    """Call `work` for every item, from `threads` threads. An error in one stops all after their current item.

    threads: by default as many as torch may use (OMP_NUM_THREADS, or the cores).
    """
    threads_before = torch.get_num_threads()
    count = threads or threads_before
    left = iter(items)  # shared: each `next` on a sequence's iterator is one step under the interpreter's lock
    stop = threading.Event()

    def work_off() -> None:
        torch.set_num_threads(1)  # of this thread, and of threads that are started later
        try:
            for item in left:
                if stop.is_set():
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="core") as pool:
        try:
            for ending in [pool.submit(work_off) for _ in range(count)]:
                ending.result()
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
            torch.set_num_threads(threads_before)
