"""Checkpoints that do not differ significantly from the best of a leaderboard column: paired tests, Holm-corrected."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bench.results.board import Board, best, group_of
from bench.results.record import CheckpointUsed
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Measured, matched, p_value
from bench.statistics.paired import holm

Key = tuple[str, str]  # name and digest of a checkpoint, or group and metric of a column


def level_with_best(board: Board, measured: Iterable[Measured]) -> dict[Key, frozenset[Key]]:
    """(group, metric) -> (name, digest) of the best checkpoint and of all that do not differ significantly from it."""
    by_group: dict[str, dict[Key, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        # A copy, so that its arrays are freed with it: memory holds those of one group at a time.
        by_group[group_of(each.result)][key_of(each.result.checkpoint)].append(replace(each))
    found = {}
    for group, metrics in board.groups.items():
        of_group = by_group.pop(group, {})
        columns = [(group, metric) for metric in metrics if best(board, group, metric) is not None]
        found |= {column: _level(board, column, of_group) for column in columns}
    return found


def key_of(used: CheckpointUsed) -> Key:
    """Name and digest, which identify a checkpoint."""
    return used.name, used.digest


def _level(board: Board, column: Key, measured: Mapping[Key, list[Measured]]) -> frozenset[Key]:
    top = best(board, *column)
    means = {key_of(row.checkpoint): row.cells[column].mean for row in board.rows if column in row.cells}
    leader = next(key for key, mean in means.items() if mean == top)
    p = {}
    for other in means:
        if other != leader and (found := _p(measured, column[1], leader, other)) is not None:
            p[other] = found
    corrected = dict(zip(p, holm(list(p.values())), strict=True))
    return frozenset(key for key in means if means[key] == top or corrected.get(key, 0.0) > LEVEL)


def _p(measured: Mapping[Key, list[Measured]], metric: str, leader: Key, other: Key) -> float | None:
    # None where no paired test is possible; such a checkpoint counts as different.
    one, another = (measured.get(key, ()) for key in (leader, other))
    matches, _ = matched(one, another, (leader[0], other[0]))
    if len(matches) != 1:
        return None
    try:
        return p_value(matches[0], metric)
    except ValueError:
        return None
