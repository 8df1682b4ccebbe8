"""When a training saves its state (at intervals) and when it stops (at a signal)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SAVE_SHARE = 0.02  # largest share of the time to spend on saving
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # from a scheduler or Ctrl-C: save and stop
STOPPED = os.EX_TEMPFAIL  # 75, "try again later" (sysexits.h): exit code of a command that a signal stopped


class Stopped(Exception):
    """A signal stopped a task's training, whose state is saved. All processes of a run raise it together."""

    reported_by = 0  # the rank that should print it

    @classmethod
    def after(cls, step: int, steps: int, label: str, folder: Path) -> "Stopped":
        """The exception with its message for the user; label: name of the training."""
        where = f"after step {step} of {steps} of {label}"
        return cls(f"stopped by a signal {where}, state saved in {folder}; to continue, run the same command again")


class StopRequest:
    """Remembers whether a signal asked this process to stop; pass its `ask` to `listening`."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        self.asked = True


@contextmanager
def listening(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGNALS for the length of a block. SIGQUIT (Ctrl-\\) still kills the process without saving.

    Outside the main thread signals keep their usual effect, because Python handles them only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python


class Timer:
    """Decides when to save: every `seconds`, less often if saving is slow. Use it as a context around each save."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.last, self.cost = seconds, time.monotonic(), 0.0

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= max(self.seconds, self.cost / SAVE_SHARE)

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.last = time.monotonic()
        self.cost = self.last - self.started
