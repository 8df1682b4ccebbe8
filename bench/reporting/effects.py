"""The effect of settings on a number: `bench sensitivity` varies the settings of a protocol one at a time, `bench
explain` attributes the difference between two results to the settings in which they differ.

A variation is a text such as `crop=1.0` or `image_size=1.5x positions=bilinear`. It changes settings of the task, of
the run (RUN) or of the network (NETWORK). Variations with the same run and network are jobs of one run, so that
features are extracted once per transform. A variation is compared with the protocol on the same images
(bench/statistics/paired.py).

`bench explain` assigns each difference its Shapley value: the change of the number when this setting is changed,
averaged over the orders in which the settings of A can be turned into those of B. All orders are used for up to
EVERY_ORDER differences, otherwise one order and its reverse. The values add up to the whole difference; as averages of
differences on the same images they have paired intervals. N images, R resamples.
"""

import csv
import io
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bench.cli.options import EvaluationOptions
from bench.cli.output import table
from bench.reporting.figures import INK, styles_of
from bench.results.record import (
    MetricRecord,
    Result,
    check_folder,
    images_seen,
    number_text,
    read_result,
    short,
    suffix,
)
from bench.results.store import StoredResult, read_results
from bench.run.checkpoints import export_folder, load_checkpoint, load_export, save_once
from bench.run.prepare import workspace_of
from bench.run.runner import run_jobs
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from bench.statistics.compare import interval_text
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import array_of
from bench.statistics.paired import PairedTest, compare_images, compare_resamples
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.spec import PositionRule
from engine.printing import did_you_mean, in_csv
from engine.settings import NonNegativeInt, from_text
from engine.tasks import settings_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Settings of a run -> their types.
RUN = {"precision": Literal["float32", "bfloat16"], "decode": Literal["exact", "fast"], "seed": NonNegativeInt}
NETWORK = ("statistics", "image_size", "positions", "checkpoint")  # change the export; checkpoint replaces it
# Variations tried for every task. 1.5x: relative to the network's own size, rounded to whole patches.
FOR_ANY_TASK = ("statistics=half", "image_size=1.5x", "image_size=1.5x positions=bilinear", "precision=bfloat16")
EVERY_ORDER = 4  # up to so many differences all orders are measured: 16 runs
Variation = tuple[str, ...]  # NAME=VALUE
PLAIN: Variation = ()


def measure(
    options: EvaluationOptions, variations: Iterable[Variation]
) -> tuple[dict[Variation, dict[str, StoredResult]], list[str]]:
    """Evaluate checkpoints under every variation of the one protocol of the options.

    Results that exist in the folder of the options are not computed again.

    Returns:
        Variation -> name of checkpoint -> result; and a line for each variation that failed.

    Raises:
        ValueError: if the options are invalid.
    """
    chosen, requested_names = protocol_of(options), options.name or (None,) * len(options.checkpoint)
    pairs = zip(options.checkpoint, requested_names, strict=True)
    imports = ImportOptions(statistics=options.statistics)
    loaded = [load_checkpoint(*pair, options.out, save=True, options=imports)[0] for pair in pairs]
    names = [checkpoint.used.name for checkpoint in loaded]
    if len(set(names)) < len(names):
        raise ValueError(f"--name: two checkpoints are called {max(names, key=names.count)}; give each its own name")
    by_run: dict[Variation, list[Variation]] = {}  # changes of run and network -> variations
    for variation in dict.fromkeys(variations):
        run_changes = tuple(sorted(change for change in variation if not _is_task_setting(change, chosen)))
        by_run.setdefault(run_changes, []).append(variation)
    results: dict[Variation, dict[str, StoredResult]] = {}
    problems: list[str] = []
    for run_changes, run_variations in by_run.items():
        values = dict(change.split("=", 1) for change in run_changes)
        networks = {}  # name of the changed network -> its reference, and the name of the original
        for checkpoint in loaded:
            name = _varied_name(checkpoint.used.name, values)
            try:
                reference = _varied_network(checkpoint.reference, name, values, options.out)
                networks[name] = (reference, checkpoint.used.name)
            except ValueError as error:
                problems.append(f"{' '.join(run_changes)}, {checkpoint.used.name}: {error}")
        if not networks:
            continue
        tasks = {variation: _task_changes(variation, chosen) for variation in run_variations}
        varied = replace(
            options,
            checkpoint=tuple(reference for reference, _ in networks.values()),
            name=tuple(networks),
            statistics=None,
            **_run_options(values),
        )
        tally = run_jobs(varied, show=False, variations=tuple(dict.fromkeys(tasks.values())))
        problems += tally.failed
        settings = {variation: settings_of(_changed(varied, changes).task) for variation, changes in tasks.items()}
        for job in tally.jobs:
            if job.path.exists() and (result := read_result(job.path)).status == "ok":
                own_name = networks[result.checkpoint.name][1]
                for variation in run_variations:
                    if settings[variation] == job.settings:
                        results.setdefault(variation, {})[own_name] = StoredResult(path=job.path, result=result)
    return results, problems


def protocol_of(options: EvaluationOptions) -> ChosenProtocol:
    """The protocol of the options, with their changes. ValueError if the options name several."""
    protocols = _protocols(options.suite)
    if len(protocols) != 1:
        raise ValueError(f"{options.suite}: name a single protocol, such as {protocols[0].name}")
    return _changed(options, ())


@cache
def _protocols(suite: str) -> list[ChosenProtocol]:
    return choose_protocols(suite, catalogue(suite=suite))


def _changed(options: EvaluationOptions, changes: Variation) -> ChosenProtocol:
    (chosen,) = changed_protocols(_protocols(options.suite), (*options.set, *changes), options.select)
    return chosen


def _run_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The options that belong to a run (RUN), with their values parsed."""
    try:
        return {name: from_text(text, RUN[name]) for name, text in options.items() if name in RUN}
    except ValueError as error:
        raise ValueError(f"{', '.join(RUN)}: {error}") from error


def _is_task_setting(change: str, chosen: ChosenProtocol) -> bool:
    name = change.partition("=")[0]
    return hasattr(chosen.task, name) or name not in (*RUN, *NETWORK)


def _task_changes(variation: Variation, chosen: ChosenProtocol) -> Variation:
    return tuple(f"{chosen.name}.{change}" for change in variation if _is_task_setting(change, chosen))


def _varied_name(name: str, options: Mapping[str, str]) -> str:
    """`dino+image_size-1.5x` for a changed network; otherwise its own name."""
    changes = [f"{change}-{Path(value).name}" for change, value in options.items() if change in NETWORK]
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", "+".join([name, *changes]))


def _varied_network(reference: str, name: str, options: Mapping[str, str], out: Path) -> str:
    """Reference of the network with other statistics, positions or image size, which is saved as an export in `out`.

    ValueError if the network cannot have them.
    """
    reference = options.get("checkpoint", reference)
    if not options.keys() & {"statistics", "positions", "image_size"}:
        return reference
    export = load_export(reference)[1]
    spec, preparation = export.spec, export.preparation
    if statistics := options.get("statistics"):
        requested = ImportOptions(statistics=statistics).preparation
        preparation = replace(preparation, mean=requested.mean, std=requested.std)
    if positions := options.get("positions"):
        spec = replace(spec, position_resize=from_text(positions, PositionRule))
    export = ViTExport.make(spec, preparation, export.tensors, export.extra, export.facts)
    if size := options.get("image_size"):
        own = spec.image_size if isinstance(spec.image_size, int) else min(spec.image_size)
        side = float(size[:-1]) * own if size.endswith("x") else float(size)
        export = export.at_size(round(side / spec.patch_size) * spec.patch_size)
    folder = export_folder(out, name, export)
    if not folder.exists():
        save_once(export, folder)
    return str(folder)


Measured = tuple[float, np.ndarray]  # a number in its unit, and its values on images (N,) or resamples (R,)


def main_metric(result: Result) -> tuple[str, MetricRecord]:
    """Name and record of a result's first metric. ValueError if it has no values on images or resamples."""
    name, metric = next(iter(result.metrics.items()))
    if not metric.array:
        raise ValueError(f"{result.protocol.name}: {name} was stored without values for each image")
    return name, metric


def main_number(stored: StoredResult) -> Measured:
    """The main metric of a result, with its values."""
    name, metric = main_metric(stored.result)
    return metric.value, array_of(stored, name).astype(np.float64)


def mean(numbers: Sequence[Measured]) -> Measured:
    """The mean of numbers that were measured on the same images."""
    return float(np.mean([value for value, _ in numbers])), np.mean([values for _, values in numbers], axis=0)


def paired(after: Measured, before: Measured, result: Result) -> PairedTest:
    """The paired test of `after` - `before` on the same images. result: any of theirs, for metric and image count."""
    metric = main_metric(result)[1]
    if metric.array_over == "resamples":
        return compare_resamples((after[0], before[0]), [after[1], before[1]], images_seen(result.data, result.limit))
    is_valid = ~np.isnan(after[1] + before[1])
    sides = after[1][is_valid], before[1][is_valid]
    scale = 100.0 if metric.unit == "%" else float(max(np.abs(side).max() for side in sides)) or 1.0
    unit = 1.0 if metric.unit == "%" else scale
    return compare_images(sides[0] / unit, sides[1] / unit, scale=scale)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one variation on the numbers of all networks."""

    variation: Variation
    own: str  # the protocol's values of the varied settings
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
        texts: variations; empty for those of the task and FOR_ANY_TASK.

    Returns:
        A line with the protocol's own numbers; the effects, the largest first and the combined one last; and a line for
        each variation that is left out.

    Raises:
        ValueError: if a variation of `texts` is invalid, or the protocol itself has no result.
    """
    chosen, left_out = protocol_of(options), []
    variations: dict[Variation, str] = {}
    for text in texts or (*chosen.task.VARIATIONS, *FOR_ANY_TASK):
        variation = tuple(text.split())
        try:
            varied = _changed(options, _task_changes(variation, chosen)).task
        except ValueError as error:
            if texts:
                raise
            left_out.append(f"{text}: {error}")
            continue
        if varied != chosen.task or not all(_is_task_setting(change, chosen) for change in variation):
            variations[variation] = ", ".join(_own_value(name, chosen, options) for name in _names(variation))
    results, problems = measure(options, [PLAIN, *variations])
    if PLAIN not in results:
        raise ValueError(f"{chosen.name}: {problems[0] if problems else 'no result of the protocol itself'}")
    plain = results[PLAIN]
    effects = [_effect(name, own, plain, results[name]) for name, own in variations.items() if name in results]
    effects.sort(key=lambda effect: -effect.size)
    pairs = (
        pair for pair in combinations(effects, 2) if not set.intersection(*(set(_names(e.variation)) for e in pair))
    )
    if pair := next(pairs, None):
        both = tuple(change for effect in pair for change in effect.variation)
        combined, failures = measure(options, [both])
        problems += failures
        effects += [_effect(both, ", ".join(effect.own for effect in pair), plain, combined[both])] if combined else []
    first = next(iter(plain.values())).result
    images, metric = images_seen(first.data, first.limit), main_metric(first)
    numbers = ", ".join(
        f"{name} {number_text(main_number(stored)[0], metric[1].unit)}" for name, stored in plain.items()
    )
    title = f"{first.group} {metric[0]}, {images} images: {numbers}"
    return title, effects, [*left_out, *dict.fromkeys(problems)]


def _names(variation: Variation) -> list[str]:
    return [change.partition("=")[0] for change in variation]


def _own_value(name: str, chosen: ChosenProtocol, options: EvaluationOptions) -> str:
    if name in RUN:
        return str(getattr(workspace_of(options), name))
    if name in NETWORK:
        return "the network's own"
    value = settings_of(chosen.task, complete=True)[name]
    return f"{len(value)} values" if isinstance(value, list) and len(value) > 5 else short(value)


def _effect(
    variation: Variation, own: str, plain: Mapping[str, StoredResult], varied: Mapping[str, StoredResult]
) -> Effect:
    """The effect of a variation, from the results of each network with the protocol (plain) and the variation."""
    numbers = {name: (main_number(varied[name]), main_number(plain[name])) for name in plain if name in varied}
    result = plain[next(iter(numbers))].result
    pairs, swaps = list(combinations(numbers, 2)), []  # swaps: whether each is significant
    for first, second in pairs:
        after, before = (paired(numbers[first][side], numbers[second][side], result) for side in (0, 1))
        if after.difference * before.difference < 0:
            swaps.append(max(after.p, before.p) < LEVEL)
    sides = [mean([number[side] for number in numbers.values()]) for side in (0, 1)]
    return Effect(
        variation=variation,
        own=own,
        tests={name: paired(*number, result) for name, number in numbers.items()},
        mean=paired(sides[0], sides[1], result),
        swapped=len(swaps),
        significant=sum(swaps),
        pairs=len(pairs),
    )


HEADS = ("setting", "protocol", "mean change [95 %]", "least", "most", "mean distance", "pairs that swap (p < 0.05)")


def table_rows(effects: Sequence[Effect]) -> list[tuple[str, ...]]:
    """A header and a row for each variation. A single network has no spread and no order, so only its change."""
    if not any(effect.pairs for effect in effects):
        alone = [(effect.label, effect.own, with_interval(effect.mean)) for effect in effects]
        return [("setting", "protocol", "change [95 %]"), *alone]
    rows: list[tuple[str, ...]] = [HEADS]
    for effect in effects:
        changes = [test.difference for test in effect.tests.values()]
        numbers = (f"{number:+.2f}" for number in (min(changes), max(changes)))
        swaps = f"{effect.swapped} of {effect.pairs} ({effect.significant})"
        rows.append((effect.label, effect.own, with_interval(effect.mean), *numbers, f"{effect.size:.2f}", swaps))
    return rows


def with_interval(test: PairedTest) -> str:
    """`+1.25 [0.4, 2.1]`"""
    return f"{test.difference:+.2f} {interval_text(test.low, test.high)}"


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
            numbers = (test.second, test.first, test.difference, test.low, test.high, test.p)
            writer.writerow([in_csv(text) for text in (effect.label, effect.own, name)] + list(numbers))
    return buffer.getvalue()


def figure(title: str, effects: Sequence[Effect]) -> "Figure":
    """A row for each variation: the changes of all networks, and their mean with its interval."""
    from matplotlib.figure import Figure

    styles = styles_of(sorted({name for effect in effects for name in effect.tests}))
    drawn = Figure(figsize=(8, 0.32 * len(effects) + 1.6), layout="constrained", dpi=72)
    axes = drawn.add_subplot()
    for y, effect in enumerate(effects):
        ends = [effect.mean.low, effect.mean.high]
        axes.plot(ends, [y, y], color=INK, linewidth=5, alpha=0.25, solid_capstyle="butt")
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
    drawn.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return drawn


def find_result(word: str, out: Path | None, checkpoint: str | None = None) -> StoredResult:
    """Find a result by its file, or in a folder by its group, protocol, variant or file stem.

    checkpoint: only results of this one. ValueError, with suggestions, if there is no such result or there are several.
    """
    if word.endswith(".json") and Path(word).is_file():
        return StoredResult(path=Path(word), result=read_result(Path(word)))
    if not out:
        raise ValueError(f"{word}: no such result file; give one, or --out DIR and the name of a result in it")
    check_folder(out)
    matches, groups, checkpoints = [], set(), set()
    for stored in read_results(out)[0]:
        used = stored.result.checkpoint
        checkpoints |= {used.name, used.unique_name}
        if checkpoint not in (None, used.name, used.unique_name):
            continue
        group = stored.result.group
        groups.add(group)
        names = (group, group.partition("/")[2], " ".join(stored.result.variant), stored.path.stem)
        if word in names and stored.result.status == "ok":
            matches.append(stored)
    if len(matches) == 1:
        return matches[0]
    if matches:
        paths = " ".join(str(stored.path) for stored in matches)
        raise ValueError(f"{word!r} is the name of {len(matches)} results: give --name NAME, or one of {paths}")
    if word in checkpoints:
        raise ValueError(
            f"{word!r} is a checkpoint: name two of its results and --name {word}; bench compare compares checkpoints"
        )
    raise ValueError(f"{out} has no result {word!r}{did_you_mean(word, sorted(groups))}")


def differences(first: Result, second: Result) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """The differences between two results, name -> (value of first, value of second).

    Returns the settings, whose effect `explain` can measure, and other facts, such as library versions.
    ValueError for results of different tasks.
    """
    if first.task != second.task:
        raise ValueError(f"{first.task} and {second.task} are different tasks; `explain` takes two results of one task")
    sides = [{**_all_settings(result), **{name: getattr(result, name) for name in RUN}} for result in (first, second)]
    changed = {name: (sides[0][name], sides[1].get(name)) for name in sides[0] if sides[0][name] != sides[1].get(name)}
    if first.checkpoint.digest != second.checkpoint.digest:
        changed["checkpoint"] = (first.checkpoint.unique_name, second.checkpoint.unique_name)
    if not (first.random or second.random):
        changed.pop("seed", None)
    facts = [_other_facts(result) for result in (first, second)]
    if first.protocol.name != second.protocol.name:
        facts = [{name: fact for name, fact in side.items() if name != "protocol version"} for side in facts]
    others = {name: (fact, facts[1].get(name)) for name, fact in facts[0].items() if fact != facts[1].get(name)}
    return changed, others


def _other_facts(result: Result) -> dict[str, Any]:
    """Facts, other than settings that a run can change, on which a number may depend."""
    facts: dict[str, Any] = {f"{split} images": digest[:8] for split, digest in result.data.fingerprints.items()}
    facts |= {name: getattr(result, name) for name in ("limit", "skipped", "device", "compiled")}
    facts |= {f"version of {name}": version for name, version in result.versions.items()}
    return facts | {"protocol version": result.protocol.version}


def _all_settings(result: Result) -> dict[str, Any]:
    """All settings of a result; settings that the task gained later have their defaults."""
    task = _protocols(result.protocol.name)[0].task
    defaults = {entry.name: entry.default for entry in fields(task) if entry.default is not MISSING}
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return as_json | dict(result.settings)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one setting in the difference between two results."""

    name: str
    values: tuple[Any, Any]  # of A and of B
    share: PairedTest  # the Shapley value
    alone: float  # change of the number if A gets this setting only
    last: float  # change of the number if all other settings are B's already


def explain(
    options: EvaluationOptions, changed: Mapping[str, tuple[Any, Any]], references: Sequence[str] = ()
) -> tuple[list[Share], PairedTest]:
    """Measure the share of each changed setting in the difference B - A.

    Args:
        options: the evaluation of A (`options_matching`).
        changed: setting -> values of A and B, from `differences`.
        references: of the networks of A and B, if these differ.

    Returns:
        The shares, the largest first, and the whole difference as measured.

    Raises:
        ValueError: if a run fails.
    """
    texts = _setting_texts(changed)
    if "checkpoint" in texts:
        if len(references) != 2:
            raise ValueError("the two results are of different weights: give --checkpoint A B")
        texts["checkpoint"] = f"checkpoint={references[1]}"
    names = sorted(changed)
    orders = list(permutations(names)) if len(names) <= EVERY_ORDER else [tuple(names), tuple(reversed(names))]
    subsets = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    subsets |= {frozenset({name}) for name in names} | {frozenset(names) - {name} for name in names}
    variations = {subset: tuple(sorted(texts[name] for name in subset)) for subset in sorted(subsets, key=sorted)}
    results, problems = measure(options, variations.values())
    if missing := [variation for variation in variations.values() if variation not in results]:
        problem = problems[0] if problems else "it has no result"
        raise ValueError(f"{' '.join(missing[0]) or 'the settings of A'}: {problem}")
    stored = {subset: next(iter(results[variation].values())) for subset, variation in variations.items()}
    numbers = {subset: main_number(result) for subset, result in stored.items()}
    nothing, everything = frozenset[str](), frozenset(names)
    result_of_a, shares = stored[nothing].result, []
    for name in names:
        before = [frozenset(order[: order.index(name)]) for order in orders]
        after = mean([numbers[subset | {name}] for subset in before])
        shares.append(
            Share(
                name=name,
                values=changed[name],
                share=paired(after, mean([numbers[subset] for subset in before]), result_of_a),
                alone=numbers[frozenset({name})][0] - numbers[nothing][0],
                last=numbers[everything][0] - numbers[everything - {name}][0],
            )
        )
    shares.sort(key=lambda share: -abs(share.share.difference))
    return shares, paired(numbers[everything], numbers[nothing], result_of_a)


def _setting_texts(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Setting -> `NAME=VALUE` with the value of B."""
    return {name: f"{name}={_as_text(after)}" for name, (_, after) in changed.items()}


def options_matching(first: Result, options: EvaluationOptions) -> EvaluationOptions:
    """The options with the protocol, settings, seed, precision, decoder and limit of a result."""
    (chosen,) = _protocols(first.protocol.name)
    own = settings_of(chosen.task, complete=True)
    changes = tuple(
        f"{chosen.name}.{name}={_as_text(value)}" for name, value in _all_settings(first).items() if value != own[name]
    )
    run_options: dict[str, Any] = {name: getattr(first, name) for name in (*RUN, "limit")}
    return replace(options, suite=chosen.name, set=changes, name=(first.checkpoint.name,), **run_options)


def _as_text(value: Any) -> str:
    """A JSON value in the syntax of `--set`."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def difference_lines(
    first: Result, second: Result, changed: Mapping[str, tuple[Any, Any]], others: Mapping[str, tuple[Any, Any]]
) -> list[str]:
    """Lines with both numbers and all differences."""
    lines = []
    for letter, result in (("A", first), ("B", second)):
        name, metric = main_metric(result)
        lines.append(f"{letter}: {result.checkpoint.unique_name}, {result.group}, seed {result.seed}: {name} {metric}")
    lines += [f"differs: {name}: {short(one)} -> {short(other)}" for name, (one, other) in changed.items()]
    lines += [
        f"also differs, not measured here: {name}: {short(one)} -> {short(other)}"
        for name, (one, other) in others.items()
    ]
    return lines if changed or others else [*lines, "no difference that a number could depend on"]


def command(first: StoredResult, second: StoredResult, changed: Mapping[str, Any]) -> str:
    """The command that measures the share of each difference."""
    sources = [first.result.checkpoint.source, *([second.result.checkpoint.source] if "checkpoint" in changed else [])]
    data = f"{first.result.data.name}={first.result.data.url}"
    words = ["bench", "explain", str(first.path), str(second.path), "--checkpoint", *sources, "--data", data]
    return shlex.join(words)


def share_lines(first: Result, second: Result, shares: Sequence[Share], whole: PairedTest) -> list[str]:
    """A table of shares in B - A, and the part that is not explained."""
    stored = main_metric(second)[1].value - main_metric(first)[1].value
    ending = suffix(main_metric(first)[1].unit) or " points"
    rows: list[tuple[str, ...]] = [("difference", "A", "B", "explains [95 %]", "alone", "as the last")]
    for share in shares:
        values = (short(value) for value in share.values)
        rows.append((share.name, *values, with_interval(share.share), f"{share.alone:+.2f}", f"{share.last:+.2f}"))
    rows.append(("all", "", "", with_interval(whole), "", ""))
    return [
        *table(rows),
        "",
        f"B - A: {stored:+.2f}{ending} in the results, {whole.difference:+.2f} measured; not explained: "
        f"{round(stored - whole.difference, 2) + 0.0:+.2f}",
    ]
