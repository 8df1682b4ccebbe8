"""Items that loader processes read ahead: images, batches of them, and pieces of batches."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

GRACE = 60  # seconds that a loader process outlives a SIGTERM
SHARED = "/dev/shm"  # where processes share memory


class Source(Protocol):
    """What is read: item after item, tuples with tensors in them."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: int) -> tuple[Any, ...]: ...


def read_ahead(source: Source, workers: int, device: str | torch.device, ahead: int = 4) -> Generator[Any]:
    """All items in order, read by loader processes, each `ahead` items in advance, or by this one if `workers` is 0.

    Close it to end them. Raises what reading an item raised. For a GPU tensors lie in pinned memory.
    """
    loader = DataLoader(
        SafeItems(source),
        batch_size=None,  # the items are batches, or pieces
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
        pin_memory=torch.device(device).type == "cuda",
        worker_init_fn=ignore_signals,
    )
    with closing(loaded_by(loader)) as items:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item


class SafeItems:
    """The items of `source`, with an error as an item: one that a loader process raised would arrive as the text of its
    traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: int) -> tuple[Any, ...] | Exception:
        try:
            if get_worker_info() is None:
                return self.source[item]
            with sharing_memory():
                parts = self.source[item]
                for part in parts:
                    if isinstance(part, Tensor):
                        part.share_memory_()
                return parts
        except (ValueError, OSError) as error:
            return error


@contextmanager
def sharing_memory() -> Iterator[None]:
    """A block of a loader process that moves tensors into shared memory. ValueError where that has no room.

    Left to torch, tensors are moved when they are sent: that fails in a thread of the process, and the training waits
    for ever.
    """
    try:
        yield
    except RuntimeError as error:
        if "shared memory" not in str(error) and "/torch_" not in str(error):
            raise
        size = os.statvfs(SHARED)
        free = size.f_bavail * size.f_frsize >> 20
        raise ValueError(
            f"{SHARED} has no room for the images of a loader process ({free} MiB free): enlarge it (docker run "
            "--shm-size 8g, mount -o remount,size=8G), or run with --workers 0"
        ) from error


def ignore_signals(worker: int) -> None:
    """In a loader process: ignore signals that are meant for the training. For DataLoader's `worker_init_fn`.

    A terminal and a scheduler signal all processes of a job at once, but the training still needs images to finish its
    update. It ends its loaders itself; if it cannot, an alarm ends them GRACE seconds after a SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))


def loaded_by(loader: Iterable[Any]) -> Generator[Any]:
    """What a DataLoader gives. Its processes end when this is closed or an error leaves it.

    torch ends them when nothing refers to its iterator any more. The traceback of an error does: then they would live
    until the process ends, which would wait GRACE seconds for each.
    """
    before = {*multiprocessing.active_children()}
    try:
        batches: Any = iter(loader)
    except RuntimeError:  # one was killed while others were started
        for process in {*multiprocessing.active_children()} - before:
            process.kill()
        raise
    try:
        yield from batches
    finally:
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            for process in batches._workers:  # one that is slow to begin has heard nothing but a SIGTERM
                process.kill()
