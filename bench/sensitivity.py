"""`bench sensitivity`: how much a protocol's number changes when its settings are changed one at a time.

A variation is a tuple of changes NAME=VALUE, such as `("crop=1.0",)` or `("image_size=1.5x", "positions=bilinear")`;
the empty tuple is the protocol itself. A change concerns the task, the run (RUN_SETTINGS) or the network
(NETWORK_CHANGES). Variations with the same run and network are jobs of one run, so that features are extracted once per
transform. Every variation is compared with the protocol on the same images (bench/statistics/paired.py).

In shapes, N is the number of images and R that of resamples.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bench.checkpoints import LoadedCheckpoint, load_checkpoint, load_export, save_export
from bench.evaluation import evaluate
from bench.names import with_names
from bench.options import EvaluationOptions
from bench.results.record import MetricRecord, Result, images_seen, number_text, read_result, short
from bench.results.store import StoredResult
from bench.run.prepare import workspace_of
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from bench.statistics.compare import interval_text
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import array_of
from bench.statistics.paired import PairedTest, compare_images, compare_resamples
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.spec import PositionRule
from engine.errors import UserError
from engine.printing import in_csv, markdown_table
from engine.settings import NonNegativeInt, from_text
from engine.tasks import settings_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Settings of a run -> their types.
RUN_SETTINGS = {"precision": Literal["float32", "bfloat16"], "decode": Literal["exact", "fast"], "seed": NonNegativeInt}
NETWORK_CHANGES = ("statistics", "image_size", "positions")

Variation = tuple[str, ...]  # changes NAME=VALUE
UNCHANGED: Variation = ()
VariedResults = dict[Variation, dict[str, StoredResult]]  # variation -> name of the original checkpoint -> result
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
    lines = [title, "", *markdown_table(table_rows(effects)), "", *(f"left out: {line}" for line in left_out)]
    return "\n".join(lines) + "\n"


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


def evaluate_variations(options: EvaluationOptions, variations: Iterable[Variation]) -> tuple[VariedResults, list[str]]:
    """Evaluate checkpoints under every variation of the one protocol of the options.

    Results that exist in the folder of the options are not computed again.

    Returns:
        The results; and a line for each evaluation that failed.

    Raises:
        ValueError: if the options are invalid.
    """
    protocol = protocol_of(options)
    checkpoints = _load_checkpoints(options)
    by_run: dict[Variation, list[Variation]] = {}  # changes of run and network -> variations that contain just these
    for variation in dict.fromkeys(variations):
        run_changes = tuple(sorted(change for change in variation if not is_task_setting(change, protocol)))
        by_run.setdefault(run_changes, []).append(variation)
    results: VariedResults = {}
    problems: list[str] = []
    for run_changes, run_variations in by_run.items():
        values = dict(change.split("=", 1) for change in run_changes)
        networks = {}  # name of the varied network -> its reference, and the name of the original checkpoint
        for checkpoint in checkpoints:
            name = _varied_name(checkpoint.used.name, values)
            try:
                reference = _varied_network(checkpoint.reference, name, values, options.out)
                networks[name] = (reference, checkpoint.used.name)
            except ValueError as error:
                problems.append(f"{' '.join(run_changes)}, {checkpoint.used.name}: {error}")
        if not networks:
            continue
        run_options = replace(
            options,
            checkpoint=tuple(reference for reference, _ in networks.values()),
            name=tuple(networks),
            statistics=None,  # an option of imports; the checkpoints are imported already
            **_run_settings(values),
        )
        task_changes = {variation: task_changes_in(variation, protocol) for variation in run_variations}
        tally = evaluate(run_options, show=False, variations=tuple(dict.fromkeys(task_changes.values())))
        problems += tally.failed
        settings = {
            variation: settings_of(changed_protocol(run_options, changes).task)
            for variation, changes in task_changes.items()
        }
        for job in tally.jobs:
            if job.path.exists() and (result := read_result(job.path)).status == "ok":
                original_name = networks[result.checkpoint.name][1]
                for variation in run_variations:
                    if settings[variation] == job.settings:
                        results.setdefault(variation, {})[original_name] = StoredResult(path=job.path, result=result)
    return results, problems


def _load_checkpoints(options: EvaluationOptions) -> list[LoadedCheckpoint]:
    """The checkpoints of the options, imported if necessary. ValueError for a wrong number of names, or equal names."""
    imports = ImportOptions(statistics=options.statistics)
    checkpoints = [
        load_checkpoint(reference, name, options.out, save=True, options=imports)[0]
        for reference, name in with_names(options.checkpoint, options.name)
    ]
    used_names = [checkpoint.used.name for checkpoint in checkpoints]
    if len(set(used_names)) < len(used_names):
        duplicate = max(used_names, key=used_names.count)
        raise UserError("name", f"two checkpoints are called {duplicate}; give each its own name")
    return checkpoints


def protocol_of(options: EvaluationOptions) -> ChosenProtocol:
    """The protocol of the options, with their changes. ValueError if the options name several."""
    protocols = protocols_in(options.suite)
    if len(protocols) != 1:
        raise ValueError(f"{options.suite}: name a single protocol, such as {protocols[0].name}")
    return changed_protocol(options, ())


@cache
def protocols_in(suite: str) -> list[ChosenProtocol]:
    """The protocols that a value of `--suite` selects. ValueError for an unknown name."""
    return choose_protocols(suite, catalogue(suite=suite))


def changed_protocol(options: EvaluationOptions, changes: Sequence[str]) -> ChosenProtocol:
    """The one protocol of the options with further changes PROTOCOL.NAME=VALUE. ValueError for an invalid change."""
    (protocol,) = changed_protocols(protocols_in(options.suite), (*options.set, *changes), options.select)
    return protocol


def setting_names(variation: Variation) -> list[str]:
    """The names of the settings that a variation changes."""
    return [change.partition("=")[0] for change in variation]


def is_task_setting(change: str, protocol: ChosenProtocol) -> bool:
    """Whether NAME=VALUE changes a setting of the task. True for unknown names, which `--set` then refuses."""
    name = change.partition("=")[0]
    return hasattr(protocol.task, name) or name not in (*RUN_SETTINGS, *NETWORK_CHANGES)


def task_changes_in(variation: Variation, protocol: ChosenProtocol) -> Variation:
    """The changes of a variation that concern the task, as values of `--set`: `("knn@dino.crop=1.0",)`."""
    return tuple(f"{protocol.name}.{change}" for change in variation if is_task_setting(change, protocol))


def _run_settings(values: Mapping[str, str]) -> dict[str, Any]:
    """The parsed values of the RUN_SETTINGS among `values`. ValueError for an invalid one."""
    try:
        return {name: from_text(text, RUN_SETTINGS[name]) for name, text in values.items() if name in RUN_SETTINGS}
    except ValueError as error:
        raise ValueError(f"{', '.join(RUN_SETTINGS)}: {error}") from error


def _varied_name(name: str, values: Mapping[str, str]) -> str:
    """`dino+image_size-1.5x` for a changed network; for an unchanged one its own name."""
    changes = [f"{change}-{Path(value).name}" for change, value in values.items() if change in NETWORK_CHANGES]
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", "+".join([name, *changes]))


def _varied_network(reference: str, name: str, values: Mapping[str, str], out: Path) -> str:
    """A reference to the network with the NETWORK_CHANGES among `values`; a changed network is saved in `out`/exports.

    ValueError if the network cannot have them.
    """
    if not values.keys() & {*NETWORK_CHANGES}:
        return reference
    export = load_export(reference)[1]
    spec, preparation = export.spec, export.preparation
    if statistics := values.get("statistics"):
        requested = ImportOptions(statistics=statistics).preparation
        preparation = replace(preparation, mean=requested.mean, std=requested.std)
    if positions := values.get("positions"):
        spec = replace(spec, position_resize=from_text(positions, PositionRule))
    export = ViTExport.make(spec, preparation, export.tensors, export.extra, export.facts)
    if size := values.get("image_size"):
        own_size = spec.image_size if isinstance(spec.image_size, int) else min(spec.image_size)
        pixels = float(size[:-1]) * own_size if size.endswith("x") else float(size)
        export = export.at_size(round(pixels / spec.patch_size) * spec.patch_size)
    return str(save_export(export, name, out))


class Score(NamedTuple):
    """The main metric of a result."""

    value: float  # in the metric's unit
    values: np.ndarray  # on images (N,) or resamples (R,)


def main_metric(result: Result) -> tuple[str, MetricRecord]:
    """Name and record of a result's first metric. ValueError if it has no values on images or resamples."""
    name, metric = next(iter(result.metrics.items()))
    if not metric.array:
        raise ValueError(f"{result.protocol.name}: {name} was stored without values for each image")
    return name, metric


def score_of(stored: StoredResult) -> Score:
    """The score of a result. ValueError if it has no values on images or resamples."""
    name, metric = main_metric(stored.result)
    return Score(metric.value, array_of(stored, name).astype(np.float64))


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of scores on the same images."""
    return Score(
        float(np.mean([score.value for score in scores])),
        np.mean([score.values for score in scores], axis=0),
    )


def paired_test(after: Score, before: Score, result: Result) -> PairedTest:
    """The paired test of `after` - `before` on the same images. result: any of theirs, for metric and image count."""
    metric = main_metric(result)[1]
    if metric.array_over == "resamples":
        images = images_seen(result.data, result.limit)
        return compare_resamples((after.value, before.value), [after.values, before.values], images)
    is_valid = ~np.isnan(after.values + before.values)  # NaN: an image that was skipped
    values_after, values_before = after.values[is_valid], before.values[is_valid]
    if metric.unit == "%":
        return compare_images(values_after, values_before, scale=100.0)
    largest = float(max(np.abs(values_after).max(), np.abs(values_before).max())) or 1.0
    return compare_images(values_after / largest, values_before / largest, scale=largest)


def difference_text(test: PairedTest) -> str:
    """The difference with its 95 % interval: `+1.25 [0.4, 2.1]`."""
    return f"{test.difference:+.2f} {interval_text(test.low, test.high)}"


def sensitivity_figure(title: str, effects: Sequence[Effect]) -> "Figure":
    """A row for each variation: the changes of all networks, and their mean with its interval.

    title: of `sensitivity`; its part before the colon is shown.
    """
    from matplotlib.figure import Figure

    from bench.reports.drawing import INK, styles_of

    styles = styles_of(sorted({name for effect in effects for name in effect.tests}))
    figure = Figure(figsize=(8, 0.32 * len(effects) + 1.6), layout="constrained", dpi=72)
    axes = figure.add_subplot()
    for y, effect in enumerate(effects):
        axes.plot(
            [effect.mean.low, effect.mean.high], [y, y], color=INK, linewidth=5, alpha=0.25, solid_capstyle="butt"
        )
        axes.plot(effect.mean.difference, y, "|", color=INK, markersize=12)
    for name, style in styles.items():
        points = [(effect.tests[name].difference, y) for y, effect in enumerate(effects) if name in effect.tests]
        axes.plot(*zip(*points, strict=True), **{**style, "linestyle": ""}, markersize=5, alpha=0.8, label=name)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(effects)), [effect.label for effect in effects], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("change, points of a percentage or the metric's unit", fontsize=8)
    axes.set_title(title.partition(":")[0], fontsize=9, parse_math=False)
    axes.grid(axis="x", alpha=0.2)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
