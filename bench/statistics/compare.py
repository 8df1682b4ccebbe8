"""`bench compare`: paired tests of every pair of checkpoints, for each protocol that both have results of.

By default the main metric of a protocol is tested, the first for which a test is possible; or a named metric, or all.
Results that differ in anything but the checkpoint are not compared, and the reason is given. Seeds that both have are
averaged per image. Holm's correction covers all comparisons of the call, so further metrics, which make it stricter,
are only tested on request.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from bench.results.record import Result, interval_decimals, number_text, sizes_note, suffix
from bench.results.store import comparable_results
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, label_of, match_results, results_by_label
from bench.statistics.paired import PairedTest, holm, paired_t
from bench.statistics.significance import PairedTestCache, paired_tests
from engine.errors import UserError, option
from engine.printing import counted, did_you_mean, table, text_of

COLUMNS = (
    *("metric", "A", "B", "of A", "of B", "difference [95 %]", "A only", "B only"),
    *("p", "p Holm", "effect", "better"),
)
MAX_CONCLUSIONS = 8  # up to this many main comparisons are also stated in sentences

SEED_COLUMNS = ("seeds_low", "seeds_high", "seeds_p_holm")  # added if a test over seeds is possible


FEWEST_SEEDS = 3  # for a test over seeds


@dataclass(frozen=True, kw_only=True)
class SeedTest:
    """The paired t test over seeds, each with the same draws for both: would another training give the same order?"""

    low: float  # ends of the 95 % interval of the mean difference, in the metric's unit
    high: float
    p: float  # two-sided, corrected for all such tests of the call


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The paired test of one metric of two checkpoints."""

    first: str  # label of a checkpoint
    second: str  # label of the other
    group: str  # image set, protocol and changed settings
    metric: str  # name of the metric
    unit: str = "%"  # of the metric
    higher_is_better: bool | None = True  # None: neither
    seeds: tuple[int, ...]  # seeds that both have, averaged per image
    paired: PairedTest  # the test over validation images and its numbers
    p_holm: float  # p of the test, corrected for all comparisons of the call
    over_seeds: SeedTest | None = None  # the test over training seeds, if both have three or more
    sizes: str = ""  # the sizes of the images, if each checkpoint has its own


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """All comparisons of a call."""

    found: tuple[Comparison, ...]  # with their corrected p
    left_out: tuple[str, ...]  # a line for each comparison that is not possible, with the reason
    results: tuple[Result, ...] = ()  # of the checkpoints, as far as they were chosen
    # (group, metric) -> a line of published numbers of the compared architectures, by the same protocol and images
    published: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The tables and sentences that `bench compare` prints."""
        return to_text(self)


def to_text(comparisons: Comparisons) -> str:
    """A table for each protocol, and a sentence for each main comparison if there are few; printable."""
    lines: list[str] = []
    tables: dict[str, list[Comparison]] = {}
    for comparison in comparisons.found:
        tables.setdefault(comparison_title(comparison), []).append(comparison)
    for title, rows in tables.items():
        sizes = [f"  {row.sizes}" for row in rows if row.sizes]
        published = [comparisons.published.get((row.group, row.metric), "") for row in rows]
        seeds = [_seeds_line(row) for row in rows if row.over_seeds]
        lines += [title, *_table(rows), *seeds, *dict.fromkeys([*sizes, *filter(None, published)]), ""]
    count = len(comparisons.found)
    mains: dict[tuple[str, str, str], Comparison] = {}  # first metric of each pair and protocol
    for comparison in comparisons.found:
        mains.setdefault((comparison.first, comparison.second, comparison.group), comparison)
    if len(mains) <= MAX_CONCLUSIONS:
        lines += [conclusion(comparison, count) for comparison in mains.values()] + [""] * bool(mains)
    if count:
        covers = f"Holm's correction covers {counted(count, 'comparison')}"
        lines += [
            f"{covers}; by default of each protocol's main metric ({option('metric')}).",
            "Difference: A - B, in percentage points or in the metric's unit; its interval is not corrected.",
            "p: two-sided, over validation images. If `better` is empty or missing, the test finds no difference.",
        ]
    lines += [f"not compared: {reason}" for reason in comparisons.left_out]
    return text_of(lines)


def conclusion(comparison: Comparison, over: int) -> str:
    """A comparison as a sentence. over: the number of comparisons that Holm's correction covers.

    `a is better than b on digits/knn@dino top1_k10 by 33.0 points [28.6, 37.2], p < 0.0001 after Holm over 8`
    """
    test, where = comparison.paired, f"on {comparison.group} {comparison.metric}"
    certainty = f"{p_text(comparison.p_holm, with_sign=True)} after Holm over {over}"
    digits = interval_decimals(test.difference, comparison.unit)
    unit = " points" if comparison.unit == "%" else suffix(comparison.unit)
    if comparison.p_holm > LEVEL:
        numbers = f"{test.difference:+.{digits}f}{unit} {interval_text(test.low, test.high, digits)}"
        return f"{comparison.first} and {comparison.second} cannot be told apart {where}: {numbers}, {certainty}"
    low, high = (test.low, test.high) if test.difference > 0 else (-test.high, -test.low)
    numbers = f"{abs(test.difference):.{digits}f}{unit} {interval_text(low, high, digits)}"
    is_first, word = better(comparison) == "first", "better"
    if comparison.higher_is_better is None:
        is_first, word = test.difference > 0, "higher"
    order = (comparison.first, comparison.second) if is_first else (comparison.second, comparison.first)
    return f"{order[0]} is {word} than {order[1]} {where} by {numbers}, {certainty}"


def _seeds_line(comparison: Comparison) -> str:
    """The test over training seeds, below the table of the tests over validation images."""
    test, difference, unit = comparison.over_seeds, comparison.paired.difference, comparison.unit
    assert test
    digits = interval_decimals(difference, unit) + (unit == "%")
    numbers = f"{difference:+.{digits}f}{suffix(unit)} {interval_text(test.low, test.high, digits)}"
    pair = f"{comparison.metric}, {comparison.first} - {comparison.second}"
    seeds = f"over {len(comparison.seeds)} training seeds in place of validation images (paired t)"
    return f"  {pair}: {numbers}, {p_text(test.p, with_sign=True)} after Holm, {seeds}"


def better(comparison: Comparison) -> Literal["first", "second", ""]:
    """The better checkpoint; "" if the corrected test finds no difference, or neither direction is better."""
    if comparison.p_holm > LEVEL or comparison.higher_is_better is None:
        return ""
    return "first" if (comparison.paired.difference > 0) == comparison.higher_is_better else "second"


def comparison_title(comparison: Comparison) -> str:
    """The title of a table: what is compared, on how many images and seeds, by which test."""
    test, count = comparison.paired, len(comparison.seeds)
    seeds = f", mean of {count} seeds" if count > 1 else ""
    are_fractions = comparison.unit == "%" and test.test == "paired bootstrap"
    note = " only, because values are fractions" if are_fractions else ""
    return f"{comparison.group}: {test.images} images{seeds}; {test.test}{note}; effect: {test.effect_name}"


def interval_text(low: float, high: float, digits: int = 1) -> str:
    """An interval as text, without a negative zero: `[28.6, 37.2]`."""
    return f"[{round(low, digits) + 0.0:.{digits}f}, {round(high, digits) + 0.0:.{digits}f}]"


def p_text(p: float, with_sign: bool = False) -> str:
    """A p value as text: `< 0.0001` or `0.0312`; with_sign: `p < 0.0001` or `p = 0.0312`."""
    if p < 1e-4:
        return "p < 0.0001" if with_sign else "< 0.0001"
    return f"p = {p:.4f}" if with_sign else f"{p:.4f}"


def to_json(comparisons: Comparisons) -> str:
    """All comparisons as JSON, with unrounded numbers."""
    value = {
        "comparisons": [_record(comparison) for comparison in comparisons.found],
        "holm_over": len(comparisons.found),
        "level": LEVEL,
        "not_compared": comparisons.left_out,
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _record(comparison: Comparison) -> dict[str, object]:
    test = asdict(comparison.paired)
    accuracies = {"accuracy_first": test.pop("first"), "accuracy_second": test.pop("second")}
    keys = {name: getattr(comparison, name) for name in ("first", "second", "group", "metric", "seeds")}
    record = {**keys, **accuracies, **test, "p_holm": comparison.p_holm, "better": better(comparison)}
    over_seeds = comparison.over_seeds
    return record | (dict(zip(SEED_COLUMNS, astuple(over_seeds), strict=True)) if over_seeds else {})


def _table(rows: Sequence[Comparison]) -> list[str]:
    lines = [COLUMNS, *(_cells(comparison) for comparison in rows)]
    filled = [column for column in range(len(COLUMNS)) if any(line[column] for line in lines[1:])]
    right = [index for index, column in enumerate(filled) if column > COLUMNS.index("B")]
    return table([[line[column] for column in filled] for line in lines], right=right, indent=2)


def _cells(comparison: Comparison) -> tuple[str, ...]:
    """A row of the printed table, in the order of COLUMNS."""
    test, digits = comparison.paired, interval_decimals(comparison.paired.difference, comparison.unit)
    difference = f"{test.difference:+.{2 if comparison.unit == '%' else digits}f}{suffix(comparison.unit)}"
    counts = ["" if count is None else str(count) for count in (test.first_only, test.second_only)]
    return (
        comparison.metric,
        comparison.first,
        comparison.second,
        number_text(test.first, comparison.unit),
        number_text(test.second, comparison.unit),
        f"{difference} {interval_text(test.low, test.high, digits)}",
        *counts,
        p_text(test.p),
        p_text(comparison.p_holm),
        "" if test.effect is None else f"{test.effect:+.2f}",
        {"first": "A", "second": "B", "": ""}[better(comparison)],
    )


ALL = "all"  # instead of a metric's name: every metric


def compare(
    out: Path, names: Sequence[str], data: str | None = None, protocol: str | None = None, metric: str | None = None
) -> Comparisons:
    """Compare every pair of the named checkpoints. ValueError, with the choices, for an unknown name.

    data: name of an image set; None: all. protocol: a protocol, or a task such as knn; None: all. metric: its name, or
    ALL; None: the main metric of each protocol.
    """
    results, left_out = comparable_results(out)
    by_label = results_by_label(results)
    labels = [label_of(name, by_label, out) for name in names]
    if duplicates := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{duplicates[0]} is given twice; name different checkpoints")
    options = {"data": data, "protocol": protocol, "metric": None if metric == ALL else metric}
    selected = {label: [stored for stored in by_label[label] if _selects(options, stored.result)] for label in labels}
    if not any(selected.values()):
        _refuse(options, [stored.result for label in labels for stored in by_label[label]])
    cache = paired_tests(out)
    comparisons: list[Comparison] = []
    for first, second in combinations(labels, 2):
        matches, reasons = match_results(selected[first], selected[second], (first, second))
        for match in matches:
            comparisons_of_match, reasons_of_match = compare_match(match, (first, second), metric, cache)
            comparisons += comparisons_of_match
            reasons += reasons_of_match
        left_out += [f"{first} and {second}: {reason}" for reason in reasons]
    cache.save({stored.identity for stored in results})
    corrected = holm([comparison.paired.p for comparison in comparisons])
    corrected_over_seeds = iter(holm([test.p for comparison in comparisons if (test := comparison.over_seeds)]))
    comparisons = [
        replace(comparison, over_seeds=replace(test, p=next(corrected_over_seeds)))
        if (test := comparison.over_seeds)
        else comparison
        for comparison in comparisons
    ]
    return Comparisons(
        results=tuple(stored.result for label in labels for stored in selected[label]),
        found=tuple(replace(comparison, p_holm=p) for comparison, p in zip(comparisons, corrected, strict=True)),
        left_out=tuple(left_out),
    )


def compare_match(
    match: Match, labels: tuple[str, str], metric: str | None, cache: PairedTestCache
) -> tuple[list[Comparison], list[str]]:
    """Uncorrected comparisons of two checkpoints' results, and the reasons why metrics could not be compared.

    metric: its name, or ALL; None: the first metric that both have and that can be tested.
    """
    try:
        match = match.with_common_seeds()
    except ValueError as error:
        return [], [f"{match.group}: {error}"]
    first, second = match.first[0].result, match.second[0].result
    shared = [name for name in first.metrics if name in second.metrics and metric in (None, ALL, name)]
    testable = [name for name in shared if first.metrics[name].array and second.metrics[name].array]
    comparisons: list[Comparison] = []
    reasons: list[str] = []
    if (alone := [name for name in shared if name not in testable]) and not (metric is None and testable):
        names = alone if len(alone) < 5 else [*alone[:3], f"{len(alone) - 3} more metrics"]
        reasons.append(f"{match.group}: kept as numbers alone, not for each image: {', '.join(names)}")
    for name in testable:
        try:
            test = cache.get(match, name)
        except ValueError as error:
            reasons.append(f"{match.group}: {error}")
            continue
        comparisons.append(
            Comparison(
                first=labels[0],
                second=labels[1],
                group=match.group,
                metric=name,
                unit=first.metrics[name].unit,
                higher_is_better=first.metrics[name].higher_is_better,
                seeds=tuple(stored.result.seed for stored in match.first),
                paired=test,
                p_holm=test.p,
                over_seeds=_seed_test(match, name),
                sizes=sizes_note(dict(zip(labels, (first, second), strict=True))),
            )
        )
        if metric is None:
            break
    return comparisons, reasons


def _seed_test(match: Match, metric: str) -> SeedTest | None:
    """The uncorrected test over seeds; None for fewer than three, or if they differ by rounding alone."""
    first, second = (np.array([stored.result.metrics[metric].value for stored in side]) for side in match.sides)
    differences = first - second
    rounding = 1e-6 * max(np.abs(first).max(), np.abs(second).max())  # of float32: seeds may draw nothing
    if len(differences) < FEWEST_SEEDS or np.ptp(differences) <= rounding:
        return None
    (low, high), p = paired_t(differences)
    return SeedTest(low=float(low), high=float(high), p=p)


def _selects(options: Mapping[str, str | None], result: Result) -> bool:
    """Whether --data, --protocol and --metric select a result; None selects all."""
    names = {"data": [result.data.name], "protocol": [result.protocol.name, result.task], "metric": [*result.metrics]}
    return all(value is None or value in names[argument] for argument, value in options.items())


def _refuse(options: Mapping[str, str | None], results: Sequence[Result]) -> None:
    """ValueError for the first option that selects no result, or for the first two that select none together."""
    choices = {
        "data": {result.data.name for result in results},
        "protocol": {result.protocol.name for result in results},
        "metric": {metric for result in results for metric in result.metrics},
    }
    for argument, names in choices.items():
        if (value := options[argument]) and not any(_selects({argument: value}, result) for result in results):
            text = f"these checkpoints have no such result{did_you_mean(value, sorted(names))}"
            raise UserError(argument, text, value)
    chosen = [argument for argument in choices if options[argument] is not None]
    for together in [*combinations(chosen, 2), tuple(chosen)]:
        values = {argument: options[argument] for argument in together}
        if not any(_selects(values, result) for result in results):
            *others, last = together
            others_text = " and ".join(option(argument, values[argument]) for argument in others)
            text = f"no result of these checkpoints has it together with {others_text}; omit one"
            raise UserError(last, text, values[last])
