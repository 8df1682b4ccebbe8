"""Worlds of several ranks for tests, each a thread of this process: they exchange values through memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.distributed import World

Result = TypeVar("Result")


class Meeting:
    """The values that the threads exchange, and the barrier at which they wait for each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size), [None] * size


@dataclass(frozen=True, kw_only=True)
class Member(World):
    """The World of one thread."""

    meeting: Meeting = field(repr=False, compare=False)

    def gather_objects(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait(60)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(60)
        return values

    def from_rank0(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def all_reduce(self, value: Any) -> None:
        value.copy_(sum(self.gather_objects(value.clone())))


def run_in_threads(size: int, work: Callable[[World], Result]) -> list[Result]:
    """The results of `work(world)`, by rank, from one thread for each of `size` ranks."""
    meeting = Meeting(size)
    members = [Member(rank=rank, size=size, meeting=meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, members))
