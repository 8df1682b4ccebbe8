"""The leaderboard: always rebuilt from all result files, one row per checkpoint, one column per protocol metric.

A column is `<data>/<protocol>:<metric>`, for example `digits/knn@dino:top1_k20`. Whatever makes a number incomparable
stands in the column's name, `digits/knn@dino[limit=100]:top1_k20`, so that it never meets the plain one. Several seeds
give their mean, with `<column>:std` (population) and `<column>:n`.
"""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.results import CheckpointUsed, Result, read_result, result_files
from engine.files import write_atomic

FACTS = ("name", "method", "architecture", "parameters", "digest")
LOWER_IS_BETTER = ("loss", "error")  # metric names that end so; every other metric is better when higher


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the board: the mean over seeds."""

    mean: float
    std: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint."""

    checkpoint: CheckpointUsed
    cells: Mapping[tuple[str, str], Cell]  # (group, metric), where group is `<data>/<protocol>[<variant>]`
    failed: Mapping[str, str]  # group (and seed) -> message


@dataclass(frozen=True, kw_only=True)
class Board:
    """All rows, the groups and their metrics in a stable order, and the files that could not be read."""

    rows: tuple[Row, ...]
    groups: Mapping[str, tuple[str, ...]]  # group -> metrics, in the task's own order
    caveats: Mapping[str, tuple[str, ...]]  # group -> why it must not be compared with the plain protocol
    problems: tuple[str, ...] = ()


def group_of(result: Result) -> str:
    """`digits/knn@dino`, or `digits/knn@dino[k=5+10 limit=100]` for a variant of it."""
    variant = f"[{' '.join(result.variant)}]" if result.variant else ""
    return f"{result.data.name}/{result.protocol.name}{variant}"


def caveats_of(result: Result) -> tuple[str, ...]:
    """Sentences for people on what `result.variant` says."""
    found = []
    if result.limit is not None:
        found.append(f"At most {result.limit} images of each split: a check that it runs, not a result.")
    if result.protocol.changes:
        changes = ", ".join(f"{name} = {value}" for name, value in result.protocol.changes.items())
        found.append(f"Modified protocol: {changes}.")
    if result.precision != "float32":
        found.append(f"Computed in {result.precision}.")
    if result.decode != "exact":
        found.append(f"Images prepared by the {result.decode} decoder, which differs from PIL by a few grey levels.")
    return tuple(found)


def read_board(out: Path) -> Board:
    """Read all result files. A damaged one is reported in `problems` and left out."""
    results, problems = [], []
    for path in result_files(out):
        try:
            results.append(read_result(path))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return board_of(results, problems)


def board_of(results: Iterable[Result], problems: Iterable[str] = ()) -> Board:
    """Group results by checkpoint, sorted by name and then digest."""
    by_checkpoint: dict[tuple[str, str], list[Result]] = defaultdict(list)
    groups: dict[str, dict[str, None]] = defaultdict(dict)
    caveats = {}
    for result in results:
        by_checkpoint[result.checkpoint.name, result.checkpoint.digest].append(result)
        if result.status == "ok":
            groups[group_of(result)].update(dict.fromkeys(result.metrics))
            caveats[group_of(result)] = caveats_of(result)
    rows = tuple(_row(by_checkpoint[key]) for key in sorted(by_checkpoint))
    ordered = {group: tuple(metrics) for group, metrics in sorted(groups.items())}
    return Board(rows=rows, groups=ordered, caveats=caveats, problems=tuple(problems))


def _row(results: list[Result]) -> Row:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    failed = {}
    for result in results:
        if result.status == "failed":
            failed[f"{group_of(result)} seed {result.seed}"] = result.message
        for metric, value in result.metrics.items() if result.status == "ok" else ():
            values[group_of(result), metric].append(value)
    cells = {
        key: Cell(mean=statistics.fmean(found), std=statistics.pstdev(found), seeds=len(found))
        for key, found in values.items()
    }
    return Row(checkpoint=results[-1].checkpoint, cells=cells, failed=failed)


def to_csv(board: Board) -> str:
    """UTF-8 text with a header, plain decimal numbers and nothing where there is no number."""
    columns = [(group, metric) for group, metrics in board.groups.items() for metric in metrics]
    several = {key for key in columns if any(row.cells[key].seeds > 1 for row in board.rows if key in row.cells)}
    header = [*FACTS]
    for group, metric in columns:
        name = f"{group}:{metric}"
        header += [name, f"{name}:std", f"{name}:n"] if (group, metric) in several else [name]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*header, "failed"])
    for row in board.rows:
        numbers: list[object] = []
        for key in columns:
            cell = row.cells.get(key)
            found = [cell.mean, cell.std, cell.seeds] if cell else ["", "", ""]
            numbers += found if key in several else found[:1]
        facts = [getattr(row.checkpoint, fact) for fact in FACTS]
        writer.writerow([*facts, *numbers, "; ".join(row.failed)])
    return buffer.getvalue()


def best(board: Board, group: str, metric: str) -> float | None:
    """Best mean of a column; None where fewer than two checkpoints compete."""
    means = [row.cells[group, metric].mean for row in board.rows if (group, metric) in row.cells]
    if len(means) < 2:
        return None
    return min(means) if metric.endswith(LOWER_IS_BETTER) else max(means)


def rewrite(out: Path) -> Board:
    """Rebuild leaderboard.csv and leaderboard.md.

    Two processes may do so at once. Each looks again after it has written: whoever writes last has seen every file.
    """
    from bench.tables import to_markdown

    while True:
        before = _state(out)
        board = read_board(out)
        write_atomic(out / "leaderboard.csv", to_csv(board))
        write_atomic(out / "leaderboard.md", to_markdown(board))
        if _state(out) == before:
            return board


def _state(out: Path) -> list[tuple[str, int]]:
    found = []
    for path in result_files(out):
        try:
            found.append((str(path), path.stat().st_mtime_ns))
        except FileNotFoundError:
            continue
    return found
