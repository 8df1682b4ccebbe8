"""Progress of work that takes longer than two seconds: rich's bar on a terminal, an occasional plain line elsewhere.

Logs of batch systems keep what a terminal would overwrite, so they get one line every HEARTBEAT seconds; between two
units a thread prints them, because one call of a library can take minutes. Of nested work the innermost is shown.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeVar

from engine import printing
from engine.files import open_regular
from engine.printing import printable

if TYPE_CHECKING:
    from rich import progress as rich_progress

SILENT_FOR = 2.0  # seconds of work before anything is printed
REDRAW = 0.1  # seconds between updates of the bar
HEARTBEAT = 8.0  # seconds between lines without a terminal; with a second until the next look, never 10
LOOK_EVERY = 1.0  # seconds between looks at whether a line is due
BAR_WIDTH = 24  # characters
Item = TypeVar("Item")
clock: Callable[[], float] = time.monotonic
_open: list["Progress"] = []  # those that are shown, the innermost last


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0.0
    with open_regular("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])  # since boot: proc_pid_stat(5), field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Progress:
    """Progress display: a context manager around `total` units of work. Any thread may call `advance`.

    Of torchrun's processes only rank 0 prints. A total of None is for work around other work, such as a command: it has
    no units, and says how long it has taken if nothing else was printed for HEARTBEAT seconds.

    parts: parts of a unit, such as the passes of an accumulated step, which `advance` and `resume` count. spent:
    seconds that the work has taken already. stream: where to print; by default standard error.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str = "images",
        *,
        parts: int = 1,
        spent: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self.label, self.unit, self.parts, self.spent = label, unit, parts, spent
        self.total = math.inf if total is None else total
        self.quiet = os.environ.get("RANK", "0") != "0"
        self.done = self.before = 0
        self._stream = stream if stream is not None else sys.stderr
        self._closed = threading.Event()
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._shown = False
        self._bar: rich_progress.Progress | None = None

    def __enter__(self) -> "Progress":
        self._start = clock() - self.spent
        self._first: tuple[float, int] | None = None  # time when the first units were done, and their number
        self._next = self._start + (SILENT_FOR if self.total < math.inf else HEARTBEAT)
        if not self.quiet:
            if _open:
                _open[-1].hide()
            _open.append(self)
            threading.Thread(target=self._look, daemon=True).start()
        return self

    def _look(self) -> None:
        """Print a line whenever one is due, until the end of the block."""
        while not self._closed.wait(LOOK_EVERY):
            if _open[-1:] == [self]:
                self.advance(0)

    def hide(self) -> None:
        """Remove the bar from the terminal until it is drawn again, for work within this one."""
        with self._lock:
            if self._bar:
                self._bar.stop()
                self._bar = None

    def resume(self, done: int) -> None:
        """Count `done` parts of an earlier run; the rate ignores them."""
        self.done = self.before = done

    def advance(self, count: int) -> None:
        """Count `count` more parts as done."""
        with self._lock:
            self.done += count
            now, is_over = clock(), self.done >= self.parts * self.total
            if count:
                self._first = self._first or (now, self.done)
            if self.total == math.inf:
                self._next = max(self._next, printing.last_line + HEARTBEAT)
            if now >= self._next and not self.quiet:
                self._next = now + (REDRAW if self._terminal else HEARTBEAT)
                self._shown = True
                if self._terminal and self.total < math.inf:
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
        self._closed.set()
        with self._lock:
            if self._shown:
                self._end(", stopped" if error else "")
            self._leave()

    def _leave(self) -> None:
        """Print nothing more; the work around this one is shown again.

        Work inside of it is stopped first: an error that is kept also keeps the generator of a `with_progress` open.
        """
        self._next = math.inf
        while self in _open:
            if (inner := _open.pop()) is not self:
                inner.__exit__(GeneratorExit, GeneratorExit(), None)

    def _end(self, ending: str) -> None:
        """Replace the bar by a closing line; nothing is drawn after it."""
        self._shown = False
        self._leave()
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self.total == math.inf:
            return
        seconds = clock() - self._start
        done, before = self.done // self.parts, self.before // self.parts
        now = f", {done - before} of them now," if before else ""
        self._write(f"{self.label}: {done} of {self.total} {self.unit}{now} in {span(seconds)}{ending}")

    def _state(self, now: float) -> str:
        if self.total == math.inf:
            return f"{span(now - self._start)} so far"
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
        printing.last_line = time.monotonic()
        self._bar.update(self._bar.task_ids[0], completed=self.done, state=state, refresh=True)

    def _write(self, text: str) -> None:
        printing.last_line = time.monotonic()
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()


def with_progress(items: Sequence[Item], label: str, unit: str) -> Iterator[Item]:
    """The items, each of them a unit of the work that is done with it before the next is asked for."""
    with Progress(label, len(items), unit) as progress:
        for item in items:
            yield item
            progress.advance(1)


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
