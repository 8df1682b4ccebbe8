"""leaderboard.html: the leaderboard as plain tables without scripts; `bench report` makes the page to read."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from bench.board.tables import Entry, cost_rows, fact_rows, group_tables, number, troubles
from bench.results.board import Board
from bench.statistics.significance import Key
from engine.printing import printable

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Leaderboard</title>
<style>
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8888; padding: .25rem .75rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
</style>
</head>
<body>
<h1>Leaderboard</h1>
<p>In brackets: 95 % interval over validation images. Bold: the best of a column and all that a paired test on the same
images cannot tell from it (5 %, Holm over the column). Floor: raw pixels.</p>
"""


def to_html(board: Board, level: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as one page; `level`: who of a column shares the first place, for the columns where that was tested."""
    parts = [HEAD, *_section("Checkpoints", [map(in_html, row) for row in fact_rows(board)])]
    if costs := cost_rows(board):
        parts += _section("Cost of pretraining", [map(in_html, row) for row in costs])
    for table in group_tables(board, level):
        rows = [(in_html(name), *map(_marked_up, entries)) for name, entries in table.rows]
        parts += _section(table.group, [("checkpoint", *map(in_html, table.metrics)), *rows], table.caveats)
    if notes := troubles(board):
        items = [f"<li>{in_html(note)}</li>\n" for note in notes]
        parts += ["<h2>Failed or unreadable</h2>\n<ul>\n", *items, "</ul>\n"]
    return "".join([*parts, "</body>\n</html>\n"])


def in_html(text: object) -> str:
    """Text for an element, in which nothing is markup."""
    return escape(printable(text))


def _marked_up(entry: Entry) -> str:
    text = in_html(number(entry.cell))
    return f"<strong>{text}</strong>" if entry.bold else text


def _section(title: str, rows: Sequence[Iterable[str]], notes: Iterable[str] = ()) -> list[str]:
    # A heading, a line for each note, and a table whose first row is its header.
    header, *body = rows
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    return [
        f"<h2>{in_html(title)}</h2>\n",
        *(f"<p>{in_html(note)}</p>\n" for note in notes),
        f"<div><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n",
        *(f"<tr>{line}</tr>\n" for line in lines),
        "</tbody>\n</table></div>\n",
    ]
