"""Output in which text from outside cannot do harm, on a terminal or in a file.

Names of files, classes and tensors, facts of checkpoints and the messages that quote them may hold anything: escape
sequences that change a terminal, line breaks that forge a line, marks that reverse text, bytes that are no text. The
tool prints through `say` alone; tests/test_architecture.py enforces it.
"""

import re
import sys
from collections.abc import Iterable


def printable(text: object) -> str:
    r"""One line, in which whatever does not print is escaped as Python writes it: \x1b, \n, \u202e, \udcff."""
    line = str(text)
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(sign: str) -> str:
    return sign if sign.isprintable() else repr(sign)[1:-1]


def text_of(lines: Iterable[object]) -> str:
    """Lines, each made printable, as one text."""
    return "\n".join(map(printable, lines))


def say(*lines: object, errors: bool = False) -> None:
    """Print each of `lines` as one line, now, to standard output or to that of `errors`."""
    if lines:
        print(text_of(lines), file=sys.stderr if errors else sys.stdout, flush=True)


def in_markdown(text: object) -> str:
    """Text for a cell, a heading or an item of Markdown, which starts no cell, link, image, definition or HTML."""
    return re.sub(r"[\\|<]|(?<=\])[(:]", r"\\\g<0>", printable(text))


def in_csv(value: object) -> object:
    """Text for a cell that no spreadsheet takes for a formula: with an apostrophe before a leading = + - or @.

    Numbers stay numbers, negative ones too.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
