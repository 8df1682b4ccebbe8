"""`bench compare`: every pair of checkpoints, on every number that both have of the same images under the same recipe.

What differs in anything but the checkpoint is not compared, and the reason is given. Several seeds that both have are
averaged per image. Holm's correction runs over all comparisons of the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from bench.cli.settings import meant
from bench.results.record import Result
from bench.statistics.matching import Match, Measured, difference, label_of, labelled, matched, read_measured
from bench.statistics.paired import PairedTest, holm


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to compare; None: everything. `protocol` may be a task, such as knn."""

    data: str | None = None
    protocol: str | None = None
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric of two checkpoints. p_holm: `paired.p` corrected for all comparisons of the call."""

    first: str
    second: str
    group: str
    metric: str
    unit: str = "%"
    higher_is_better: bool | None = True
    seeds: tuple[int, ...]
    paired: PairedTest
    p_holm: float


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """All comparisons of a call, and a line for each thing that could not be compared."""

    found: tuple[Comparison, ...]
    left_out: tuple[str, ...]


def compare(out: Path, names: Sequence[str], wanted: Wanted) -> Comparisons:
    """Compare every pair of the named checkpoints. ValueError names the choices for a word that is none of them."""
    measured, left_out = read_measured(out)
    by_label = labelled(measured)
    labels = [label_of(name, by_label, out) for name in names]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{twice[0]} is given twice; name different checkpoints")
    chosen = {label: _selected(by_label[label], wanted) for label in labels}
    if not any(chosen.values()):
        _refuse(wanted, [each for label in labels for each in by_label[label]])
    found: list[Comparison] = []
    for first, second in combinations(labels, 2):
        matches, reasons = matched(chosen[first], chosen[second], (first, second))
        for match in matches:
            comparisons, more = compared(match, (first, second), wanted.metric)
            found += comparisons
            reasons += more
        left_out += [f"{first} and {second}: {reason}" for reason in reasons]
    corrected = holm([each.paired.p for each in found])
    found = [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]
    return Comparisons(found=tuple(found), left_out=tuple(left_out))


def compared(match: Match, labels: tuple[str, str], metric: str | None) -> tuple[list[Comparison], list[str]]:
    """One comparison for each metric (or the one) that both have, not yet corrected, and why others have none."""
    first, second = match.first[0].result, match.second[0].result
    shared = [name for name in first.metrics if name in second.metrics and metric in (None, name)]
    testable = [name for name in shared if name in first.traced and name in second.traced]
    found, reasons = [], []
    for name in [name for name in testable if _meaning(first, name) != _meaning(second, name)]:
        testable.remove(name)
        shared.remove(name)
        reasons.append(f"{match.group}: {name}: {_meaning(first, name)} against {_meaning(second, name)}")
    if alone := [name for name in shared if name not in testable]:
        reasons.append(f"{match.group}: kept as numbers alone, not for each image: {', '.join(alone)}")
    for name in testable:
        try:
            test = difference(match, name)
        except ValueError as error:
            reasons.append(f"{match.group}: {error}")
            continue
        is_better = first.metrics[name].higher_is_better
        place = dict(first=labels[0], second=labels[1], group=match.group, metric=name)
        place |= dict(unit=first.metrics[name].unit, higher_is_better=is_better)
        seeds = tuple(each.result.seed for each in match.first)
        found.append(Comparison(**place, seeds=seeds, paired=test, p_holm=test.p))
    return found, reasons


def _meaning(result: Result, name: str) -> str:
    # What two numbers must share to be subtracted.
    better = {True: "higher is better", False: "lower is better", None: "neither is better"}
    return f"{result.metrics[name].unit or 'no unit'}, {better[result.metrics[name].higher_is_better]}"


def _selected(measured: Sequence[Measured], wanted: Wanted) -> list[Measured]:
    return [each for each in measured if _is_wanted(each.result, wanted)]


def _is_wanted(result: Result, wanted: Wanted) -> bool:
    return (
        wanted.data in (None, result.data.name)
        and wanted.protocol in (None, result.protocol.name, result.task)
        and (wanted.metric is None or wanted.metric in result.metrics)
    )


def _refuse(wanted: Wanted, measured: Sequence[Measured]) -> None:
    # ValueError for the first option that no result fits by itself, or for all together.
    results = [each.result for each in measured]
    choices = {
        "data": {result.data.name for result in results},
        "protocol": {result.protocol.name for result in results},
        "metric": {metric for result in results for metric in result.metrics},
    }
    for option, known in choices.items():
        word = getattr(wanted, option)
        if word is not None and not _selected(measured, Wanted(**{option: word})):
            raise ValueError(f"--{option} {word}: these checkpoints have no such result{meant(word, sorted(known))}")
    raise ValueError("no result of these checkpoints fits --data, --protocol and --metric together; leave one out")
