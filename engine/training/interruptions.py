"""When a training saves its state and stops: at intervals, and at signals."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SAVE_SHARE = 0.02  # largest share of the time that goes into saving
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # a scheduler's and Ctrl-C: save and leave
STOPPED = os.EX_TEMPFAIL  # 75, "try again later" (sysexits.h): exit code of a command that a signal stopped


class Stopped(Exception):
    """A signal has stopped a training of a task, whose state is saved. All processes of a run raise it together."""

    told_by = 0  # the rank that should say so

    @classmethod
    def after(cls, step: int, steps: int, label: str, folder: Path) -> "Stopped":
        """With the line for the user; label: of the training."""
        where = f"after step {step} of {steps} of {label}"
        return cls(f"stopped by a signal {where}, state saved in {folder}; to go on, run the same command again")


class StopRequest:
    """Whether a signal asked this process to stop; give `ask` to `listening`."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        self.asked = True


@contextmanager
def listening(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGNALS, for the length of a block. SIGQUIT (Ctrl-\\) still ends it at once, unsaved.

    Outside the main thread signals keep their usual effect: Python handles them in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, heard) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that is not Python's


class Timer:
    """Says when to save: every `seconds`, less often where saving is slow. A context around the saving itself."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.last, self.cost = seconds, time.monotonic(), 0.0

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= max(self.seconds, self.cost / SAVE_SHARE)

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.last = time.monotonic()
        self.cost = self.last - self.started
