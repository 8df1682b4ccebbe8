"""The files of a leaderboard, written anew from all results of a folder: CSV, Markdown, LaTeX, HTML and Parquet.

The Markdown page shows a table for each group of comparable results, with intervals and without columns of deviations.
LaTeX is a booktabs table a group, to be read by `input`, with mean and standard deviation over seeds; it compiles with
pdfLaTeX, XeLaTeX and LuaLaTeX, and text from outside is typeset as it is: no character of it is a command. Parquet has
every number of every result file in a row of its own, for DuckDB, pandas and the like.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from bench.board.tables import Entry, GroupTable, cost_rows, fact_rows, group_tables, number, troubles
from bench.published.rows import with_published
from bench.results.board import Board, Cell, board_of, group_of
from bench.results.index import stamps
from bench.results.record import MetricRecord, Result, decimals, number_text
from bench.statistics.matching import Measured, read_measured
from bench.statistics.significance import Key, p_value_cache, ties_with_best
from checkpoints.training_cost import COST_UNITS
from engine.files import write_atomic
from engine.optional import require
from engine.printing import in_csv, in_markdown, printable

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


def to_latex(board: Board, ties: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as tables; `ties`: who of a column shares the first place, for the columns where that was tested."""
    return "\n".join([HEADER, *map(_latex_table, group_tables(board, ties))])


def in_latex(text: object) -> str:
    """Text for a cell or a caption, in which nothing is a command; `[U+4E2D]` for a sign that pdfLaTeX lacks."""
    return re.sub("-(?=-)", "-{}", "".join(map(_escaped, printable(text))))  # two hyphens would become a dash


def _escaped(sign: str) -> str:
    if sign.isascii() or sign in LETTERS:
        return ESCAPES.get(sign, sign)
    return f"{{[}}U+{ord(sign):04X}{{]}}"


def _latex_table(table: GroupTable) -> str:
    rows = [(in_latex(name), *map(_latex_number, entries)) for name, entries in table.rows]
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


def _latex_number(entry: Entry) -> str:
    cell = entry.cell
    if cell is None:
        return ""
    text = re.sub("^-", "$-$", in_latex(number_text(cell.mean, cell.unit)))
    shown = rf"\textbf{{{text}}}" if entry.bold else text
    spread = rf" $\pm$ {cell.std:.{decimals(cell.mean, cell.unit)}f}" if cell.seeds > 1 else ""
    return shown + spread


LARGEST = 2**63 - 1  # of a column of integers
TEXT, REAL, WHOLE, FLAG = "string", "float64", "int64", "bool"
COLUMNS = {
    "checkpoint": TEXT,
    "digest": TEXT,
    "method": TEXT,
    "recipe": TEXT,
    "branch": TEXT,
    "architecture": TEXT,
    "parameters": WHOLE,
    "source": TEXT,
    "checkpoint_plugin": TEXT,
    "training_hours": REAL,
    "data": TEXT,
    "url": TEXT,
    "split": TEXT,
    "images": WHOLE,
    "fingerprint": TEXT,
    "task": TEXT,
    "protocol": TEXT,
    "version": WHOLE,
    "protocol_source": TEXT,
    "plugin": TEXT,
    "changes": TEXT,
    "group": TEXT,
    "metric": TEXT,
    "value": REAL,
    "unit": TEXT,
    "higher_is_better": FLAG,
    "low": REAL,
    "high": REAL,
    "interval_method": TEXT,
    "chosen_on_val": FLAG,
    "deviation_of": TEXT,
    "seed": WHOLE,
    "random": FLAG,
    "limit": WHOLE,
    "precision": TEXT,
    "decode": TEXT,
    "skipped": WHOLE,
    "status": TEXT,
    "message": TEXT,
    "settings": TEXT,
    "facts": TEXT,
    "device": TEXT,
    "compiled": FLAG,
    "processes": WHOLE,
    "seconds": REAL,
    "images_per_second": REAL,
    "date": TEXT,
    "versions": TEXT,
    "hardware": TEXT,
    "file": TEXT,
}
SPLIT = "val"  # that all metrics are of


def to_parquet(measured: Iterable[Measured], root: Path) -> bytes:
    """All results as a Parquet table. root: the folder below which the result files lie, which `file` leaves out.

    ValueError where pyarrow is missing.
    """
    require("pyarrow")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    rows = [row for each in measured for row in _rows(each, root)]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    buffer = io.BytesIO()
    write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def _rows(measured: Measured, root: Path) -> Iterator[dict[str, Any]]:
    result = measured.result
    shared = _facts(result) | {"file": printable(measured.path.relative_to(root))}
    for name, metric in result.metrics.items() if result.metrics else [(None, None)]:
        yield shared | _exact_number(name, metric)


def _exact_number(name: str | None, metric: MetricRecord | None) -> dict[str, Any]:
    if name is None or metric is None:
        absent = ("metric", "value", "unit", "higher_is_better", "low", "high", "chosen_on_val", "deviation_of")
        return dict.fromkeys(absent)
    low, high = metric.interval or (None, None)
    return {
        "metric": printable(name),
        "value": metric.value,
        "unit": printable(metric.unit),
        "higher_is_better": metric.higher_is_better,
        "low": low,
        "high": high,
        "chosen_on_val": metric.chosen_on_val,
        "deviation_of": None if metric.deviation_of is None else printable(metric.deviation_of),
    }


def _facts(result: Result) -> dict[str, Any]:
    """What all rows of a result share."""
    used, data, protocol = result.checkpoint, result.data, result.protocol
    found = {
        **{name: getattr(used, name) for name in ("digest", "method", "recipe", "branch", "architecture", "source")},
        "checkpoint": used.name,
        "parameters": used.parameters,
        "checkpoint_plugin": used.plugin,
        "training_hours": used.training_cost.hours,
        "data": data.name,
        "url": data.url,
        "split": SPLIT,
        "images": data.images.get(SPLIT),
        "fingerprint": data.fingerprints.get(SPLIT),
        "protocol": protocol.name,
        "version": protocol.version,
        "protocol_source": protocol.source,
        "plugin": protocol.plugin,
        "changes": _json(protocol.changes),
        "group": group_of(result),
    }
    same = ["task", "interval_method", "seed", "random", "limit", "precision", "decode", "skipped", "status", "message"]
    same += ["device", "compiled", "processes", "seconds", "images_per_second", "date"]
    found |= {name: getattr(result, name) for name in same}
    found |= {name: _json(getattr(result, name)) for name in ("settings", "facts", "versions", "hardware")}
    return {name: _kept(value) for name, value in found.items()}


def _json(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value))


def _kept(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return None if is_whole and abs(value) > LARGEST else value  # such a number is in the file, as JSON has it


INTRODUCTION = """# Leaderboard

Rebuilt by `bench leaderboard`; every number is in leaderboard.csv. In brackets: 95 % interval over validation images.
Bold: the best of a column and all that a paired test on the same images cannot tell from it (5 %, Holm over the
column; `bench compare` has the numbers). Without per-image results the best alone is bold. Floor: raw pixels.
"""


def to_markdown(board: Board, ties: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as Markdown; `ties`: who of a column shares the first place, for the columns where that was tested."""
    lines = [*INTRODUCTION.split("\n"), *_markdown_table([map(in_markdown, row) for row in fact_rows(board)], "---")]
    if costs := cost_rows(board):
        lines += ["", "## Cost of pretraining", "", *_markdown_table([map(in_markdown, row) for row in costs], "---:")]
    for table in group_tables(board, ties):
        lines += ["", f"## {in_markdown(table.group)}", ""]
        lines += [f"> {in_markdown(caveat)}\n" for caveat in table.caveats]
        body = [(in_markdown(name), *map(_marked, entries)) for name, entries in table.rows]
        lines += _markdown_table([("checkpoint", *map(in_markdown, table.metrics)), *body], "---:")
    if notes := troubles(board):
        lines += ["", "## Failed or unreadable", ""] + [f"- {in_markdown(note)}" for note in notes]
    return "\n".join(lines) + "\n"


def _marked(entry: Entry) -> str:
    text = in_markdown(number(entry.cell))
    return f"**{text}**" if entry.bold else text


def _markdown_table(rows: Sequence[Iterable[str]], align: str) -> list[str]:
    header, *body = map(list, rows)
    ruler = ["---", *[align] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *body)]


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


def to_html(board: Board, ties: Mapping[Key, frozenset[Key]] | None = None) -> str:
    """The board as one page; `ties`: who of a column shares the first place, for the columns where that was tested."""
    parts = [HEAD, *_section("Checkpoints", [map(in_html, row) for row in fact_rows(board)])]
    if costs := cost_rows(board):
        parts += _section("Cost of pretraining", [map(in_html, row) for row in costs])
    for table in group_tables(board, ties):
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


FACTS = ("name", "method", "architecture", "parameters", "digest")
SPENT = (*COST_UNITS, "devices")  # of checkpoint.training_cost, where it is known of any


def leaderboard_csv(board: Board) -> str:
    """UTF-8 text with a header, plain decimal numbers and nothing where there is no number."""
    columns = [(group, metric) for group, metrics in board.groups.items() for metric in metrics]
    parts = {key: _parts([row.cells[key] for row in board.rows if key in row.cells]) for key in columns}
    names = [f"{group}:{metric}{part}" for group, metric in columns for part in parts[group, metric]]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    spent = [name for name in SPENT if any(getattr(row.checkpoint.training_cost, name) for row in board.rows)]
    writer.writerow([*FACTS, *spent, *map(in_csv, names), "failed"])
    for row in board.rows:
        numbers = [_number(row.cells.get(key), part) for key in columns for part in parts[key]]
        facts = [in_csv(getattr(row.checkpoint, fact)) for fact in FACTS]
        costs = [in_csv(getattr(row.checkpoint.training_cost, name) or "") for name in spent]
        writer.writerow([*facts, *costs, *numbers, in_csv("; ".join(row.failed))])
    return buffer.getvalue()


def _parts(cells: Sequence[Cell]) -> list[str]:
    # Ends of the names of the columns that one metric needs.
    found = [""]
    found += [":low", ":high"] if any(cell.interval for cell in cells) else []
    found += [":std", ":n"] if any(cell.seeds > 1 for cell in cells) else []
    return found


def _number(cell: Cell | None, part: str) -> float | int | str:
    if cell is None:
        return ""
    low, high = cell.interval or ("", "")
    return {"": cell.mean, ":low": low, ":high": high, ":std": cell.std, ":n": cell.seeds}[part]


def ties_in(out: Path, board: Board, measured: Sequence[Measured]) -> dict[Key, frozenset[Key]]:
    """Who shares the first place of each column, by tests of which those on unchanged results are kept in OUT/cache."""
    tests = p_value_cache(out)
    found = ties_with_best(board, measured, tests)
    tests.save({each.identity for each in measured})
    return found


@dataclass(frozen=True, kw_only=True)
class LeaderboardSnapshot:
    """A leaderboard, its ties and the results behind it: what all its files are written from."""

    board: Board  # what was measured
    shown: Board  # the same, with published rows where they are asked for
    ties: Mapping[Key, frozenset[Key]]  # column -> checkpoints that share its first place
    measured: Sequence[Measured]
    results: Path  # folder of the result files


# Name of a format -> its file, and what is written there. The bytes of these depend on this tool alone.
TEXT_FORMATS: dict[str, tuple[str, Callable[[LeaderboardSnapshot], str]]] = {
    "csv": ("leaderboard.csv", lambda found: leaderboard_csv(found.board)),
    "markdown": ("leaderboard.md", lambda found: to_markdown(found.shown, found.ties)),
    "latex": ("leaderboard.tex", lambda found: to_latex(found.shown, found.ties)),
    "html": ("leaderboard.html", lambda found: to_html(found.shown, found.ties)),
}
FORMATS: dict[str, tuple[str, Callable[[LeaderboardSnapshot], str | bytes]]] = {
    **TEXT_FORMATS,
    "parquet": ("results.parquet", lambda found: to_parquet(found.measured, found.results)),
}
ALWAYS = ("csv", "markdown")


def snapshot(out: Path, published: bool = False) -> LeaderboardSnapshot:
    """Leaderboard of the results of a folder. published: with published numbers of the same protocols in `shown`."""
    measured, problems = read_measured(out)
    results = [each.result for each in measured]
    board = board_of(results, problems)
    ties = ties_in(out, board, measured)
    shown = with_published(board, results) if published else board
    return LeaderboardSnapshot(board=board, shown=shown, ties=ties, measured=measured, results=out / "results")


def rewrite(out: Path, published: bool = False, formats: Iterable[str] = ()) -> LeaderboardSnapshot:
    """Rebuild leaderboard.csv, leaderboard.md and the files of other `formats`; returns what they are made of.

    published: with published numbers of the same protocols in the files for people; leaderboard.csv and
    results.parquet hold what was measured.

    Only result files that changed are read, and only pairs of changed results are tested again; the rest is kept in
    OUT/cache. Two processes may do so at once. Each looks again after it has written: whoever writes last has seen
    every file.
    """
    while True:
        before = stamps(out)
        found = snapshot(out, published)
        for key in dict.fromkeys((*ALWAYS, *formats)):
            name, content = FORMATS[key]
            write_atomic(out / name, content(found))
        if stamps(out) == before:
            return found
