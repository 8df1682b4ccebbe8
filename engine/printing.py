"""Output in which untrusted text cannot do harm, on a terminal or in a file.

Names of files, classes and tensors, facts of checkpoints and messages that quote them may contain anything: escape
sequences that change a terminal, line breaks that forge a line, marks that reverse text, bytes that are not text. The
tool prints only through `say`; tests/test_architecture.py enforces it.
"""

import csv
import io
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def printable(text: object) -> str:
    r"""The text as one line, with unprintable characters escaped as in Python: \x1b, \n, \u202e, \udcff."""
    line = str(text)
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def text_of(lines: Iterable[object]) -> str:
    """Lines joined into one text, each made printable."""
    return "\n".join(map(printable, lines))


def print_lines(text: str) -> None:
    """The listener of the command line: print lines to standard output, unbuffered."""
    print(text, flush=True)


last_line = 0.0  # when something was printed last, by time.monotonic()
_listener: Callable[[str], object] | None = None  # in Python, progress is silent unless the caller wants to hear it


def say(*lines: object, errors: bool = False) -> None:
    """Report each of `lines` as one line to the listener; with `errors` print it to standard error instead."""
    global last_line
    last_line = time.monotonic()
    if lines and errors:
        print(text_of(lines), file=sys.stderr, flush=True)
    elif lines and _listener:
        _listener(text_of(lines))


@contextmanager
def heard_by(listener: Callable[[str], object] | None) -> Iterator[None]:
    """A block whose lines a function gets, called with one or several lines; None keeps the present listener."""
    global _listener
    before, _listener = _listener, listener or _listener
    try:
        yield
    finally:
        _listener = before


def in_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; "" for no words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_markdown(text: object) -> str:
    """Text escaped for Markdown: none of it becomes a cell, link, image, definition, HTML, entity, emphasis or code.

    An underscore between letters or digits, as in `top1_k10`, is none of these and stays.
    """
    signs = r"[\\|<*`~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(:]"
    return re.sub(signs, r"\\\g<0>", printable(text))


def markdown_table(rows: Sequence[Iterable[str]], align: str = "---") -> list[str]:
    """Lines of a Markdown table from rows of Markdown cells, the header first.

    align: of all columns but the first, such as `---:` for right.
    """
    header, *body = map(list, rows)
    ruler = ["---", *[align] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *body)]


@cache  # compiling a template takes longer than rendering it
def html_template(text: str, folder: Path | None = None) -> "Template":
    """A jinja2 template that escapes every value and makes it printable, except Markup. folder: of its includes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    return Environment(
        loader=FileSystemLoader(folder) if folder else None,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=folder is None,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    ).from_string(text)


def size(count: float) -> str:
    """A number of bytes as text: `0.4 MB`, `15 MB`, `2.1 GB`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """CSV of rows of cells, with a line feed after each row."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def in_csv(value: object) -> object:
    """A value for a CSV cell: text gets an apostrophe before a leading = + - or @, so that it is not read as a formula.

    Numbers stay numbers, including negative ones.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


MAX_LISTED = 20  # choices that a message lists itself, if a command lists them too


def did_you_mean(word: str, choices: Mapping[str, str] | Iterable[str], listed_by: str = "", rest: str = "") -> str:
    """The end of a message about an unknown word: `; did you mean 'knn@dino'? there are: knn@dino, linear@mae`.

    Args:
        choices: the words, or each word with its text in the list.
        listed_by: the command that lists them, which a message names in place of a long list.
        rest: what follows the word, such as the path of a URL.

    Upper and lower case are not distinguished.
    """
    listed = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    close = closest(word, list(listed))
    likely = f"; did you mean {close + rest!r}?" if close else ";"
    if listed_by and len(listed) > MAX_LISTED:
        return f"{likely} {listed_by} lists them all"
    return f"{likely} there are: {', '.join(listed.values()) or 'none'}"


def closest(word: str, choices: list[str]) -> str:
    """The choice that begins with the word, else the most similar one; "" if none is similar."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    longer = [choice for choice in by_lower if word and choice.startswith(word.lower())]
    near = longer[-1:] or get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    return by_lower[near[0]] if near else ""


def millions(parameters: int) -> str:
    """A number of parameters for people: `21.7 M parameters`; small counts in full."""
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**5 else f"{parameters} parameters"


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
