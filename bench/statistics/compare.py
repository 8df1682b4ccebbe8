"""`bench compare`: every pair of checkpoints, on the main metric of each protocol that both have under the same
conditions, on a named one, or on all.

The main metric is the first that can be tested. Results that differ in anything but the checkpoint are not compared,
and the reason is given. Seeds that both have are averaged per image. Holm's correction covers all comparisons of the
call, so that metrics nobody asked for do not weaken the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from bench.results.record import Result
from bench.statistics.matching import Match, Measured, difference, label_of, labelled, matched, read_measured
from bench.statistics.paired import PairedTest, holm
from bench.statistics.report import Comparison, Comparisons
from bench.statistics.significance import KeptTests
from engine.printing import meant

ALL = "all"  # in place of a metric's name: every metric


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to compare; None: every image set, every protocol, the main metric of each."""

    data: str | None = None  # name of an image set
    protocol: str | None = None  # a protocol, or a task such as knn
    metric: str | None = None  # name of a metric, or ALL


def compare(out: Path, names: Sequence[str], wanted: Wanted) -> Comparisons:
    """Compare every pair of the named checkpoints. ValueError gives the choices for an unknown name."""
    measured, left_out = read_measured(out)
    by_label = labelled(measured)
    labels = [label_of(name, by_label, out) for name in names]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{twice[0]} is given twice; name different checkpoints")
    chosen = {label: _selected(by_label[label], wanted) for label in labels}
    if not any(chosen.values()):
        _refuse(wanted, [each for label in labels for each in by_label[label]])
    kept: KeptTests[PairedTest] = KeptTests(out / "cache" / "comparisons.json", PairedTest)
    found: list[Comparison] = []
    for first, second in combinations(labels, 2):
        matches, reasons = matched(chosen[first], chosen[second], (first, second))
        for match in matches:
            comparisons, more = compared(match, (first, second), wanted.metric, kept)
            found += comparisons
            reasons += more
        left_out += [f"{first} and {second}: {reason}" for reason in reasons]
    kept.save({each.identity for each in measured})
    corrected = holm([each.paired.p for each in found])
    found = [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]
    return Comparisons(found=tuple(found), left_out=tuple(left_out))


def compared(
    match: Match, labels: tuple[str, str], metric: str | None, kept: KeptTests[PairedTest]
) -> tuple[list[Comparison], list[str]]:
    """Uncorrected comparisons: of the first metric that both have and that can be tested, of `metric` or of ALL.

    Also the reasons why others have none.
    """
    first, second = match.first[0].result, match.second[0].result
    shared = [name for name in first.metrics if name in second.metrics and metric in (None, ALL, name)]
    testable = [name for name in shared if name in first.traced and name in second.traced]
    found: list[Comparison] = []
    reasons = []
    for name in [name for name in testable if _meaning(first, name) != _meaning(second, name)]:
        testable.remove(name)
        shared.remove(name)
        reasons.append(f"{match.group}: {name}: {_meaning(first, name)} against {_meaning(second, name)}")
    if (alone := [name for name in shared if name not in testable]) and not (metric is None and testable):
        reasons.append(f"{match.group}: kept as numbers alone, not for each image: {', '.join(alone)}")
    for name in testable:
        if metric is None and found:
            break
        try:
            test = kept.get(match.identities, name, lambda name=name: difference(match, name))  # type: ignore[misc]
        except ValueError as error:
            reasons.append(f"{match.group}: {error}")
            continue
        found.append(
            Comparison(
                first=labels[0],
                second=labels[1],
                group=match.group,
                metric=name,
                unit=first.metrics[name].unit,
                higher_is_better=first.metrics[name].higher_is_better,
                seeds=tuple(each.result.seed for each in match.first),
                paired=test,
                p_holm=test.p,
            )
        )
    return found, reasons


def _meaning(result: Result, name: str) -> str:
    # Two numbers with the same meaning can be subtracted.
    better = {True: "higher is better", False: "lower is better", None: "neither is better"}
    return f"{result.metrics[name].unit or 'no unit'}, {better[result.metrics[name].higher_is_better]}"


def _selected(measured: Sequence[Measured], wanted: Wanted) -> list[Measured]:
    return [each for each in measured if _is_wanted(each.result, wanted)]


def _is_wanted(result: Result, wanted: Wanted) -> bool:
    return (
        wanted.data in (None, result.data.name)
        and wanted.protocol in (None, result.protocol.name, result.task)
        and (wanted.metric in (None, ALL) or wanted.metric in result.metrics)
    )


def _refuse(wanted: Wanted, measured: Sequence[Measured]) -> None:
    # ValueError for the first option that no result fits, or for their combination.
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
