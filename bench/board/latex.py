r"""leaderboard.tex: a booktabs table for each group, to be read by \input; mean and standard deviation over seeds.

It compiles with pdfLaTeX, XeLaTeX and LuaLaTeX and needs the package booktabs alone. Text from outside is typeset as it
is: no character of it is a command, and none is outside what pdfLaTeX knows without further packages.
"""

import re
from collections.abc import Mapping, Sequence

from bench.board.tables import Entry, GroupTable, group_tables
from bench.results.board import Board
from bench.results.units import decimals, number_text
from bench.statistics.significance import Key
from engine.printing import printable

HEADER = r"""% Rebuilt by bench leaderboard --format latex. Needs \usepackage{booktabs}.
% Numbers are means over seeds with their standard deviation (population). Bold: the best of a column and all that a
% paired test on the same images cannot tell from it (5 %, Holm over the column).
"""
# Of LaTeX's own marks; of signs that its old encoding OT1 sets as other signs; of signs that are read as an option, or
# as a part of \\, at the start of a row.
ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"''",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}
LETTERS = {chr(code) for code in range(0xC0, 0x100)} - set("\xd0\xd7\xde\xf0\xf7\xfe")  # accented, in every encoding


def to_latex(board: Board, level: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as tables; `level`: who of a column shares the first place, for the columns where that was tested."""
    return "\n".join([HEADER, *map(_table, group_tables(board, level))])


def in_latex(text: object) -> str:
    """Text for a cell or a caption, in which nothing is a command; `[U+4E2D]` for a sign that pdfLaTeX lacks."""
    return re.sub("-(?=-)", "-{}", "".join(map(_escaped, printable(text))))  # two hyphens would become a dash


def _escaped(sign: str) -> str:
    if sign.isascii() or sign in LETTERS:
        return ESCAPES.get(sign, sign)
    return f"{{[}}U+{ord(sign):04X}{{]}}"


def _table(table: GroupTable) -> str:
    rows = [(in_latex(name), *map(_number, entries)) for name, entries in table.rows]
    caption = " ".join([f"{in_latex(table.group)}.", *map(in_latex, table.caveats)])
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * len(table.metrics)}}}",
            r"\toprule",
            _row(["checkpoint", *map(in_latex, table.metrics)]),
            r"\midrule",
            *map(_row, rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _number(entry: Entry) -> str:
    cell = entry.cell
    if cell is None:
        return ""
    text = re.sub("^-", "$-$", in_latex(number_text(cell.mean, cell.unit)))
    shown = rf"\textbf{{{text}}}" if entry.bold else text
    spread = rf" $\pm$ {cell.std:.{decimals(cell.mean, cell.unit)}f}" if cell.seeds > 1 else ""
    return shown + spread
