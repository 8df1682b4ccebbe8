"""`bench sensitivity`: how much a protocol's number changes when its settings are changed one at a time.

Every variation is compared with the protocol on the same images (bench/statistics/paired.py).
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from bench.cli.options import EvaluationOptions
from bench.effects.variations import (
    NETWORK_CHANGES,
    RUN_SETTINGS,
    UNCHANGED,
    Variation,
    changed_protocol,
    difference_text,
    evaluate_variations,
    is_task_setting,
    main_metric,
    mean_score,
    paired_test,
    protocol_of,
    score_of,
    setting_names,
    task_changes_in,
)
from bench.results.record import images_seen, number_text, short
from bench.results.store import StoredResult
from bench.run.prepare import workspace_of
from bench.run.suites import ChosenProtocol
from bench.statistics.intervals import LEVEL
from bench.statistics.paired import PairedTest
from engine.printing import in_csv
from engine.tasks import settings_of

# Variations tried for every task. 1.5x: relative to the network's own size, rounded to whole patches.
FOR_ANY_TASK = ("statistics=half", "image_size=1.5x", "image_size=1.5x positions=bilinear", "precision=bfloat16")
MAX_LISTED_VALUES = 5  # of a setting; of a longer sweep only the number of values is shown


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one variation on the numbers of all networks."""

    variation: Variation
    original: str  # the protocol's values of the varied settings
    tests: Mapping[str, PairedTest]  # name of network -> variation - protocol
    mean: PairedTest  # variation - protocol, of the mean over networks
    swapped: int  # pairs of networks that change their order
    significant: int  # pairs of these whose difference is significant (p < 0.05) before and after
    pairs: int  # all pairs of networks

    @property
    def label(self) -> str:
        return " ".join(self.variation)

    @property
    def size(self) -> float:
        """Mean absolute change over the networks."""
        return float(np.mean([abs(test.difference) for test in self.tests.values()]))


def sensitivity(options: EvaluationOptions, texts: Sequence[str] = ()) -> tuple[str, list[Effect], list[str]]:
    """Measure the effect of every variation, and of the two largest effects of different settings together.

    Args:
        options: the evaluation of the protocol.
        texts: variations, each with spaces between its changes; empty for those of the task and FOR_ANY_TASK.

    Returns:
        A line with the protocol's own numbers; the effects, the largest first and the combined one last; and a line for
        each variation that is left out.

    Raises:
        ValueError: if a variation of `texts` is invalid, or the protocol itself has no result.
    """
    protocol = protocol_of(options)
    variations: dict[Variation, str] = {}  # variation -> the protocol's own values of its settings
    left_out = []
    for text in texts or (*protocol.task.VARIATIONS, *FOR_ANY_TASK):
        variation = tuple(text.split())
        try:
            varied_task = changed_protocol(options, task_changes_in(variation, protocol)).task
        except ValueError as error:
            if texts:
                raise
            left_out.append(f"{text}: {error}")
            continue
        changes_task_only = all(is_task_setting(change, protocol) for change in variation)
        if changes_task_only and varied_task == protocol.task:
            continue  # the protocol has these values already
        variations[variation] = ", ".join(_original_value(name, protocol, options) for name in setting_names(variation))
    results, problems = evaluate_variations(options, [UNCHANGED, *variations])
    if UNCHANGED not in results:
        raise ValueError(f"{protocol.name}: {problems[0] if problems else 'no result of the protocol itself'}")
    unchanged = results[UNCHANGED]
    effects = [
        effect_of(variation, original, unchanged, results[variation])
        for variation, original in variations.items()
        if variation in results
    ]
    effects.sort(key=lambda effect: -effect.size)
    if pair := _largest_pair(effects):
        both = tuple(change for effect in pair for change in effect.variation)
        combined_results, failures = evaluate_variations(options, [both])
        problems += failures
        if combined_results:
            original = ", ".join(effect.original for effect in pair)
            effects.append(effect_of(both, original, unchanged, combined_results[both]))
    first = next(iter(unchanged.values())).result
    name, metric = main_metric(first)
    numbers = ", ".join(
        f"{network} {number_text(score_of(stored).value, metric.unit)}" for network, stored in unchanged.items()
    )
    title = f"{first.group} {name}, {images_seen(first.data, first.limit)} images: {numbers}"
    return title, effects, [*left_out, *dict.fromkeys(problems)]


def _largest_pair(effects: Sequence[Effect]) -> tuple[Effect, Effect] | None:
    """The first two of sorted effects that change different settings; None if there are none."""
    for first, second in combinations(effects, 2):
        if not set(setting_names(first.variation)) & set(setting_names(second.variation)):
            return first, second
    return None


def _original_value(name: str, protocol: ChosenProtocol, options: EvaluationOptions) -> str:
    """The value of a setting before it is varied, as text."""
    if name in RUN_SETTINGS:
        return str(getattr(workspace_of(options), name))
    if name in NETWORK_CHANGES:
        return "the network's own"
    value = settings_of(protocol.task, complete=True)[name]
    is_long = isinstance(value, list) and len(value) > MAX_LISTED_VALUES
    return f"{len(value)} values" if is_long else short(value)


def effect_of(
    variation: Variation, original: str, unchanged: Mapping[str, StoredResult], varied: Mapping[str, StoredResult]
) -> Effect:
    """The effect of a variation. unchanged, varied: name of network -> its result without and with the variation."""
    after = {name: score_of(varied[name]) for name in unchanged if name in varied}
    before = {name: score_of(unchanged[name]) for name in after}
    result = unchanged[next(iter(after))].result
    pairs = list(combinations(after, 2))
    swaps = []  # for each pair that changes its order: whether both differences are significant
    for first, second in pairs:
        test_after = paired_test(after[first], after[second], result)
        test_before = paired_test(before[first], before[second], result)
        if test_after.difference * test_before.difference < 0:
            swaps.append(max(test_after.p, test_before.p) < LEVEL)
    return Effect(
        variation=variation,
        original=original,
        tests={name: paired_test(after[name], before[name], result) for name in after},
        mean=paired_test(mean_score(list(after.values())), mean_score(list(before.values())), result),
        swapped=len(swaps),
        significant=sum(swaps),
        pairs=len(pairs),
    )


HEADS = ("setting", "protocol", "mean change [95 %]", "least", "most", "mean distance", "pairs that swap (p < 0.05)")


def table_rows(effects: Sequence[Effect]) -> list[tuple[str, ...]]:
    """A header and a row for each variation; of a single network only the change, as it has no spread and no order."""
    if not any(effect.pairs for effect in effects):
        changes = [(effect.label, effect.original, difference_text(effect.mean)) for effect in effects]
        return [("setting", "protocol", "change [95 %]"), *changes]
    rows: list[tuple[str, ...]] = [HEADS]
    for effect in effects:
        differences = [test.difference for test in effect.tests.values()]
        rows.append(
            (
                effect.label,
                effect.original,
                difference_text(effect.mean),
                f"{min(differences):+.2f}",
                f"{max(differences):+.2f}",
                f"{effect.size:.2f}",
                f"{effect.swapped} of {effect.pairs} ({effect.significant})",
            )
        )
    return rows


def to_markdown(title: str, effects: Sequence[Effect], left_out: Sequence[str]) -> str:
    """The table as Markdown, below a title."""
    heads, *rows = table_rows(effects)
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([title, "", *lines, "", *(f"left out: {line}" for line in left_out)]) + "\n"


def to_csv(effects: Sequence[Effect]) -> str:
    """CSV with a row for each variation and network; numbers are not rounded."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("setting", "protocol", "checkpoint", "number", "varied", "change", "low", "high", "p"))
    for effect in effects:
        for name, test in effect.tests.items():
            texts = [in_csv(text) for text in (effect.label, effect.original, name)]
            writer.writerow([*texts, test.second, test.first, test.difference, test.low, test.high, test.p])
    return buffer.getvalue()
