"""Output in which text from outside cannot do harm, on a terminal or in a file.

Names of files, classes and tensors, facts of checkpoints and the messages that quote them may hold anything: escape
sequences that change a terminal, line breaks that forge a line, marks that reverse text, bytes that are no text. The
tool prints through `say` alone; tests/test_architecture.py enforces it.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def printable(text: object) -> str:
    r"""One line, in which whatever does not print is escaped as Python writes it: \x1b, \n, \u202e, \udcff."""
    line = str(text)
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


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


def markdown_table(rows: Sequence[Iterable[str]], align: str = "---") -> list[str]:
    """Lines of a table, the header first. Cells are Markdown; `---:` aligns those after the first column right."""
    header, *body = map(list, rows)
    ruler = ["---", *[align] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *body)]


@cache  # compiling takes longer than filling in
def html_template(text: str, folder: Path | None = None) -> "Template":
    """A template of jinja2 in which every value is escaped and printable, but Markup. folder: of what it includes."""
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


def in_csv(value: object) -> object:
    """Text for a cell that no spreadsheet takes for a formula: with an apostrophe before a leading = + - or @.

    Numbers stay numbers, negative ones too.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


MAX_LISTED = 20  # choices that a message names itself, where something else lists them


def did_you_mean(word: str, choices: Mapping[str, str] | Iterable[str], listed_by: str = "", rest: str = "") -> str:
    """The end of a message about an unknown word: `; did you mean 'knn@dino'? there are: knn@dino, linear@mae`.

    choices: the words, or each word with how the message lists it. listed_by: what shows them, in place of a long list.
    rest: what follows the word, such as the path of a URL. Capitals do not matter.
    """
    listed = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    close = closest(word, list(listed))
    likely = f"; did you mean {close + rest!r}?" if close else ";"
    if listed_by and len(listed) > MAX_LISTED:
        return f"{likely} {listed_by} lists them all"
    return f"{likely} there are: {', '.join(listed.values()) or 'none'}"


def closest(word: str, choices: list[str]) -> str:
    """The choice that begins with the word, else the most similar one; "" where none is."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    longer = [choice for choice in by_lower if word and choice.startswith(word.lower())]
    near = longer[-1:] or get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    return by_lower[near[0]] if near else ""


def millions(parameters: int) -> str:
    """`21.7 M parameters`; small counts in full."""
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**5 else f"{parameters} parameters"
