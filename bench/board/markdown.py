"""leaderboard.md: the leaderboard as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from bench.board.tables import Entry, cost_rows, fact_rows, group_tables, number, troubles
from bench.results.board import Board
from bench.statistics.significance import Key
from engine.printing import in_markdown

INTRODUCTION = """# Leaderboard

Rebuilt by `bench leaderboard`; every number is in leaderboard.csv. In brackets: 95 % interval over validation images.
Bold: the best of a column and all that a paired test on the same images cannot tell from it (5 %, Holm over the
column; `bench compare` has the numbers). Without per-image results the best alone is bold. Floor: raw pixels.
"""


def to_markdown(board: Board, level: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as Markdown; `level`: who of a column shares the first place, for the columns where that was tested."""
    lines = [*INTRODUCTION.split("\n"), *_table([map(in_markdown, row) for row in fact_rows(board)], "---")]
    if costs := cost_rows(board):
        lines += ["", "## Cost of pretraining", "", *_table([map(in_markdown, row) for row in costs], "---:")]
    for table in group_tables(board, level):
        lines += ["", f"## {in_markdown(table.group)}", ""]
        lines += [f"> {in_markdown(caveat)}\n" for caveat in table.caveats]
        body = [(in_markdown(name), *map(_marked, entries)) for name, entries in table.rows]
        lines += _table([("checkpoint", *map(in_markdown, table.metrics)), *body], "---:")
    if notes := troubles(board):
        lines += ["", "## Failed or unreadable", ""] + [f"- {in_markdown(note)}" for note in notes]
    return "\n".join(lines) + "\n"


def _marked(entry: Entry) -> str:
    text = in_markdown(number(entry.cell))
    return f"**{text}**" if entry.bold else text


def _table(rows: Sequence[Iterable[str]], align: str) -> list[str]:
    header, *body = map(list, rows)
    ruler = ["---", *[align] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *body)]
