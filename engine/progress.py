"""Progress of work that takes longer than two seconds: rich's bar on a terminal, an occasional plain line elsewhere.

Logs of batch systems keep what a terminal would overwrite, so they get one line every HEARTBEAT seconds.
"""

import math
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from engine.printing import printable

if TYPE_CHECKING:
    from rich import progress as rich_progress

SILENT_FOR = 2.0  # seconds of work before anything is printed
REDRAW = 0.1  # seconds between updates of the bar
HEARTBEAT = 30.0  # seconds between lines without a terminal
BAR_WIDTH = 24  # characters


class Progress:
    """Progress display: a context manager around `total` units of work. Any thread may call `advance`.

    parts: parts of a unit, such as the passes of an accumulated step, which `advance` and `resume` count. quiet: print
    nothing, as in all processes but rank 0. stream: where to print; by default standard error.
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
        self._bar: rich_progress.Progress | None = None

    def __enter__(self) -> "Progress":
        self._start = self._clock()
        self._first: tuple[float, int] | None = None  # time when the first units were done, and their number
        self._next = self._start + SILENT_FOR
        return self

    def resume(self, done: int) -> None:
        """Count `done` parts of an earlier run; the rate ignores them."""
        self.done = self.before = done

    def advance(self, count: int) -> None:
        """Count `count` more parts as done."""
        with self._lock:
            self.done += count
            now, is_over = self._clock(), self.done >= self.parts * self.total
            self._first = self._first or (now, self.done)
            if now >= self._next and not self.quiet:
                self._next = now + (REDRAW if self._terminal else HEARTBEAT)
                self._shown = True
                if self._terminal:
                    self._draw(self._state(now))
                elif not is_over:
                    self._write(f"{self.label}: {self._state(now)}")
            if self._shown and is_over:
                self._end("")  # now, as other threads may print between the last unit and the end of the block

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._bar:
                self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
            elif not self.quiet:
                self._write(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._end(", stopped" if error else "")

    def _end(self, ending: str) -> None:
        """Replace the bar by a closing line; nothing is drawn after it."""
        self._shown, self._next = False, math.inf
        if self._bar:
            self._bar.stop()
            self._bar = None
        seconds = self._clock() - self._start
        done, before = self.done // self.parts, self.before // self.parts
        now = f", {done - before} of them now," if before else ""
        self._write(f"{self.label}: {done} of {self.total} {self.unit}{now} in {span(seconds)}{ending}")

    def _state(self, now: float) -> str:
        done, part = divmod(self.done, self.parts)
        within = f" and {part}/{self.parts} of the next" if part else ""
        rate = (self.done - self.before) / self.parts / (now - self._start)
        speed = f"{rate:.1f} {self.unit}/s" if rate >= 0.1 or not rate else f"{span(1 / rate)} each"
        return f"{done}/{self.total} {self.unit}{within}, {speed}, {self._left(now)} left"

    def _left(self, now: float) -> str:
        """Time left, by the rate since the first units: these wait for loaders and memory, so their own rate is low."""
        since, already = self._first or (now, self.done)
        if now <= since or self.done <= already:
            return "unknown time"
        return span((self.parts * self.total - self.done) * (now - since) / (self.done - already))

    def _draw(self, state: str) -> None:
        # One line, cut at the terminal's width, which the closing line replaces.
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [
                TextColumn("{task.description}", markup=False),
                BarColumn(BAR_WIDTH),
                TextColumn("{task.fields[state]}", markup=False),
            ]
            console = Console(file=self._stream, force_terminal=True)
            self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._bar.add_task(printable(self.label), total=self.parts * self.total, completed=self.done, state=state)
            self._bar.start()
            console.show_cursor()  # a killed process would leave it hidden
        self._bar.update(self._bar.task_ids[0], completed=self.done, state=state, refresh=True)

    def _write(self, text: str) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()


def span(seconds: float) -> str:
    """A duration for people: 8 s, 3 min 20 s, 2 h 05 min, 24 d 07 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
