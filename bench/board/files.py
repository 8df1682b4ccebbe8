"""The leaderboard's files: a function of all result files, one row per checkpoint, one column per metric.

A column is `<data>/<protocol>:<metric>`, for example `digits/knn@dino:top1_k20`. Several seeds give their mean, with
`<column>:std` (population) and `<column>:n`; what is kept of the images gives the 95 % interval `:low`, `:high`. Before
them stands what the pretraining took, where it was done here.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.board.latex import to_latex
from bench.board.long_form import to_parquet
from bench.board.markdown import to_markdown
from bench.board.webpage import to_html
from bench.published.rows import with_published
from bench.results.board import Board, Cell, board_of
from bench.results.index import stamps
from bench.statistics.matching import Measured, read_measured
from bench.statistics.significance import Key, kept_p_values, level_with_best
from checkpoints.training_cost import COST_UNITS
from engine.files import write_atomic
from engine.printing import in_csv

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


def level_in(out: Path, board: Board, measured: Sequence[Measured]) -> dict[Key, frozenset[Key]]:
    """Who shares the first place of each column, by tests of which those on unchanged results are kept in OUT/cache."""
    tests = kept_p_values(out)
    found = level_with_best(board, measured, tests)
    tests.save({each.identity for each in measured})
    return found


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All that a leaderboard's files are made of. results: the folder of the result files."""

    board: Board  # what was measured
    shown: Board  # the same, with published rows where they are asked for
    level: Mapping[Key, frozenset[Key]]
    measured: Sequence[Measured]
    results: Path


# Name of a format -> its file, and what is written there. The bytes of these depend on this tool alone.
TEXT_FORMATS: dict[str, tuple[str, Callable[[Standing], str]]] = {
    "csv": ("leaderboard.csv", lambda found: leaderboard_csv(found.board)),
    "markdown": ("leaderboard.md", lambda found: to_markdown(found.shown, found.level)),
    "latex": ("leaderboard.tex", lambda found: to_latex(found.shown, found.level)),
    "html": ("leaderboard.html", lambda found: to_html(found.shown, found.level)),
}
FORMATS: dict[str, tuple[str, Callable[[Standing], str | bytes]]] = {
    **TEXT_FORMATS,
    "parquet": ("results.parquet", lambda found: to_parquet(found.measured, found.results)),
}
ALWAYS = ("csv", "markdown")


def standing(out: Path, published: bool = False) -> Standing:
    """What the results of a folder come to. published: with published numbers of the same protocols in `shown`."""
    measured, problems = read_measured(out)
    results = [each.result for each in measured]
    board = board_of(results, problems)
    level = level_in(out, board, measured)
    shown = with_published(board, results) if published else board
    return Standing(board=board, shown=shown, level=level, measured=measured, results=out / "results")


def rewrite(out: Path, published: bool = False, formats: Iterable[str] = ()) -> Standing:
    """Rebuild leaderboard.csv, leaderboard.md and the files of other `formats`; returns what they are made of.

    published: with published numbers of the same protocols in the files for people; leaderboard.csv and
    results.parquet hold what was measured.

    Only result files that changed are read, and only pairs of changed results are tested again; the rest is kept in
    OUT/cache. Two processes may do so at once. Each looks again after it has written: whoever writes last has seen
    every file.
    """
    while True:
        before = stamps(out)
        found = standing(out, published)
        for key in dict.fromkeys((*ALWAYS, *formats)):
            name, content = FORMATS[key]
            write_atomic(out / name, content(found))
        if stamps(out) == before:
            return found
