"""Checkpoints that do not differ significantly from the best of a leaderboard column: paired tests, Holm-corrected.

A test depends only on the two checkpoints' results, so it is cached in OUT/cache under their identities and the metric,
and not computed again. The file may be deleted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.results.store import StoredResult, write_cache
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, match_results, paired_test
from bench.statistics.paired import PairedTest, holm_of_networks
from engine.files import json_bytes, read_json

VERSION = 3  # raise it when the same values would be tested differently


class PairedTestCache:
    """Paired tests that were computed before: "identities|identities" -> metric -> test. path: None keeps no file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tests = self._read()
        self.is_new = False

    def get(self, match: Match, metric: str) -> PairedTest:
        """The test of a metric, computed if it is not cached. ValueError, which is not cached, if none is possible."""
        pair = "|".join("+".join(side) for side in match.identities)
        test = self.tests.get(pair, {}).get(metric)
        if test is None:
            test = paired_test(match, metric)
            if all(identity for side in match.identities for identity in side) and _is_finite(test):
                self.tests.setdefault(pair, {})[metric] = test
                self.is_new = True
        return test

    def save(self, identities: Collection[str]) -> None:
        """Write the file if there are new tests, merged with those that other processes wrote in the meantime.

        identities: of all current results; tests of other results are dropped.
        """
        if not (self.path and self.is_new):
            return
        merged = self._read()
        for pair, tests in self.tests.items():
            merged[pair] = merged.get(pair, {}) | tests
        known = set(identities)
        current = {pair: tests for pair, tests in merged.items() if known.issuperset(pair.replace("|", "+").split("+"))}
        write_cache(self.path, json_bytes({"version": VERSION, "tests": current}))
        self.is_new = False

    def _read(self) -> dict[str, dict[str, PairedTest]]:
        try:
            content = read_json(self.path) if self.path else {}
            if content.get("version") != VERSION:
                return {}
            return msgspec.convert(content["tests"], dict[str, dict[str, PairedTest]])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file is missing or damaged
            return {}


def _is_finite(test: PairedTest) -> bool:
    # JSON has neither NaN nor infinity.
    return all(isfinite(value) for value in asdict(test).values() if isinstance(value, float))


Key = tuple[str, str]  # name and digest of a checkpoint
Column = tuple[str, str]  # group and metric


def paired_tests(out: Path) -> PairedTestCache:
    """The paired tests of a folder of results, for its leaderboard and for `bench compare`."""
    return PairedTestCache(out / "cache" / "paired-tests.json")


class Ties(NamedTuple):
    """The outcome of the paired tests of a column."""

    tied: frozenset[Key]  # the best checkpoint and all that it is not significantly better than
    tested: frozenset[Key]  # the best checkpoint and all that were compared with it


def ties_with_best(
    columns: Mapping[Column, Mapping[Key, float]],
    best: Mapping[Column, float],
    results: Iterable[StoredResult],
    cache: PairedTestCache,
) -> dict[Column, Ties]:
    """Column -> which checkpoints are tied with its best, and which were tested against it.

    Columns without any possible paired test are omitted, such as metrics that have no values for images. To save
    memory, only the arrays of the leaders of one group and of one other checkpoint are loaded at a time. Copies of one
    network under several names count as one in Holm's correction; those of the best with its number are not tested.

    columns: column -> checkpoint -> its number. best: column -> the best number, for columns that have one.
    """
    ties: dict[Column, Ties] = {}
    by_group: dict[str, dict[Key, list[StoredResult]]] = defaultdict(lambda: defaultdict(list))
    for stored in results:
        by_group[stored.result.group][stored.result.checkpoint.key].append(stored)
    for group, of_group in by_group.items():
        tested = {column: numbers for column, numbers in columns.items() if column[0] == group and column in best}
        leaders = {
            column: next(key for key, number in numbers.items() if number == best[column])
            for column, numbers in tested.items()
        }
        p_values: dict[Column, dict[Key, float]] = {column: {} for column in tested}
        for key in dict.fromkeys(chain.from_iterable(tested.values())):
            matches = {leader: _match(of_group, leader, key) for leader in {*leaders.values()} - {key}}
            for column, leader in leaders.items():
                numbers = tested[column]
                is_copy = key[1] == leader[1] and numbers.get(key) == numbers[leader]
                if key in numbers and not is_copy and (match := matches.get(leader)):
                    with suppress(ValueError):  # if no paired test is possible
                        p_values[column][key] = cache.get(match, column[1]).p
            if key not in leaders.values():
                _forget_arrays(of_group[key])
        _forget_arrays(chain.from_iterable(of_group.values()))
        for column, numbers in tested.items():
            p = p_values[column]
            if p or len({digest for _, digest in numbers}) == 1:
                corrected = holm_of_networks(p, network=itemgetter(1))
                first = {key for key in numbers if numbers[key] == best[column]}
                tied = first | {key for key, corrected_p in corrected.items() if corrected_p > LEVEL}
                ties[column] = Ties(frozenset(tied), frozenset(first | p.keys()))
    return ties


def _match(results: Mapping[Key, Sequence[StoredResult]], leader: Key, other: Key) -> Match | None:
    """The results of two checkpoints in one group, if they can be compared in one way."""
    matches, _ = match_results(results.get(leader, ()), results.get(other, ()), (leader[0], other[0]))
    return matches[0] if len(matches) == 1 else None


def _forget_arrays(results: Iterable[StoredResult]) -> None:
    for stored in results:
        stored.forget_arrays()
