"""The leaderboard's files: a function of all result files, one row per checkpoint, one column per metric.

A column is `<data>/<protocol>:<metric>`, for example `digits/knn@dino:top1_k20`. Several seeds give their mean, with
`<column>:std` (population) and `<column>:n`; what is kept of the images gives the 95 % interval `:low`, `:high`. Before
them stands what the pretraining took, where it was done here.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from bench.leaderboard.tables import to_markdown
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
        costs = [getattr(row.checkpoint.training_cost, name) or "" for name in spent]
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


def rewrite(out: Path, published: bool = False) -> tuple[Board, list[Measured]]:
    """Rebuild leaderboard.csv and leaderboard.md; returns what is in them, and the results that they are made of.

    published: with published numbers of the same protocols in leaderboard.md and in what is returned; leaderboard.csv
    holds what was measured.

    Only result files that changed are read, and only pairs of changed results are tested again; the rest is kept in
    OUT/cache. Two processes may do so at once. Each looks again after it has written: whoever writes last has seen
    every file.
    """
    while True:
        before = stamps(out)
        measured, problems = read_measured(out)
        board = board_of([each.result for each in measured], problems)
        write_atomic(out / "leaderboard.csv", leaderboard_csv(board))
        level = level_in(out, board, measured)
        board = with_published(board, [each.result for each in measured]) if published else board
        write_atomic(out / "leaderboard.md", to_markdown(board, level))
        if stamps(out) == before:
            return board, measured
