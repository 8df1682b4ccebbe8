"""Paired tests of results that did not change are not made again.

A test is a function of its two sides, so it is kept under their identities and the metric, in OUT/cache. The file may
be deleted; what it says is what the test would give.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from bench.results.index import write_kept

VERSION = 1  # raise it when the same values would be tested otherwise

Test = TypeVar("Test")


class KeptTests(Generic[Test]):
    """Tests of one kind, a float or a dataclass, in a file. tests: "identities|identities" -> metric -> test."""

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
