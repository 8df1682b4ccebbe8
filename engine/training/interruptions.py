"""When a training saves its state, and when it leaves: now and then, and when a signal asks."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SAVE_SHARE = 0.02  # of the time at most goes into saving, whatever was asked
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # a scheduler's and Ctrl-C: save and leave


@contextmanager
def listening(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGNALS, for the length of a block. SIGQUIT (Ctrl-\\) still ends it at once, unsaved."""

    def heard(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, heard) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
