"""The leaderboard for people, one table per protocol: what each file of it shows, and tables that fit a terminal."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.results.board import Board, Cell, Row, best
from bench.results.record import CheckpointUsed, decimals, interval_decimals, number_text
from bench.statistics.significance import Key, key_of
from checkpoints.training_cost import COST_UNITS, TrainingCost
from engine.printing import text_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell of a table. bold: the best of its column, or what a paired test cannot tell from it."""

    cell: Cell | None
    bold: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """One group of the board as a table: what the files for people show, before any of them escapes it."""

    group: str
    caveats: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]  # a checkpoint's name, and an entry for each metric


def group_tables(board: Board, ties: Mapping[Key, frozenset[Key]] | None = None) -> list[GroupTable]:
    """A table of each group. ties: who of a column shares the first place, for the columns where that was tested."""
    names, found = row_names(board), []
    for group, metrics in board.groups.items():
        first = {metric: best(board, group, metric) for metric in metrics}
        shared = {metric: (ties or {}).get((group, metric), frozenset()) for metric in metrics}
        rows = tuple(
            (
                names[row.checkpoint],
                tuple(_entry(row, (group, metric), first[metric], shared[metric]) for metric in metrics),
            )
            for row in _in_group(board, group)
        )
        found.append(GroupTable(group=group, caveats=tuple(board.caveats[group]), metrics=tuple(metrics), rows=rows))
    return found


def fact_rows(board: Board) -> list[tuple[str, ...]]:
    """What each checkpoint is, below a header."""
    names = row_names(board)
    facts = [
        (names[used], used.method, used.architecture, str(used.parameters), used.digest[:12])
        for used in (row.checkpoint for row in board.rows)
    ]
    return [("checkpoint", "method", "architecture", "parameters", "digest"), *facts]


def cost_rows(board: Board) -> list[tuple[str, ...]]:
    """What the pretrainings took that are known to have taken something, below a header; empty where none is."""
    names = row_names(board)
    spent = [used for used in (row.checkpoint for row in board.rows) if used.training_cost != TrainingCost()]
    rows = [(names[used], *_spent(used.training_cost)) for used in spent]
    return [("checkpoint", *COST_UNITS.values(), "devices"), *rows] if rows else []


def to_terminal(board: Board, width: int, shown: Collection[str] | None = None) -> str:
    """Printable tables of at most `width` characters: as many metrics as fit, and how many more there are.

    All metrics with their intervals where that fits, otherwise the first one alone. shown: these groups alone, and no
    failures, which may be of other checkpoints and runs. A caveat of several tables stands below the first of them.
    """
    lines: list[str] = []
    said: set[str] = set()
    groups = board.groups if shown is None else shown
    for group, metrics in board.groups.items():
        if group not in groups:
            continue
        header, body = ["checkpoint", *metrics], _body(board, group, with_interval=len(metrics))
        if _width(header, body) > width:
            body = _body(board, group, with_interval=1)
        new = [caveat for caveat in board.caveats[group] if caveat not in said]
        said.update(new)
        lines += [group, *text_table(header, body, width), *new, ""]
    if others := len(board.groups.keys() - set(groups)):
        lines += [f"{others} more {'table' if others == 1 else 'tables'} in leaderboard.md", ""]
    lines += troubles(board) if shown is None else []
    return text_of(lines).rstrip() or "no results yet"


def _spent(cost: TrainingCost) -> list[str]:
    numbers = [getattr(cost, name) for name in COST_UNITS]
    return [*("" if number is None else f"{number:.4g}" for number in numbers), cost.devices]


def row_names(board: Board) -> dict[CheckpointUsed, str]:
    """Name of each checkpoint, with its digest where two share one; the floor and published rows are marked."""
    counts = Counter(row.checkpoint.name for row in board.rows if not row.published)
    found = {}
    for row in board.rows:
        used = row.checkpoint
        digest = f" ({used.digest[:8]})" if counts[used.name] > 1 else ""
        mark = " (published)" if row.published else " (floor)" if used.is_floor else ""
        found[used] = f"{used.name}{'' if row.published else digest}{mark}"
    return found


def number(cell: Cell | None, with_interval: bool = True) -> str:
    """`97.20 [96.1, 98.0]`, over seeds `97.20 [96.1, 98.0] +- 0.14 (n=3)`, `0.731 s [0.702, 0.760]`, or nothing."""
    if cell is None:
        return ""
    digits = decimals(cell.mean, cell.unit)
    ends = ", ".join(f"{end:.{interval_decimals(cell.mean, cell.unit)}f}" for end in cell.interval or ())
    interval = f" [{ends}]" if ends and with_interval else ""
    spread = f" +- {cell.std:.{digits}f} (n={cell.seeds})" if cell.seeds > 1 else ""
    return f"{number_text(cell.mean, cell.unit)}{interval}{spread}"


def troubles(board: Board) -> list[str]:
    """One line for each failed result and each file that could not be read."""
    names = row_names(board)
    pairs = [(names[row.checkpoint], what, why) for row in board.rows for what, why in row.failed.items()]
    failed = [f"failed: {name}: {what}: {why}" for name, what, why in pairs]
    return failed + [f"left out: {problem}" for problem in board.problems]


def text_table(header: Sequence[str], body: Sequence[Sequence[str]], width: int) -> list[str]:
    """A text table of at most `width` characters; columns that do not fit are counted in the last line."""
    sizes = _sizes(header, body)
    shown, used = 1, sizes[0] + 2
    while shown < len(sizes) and (shown == 1 or used + 2 + sizes[shown] <= width):
        used += 2 + sizes[shown]
        shown += 1
    lines = []
    for cells in (header, *body):
        first, *rest = [cell.rjust(size) for cell, size in zip(cells[:shown], sizes[:shown], strict=True)]
        lines.append("  " + "  ".join([first.strip().ljust(sizes[0]), *rest]).rstrip())
    if hidden := len(sizes) - shown:
        lines.append(f"  ... {hidden} more {'column' if hidden == 1 else 'columns'} in leaderboard.csv")
    return lines


def _sizes(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *body, strict=True)]


def _width(header: Sequence[str], body: Sequence[Sequence[str]]) -> int:
    # Two spaces before every column.
    return sum(size + 2 for size in _sizes(header, body))


def _body(board: Board, group: str, with_interval: int) -> list[list[str]]:
    # Names and numbers of a group's checkpoints, so many leading metrics with their intervals.
    names, metrics = row_names(board), board.groups[group]
    return [
        [
            names[row.checkpoint],
            *(
                number(row.cells.get((group, metric)), at < with_interval) + doubt(board, group, row, metric)
                for at, metric in enumerate(metrics)
            ),
        ]
        for row in _in_group(board, group)
    ]


def doubt(board: Board, group: str, row: Row, metric: str) -> str:
    """` ?` behind a number that a caveat below the table is about, as where nothing was fitted."""
    about = f"{row.checkpoint.name}: {metric}: "
    return " ?" * any(caveat.startswith(about) for caveat in board.caveats[group])


def _in_group(board: Board, group: str) -> list[Row]:
    return [row for row in board.rows if any(key[0] == group for key in row.cells)]


def _entry(row: Row, column: Key, first: float | None, shared: Collection[Key]) -> Entry:
    # first: the best number of the column; shared: the checkpoints that cannot be told from it.
    cell = row.cells.get(column)
    if cell is None or row.published:
        return Entry(cell=cell)
    return Entry(cell=cell, bold=key_of(row.checkpoint) in shared or cell.mean == first)
