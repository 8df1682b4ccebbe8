"""Checkpoints that do not differ significantly from the best of a leaderboard column: paired tests, Holm-corrected."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.results.board import Board, best, group_of
from bench.results.record import CheckpointUsed
from bench.statistics.intervals import LEVEL
from bench.statistics.kept_tests import KeptTests
from bench.statistics.matching import Match, Measured, matched, p_value
from bench.statistics.paired import holm

Key = tuple[str, str]  # name and digest of a checkpoint, or group and metric of a column


def kept_p_values(out: Path) -> KeptTests[float]:
    """The p values of the leaderboard of a folder."""
    return KeptTests(out / "cache" / "p-values.json", float)


def level_with_best(board: Board, measured: Iterable[Measured], kept: KeptTests[float]) -> dict[Key, frozenset[Key]]:
    """(group, metric) -> (name, digest) of the best checkpoint and of all that do not differ significantly from it.

    Tests that are `kept` are not made again. Memory holds the arrays of the leaders of one group and of one other
    checkpoint at a time.
    """
    by_group: dict[str, dict[Key, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        by_group[group_of(each.result)][key_of(each.result.checkpoint)].append(each)
    found: dict[Key, frozenset[Key]] = {}
    for group, metrics in board.groups.items():
        columns = [(group, metric) for metric in metrics if best(board, group, metric) is not None]
        found |= _level_in_group(_means(board, columns), by_group[group], kept)
        for results in by_group[group].values():
            _forget(results)
    return found


def key_of(used: CheckpointUsed) -> Key:
    """Name and digest, which identify a checkpoint."""
    return used.name, used.digest


@dataclass(frozen=True, kw_only=True)
class _Column:
    key: Key
    means: Mapping[Key, float]  # checkpoint -> its number
    top: float

    @property
    def leader(self) -> Key:
        return next(key for key, mean in self.means.items() if mean == self.top)


def _means(board: Board, columns: Iterable[Key]) -> list[_Column]:
    found = []
    for column in columns:
        means = {key_of(row.checkpoint): row.cells[column].mean for row in board.rows if column in row.cells}
        top = best(board, *column)
        assert top is not None
        found.append(_Column(key=column, means=means, top=top))
    return found


def _level_in_group(
    columns: Sequence[_Column], measured: Mapping[Key, list[Measured]], kept: KeptTests[float]
) -> dict[Key, frozenset[Key]]:
    leaders = [column.leader for column in columns]
    p: dict[Key, dict[Key, float]] = {column.key: {} for column in columns}
    for other in dict.fromkeys(key for column in columns for key in column.means):
        rivals: dict[Key, Match | None] = {leader: _match(measured, leader, other) for leader in {*leaders} - {other}}
        for column, leader in zip(columns, leaders, strict=True):
            match = rivals.get(leader) if other in column.means else None
            if match and (found := _p(match, column.key[1], kept)) is not None:
                p[column.key][other] = found
        if other not in leaders:
            _forget(measured.get(other, ()))
    return {column.key: _level(column, p[column.key]) for column in columns}


def _level(column: _Column, p: Mapping[Key, float]) -> frozenset[Key]:
    corrected = dict(zip(p, holm(list(p.values())), strict=True))
    means = column.means
    return frozenset(key for key in means if means[key] == column.top or corrected.get(key, 0.0) > LEVEL)


def _match(measured: Mapping[Key, list[Measured]], leader: Key, other: Key) -> Match | None:
    # None where no paired test is possible; such a checkpoint counts as different.
    one, another = (measured.get(key, ()) for key in (leader, other))
    matches, _ = matched(one, another, (leader[0], other[0]))
    return matches[0] if len(matches) == 1 else None


def _p(match: Match, metric: str, kept: KeptTests[float]) -> float | None:
    try:
        return kept.get(match.identities, metric, lambda: p_value(match, metric))
    except ValueError:
        return None


def _forget(results: Iterable[Measured]) -> None:
    for each in results:
        each.forget_arrays()
