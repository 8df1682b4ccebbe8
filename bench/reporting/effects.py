"""What a setting does to a number: `bench sensitivity` varies the settings of a protocol one at a time, `bench explain`
divides the difference of two results among the settings in which they differ.

A variation is a text, `crop=1.0` or `image_size=1.5x positions=bilinear`: settings of the task, or of the run and of
the network (RUN, NETWORK). All variations of a run are jobs of one `RunRequest`, so that features of one transform are
extracted in one pass. The protocol and its variation are compared on the same images (bench/statistics/paired.py).

`bench explain` gives each difference its Shapley value: what it adds to the number, averaged over the orders in which
the settings of A can be turned into those of B; all orders of up to EVERY_ORDER differences, else one order and its
reverse. Being an average of differences on the same images, it has a paired interval, and all of them add up to the
whole difference. N images, R resamples.
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
from bench.run.checkpoints import kept_export, load_checkpoint, opened, save_once
from bench.run.prepare import RunRequest
from bench.run.runner import run_jobs
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from bench.statistics.compare import interval_text
from bench.statistics.intervals import LEVEL
from bench.statistics.matching import array_of
from bench.statistics.paired import PairedTest, compare_images, compare_resamples
from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.spec import PositionRule
from engine.printing import in_csv
from engine.settings import NonNegativeInt, from_text
from engine.tasks import settings_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of a Workspace.
RUN = {"precision": Literal["float32", "bfloat16"], "decode": Literal["exact", "fast"], "seed": NonNegativeInt}
NETWORK = ("statistics", "image_size", "positions", "checkpoint")  # of the export; checkpoint: another reference
# Tried with every task. 1.5x: times the network's own size, to a whole number of patches.
OF_ANY_TASK = ("statistics=half", "image_size=1.5x", "image_size=1.5x positions=bilinear", "precision=bfloat16")
EVERY_ORDER = 4  # differences of which all orders are measured: 16 runs
Variation = tuple[str, ...]  # NAME=VALUE
PLAIN: Variation = ()


def measure(
    request: RunRequest, variations: Iterable[Variation]
) -> tuple[dict[Variation, dict[str, StoredResult]], list[str]]:
    """Variation -> name of checkpoint -> result, of the one protocol of a request; and why others have none.

    What exists in the folder of the request is not run again. ValueError where the request itself is wrong.
    """
    chosen = protocol_of(request)
    loaded = [
        load_checkpoint(reference, name, request.out, save=True, options=request.imports)[0]
        for reference, name in zip(
            request.checkpoints, request.names or (None,) * len(request.checkpoints), strict=True
        )
    ]
    names = tuple(checkpoint.used.name for checkpoint in loaded)
    if len(set(names)) < len(names):
        raise ValueError(f"--name: two checkpoints are called {max(names, key=names.count)}; give each its own")
    by_run: dict[Variation, list[Variation]] = {}
    for variation in dict.fromkeys(variations):
        outside = tuple(sorted(change for change in variation if not _is_of_task(change, chosen)))
        by_run.setdefault(outside, []).append(variation)
    results: dict[Variation, dict[str, StoredResult]] = {}
    problems = []
    for outside, together in by_run.items():
        options = dict(change.split("=", 1) for change in outside)
        space: dict[str, Any] = {name: _of_run(name, text) for name, text in options.items() if name in RUN}
        networks: dict[str, str] = {}
        own_names: dict[str, str] = {}
        for checkpoint in loaded:
            name = _varied_name(checkpoint.used.name, options)
            try:
                networks[name] = _varied_network(checkpoint.reference, name, options, request.out)
                own_names[name] = checkpoint.used.name
            except ValueError as error:
                problems.append(f"{' '.join(outside)}, {checkpoint.used.name}: {error}")
        tasks = {variation: _changes_of_task(variation, chosen) for variation in together}
        varied = replace(
            request,
            checkpoints=tuple(networks.values()),
            names=tuple(networks),
            imports=ImportOptions(),
            space=replace(request.space, **space),
            variations=tuple(dict.fromkeys(tasks.values())),
        )
        if not networks:
            continue
        tally = run_jobs(varied, show=False)
        problems += tally.failed
        settings = {variation: settings_of(_changed(varied, changes).task) for variation, changes in tasks.items()}
        for job in tally.jobs:
            if job.path.exists() and (result := read_result(job.path)).status == "ok":
                stored = StoredResult(path=job.path, result=result)
                for variation in together:
                    if settings[variation] == job.settings:
                        results.setdefault(variation, {})[own_names[result.checkpoint.name]] = stored
    return results, problems


def protocol_of(request: RunRequest) -> ChosenProtocol:
    """The protocol of a request, with its changes. ValueError where there are several."""
    protocols = _protocols(request.suite)
    if len(protocols) != 1:
        raise ValueError(f"{request.suite}: give one protocol, such as {protocols[0].name}")
    return _changed(request, ())


@cache
def _protocols(suite: str) -> list[ChosenProtocol]:
    return choose_protocols(suite, catalogue(words=suite))


def _changed(request: RunRequest, changes: Variation) -> ChosenProtocol:
    (chosen,) = changed_protocols(_protocols(request.suite), (*request.changes, *changes), request.select)
    return chosen


def _of_run(name: str, text: str) -> Any:
    try:
        return from_text(text, RUN[name])
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from error


def _is_of_task(change: str, chosen: ChosenProtocol) -> bool:
    name = change.partition("=")[0]
    return hasattr(chosen.task, name) or name not in (*RUN, *NETWORK)


def _changes_of_task(variation: Variation, chosen: ChosenProtocol) -> Variation:
    return tuple(f"{chosen.name}.{change}" for change in variation if _is_of_task(change, chosen))


def _varied_name(name: str, options: Mapping[str, str]) -> str:
    """`dino+image_size-1.5x` of a network that is changed; else its own name."""
    changes = [f"{change}-{Path(value).name}" for change, value in options.items() if change in NETWORK]
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", "+".join([name, *changes]))


def _varied_network(reference: str, name: str, options: Mapping[str, str], out: Path) -> str:
    """Reference of the network with other statistics, positions and image size, saved as an export of `out`.

    ValueError for what it cannot have."""
    reference = options.get("checkpoint", reference)
    if not options.keys() & {"statistics", "positions", "image_size"}:
        return reference
    export = opened(reference)[1]
    spec, preparation = export.spec, export.preparation
    if statistics := options.get("statistics"):
        asked = ImportOptions(statistics=statistics).preparation
        preparation = replace(preparation, mean=asked.mean, std=asked.std)
    if positions := options.get("positions"):
        spec = replace(spec, position_resize=from_text(positions, PositionRule))
    export = ViTExport.make(spec, preparation, export.tensors, export.extra, export.facts)
    if size := options.get("image_size"):
        export = export.at_size(_size(size, spec.image_size, spec.patch_size))
    folder = kept_export(out, name, export)
    if not folder.exists():
        save_once(export, folder)
    return str(folder)


def _size(text: str, own: int | tuple[int, int], patch: int) -> int:
    """`336`, or `1.5x` of the network's own size."""
    if not text.endswith("x"):
        return int(text)
    if isinstance(own, tuple):
        raise ValueError(f"image_size={text}: the network's images are not square; give pixels")
    return round(float(text[:-1]) * own / patch) * patch


Measured = tuple[float, np.ndarray]  # a number in its unit, and its values (N,) of images or (R,) of resamples


def main_metric(result: Result) -> tuple[str, MetricRecord]:
    """The first metric. ValueError where it has no values on the images."""
    name, metric = next(iter(result.metrics.items()))
    if not metric.array:
        raise ValueError(f"{result.protocol.name}: {name} is kept as a number alone, not for each image")
    return name, metric


def measured(stored: StoredResult) -> Measured:
    """The main metric of a result."""
    name, metric = main_metric(stored.result)
    return metric.value, array_of(stored, name).astype(np.float64)


def mean(numbers: Sequence[Measured]) -> Measured:
    """The mean of numbers on the same images."""
    return float(np.mean([value for value, _ in numbers])), np.mean([values for _, values in numbers], axis=0)


def paired(after: Measured, before: Measured, of: Result) -> PairedTest:
    """The paired test of `after` - `before` on the same images; `of` says of what kind these numbers are."""
    metric = main_metric(of)[1]
    if metric.array_over == "resamples":
        return compare_resamples((after[0], before[0]), [after[1], before[1]], images_seen(of.data, of.limit))
    seen = ~np.isnan(after[1] + before[1])
    sides = after[1][seen], before[1][seen]
    scale = 100.0 if metric.unit == "%" else float(max(np.abs(side).max() for side in sides)) or 1.0
    unit = 1.0 if metric.unit == "%" else scale
    return compare_images(sides[0] / unit, sides[1] / unit, seed=0, scale=scale)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one variation does to the numbers of all networks that have it."""

    variation: Variation
    own: str  # the values of the protocol
    tests: Mapping[str, PairedTest]  # name of network -> variation - protocol
    mean: PairedTest  # of their mean
    swapped: tuple[
        int, int
    ]  # pairs of networks whose order differs; of these, how many differ in both orders (p < 0.05)
    pairs: int  # of networks

    @property
    def label(self) -> str:
        return " ".join(self.variation)

    @property
    def size(self) -> float:
        """Mean distance over the networks, whatever its sign."""
        return float(np.mean([abs(test.difference) for test in self.tests.values()]))


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effects of variations of a protocol: the largest first, the two largest together last."""

    title: str  # protocol, metric, images
    unit: str
    numbers: Mapping[str, float]  # name of network -> number by the protocol
    effects: Sequence[Effect]
    together: Effect | None
    left_out: Sequence[str]  # a line for each reason

    @property
    def rows(self) -> list[Effect]:
        return [*self.effects, *filter(None, [self.together])]


def sensitivity(request: RunRequest, texts: Sequence[str] = ()) -> Sensitivity:
    """Measure every variation by itself, then the two of different settings that move the number most.

    texts: variations in place of those of the task and OF_ANY_TASK. ValueError for a wrong one.
    """
    chosen, left_out = protocol_of(request), []
    if not (texts or chosen.task.VARIATIONS):
        raise ValueError(
            f"{chosen.name}: its task names no VARIATIONS; give some by --vary, such as precision=bfloat16"
        )
    variations: dict[Variation, str] = {}
    for text in texts or (*chosen.task.VARIATIONS, *OF_ANY_TASK):
        variation = tuple(text.split())
        try:
            task = _changed(request, _changes_of_task(variation, chosen)).task
        except ValueError as error:
            if texts:
                raise
            left_out.append(f"{text}: {error}")
            continue
        if all(_is_of_task(change, chosen) for change in variation) and task == chosen.task:
            continue  # the protocol's own value
        variations[variation] = ", ".join(_own_value(change, chosen, request) for change in variation)
    results, problems = measure(request, [PLAIN, *variations])
    if PLAIN not in results:
        raise ValueError(f"{chosen.name}: {problems[0] if problems else 'no result of the protocol itself'}")
    plain = results[PLAIN]
    effects = [_effect(name, own, plain, results[name]) for name, own in variations.items() if name in results]
    effects.sort(key=lambda effect: -effect.size)
    together = None
    if pair := next(
        ((a, b) for a, b in combinations(effects, 2) if not _names(a.variation) & _names(b.variation)), None
    ):
        both = tuple(change for effect in pair for change in effect.variation)
        found, more = measure(request, [both])
        problems += more
        if both in found:
            together = _effect(both, ", ".join(effect.own for effect in pair), plain, found[both])
    first = next(iter(plain.values())).result
    images = images_seen(first.data, first.limit)
    return Sensitivity(
        title=f"{first.group} {main_metric(first)[0]}, {images} images, {len(plain)} networks",
        unit=main_metric(first)[1].unit,
        numbers={name: measured(stored)[0] for name, stored in plain.items()},
        effects=effects,
        together=together,
        left_out=[*left_out, *dict.fromkeys(problems)],
    )


def _names(variation: Variation) -> set[str]:
    return {change.partition("=")[0] for change in variation}


def _own_value(change: str, chosen: ChosenProtocol, request: RunRequest) -> str:
    name = change.partition("=")[0]
    if name in RUN:
        return str(getattr(request.space, name))
    return "its own" if name in NETWORK else short(settings_of(chosen.task, complete=True)[name])


def _effect(
    variation: Variation, own: str, plain: Mapping[str, StoredResult], varied: Mapping[str, StoredResult]
) -> Effect:
    numbers = {name: (measured(varied[name]), measured(plain[name])) for name in plain if name in varied}
    one = plain[next(iter(numbers))].result
    both, swapped = list(combinations(numbers, 2)), [0, 0]
    for first, second in both:
        after, before = (paired(numbers[first][side], numbers[second][side], one) for side in (0, 1))
        if after.difference * before.difference < 0:
            swapped[0] += 1
            swapped[1] += max(after.p, before.p) < LEVEL
    sides = [mean([number[side] for number in numbers.values()]) for side in (0, 1)]
    return Effect(
        variation=variation,
        own=own,
        tests={name: paired(*number, one) for name, number in numbers.items()},
        mean=paired(sides[0], sides[1], one),
        swapped=(swapped[0], swapped[1]),
        pairs=len(both),
    )


HEADS = ("setting", "protocol", "mean change [95 %]", "least", "most", "mean distance", "pairs that swap (p < 0.05)")


def table_rows(study: Sensitivity) -> list[tuple[str, ...]]:
    """The cells of the table, below HEADS."""
    rows: list[tuple[str, ...]] = []
    for effect in study.rows:
        changes = [test.difference for test in effect.tests.values()]
        rows.append(
            (
                f"both: {effect.label}" if effect is study.together else effect.label,
                effect.own,
                with_interval(effect.mean),
                f"{min(changes):+.2f}",
                f"{max(changes):+.2f}",
                f"{effect.size:.2f}",
                f"{effect.swapped[0]} of {effect.pairs} ({effect.swapped[1]})",
            )
        )
    return rows


def with_interval(test: PairedTest) -> str:
    """`+1.25 [0.4, 2.1]`"""
    return f"{test.difference:+.2f} {interval_text(test.low, test.high)}"


def to_markdown(study: Sensitivity) -> str:
    """Two tables: what each variation does, and the networks' numbers by each."""
    unit = "points" if study.unit == "%" else study.unit
    networks = [
        ("protocol", *(number_text(value, study.unit) for value in study.numbers.values())),
        *(
            (
                effect.label,
                *(with_interval(effect.tests[name]) if name in effect.tests else "" for name in study.numbers),
            )
            for effect in study.rows
        ),
    ]
    lines = [f"**{study.title}; changes in {unit}**", ""]
    lines += [*_markdown(HEADS, table_rows(study)), "", *_markdown(("setting", *study.numbers), networks)]
    return "\n".join([*lines, *([""] if study.left_out else []), *(f"left out: {line}" for line in study.left_out), ""])


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def to_csv(study: Sensitivity) -> str:
    """A row for each variation and network, unrounded."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("setting", "protocol", "checkpoint", "number", "varied", "change", "low", "high", "p"))
    for effect in study.rows:
        for name, test in effect.tests.items():
            numbers = (test.second, test.first, test.difference, test.low, test.high, test.p)
            writer.writerow([in_csv(text) for text in (effect.label, effect.own, name)] + list(numbers))
    return buffer.getvalue()


def figure(study: Sensitivity) -> "Figure":
    """Changes of all networks, and the mean with its interval; a row for each variation."""
    from matplotlib.figure import Figure

    rows, styles = study.rows, styles_of(sorted(study.numbers))
    drawn = Figure(figsize=(8, 0.32 * len(rows) + 1.6), layout="constrained", dpi=72)
    axes = drawn.add_subplot()
    for place, effect in enumerate(rows):
        test = effect.mean
        axes.plot([test.low, test.high], [place, place], color=INK, linewidth=5, alpha=0.25, solid_capstyle="butt")
        axes.plot(test.difference, place, "|", color=INK, markersize=12)
        for name, own in effect.tests.items():
            axes.plot(own.difference, place, **{**styles[name], "linestyle": ""}, markersize=5, alpha=0.8)
    for name, style in styles.items():
        axes.plot([], [], **{**style, "linestyle": ""}, label=name)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row[0] for row in table_rows(study)], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"change, {'points' if study.unit == '%' else study.unit}", fontsize=8)
    axes.set_title(study.title, fontsize=9, parse_math=False)
    axes.grid(axis="x", alpha=0.2)
    drawn.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return drawn


def found_result(word: str, out: Path | None, checkpoint: str | None = None) -> StoredResult:
    """A result by its file, or by its name in a folder: its group, its protocol, or what varies it. ValueError says
    what there is."""
    if word.endswith(".json") or not out:
        if not Path(word).is_file():
            raise ValueError(f"{word}: no such result file; give one, or --out DIR and a name in it")
        return StoredResult(path=Path(word), result=read_result(Path(word)))
    check_folder(out)
    results = [stored for stored in read_results(out)[0] if stored.result.status == "ok"]
    results = [stored for stored in results if checkpoint in (None, stored.result.checkpoint.name)]
    for names in (_exact_names, _loose_names):
        fitting = [stored for stored in results if word in names(stored)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            paths = " ".join(str(stored.path) for stored in fitting)
            raise ValueError(f"{word!r} is the name of {len(fitting)} results: give --name NAME, or one of {paths}")
    known = sorted({stored.result.group for stored in results})
    raise ValueError(f"{out} has no result {word!r}; it has {', '.join(known)}")


def _exact_names(stored: StoredResult) -> tuple[str, ...]:
    group = stored.result.group
    return group, group.partition("/")[2], stored.path.stem


def _loose_names(stored: StoredResult) -> tuple[str, ...]:
    return (" ".join(stored.result.variant),)


def differences(first: Result, second: Result) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """What differs in two results, name -> value of each: what can be measured, and what cannot.

    ValueError for results of two tasks.
    """
    if first.task != second.task:
        raise ValueError(f"{first.task} and {second.task} are two tasks; `explain` takes two results of one")
    sides = [{**_complete(result), **{name: getattr(result, name) for name in RUN}} for result in (first, second)]
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
    """What a number may depend on beside the settings that can be changed for a run."""
    facts: dict[str, Any] = {f"{split} images": digest[:8] for split, digest in result.data.fingerprints.items()}
    facts |= {name: getattr(result, name) for name in ("limit", "skipped", "device", "compiled")}
    facts |= {f"version of {name}": version for name, version in result.versions.items()}
    return facts | {"protocol version": result.protocol.version}


def _complete(result: Result) -> dict[str, Any]:
    """All settings, those that the task gained after the result was made with their defaults."""
    (known,) = {type(chosen.task) for chosen in catalogue().protocols.values() if chosen.key == result.task}
    defaults = {entry.name: entry.default for entry in fields(known) if entry.default is not MISSING}
    late = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return late | dict(result.settings)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one difference explains."""

    name: str
    values: tuple[Any, Any]  # of A and of B
    share: PairedTest  # its Shapley value
    alone: float  # what it does to A
    last: float  # what it does as the last step to B


def explain(
    request: RunRequest, changed: Mapping[str, tuple[Any, Any]], references: Sequence[str] = ()
) -> tuple[list[Share], PairedTest]:
    """Shares of the differences, the largest first, and the whole difference B - A as measured.

    request: of A. references: of the networks of A and B, where these differ. ValueError where something cannot run.
    """
    texts = _texts(changed)
    if "checkpoint" in texts:
        if len(references) != 2:
            raise ValueError("the two results are of different weights: give --checkpoint A B")
        texts["checkpoint"] = f"checkpoint={references[1]}"
    names = sorted(changed)
    orders = list(permutations(names)) if len(names) <= EVERY_ORDER else [tuple(names), tuple(reversed(names))]
    subsets = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    subsets |= {frozenset({name}) for name in names} | {frozenset(names) - {name} for name in names}
    variations = {subset: tuple(sorted(texts[name] for name in subset)) for subset in sorted(subsets, key=sorted)}
    results, problems = measure(request, variations.values())
    if missing := [variation for variation in variations.values() if variation not in results]:
        why = problems[0] if problems else "it has no result"
        raise ValueError(f"{' '.join(missing[0]) or 'the settings of A'}: {why}")
    stored = {subset: next(iter(results[variation].values())) for subset, variation in variations.items()}
    numbers = {subset: measured(result) for subset, result in stored.items()}
    nothing, everything = frozenset[str](), frozenset(names)
    one, shares = stored[nothing].result, []
    for name in names:
        before = [frozenset(order[: order.index(name)]) for order in orders]
        after = mean([numbers[subset | {name}] for subset in before])
        shares.append(
            Share(
                name=name,
                values=changed[name],
                share=paired(after, mean([numbers[subset] for subset in before]), one),
                alone=numbers[frozenset({name})][0] - numbers[nothing][0],
                last=numbers[everything][0] - numbers[everything - {name}][0],
            )
        )
    shares.sort(key=lambda share: -abs(share.share.difference))
    return shares, paired(numbers[everything], numbers[nothing], one)


def _texts(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Name -> NAME=VALUE of B."""
    return {name: f"{name}={_as_text(after)}" for name, (_, after) in changed.items()}


def request_of(first: Result, request: RunRequest) -> RunRequest:
    """The request with the protocol, settings, seed, precision, decoder and limit of a result."""
    (chosen,) = _protocols(first.protocol.name)
    own = settings_of(chosen.task, complete=True)
    changes = tuple(
        f"{chosen.name}.{name}={_as_text(value)}" for name, value in _complete(first).items() if value != own[name]
    )
    space = {name: getattr(first, name) for name in (*RUN, "limit")}
    return replace(
        request,
        suite=chosen.name,
        changes=changes,
        names=(first.checkpoint.name,),
        space=replace(request.space, **space),
    )


def _as_text(value: Any) -> str:
    """A JSON value as `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def to_text(study: Sensitivity) -> list[str]:
    """The table for a terminal."""
    lines = [f"{study.title}; changes in {'points' if study.unit == '%' else study.unit}", ""]
    lines += [*_aligned([HEADS, *table_rows(study)]), ""]
    return [*lines, *(f"left out: {line}" for line in study.left_out)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def difference_lines(
    first: Result, second: Result, changed: Mapping[str, tuple[Any, Any]], others: Mapping[str, tuple[Any, Any]]
) -> list[str]:
    """Both numbers, and what differs."""
    lines = []
    for letter, result in (("A", first), ("B", second)):
        name, metric = main_metric(result)
        lines.append(f"{letter}: {result.checkpoint.unique_name}, {result.group}, seed {result.seed}: {name} {metric}")
    lines += [f"differs: {name}: {short(one)} -> {short(other)}" for name, (one, other) in changed.items()]
    lines += [
        f"also differs, not measured here: {name}: {short(one)} -> {short(other)}"
        for name, (one, other) in others.items()
    ]
    return lines if changed or others else [*lines, "nothing differs that a number depends on"]


def command(first: StoredResult, second: StoredResult, changed: Mapping[str, Any]) -> str:
    """The command that measures what each difference explains."""
    sources = [first.result.checkpoint.source, *([second.result.checkpoint.source] if "checkpoint" in changed else [])]
    data = f"{first.result.data.name}={first.result.data.url}"
    words = ["bench", "explain", str(first.path), str(second.path), "--checkpoint", *sources, "--data", data]
    return shlex.join(words)


def share_lines(first: Result, second: Result, shares: Sequence[Share], whole: PairedTest) -> list[str]:
    """What each difference explains of B - A, and what is left."""
    stored = main_metric(second)[1].value - main_metric(first)[1].value
    ending = suffix(main_metric(first)[1].unit) or " points"
    rows: list[tuple[str, ...]] = [("difference", "A", "B", "explains [95 %]", "alone", "as the last")]
    for share in shares:
        values = (short(value) for value in share.values)
        rows.append((share.name, *values, with_interval(share.share), f"{share.alone:+.2f}", f"{share.last:+.2f}"))
    rows.append(("all", "", "", with_interval(whole), "", ""))
    return [
        *_aligned(rows),
        "",
        f"B - A: {stored:+.2f}{ending} in the results, {whole.difference:+.2f} measured; not explained: "
        f"{stored - whole.difference:+.2f}",
    ]
