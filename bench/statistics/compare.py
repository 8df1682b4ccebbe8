"""`bench compare`: every pair of checkpoints, on the main metric of each protocol that both have under the same
conditions, on a named one, or on all.

The main metric is the first that can be tested. Results that differ in anything but the checkpoint are not compared,
and the reason is given. Seeds that both have are averaged per image. Holm's correction covers all comparisons of the
call, so that metrics nobody asked for do not weaken the others.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from bench.results.record import Result, interval_decimals, number_text, suffix
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, Measured, difference, label_of, labelled, matched, read_measured
from bench.statistics.paired import PairedTest, holm
from bench.statistics.significance import PairedTestCache
from engine.printing import did_you_mean, in_csv, text_of

COLUMNS = (
    *("metric", "A", "B", "of A", "of B", "difference [95 %]", "A only", "B only"),
    *("p", "p Holm", "effect", "better"),
)
SENTENCES = 8  # most comparisons that are also said in words

HEADER = (
    *("first", "second", "group", "metric", "seeds", "accuracy_first", "accuracy_second"),
    *(field.name for field in fields(PairedTest) if field.name not in ("first", "second")),
    *("p_holm", "better"),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric of two checkpoints."""

    first: str  # label of a checkpoint
    second: str  # label of the other
    group: str  # image set, protocol and changed settings
    metric: str  # its name
    unit: str = "%"  # of the metric
    higher_is_better: bool | None = True  # None: neither
    seeds: tuple[int, ...]  # seeds that both have, averaged per image
    paired: PairedTest  # the test and its numbers
    p_holm: float  # p of the test, corrected for all comparisons of the call


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """All comparisons of a call."""

    found: tuple[Comparison, ...]  # with their corrected p
    left_out: tuple[str, ...]  # a line for each thing that could not be compared

    def __str__(self) -> str:
        """What `bench compare` prints."""
        return to_text(self)


def to_text(comparisons: Comparisons) -> str:
    """A table for each protocol, and a sentence for each main comparison where these are few; printable."""
    found, lines = comparisons.found, []
    tables: dict[str, list[Comparison]] = {}
    for each in found:
        tables.setdefault(comparison_title(each), []).append(each)
    for title, rows in tables.items():
        lines += [title, *_table(rows), ""]
    mains = main_comparisons(found)
    if len(mains) <= SENTENCES:
        lines += [conclusion(each, len(found)) for each in mains] + [""] * bool(mains)
    if found:
        covers = f"Holm's correction covers {len(found)} comparison{'s' if len(found) > 1 else ''}"
        lines += [
            f"{covers}; by default of each protocol's main metric (--metric NAME, --metric all).",
            "Difference: A - B, in points of a percentage, else in the metric's unit; its interval is not corrected.",
            "p: two-sided, on the same images. Where `better` is empty or missing, the test finds no difference.",
        ]
    lines += [f"not compared: {reason}" for reason in comparisons.left_out]
    return text_of(lines)


def main_comparisons(found: Sequence[Comparison]) -> list[Comparison]:
    """The first comparison of each pair and protocol: that of the main metric that can be tested."""
    first: dict[tuple[str, str, str], Comparison] = {}
    for each in found:
        first.setdefault((each.first, each.second, each.group), each)
    return list(first.values())


def conclusion(each: Comparison, over: int) -> str:
    """`a is better than b on digits/knn@dino top1_k10 by 33.0 points [28.6, 37.2], p < 0.0001 after Holm over 8`"""
    test, where = each.paired, f"on {each.group} {each.metric}"
    certainty = f"{p_text(each.p_holm, with_sign=True)} after Holm over {over}"
    digits, unit = interval_decimals(test.difference, each.unit), " points" if each.unit == "%" else suffix(each.unit)
    if each.p_holm > LEVEL:
        numbers = f"{test.difference:+.{digits}f}{unit} {interval_text(test.low, test.high, digits)}"
        return f"{each.first} and {each.second} cannot be told apart {where}: {numbers}, {certainty}"
    low, high = (test.low, test.high) if test.difference > 0 else (-test.high, -test.low)
    numbers = f"{abs(test.difference):.{digits}f}{unit} {interval_text(low, high, digits)}"
    is_first, word = better(each) == "first", "better"
    if each.higher_is_better is None:
        is_first, word = test.difference > 0, "higher"
    order = (each.first, each.second) if is_first else (each.second, each.first)
    return f"{order[0]} is {word} than {order[1]} {where} by {numbers}, {certainty}"


def better(each: Comparison) -> Literal["first", "second", ""]:
    """The better one; "" where the corrected test finds no difference, or where the metric has no better direction."""
    if each.p_holm > LEVEL or each.higher_is_better is None:
        return ""
    return "first" if (each.paired.difference > 0) == each.higher_is_better else "second"


def comparison_title(each: Comparison) -> str:
    """What is compared, on which images and seeds, by which test."""
    seeds = f", mean of {len(each.seeds)} seeds" if len(each.seeds) > 1 else ""
    are_fractions = each.unit == "%" and each.paired.test == "paired bootstrap"
    alone = " alone, as values are fractions" if are_fractions else ""
    basis = f"{each.paired.images} images{seeds}; {each.paired.test}{alone}; effect: {each.paired.effect_name}"
    return f"{each.group}: {basis}"


def interval_text(low: float, high: float, digits: int = 1) -> str:
    """`[28.6, 37.2]`, without a negative zero."""
    return f"[{round(low, digits) + 0.0:.{digits}f}, {round(high, digits) + 0.0:.{digits}f}]"


def p_text(p: float, with_sign: bool = False) -> str:
    """`< 0.0001` or `0.0312`; with sign `p < 0.0001` or `p = 0.0312`."""
    if p < 1e-4:
        return "p < 0.0001" if with_sign else "< 0.0001"
    return f"p = {p:.4f}" if with_sign else f"{p:.4f}"


def to_json(comparisons: Comparisons) -> str:
    """All numbers, unrounded."""
    value = {
        "comparisons": [_record(each) for each in comparisons.found],
        "holm_over": len(comparisons.found),
        "level": LEVEL,
        "not_compared": comparisons.left_out,
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def comparisons_csv(comparisons: Comparisons) -> str:
    """A header and a row for each comparison, with empty cells where there is no number."""
    records = [_record(each) | {"seeds": "+".join(map(str, each.seeds))} for each in comparisons.found]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: in_csv(value) for name, value in record.items()} for record in records)
    return buffer.getvalue()


def _record(each: Comparison) -> dict[str, object]:
    test = asdict(each.paired)
    accuracies = {"accuracy_first": test.pop("first"), "accuracy_second": test.pop("second")}
    place = {name: getattr(each, name) for name in ("first", "second", "group", "metric", "seeds")}
    return {**place, **accuracies, **test, "p_holm": each.p_holm, "better": better(each)}


def _table(rows: Sequence[Comparison]) -> list[str]:
    body = [COLUMNS, *(_cells(each) for each in rows)]
    shown = [at for at in range(len(COLUMNS)) if any(line[at] for line in body[1:])]
    sizes = {at: max(len(line[at]) for line in body) for at in shown}
    lines = []
    for line in body:
        first, *rest = [line[at].ljust(sizes[at]) if at < 3 else line[at].rjust(sizes[at]) for at in shown]
        lines.append("  " + "  ".join([first, *rest]).rstrip())
    return lines


def _cells(each: Comparison) -> tuple[str, ...]:
    test, digits = each.paired, interval_decimals(each.paired.difference, each.unit)
    difference = f"{test.difference:+.{2 if each.unit == '%' else digits}f}{suffix(each.unit)}"
    counts = ["" if count is None else str(count) for count in (test.first_only, test.second_only)]
    return (
        each.metric,
        each.first,
        each.second,
        number_text(test.first, each.unit),
        number_text(test.second, each.unit),
        f"{difference} {interval_text(test.low, test.high, digits)}",
        *counts,
        p_text(test.p),
        p_text(each.p_holm),
        "" if test.effect is None else f"{test.effect:+.2f}",
        {"first": "A", "second": "B", "": ""}[better(each)],
    )


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
    kept: PairedTestCache[PairedTest] = PairedTestCache(out / "cache" / "comparisons.json", PairedTest)
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
    match: Match, labels: tuple[str, str], metric: str | None, kept: PairedTestCache[PairedTest]
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
            raise ValueError(
                f"--{option} {word}: these checkpoints have no such result{did_you_mean(word, sorted(known))}"
            )
    raise ValueError("no result of these checkpoints fits --data, --protocol and --metric together; leave one out")
