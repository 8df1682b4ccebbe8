"""Whether numbers of published weights are the published ones: `bench run` says so the moment it has measured them.

Weights are known by their digest, so that nothing is said of weights that only bear a name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cli.settings import setting_text
from bench.published.values import SETS, PublishedValue, published_values
from bench.results.record import DataUsed, ProtocolUsed

OURS = 0.5  # tolerance in points where the source states none
ROUNDING = 0.05  # of a number with one decimal
DEVIATIONS = 2  # so many standard deviations of repeated runs hold 95 % of them


@dataclass(frozen=True, kw_only=True)
class MeasuredNumbers:
    """What was measured, and of what. digests: of the export, and of the file that it was imported from."""

    digests: Sequence[str]
    protocol: ProtocolUsed
    data: DataUsed
    numbers: Mapping[str, float]  # metric -> value
    limit: int | None = None
    branch: str = ""  # of the file that it was imported from; "" for its importer's first


def tolerance_of(value: PublishedValue) -> tuple[float, str]:
    """How far a repetition may be from a published value, in its unit, and where that is from."""
    if value.tolerance is None:
        return OURS, "ours, the source states none"
    stated = DEVIATIONS * value.tolerance + ROUNDING
    return stated, f"twice the source's deviation of {value.tolerance:g}, and rounding"


def against_published(found: MeasuredNumbers, values: Iterable[PublishedValue] | None = None) -> Iterator[str]:
    """A line for every published value of these very weights, protocol and images."""
    for value in published_values() if values is None else values:
        if not _is_same(found, value):
            continue
        difference = found.numbers[value.metric] - value.value
        most, reason = tolerance_of(value)
        verdict, where = ("as published", "within") if abs(difference) <= most else ("NOT AS PUBLISHED", "beyond")
        yield (
            f"{verdict}: {value.metric} is {value.value:g} in {value.table}, difference {difference:+.2f}, "
            f"{where} the tolerance of {most:g} ({reason})"
        )


def _is_same(found: MeasuredNumbers, value: PublishedValue) -> bool:
    return (
        bool(value.digest)
        and any(digest.startswith(value.digest) for digest in found.digests)
        and value.protocol == found.protocol.name
        and sorted(value.settings.split()) == _texts(found.protocol.changes)
        and value.metric in found.numbers
        and found.branch == value.network
        and found.limit is None
        and dict(found.data.images) == dict(SETS[value.data].images)
    )


def _texts(changes: Mapping[str, Any]) -> list[str]:
    return sorted(f"{name}={setting_text(value)}" for name, value in changes.items())
