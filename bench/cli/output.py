"""What commands print: one line out of any exception (what went wrong, where, what to do about it), and tables that fit
a terminal."""

import errno
import io
import resource
import shutil
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from engine.printing import printable

ADVICE = {
    errno.ENOSPC: "free some space and run the same command again to continue",
    errno.EDQUOT: "free some of your quota and run the same command again to continue",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.EROFS: "choose a place that can be written",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "a folder is needed there",
    errno.EISDIR: "a file is needed there",
}


def in_one_line(error: BaseException) -> str:
    """What a person needs to read of `error`: one printable line.

    A ValueError is a message of ours and stands for itself; the type of any other exception is part of its meaning.
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if error.errno in ADVICE:
            text += f"; {ADVICE[error.errno]}"
    elif isinstance(error, ImportError) and "failed to map segment" in str(error):
        text = f"not enough memory to load {error}".removesuffix(": failed to map segment from shared object")
        text += f"; {memory_limit() or 'free some memory'}"
    elif isinstance(error, ImportError):
        text = f"{error}; `bench doctor` says what is missing and how to install it"
    elif isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        text = f"a process that loads images was killed, as happens for lack of memory or of /dev/shm ({error}); fewer "
        text += "--workers need less of both; run the same command again to go on (a pretraining with --resume)"
    elif isinstance(error, ValueError) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return printable(" ".join(text.split()))


def table(
    rows: Iterable[Sequence[object]], *, right: Collection[int] = (), indent: int = 0, wrapped: Mapping[int, int] = {}
) -> list[str]:
    """Rows as lines of aligned columns, printable.

    On a terminal the last column wraps, and so do those of `wrapped`, column -> characters; in a file or a pipe a row
    is one line, in which a longer cell of these columns moves what follows it. right: columns that are aligned to the
    right. indent: spaces before each line.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and cells:
        return _on_terminal(cells, right, indent, wrapped)
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sizes = [min(size, wrapped.get(i, size)) for i, size in enumerate(longest)]
    lines = []
    for row in cells:
        aligned = [cell.rjust(sizes[i]) if i in right else cell.ljust(sizes[i]) for i, cell in enumerate(row)]
        lines.append((" " * indent + "  ".join(aligned)).rstrip())
    return lines


def _on_terminal(
    cells: Sequence[Sequence[str]], right: Collection[int], indent: int, wrapped: Mapping[int, int]
) -> list[str]:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for i in range(len(cells[0])):
        wraps = i in wrapped or i == len(cells[0]) - 1
        grid.add_column(
            justify="right" if i in right else "left", no_wrap=not wraps, overflow="fold", max_width=wrapped.get(i)
        )
    for row in cells:
        # A long list gets spaces, at which it wraps.
        long = [i in wrapped and len(cell) > wrapped[i] and " " not in cell for i, cell in enumerate(row)]
        grid.add_row(*(Text(cell.replace(",", ", ") if long[i] else cell) for i, cell in enumerate(row)))
    buffer = io.StringIO()
    console = Console(file=buffer, width=shutil.get_terminal_size().columns, color_system=None)
    console.print(Padding(grid, (0, 0, 0, indent), expand=False))
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def memory_limit() -> str:
    """What limits the memory of this process, and what to do; "" for nothing."""
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return f"the limit is {most / 1e9:.1f} GB (ulimit {option}): raise it, torch's libraries take 6 GB"
    return ""


def traceback_of(error: BaseException) -> list[str]:
    """The lines of its traceback, in which the second and later ones of a message are set in."""
    lines = []
    for part in traceback.format_exception(error):
        ours = part.startswith(("Traceback", " ", "\n"))  # otherwise the type of an exception and its message
        line = part.removesuffix("\n")
        lines.append(line if ours else line.replace("\n", "\n    "))
    return "\n".join(lines).split("\n")


def epochs_of(facts: Mapping[str, Any]) -> str:
    """`5.0`, or how far a training was; empty where nothing is known."""
    if unfinished := facts.get("unfinished"):
        done, of = f"{round(facts['epochs'], 2):.6g}", unfinished["epochs"]
        return f"{done} of {of}, not finished (update {unfinished['step']} of {unfinished['steps']})"
    return str(facts.get("epochs") or "")
