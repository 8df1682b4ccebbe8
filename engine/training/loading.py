"""Reading items ahead in loader processes: images, batches of images, and pieces of batches."""

import multiprocessing
import signal
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from engine.errors import option

EXIT_GRACE = 60  # seconds after a SIGTERM until a loader process ends itself
SHARED_MEMORY = "/dev/shm"  # file system of shared memory


class Source(Protocol):
    """A sequence of items to read, each a tuple that may contain tensors."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: int) -> tuple[Any, ...]: ...


def read_ahead(source: Source, workers: int, device: str | torch.device, ahead: int = 4) -> Generator[Any]:
    """All items in order, read by loader processes, each `ahead` items in advance, or by this process for 0 workers.

    Closing the generator ends the loaders. An error while reading an item is raised here. For a GPU, tensors are in
    pinned memory.
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
    """The items of `source`, with errors returned as items: if a loader process raised one, only the text of its
    traceback would arrive."""

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
    """Context in which a loader process moves tensors into shared memory. ValueError if there is no room.

    torch would move the tensors when it sends them. A failure there happens in a thread of the loader process, and the
    training waits forever.
    """
    try:
        yield
    except RuntimeError as error:
        if "shared memory" not in str(error) and "/torch_" not in str(error):
            raise
        full = "unable to allocate" in str(error)  # torch shows an old errno for this, as "Success (0)"
        raise _no_sharing("no room is left" if full else str(error).rpartition(">: ")[2]) from error


def _no_sharing(reason: str) -> ValueError:
    return ValueError(
        f"loader processes cannot share images in {SHARED_MEMORY} ({reason}): mount or enlarge it (docker run "
        f"--shm-size 8g, mount -t tmpfs -o size=8G tmpfs /dev/shm), or run with {option('workers', 0)}"
    )


def ignore_signals(worker: int) -> None:
    """Ignore signals that are meant for the training; a `worker_init_fn` for DataLoader, called in loader processes.

    A terminal or a scheduler signals all processes of a job at once, but the training still needs images to finish its
    update. The training ends its loaders itself; if it cannot, an alarm ends them EXIT_GRACE seconds after a SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(EXIT_GRACE))


def loaded_by(loader: DataLoader) -> Generator[Any]:
    """The items of a DataLoader; its processes end when this generator is closed or raises an error.

    torch ends them only when nothing refers to its iterator any more. After an error the traceback refers to it, so
    they would live until this process ends, which would wait EXIT_GRACE seconds for each.

    ValueError if shared memory is missing, read-only or full.
    """
    before = {*multiprocessing.active_children()}
    try:
        if loader.num_workers:
            multiprocessing.Lock()  # if this fails, torch's iterator would too, with a traceback of its own
        batches: Any = DataLoader.__iter__(loader)  # also of a subclass whose own __iter__ calls this function
    except (RuntimeError, OSError) as error:  # a loader was killed while others were being started, or none can start
        for process in {*multiprocessing.active_children()} - before:
            process.kill()
        if isinstance(error, OSError):
            raise _no_sharing(error.strerror or str(error)) from error
        raise
    try:
        yield from batches
    finally:
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            for process in batches._workers:  # one that is still starting may have missed the request to end
                process.kill()
