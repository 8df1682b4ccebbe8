"""Checkpoints that do not differ significantly from the best of a leaderboard column: paired tests, Holm-corrected.

A test is a function of its two sides, so its result is kept under their identities and the metric, in OUT/cache, and
not computed again. The file may be deleted.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from itertools import chain, combinations
from math import isfinite
from pathlib import Path
from string import ascii_letters
from typing import Any, Generic, TypeVar

import msgspec

from bench.results.store import StoredResult, write_cache
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import matched, p_value
from bench.statistics.paired import holm

VERSION = 2  # raise it when the same values would be tested otherwise
LETTERS = ascii_letters + "".join(filter(str.isalpha, map(chr, range(0x3B1, 0x530))))  # Greek and Cyrillic are many
LETTERED = 60  # checkpoints up to which all pairs of a column are tested: 1770 tests, half a millisecond to 12 ms each

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
        result = self.tests.get(pair, {}).get(metric)
        if result is None:
            result = test()
            if all(identity for side in sides for identity in side) and _is_finite(result):
                self.tests.setdefault(pair, {})[metric] = result
                self.is_new = True
        return result

    def save(self, identities: Collection[str]) -> None:
        """Write new tests, with those that others wrote meanwhile, of results that still have these identities."""
        if not self.is_new:
            return
        merged = self._read()
        for pair, tests in self.tests.items():
            merged[pair] = merged.get(pair, {}) | tests
        known = set(identities)
        alive = {pair: tests for pair, tests in merged.items() if known.issuperset(pair.replace("|", "+").split("+"))}
        write_cache(self.path, msgspec.json.encode({"version": VERSION, "tests": alive}))
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


Key = tuple[str, str]  # name and digest of a checkpoint
Column = tuple[str, str]  # group and metric


def p_value_cache(out: Path) -> PairedTestCache[float]:
    """The p values of the leaderboard of a folder."""
    return PairedTestCache(out / "cache" / "p-values.json", float)


def ties_with_best(
    columns: Mapping[Column, Mapping[Key, float]],
    best: Mapping[Column, float],
    results: Iterable[StoredResult],
    cache: PairedTestCache[float],
) -> dict[Column, frozenset[Key]]:
    """(group, metric) -> the best checkpoint and all that do not differ significantly from it; without columns of
    which no paired test is possible, as of a number that no values of images give.

    columns: of each, checkpoint -> its number. best: column -> the best number, where there is one. Memory holds the
    arrays of the leaders of one group and of one other checkpoint at a time.
    """
    ties: dict[Column, frozenset[Key]] = {}
    for group, by_checkpoint in _by_group(results).items():
        tested = {column: numbers for column, numbers in columns.items() if column[0] == group and column in best}
        p_values = _p_values(tested, best, by_checkpoint, cache)
        for column, numbers in tested.items():
            p = p_values[column]
            if not p and len(numbers) > 1:
                continue
            corrected = dict(zip(p, holm(list(p.values())), strict=True))
            ties[column] = frozenset(
                key for key, number in numbers.items() if number == best[column] or corrected.get(key, 0.0) > LEVEL
            )
        for stored in chain.from_iterable(by_checkpoint.values()):
            stored.forget_arrays()
    return ties


def _by_group(results: Iterable[StoredResult]) -> dict[str, dict[Key, list[StoredResult]]]:
    by_group: dict[str, dict[Key, list[StoredResult]]] = defaultdict(lambda: defaultdict(list))
    for stored in results:
        by_group[stored.result.group][stored.result.checkpoint.key].append(stored)
    return by_group


def tie_letters(
    columns: Mapping[Column, Mapping[Key, float]],
    ties: Mapping[Column, frozenset[Key]],
    results: Iterable[StoredResult],
    cache: PairedTestCache[float],
) -> dict[Column, dict[Key, str]]:
    """(group, metric) -> checkpoint -> its letters: two checkpoints share one where no paired test tells them apart.

    A compact letter display: each letter is a largest set of checkpoints of which none differs from another (Piepho
    2004, doi:10.1198/1061860043515), without those of one checkpoint. Comparisons with the leader are those of
    `ties_with_best`; all others are Holm-corrected together. Columns of more than LETTERED checkpoints have none.

    columns: of each, checkpoint -> its number, the best first. ties: of `ties_with_best`.
    """
    by_group = _by_group(results)
    letters = {}
    for column, numbers in columns.items():
        if column in ties and len(numbers) <= LETTERED:
            by_checkpoint = by_group[column[0]]
            leader, *others = numbers
            p = {}
            for first, second in combinations(others, 2):
                matches, _ = matched(by_checkpoint[first], by_checkpoint[second], (first[0], second[0]))
                with suppress(ValueError):  # no paired test is possible: they count as different
                    if len(matches) == 1:
                        test = partial(p_value, matches[0], column[1])
                        p[first, second] = cache.get(matches[0].identities, column[1], test)
            corrected = zip(p, holm(list(p.values())), strict=True)
            level = [(leader, key) for key in ties[column] - {leader}] + [pair for pair, at in corrected if at > LEVEL]
            letters[column] = _letters_of(list(numbers), level)
            for stored in chain.from_iterable(by_checkpoint.values()):
                stored.forget_arrays()
    return letters


def _letters_of(keys: Sequence[Key], level: Iterable[tuple[Key, Key]]) -> dict[Key, str]:
    """Letters of checkpoints, the best first, of which some pairs are level."""
    from networkx import Graph, find_cliques

    places = {key: place for place, key in enumerate(keys)}
    groups = sorted(sorted(map(places.__getitem__, clique)) for clique in find_cliques(Graph(level)))
    return {
        key: "".join(letter for letter, group in zip(LETTERS, groups, strict=False) if place in group)
        for key, place in places.items()
    }


def _p_values(
    columns: Mapping[Column, Mapping[Key, float]],
    best: Mapping[Column, float],
    results: Mapping[Key, Sequence[StoredResult]],
    cache: PairedTestCache[float],
) -> dict[Column, dict[Key, float]]:
    """Column -> checkpoint -> uncorrected p value of its test against the column's leader, in one group of results.

    A checkpoint for which no paired test is possible has no p, and counts as different.
    """
    leaders = {
        column: next(key for key, number in numbers.items() if number == best[column])
        for column, numbers in columns.items()
    }
    p_values: dict[Column, dict[Key, float]] = {column: {} for column in columns}
    for key in dict.fromkeys(chain.from_iterable(columns.values())):
        matches = {}
        for leader in {*leaders.values()} - {key}:
            pairs, _ = matched(results.get(leader, ()), results.get(key, ()), (leader[0], key[0]))
            matches[leader] = pairs[0] if len(pairs) == 1 else None
        for column, leader in leaders.items():
            match, metric = matches.get(leader), column[1]
            if match and key in columns[column]:
                with suppress(ValueError):
                    p_values[column][key] = cache.get(match.identities, metric, partial(p_value, match, metric))
        if key not in leaders.values():
            for stored in results.get(key, ()):
                stored.forget_arrays()
    return p_values
