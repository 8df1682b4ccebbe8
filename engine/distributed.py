"""The processes of one run: started by torchrun, or this one alone.

Work is split by rank. When work fails in one process it fails in all, so that none waits for one that has stopped.
Functions import torch themselves, so that importing this file does not take its seconds.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from engine.peers import watching_peers
from engine.training.interruptions import Stopped

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
# Ranks may reach a collective hours apart (a slow disk, a lock of others); engine/peers.py ends all when one dies.
MAX_WAIT = timedelta(days=2)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run."""

    rank: int = 0  # 0..size-1
    size: int = 1  # number of processes

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            from torch import distributed

            distributed.barrier()

    def from_rank0(self, value: Value) -> Value:
        """The `value` of rank 0, in every process."""
        values: list[Any] = [value]
        if self.size > 1:
            from torch import distributed

            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def add_up(self, value: "Tensor") -> None:
        """Replace a tensor, of one shape in all processes, by the sum of all: exact where it holds integers."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(value)

    def gather_objects(self, value: Value) -> list[Value]:
        """The `value` of every process in the order of ranks; every process gets the whole list."""
        values: list[Any] = [value]
        if self.size > 1:
            from torch import distributed

            values = [None] * self.size
            distributed.all_gather_object(values, value)
        return values

    def gather_on_rank0(self, value: Value) -> list[Value]:
        """The `value` of every process in the order of ranks, in rank 0; an empty list in the others."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.gather_object(value, values if self.is_rank0 else None)
        return values if self.is_rank0 else []

    def gather_tensors(self, value: "Tensor") -> "list[Tensor]":
        """The tensors of all processes, of one shape and on devices of one kind, in the order of ranks."""
        if self.size == 1:
            return [value]
        from torch import distributed, empty_like

        values = [empty_like(value) for _ in range(self.size)]
        distributed.all_gather(values, value)
        return values

    def on_rank0(self, work: Callable[[], Value]) -> Value:
        """Run `work` in rank 0 and return its result in every process. If it fails, every process raises its error."""
        results: list[Any] = self.gather_results(lambda: work() if self.is_rank0 else None)
        return results[0]

    def on_all_ranks(self, work: Callable[[], Value]) -> Value:
        """Run `work` in every process and return this process's result. If one fails, every process raises."""
        own: list[Value] = []
        self.gather_results(lambda: own.append(work()))
        return own[0]

    def first_on_each_machine(self, work: Callable[[], Value]) -> Value:
        """As `on_all_ranks`, but the other processes of a machine begin once its first one has ended: they find what it
        left on disk."""
        is_first = self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        own = self.on_all_ranks(lambda: [work()] if is_first else [])
        return self.on_all_ranks(lambda: own[0] if is_first else work())

    @contextmanager
    def held_by_rank0(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Hold a context, such as a lock, in rank 0 while every process runs a block."""
        with ExitStack() as held:
            self.on_rank0(lambda: held.enter_context(context))
            yield

    def gather_results(self, work: Callable[[], Value]) -> list[Value]:
        """Run `work` in every process and return the results of all, in the order of ranks, in every process.

        If it fails anywhere, every process raises: its own error, or else that of the lowest rank that failed. The
        error's `told_by` is the rank of the one process that should print it.
        """
        if self.size == 1:
            return [work()]
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # carried to every process and raised there
            error = raised
        outcomes = self.gather_objects((result, _portable(error)))
        failures = {rank: other for rank, (_, other) in enumerate(outcomes) if other is not None}
        if failures:
            failure = error or failures[min(failures)]
            if not hasattr(failure, "told_by"):  # else it was raised in all of them already, inside of `work`
                failure.told_by = min(failures)  # type: ignore[attr-defined]
            raise failure
        return [value for value, _ in outcomes]


def _portable(error: Exception | None) -> Exception | None:
    """The error as other processes get it: our own kinds as they are, of others, which may not pickle, the text."""
    if error is None or isinstance(error, ValueError | Stopped):
        return error
    return RuntimeError(f"{type(error).__name__} in another process: {error}")


def current_world() -> World:
    """The connected processes; this one alone where none are."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return World()
    return World(rank=distributed.get_rank(), size=distributed.get_world_size())


@contextmanager
def start_world(device: str) -> Iterator[World]:
    """Connect the processes that torchrun started (gloo on CPU, nccl too on CUDA) for the length of a block.

    Without torchrun's environment this process is alone. Processes that are connected already stay so afterwards. On
    CUDA each process uses the GPU of its local rank. When a process dies, the others end (engine/peers.py).
    """
    import torch
    from torch import distributed

    from engine.precision import keep_float32_exact

    chosen = torch.device(device)
    if chosen.type == "cuda":
        keep_float32_exact()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or distributed.is_initialized():
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # generators and contexts are those of the current device
        yield current_world()
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
        # Objects and flags travel by gloo between CPUs, so that exchanging them does not wait for the GPU.
        distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=MAX_WAIT, device_id=chosen)
    else:
        distributed.init_process_group("gloo", timeout=MAX_WAIT)
    world = current_world()
    try:
        with watching_peers(world.rank, world.gather_results) as peers:
            try:
                yield world
                _leave_together()
            except Exception as error:
                if hasattr(error, "told_by"):  # every process raises it and comes here
                    _leave_together()
                else:
                    peers.explain(error)
                raise
    finally:
        distributed.destroy_process_group()


def _leave_together() -> None:
    # Without both, gloo aborted at exit, after correct results, in 7 of 8 runs.
    from torch import distributed

    gc.collect()
    distributed.barrier()
