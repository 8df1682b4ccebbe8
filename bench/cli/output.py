"""What commands print: exceptions as one line (what went wrong, where, what to do), and tables that fit a terminal."""

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
    errno.EACCES: "choose a path that you have access to, or change its permissions",
    errno.EPERM: "choose a path that you have access to, or change its permissions",
    errno.EROFS: "choose a path on a writable file system",
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "it has to be a folder",
    errno.EISDIR: "it has to be a file",
}


def in_one_line(error: BaseException) -> str:
    """An exception as one printable line for the user.

    A ValueError carries a complete message of ours; for any other exception the type is part of the message.
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if error.errno in ADVICE:
            text += f"; {ADVICE[error.errno]}"
    elif isinstance(error, ImportError) and "failed to map segment" in str(error):
        text = f"not enough memory to load {error}".removesuffix(": failed to map segment from shared object")
        text += f"; {memory_limit() or 'free some memory'}"
    elif isinstance(error, ImportError):
        text = f"{error}; `bench doctor` shows what is missing and how to install it"
    elif isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        text = f"a process that loads images was killed, as happens for lack of memory or of /dev/shm ({error}); fewer "
        text += "--workers need less of both; run the same command again to continue (a pretraining with --resume)"
    elif isinstance(error, ValueError) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return printable(" ".join(text.split()))


def table(
    rows: Iterable[Sequence[object]], *, right: Collection[int] = (), indent: int = 0, wrapped: Mapping[int, int] = {}
) -> list[str]:
    """Rows as printable lines of aligned columns.

    Args:
        rows: Cells, of equally many columns.
        right: Indices of the columns that are aligned to the right.
        indent: Spaces before each line.
        wrapped: Column -> its width in characters, at which it wraps on a terminal, as the last column does at the
            terminal's edge. In a file or a pipe every row is one line, and a longer cell shifts those after it.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and cells:
        return _on_terminal(cells, right, indent, wrapped)
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = [min(width, wrapped.get(i, width)) for i, width in enumerate(longest)]
    lines = []
    for row in cells:
        aligned = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append((" " * indent + "  ".join(aligned)).rstrip())
    return lines


def _on_terminal(
    cells: Sequence[Sequence[str]], right: Collection[int], indent: int, wrapped: Mapping[int, int]
) -> list[str]:
    """The lines of a table whose long cells wrap within their columns."""
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
        # Long lists get spaces after their commas, so that they can wrap there.
        is_long = [i in wrapped and len(cell) > wrapped[i] and " " not in cell for i, cell in enumerate(row)]
        grid.add_row(*(Text(cell.replace(",", ", ") if is_long[i] else cell) for i, cell in enumerate(row)))
    buffer = io.StringIO()
    console = Console(file=buffer, width=shutil.get_terminal_size().columns, color_system=None)
    console.print(Padding(grid, (0, 0, 0, indent), expand=False))
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def memory_limit() -> str:
    """The ulimit on this process's memory, and advice to raise it; "" if there is none."""
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return f"the limit is {limit / 1e9:.1f} GB (ulimit {option}): raise it, torch's libraries take 6 GB"
    return ""


def traceback_of(error: BaseException) -> list[str]:
    """The lines of an exception's traceback; the second and later lines of a message are indented."""
    lines = []
    for part in traceback.format_exception(error):
        is_frame = part.startswith(("Traceback", " ", "\n"))  # otherwise the type of an exception and its message
        line = part.removesuffix("\n")
        lines.append(line if is_frame else line.replace("\n", "\n    "))
    return "\n".join(lines).split("\n")


def epochs_of(facts: Mapping[str, Any]) -> str:
    """The epochs of a checkpoint's training as text: `5.0`, how far an unfinished one is, or "" if unknown."""
    if unfinished := facts.get("unfinished"):
        done, total = f"{round(facts['epochs'], 2):.6g}", unfinished["epochs"]
        return f"{done} of {total}, not finished (update {unfinished['step']} of {unfinished['steps']})"
    return str(facts.get("epochs") or "")
