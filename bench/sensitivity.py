"""`bench sensitivity`: how much a protocol's number changes when its settings are changed one at a time.

A variation is a tuple of changes NAME=VALUE, such as `("crop=1.0",)` or `("image_size=1.5x", "positions=bilinear")`;
the empty tuple is the protocol itself. A change concerns the task, the run (RUN_SETTINGS) or the network
(NETWORK_CHANGES). Variations with the same run and network are jobs of one run, so that features are extracted once per
transform. Every variation is compared with the protocol on the same images (bench/statistics/matching.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Literal

from bench.checkpoints import load_checkpoint, load_export, save_export
from bench.evaluation import evaluate
from bench.names import with_names
from bench.options import EvaluationOptions
from bench.results.record import images_seen, number_text, read_result, short
from bench.results.store import StoredResult
from bench.run.prepare import workspace_of
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from bench.statistics.compare import interval_text
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import Match, paired_test
from bench.statistics.paired import PairedTest
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.spec import PositionRule
from engine.errors import UserError
from engine.printing import csv_text, in_csv
from engine.settings import NonNegativeInt, from_text
from engine.tasks import settings_of

# Settings of a run -> their types.
RUN_SETTINGS = {
    "precision": Literal["float32", "bfloat16"],
    "decode": Literal["exact", "fast"],
    "seed": tuple[NonNegativeInt, ...],
}
NETWORK_CHANGES = ("statistics", "image_size", "positions")

Variation = tuple[str, ...]  # changes NAME=VALUE
UNCHANGED: Variation = ()
ResultsByNetwork = dict[str, StoredResult]  # name of a network before it is varied -> its result
# Variations tried for every task. 1.5x: relative to the network's own size, rounded to whole patches.
FOR_ANY_TASK = ("statistics=half", "image_size=1.5x", "image_size=1.5x positions=bilinear", "precision=bfloat16")
MAIN = "the main metric"
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
    def settings(self) -> set[str]:
        """The names of the varied settings."""
        return {change.partition("=")[0] for change in self.variation}

    @property
    def size(self) -> float:
        """Mean absolute change over the networks."""
        return fmean(abs(test.difference) for test in self.tests.values())


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
    protocol = protocol_with(options)
    variations: dict[Variation, str] = {}  # variation -> the protocol's own values of its settings
    left_out = []
    for text in texts or (*protocol.task.VARIATIONS, *FOR_ANY_TASK):
        variation = tuple(text.split())
        task_changes = task_changes_in(variation, protocol)
        try:
            varied_task = protocol_with(options, task_changes).task
        except ValueError as error:
            if texts:
                raise
            left_out.append(f"{text}: {error}")
            continue
        if len(task_changes) < len(variation) or varied_task != protocol.task:  # else the protocol has these values
            names = [change.partition("=")[0] for change in variation]
            variations[variation] = ", ".join(_original_value(name, protocol, options) for name in names)
    results, problems = evaluate_variations(options, [UNCHANGED, *variations])
    if not (unchanged := results.get(UNCHANGED)):
        raise ValueError(f"{protocol.name}: {problems[0] if problems else 'no result of the protocol itself'}")
    effects = [
        effect_of(variation, original, unchanged, results[variation])
        for variation, original in variations.items()
        if variation in results
    ]
    effects.sort(key=lambda effect: -effect.size)
    for first, second in combinations(effects, 2):
        if not first.settings & second.settings:
            both, original = first.variation + second.variation, f"{first.original}, {second.original}"
            results, failures = evaluate_variations(options, [both])
            problems += failures
            effects += [effect_of(both, original, unchanged, varied) for varied in results.values()]
            break
    first_result = next(iter(unchanged.values())).result
    metric, record = next(iter(first_result.metrics.items()))
    numbers = ", ".join(
        f"{name} {number_text(stored.result.metrics[metric].value, record.unit)}" for name, stored in unchanged.items()
    )
    title = f"{first_result.group} {metric}, {images_seen(first_result.data, first_result.limit)} images: {numbers}"
    return title, effects, [*left_out, *dict.fromkeys(problems)]


def _original_value(name: str, protocol: ChosenProtocol, options: EvaluationOptions) -> str:
    """The value of a setting before it is varied, as text."""
    if name in RUN_SETTINGS:
        return str(getattr(workspace_of(options), name))
    if name in NETWORK_CHANGES:
        return "the network's own"
    value = settings_of(protocol.task, complete=True)[name]
    is_long = isinstance(value, list) and len(value) > MAX_LISTED_VALUES
    return f"{len(value)} values" if is_long else short(value)


def effect_of(variation: Variation, original: str, unchanged: ResultsByNetwork, varied: ResultsByNetwork) -> Effect:
    """The effect of a variation. ValueError for a metric without values for each image or resample."""
    names = [name for name in unchanged if name in varied]
    before, after = ({name: _main_alone(results[name]) for name in names} for results in (unchanged, varied))
    group = before[names[0]].result.group

    def test(first: Sequence[StoredResult], second: Sequence[StoredResult]) -> PairedTest:
        return paired_test(Match(group=group, first=tuple(first), second=tuple(second)), MAIN)

    pairs = list(combinations(names, 2))
    swaps = []  # for each pair that changes its order: whether both differences are significant
    for one, other in pairs:
        of_varied, of_unchanged = (test([results[one]], [results[other]]) for results in (after, before))
        if of_varied.difference * of_unchanged.difference < 0:
            swaps.append(max(of_varied.p, of_unchanged.p) < LEVEL)
    return Effect(
        variation=variation,
        original=original,
        tests={name: test([after[name]], [before[name]]) for name in names},
        mean=test(list(after.values()), list(before.values())),
        swapped=len(swaps),
        significant=sum(swaps),
        pairs=len(pairs),
    )


def _main_alone(stored: StoredResult) -> StoredResult:
    """A result with its first metric alone, as MAIN: a variation such as k=20 changes the names of metrics."""
    metric = next(iter(stored.result.metrics.values()))
    return StoredResult(path=stored.path, result=replace(stored.result, metrics={MAIN: metric}))


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


def to_csv(effects: Sequence[Effect]) -> str:
    """CSV with a row for each variation and network; numbers are not rounded."""
    rows: list[Sequence[object]] = [
        ("setting", "protocol", "checkpoint", "number", "varied", "change", "low", "high", "p")
    ]
    for effect in effects:
        for name, test in effect.tests.items():
            texts = [in_csv(text) for text in (effect.label, effect.original, name)]
            rows.append([*texts, test.second, test.first, test.difference, test.low, test.high, test.p])
    return csv_text(rows)


def evaluate_variations(
    options: EvaluationOptions, variations: Iterable[Variation]
) -> tuple[dict[Variation, ResultsByNetwork], list[str]]:
    """Evaluate checkpoints under every variation of the one protocol of the options, unless a result exists.

    Returns the results, and a line for each evaluation that failed. ValueError for invalid options.
    """
    protocol = protocol_with(options)
    references: dict[str, str] = {}  # name of a checkpoint -> its export
    for reference, given_name in with_names(options.checkpoint, options.name):
        imports = ImportOptions(statistics=options.statistics)
        checkpoint, _ = load_checkpoint(
            reference, given_name, options.out, save=True, options=imports, image_size=options.image_size
        )
        if checkpoint.used.name in references:
            raise UserError("names", f"two checkpoints are called {checkpoint.used.name}; give each its own name")
        references[checkpoint.used.name] = checkpoint.reference
    by_run: dict[Variation, list[Variation]] = {}  # changes of run and network -> variations that contain just these
    for variation in variations:
        run_changes = tuple(sorted(change for change in variation if not is_task_setting(change, protocol)))
        by_run.setdefault(run_changes, []).append(variation)
    results: dict[Variation, ResultsByNetwork] = {}
    problems: list[str] = []
    for run_changes, run_variations in by_run.items():
        values = dict(change.split("=", 1) for change in run_changes)
        varied: dict[str, tuple[str, str]] = {}  # name of a varied network -> its reference, and its original name
        for name, reference in references.items():
            varied_name = _varied_name(name, values)
            try:
                varied[varied_name] = _varied_network(reference, varied_name, values, options), name
            except ValueError as error:
                problems.append(f"{' '.join(run_changes)}, {name}: {error}")
        if not varied:
            continue
        try:
            of_run = {
                name: from_text(text, RUN_SETTINGS[name]) for name, text in values.items() if name in RUN_SETTINGS
            }
        except ValueError as error:
            raise ValueError(f"{', '.join(RUN_SETTINGS)}: {error}") from error
        checkpoints = tuple(reference for reference, _ in varied.values())
        # The checkpoints are imported already, so that there is no option of imports.
        size = None if "image_size" in values else options.image_size  # a varied one is that of the saved network
        run_options = replace(
            options, checkpoint=checkpoints, name=tuple(varied), statistics=None, image_size=size, **of_run
        )
        changes = {variation: task_changes_in(variation, protocol) for variation in run_variations}
        settings = {
            variation: settings_of(protocol_with(run_options, changes[variation]).task) for variation in changes
        }
        tally = evaluate(run_options, show=False, variations=tuple(dict.fromkeys(changes.values())))
        problems += tally.failed
        for job in tally.jobs:
            if job.path.exists() and (result := read_result(job.path)).status == "ok":
                for variation in run_variations:
                    if settings[variation] == job.settings:
                        stored = StoredResult(path=job.path, result=result)
                        results.setdefault(variation, {})[varied[result.checkpoint.name][1]] = stored
    return results, problems


@cache
def protocols_in(suite: str) -> list[ChosenProtocol]:
    """The protocol that a value of `--suite` names. ValueError if it names none or several."""
    protocols = choose_protocols(suite, catalogue(suite=suite))
    if len(protocols) != 1:
        raise ValueError(f"{suite}: name a single protocol, such as {protocols[0].name}")
    return protocols


def protocol_with(options: EvaluationOptions, changes: Sequence[str] = ()) -> ChosenProtocol:
    """The one protocol of the options with further changes PROTOCOL.NAME=VALUE. ValueError for an invalid change."""
    return changed_protocols(protocols_in(options.suite), (*options.set, *changes), options.select)[0]


def is_task_setting(change: str, protocol: ChosenProtocol) -> bool:
    """Whether NAME=VALUE changes a setting of the task. True for unknown names, which `--set` then refuses."""
    name = change.partition("=")[0]
    return hasattr(protocol.task, name) or name not in (*RUN_SETTINGS, *NETWORK_CHANGES)


def task_changes_in(variation: Variation, protocol: ChosenProtocol) -> Variation:
    """The changes of a variation that concern the task, as values of `--set`: `("knn@dino.crop=1.0",)`."""
    return tuple(f"{protocol.name}.{change}" for change in variation if is_task_setting(change, protocol))


def _varied_name(name: str, values: Mapping[str, str]) -> str:
    """`dino+image_size-1.5x` for a changed network; for an unchanged one its own name."""
    changes = [f"{change}-{Path(value).name}" for change, value in values.items() if change in NETWORK_CHANGES]
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", "+".join([name, *changes]))


def _varied_network(reference: str, name: str, values: Mapping[str, str], options: EvaluationOptions) -> str:
    """A reference to the network with the NETWORK_CHANGES among `values`; a changed network is saved in OUT/exports.

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
        evaluated = options.image_size or export.evaluation_size
        own_size = evaluated if isinstance(evaluated, int) else min(evaluated)
        pixels = float(size[:-1]) * own_size if size.endswith("x") else float(size)
        export = export.at_size(round(pixels / spec.patch_size) * spec.patch_size)
    return str(save_export(export, name, options.out))


def difference_text(test: PairedTest) -> str:
    """The difference with its 95 % interval: `+1.25 [0.4, 2.1]`."""
    return f"{test.difference:+.2f} {interval_text(test.low, test.high)}"
