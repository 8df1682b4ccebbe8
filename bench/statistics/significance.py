"""Checkpoints that do not differ significantly from the best of a leaderboard column: paired tests, Holm-corrected.

A test is a function of its two sides, so its result is kept under their identities and the metric, in OUT/cache, and
not computed again. The file may be deleted.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from bench.results.board import Board, best, group_of
from bench.results.index import write_kept
from bench.results.record import CheckpointUsed
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, Measured, matched, p_value
from bench.statistics.paired import holm

VERSION = 1  # raise it when the same values would be tested otherwise

Test = TypeVar("Test")


class PairedTestCache(Generic[Test]):
    """File of paired tests of one kind, a float or a dataclass. tests: "identities|identities" -> metric -> test."""

    def __init__(self, path: Path, kind: Any) -> None:
        self.path, self.kind = path, kind
        self.tests: dict[str, dict[str, Test]] = self._read()
        self.is_new = False

    def get(self, sides: Sequence[Sequence[str]], metric: str, test: Callable[[], Test]) -> Test:
        """The test of a metric of two sides, made if it is not there. sides: identities of the results of each.

        Whatever `test` raises is raised, and made again the next time.
        """
        pair = "|".join("+".join(side) for side in sides)
        kept = self.tests.get(pair, {}).get(metric)
        if kept is None:
            kept = test()
            if all(identity for side in sides for identity in side) and _is_finite(kept):
                self.tests.setdefault(pair, {})[metric] = kept
                self.is_new = True
        return kept

    def save(self, there: Collection[str]) -> None:
        """Write what is new, with what others wrote meanwhile, of results whose identities are still `there`."""
        if not self.is_new:
            return
        merged = self._read()
        for pair, tests in self.tests.items():
            merged[pair] = merged.get(pair, {}) | tests
        alive = {pair: tests for pair, tests in merged.items() if set(pair.replace("|", "+").split("+")) <= set(there)}
        write_kept(self.path, msgspec.json.encode({"version": VERSION, "tests": alive}))
        self.is_new = False

    def _read(self) -> dict[str, dict[str, Test]]:
        try:
            content = msgspec.json.decode(self.path.read_bytes())
            if content["version"] != VERSION:
                return {}
            return msgspec.convert(content["tests"], dict[str, dict[str, self.kind]])  # type: ignore[name-defined]
        except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
            return {}


def _is_finite(test: Any) -> bool:
    # JSON has no other numbers.
    values = asdict(test).values() if is_dataclass(test) and not isinstance(test, type) else [test]
    return all(isfinite(value) for value in values if isinstance(value, float))


Key = tuple[str, str]  # name and digest of a checkpoint, or group and metric of a column


def p_value_cache(out: Path) -> PairedTestCache[float]:
    """The p values of the leaderboard of a folder."""
    return PairedTestCache(out / "cache" / "p-values.json", float)


def ties_with_best(
    board: Board, measured: Iterable[Measured], kept: PairedTestCache[float]
) -> dict[Key, frozenset[Key]]:
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
    columns: Sequence[_Column], measured: Mapping[Key, list[Measured]], kept: PairedTestCache[float]
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


def _p(match: Match, metric: str, kept: PairedTestCache[float]) -> float | None:
    try:
        return kept.get(match.identities, metric, lambda: p_value(match, metric))
    except ValueError:
        return None


def _forget(results: Iterable[Measured]) -> None:
    for each in results:
        each.forget_arrays()
