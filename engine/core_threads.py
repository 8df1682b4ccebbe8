"""Work off many independent items on all cores: each core is a lane, one thread whose tensor operators use it alone.

Where items are many, this beats running one item after the other on all cores: no operator ends in a barrier that
waits for the slowest core, and a core that reads or decodes does not keep the others waiting. It also makes results
independent of the number of cores, since every item is computed by one.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def run_on_core_threads(work: Callable[[Item], None], items: Sequence[Item], lanes: int | None = None) -> None:
    """Call `work` for every item, from `lanes` threads. An error in one stops all after the item in hand.

    lanes: unless told, one for each thread that torch was given (OMP_NUM_THREADS, or the cores).
    """
    threads_before = torch.get_num_threads()
    left = iter(items)  # shared: each `next` on a sequence's iterator is one step under the interpreter's lock
    stop = threading.Event()

    def lane() -> None:
        torch.set_num_threads(1)  # of this thread, and the number that threads started later begin with
        try:
            for item in left:
                if stop.is_set():
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(lanes or threads_before, thread_name_prefix="lane") as pool:
        try:
            for ending in [pool.submit(lane) for _ in range(lanes or threads_before)]:
                ending.result()
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
            torch.set_num_threads(threads_before)
