"""Progress of anything that may take longer than two seconds: a bar on a terminal, heartbeat lines elsewhere.

Logs of batch systems keep what a terminal would overwrite, so there one plain line is printed now and then.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from engine.printing import printable

SILENT_FOR = 2.0  # seconds: shorter work prints nothing
REDRAW = 0.1  # seconds between two states of the bar
HEARTBEAT = 30.0  # seconds between two lines where there is no terminal
BAR = 24  # characters


class Progress:
    """Context manager around `total` units of work; `advance` may be called from any thread.

    parts: `advance` and `resume` count these parts of a unit, such as the passes of an accumulated step. quiet: print
    nothing, as in every process but rank 0. stream: standard error unless given.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str = "images",
        *,
        parts: int = 1,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.unit, self.parts, self.quiet = label, total, unit, parts, quiet
        self.done = self.before = 0
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._shown = False

    def __enter__(self) -> "Progress":
        self._start = self._clock()
        self._first: tuple[float, int] | None = None  # when the first units were done, and how many then were
        self._next = self._start + SILENT_FOR
        return self

    def resume(self, done: int) -> None:
        """Count `done` parts of an earlier run, which do not enter the rate."""
        self.done = self.before = done

    def advance(self, count: int) -> None:
        """`count` more parts are done."""
        with self._lock:
            self.done += count
            now = self._clock()
            self._first = self._first or (now, self.done)
            if now < self._next or self.quiet:
                return
            self._next = now + (REDRAW if self._terminal else HEARTBEAT)
            self._shown = True
            self._write(self._state(now), end="" if self._terminal else "\n")

    def say(self, text: str) -> None:
        """A line of its own; the bar goes on below it."""
        with self._lock:
            if not self.quiet:
                self._write(text, end="\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._shown:
            return
        seconds = self._clock() - self._start
        ending = (
            "" if error is None or self.done >= self.total else ", stopped"
        )  # a generator that has given all is closed
        done, before = self.done // self.parts, self.before // self.parts
        now = f", {done - before} of them now," if before else ""
        self._write(f"{self.label}: {done} of {self.total} {self.unit}{now} in {span(seconds)}{ending}", end="\n")

    def _state(self, now: float) -> str:
        done, part = divmod(self.done, self.parts)
        within = f" and {part}/{self.parts} of the next" if part else ""
        rate = (self.done - self.before) / self.parts / (now - self._start)
        speed = f"{rate:.1f} {self.unit}/s" if rate >= 0.1 or not rate else f"{span(1 / rate)} each"
        counts = f"{done}/{self.total} {self.unit}{within}, {speed}, {self._left(now)} left"
        if not self._terminal:
            return f"{self.label}: {counts}"
        filled = BAR * done // self.total if self.total else BAR
        return f"{self.label} [{'#' * filled}{'.' * (BAR - filled)}] {counts}"

    def _left(self, now: float) -> str:
        """By the rate since the first units, which wait for loaders to start and for memory: hours, by theirs alone."""
        since, already = self._first or (now, self.done)
        if now <= since or self.done <= already:
            return "unknown time"
        return span((self.parts * self.total - self.done) * (now - since) / (self.done - already))

    def _write(self, text: str, end: str) -> None:
        # Back to the first column, then erase to the end of the line (ECMA-48).
        line = printable(text)
        self._stream.write(f"\r\x1b[K{line}{end}" if self._terminal else f"{line}{end}")
        self._stream.flush()


def span(seconds: float) -> str:
    """Seconds for people: 8 s, 3 min 20 s, 2 h 05 min, 24 d 07 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
