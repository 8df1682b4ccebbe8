"""`bench reproduce`: published numbers, the numbers measured here, and the commands that measure them.

A plan is a list of published values: a table of a source; `today`, current networks by common protocols; or `laptop`,
four numbers that a laptop measures. A value names its weights, protocol, settings and images. It can
be measured by a named protocol, by a protocol with changed settings, or, for a stated reason, not at all; its weights
are given by the user, downloaded by timm, or trained first. Measurements are read from the results in a folder.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isnan, nan
from pathlib import Path
from typing import NoReturn

from bench.options import absent_file, absent_images, check_writable
from bench.pretraining.recipes import changed_recipe
from bench.published.values import (
    LOG,
    PRETRAINED_ON,
    SETS,
    TABLES,
    PublishedValue,
    published_values,
    set_name,
    set_names,
    values_of,
)
from bench.reports.leaderboard import leaderboard_of
from bench.results.record import Result, interval_decimals, number_with_interval, suffix
from bench.results.store import StoredResult
from bench.run.prepare import named_urls, open_data
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from checkpoints.export import is_export
from checkpoints.frozen import SCHEME
from checkpoints.import_options import TIMM_SCHEMES
from checkpoints.runs import EXPORT
from engine.errors import UserError, command, command_line, in_one_line
from engine.extensions import load_extension, source_files, warn_of
from engine.files import write_atomic
from engine.printing import did_you_mean, in_markdown, markdown_table, printable, say
from engine.printing import table as text_table
from engine.settings import named_values
from engine.tasks import Workspace

TODAY = "today"  # name of the plan of these weights: timm's copies where it has any, else what to look for
WEIGHTS = {
    "dino-s16": "timm:vit_small_patch16_224.dino",
    "dino-b": "timm:vit_base_patch16_224.dino",
    "ibot-b": "",  # https://github.com/bytedance/ibot, ViT-B/16, teacher
    "mae-b": "timm:vit_base_patch16_224.mae",
    "dinov2-s": "timm:vit_small_patch14_dinov2.lvd142m",
    "dinov2-b": "timm:vit_base_patch14_dinov2.lvd142m",
    "dinov3-s": "timm:vit_small_patch16_dinov3.lvd1689m",
    "dinov3-b": "timm:vit_base_patch16_dinov3.lvd1689m",
}
LAPTOP = "laptop"  # name of the plan of four numbers of the smallest DINOv2
# 87,200 images at 224 px, 13.9 a second on two cores of a Zen 4 in float32 (docs/log.md); the last number takes 60,000.
LAPTOP_NEEDS = "about 0.6 GB of downloads, 1.5 GB of disk, and 105 minutes of two cores, three numbers after 35"
DOWNLOADS = {"cifar10": "CIFAR10", "flowers102": "Flowers102"}  # set of a source -> its name for `bench data get`
SUITE = "knn@dino,linear@dinov2,attentive@ep,lowshot@msn,segmentation_linear@dinov3,depth_linear@dinov3"
Z95 = 1.959964  # half the width of a 95 % interval in standard errors, of a normal distribution


@cache
def protocols() -> Mapping[str, ChosenProtocol]:
    """All protocols of this installation by name; prints a warning for each task file that cannot be loaded."""
    known = catalogue()
    warn_of(known.broken)
    return known.protocols


def plan_of(name: str, suite: str | None = None) -> list[PublishedValue]:
    """The values of a plan. ValueError if there is none of this name, or if nothing of `suite` is in it.

    suite: only the values that these protocols measure; None for all.
    """
    plan = networks_of_today() if name == TODAY else on_a_laptop() if name == LAPTOP else list(values_of(name))
    if suite is not None:
        chosen = {protocol.name for protocol in choose_protocols(suite, catalogue())}
        plan = [value for value in plan if value.protocol in chosen]
        if not plan:
            raise UserError("suite", f"no value of {name} is measured by it", suite)
    return plan


def networks_of_today() -> list[PublishedValue]:
    """Each network by all protocols of SUITE, and its published values by these tasks on the same images.

    Values that no source published are NaN.
    """
    suite = choose_protocols(SUITE, catalogue())
    tasks, data = {protocol.key for protocol in suite}, {protocol.layout or "imagenet" for protocol in suite}
    plan: list[PublishedValue] = []
    for name in WEIGHTS:
        of_network = [value for value in published_values() if value.checkpoint == name and not value.network]
        values = [value for value in of_network if value.data in data and not unmeasured(value)]
        published = [value for value in values if protocol_of(value).key in tasks]
        measured = {value.protocol for value in published if not value.settings}
        unpublished = dict.fromkeys(("setting", "source", "note", "settings", "metric"), "") | {"table": TODAY}
        for protocol in suite:
            if protocol.name not in measured:
                facts = unpublished | {"protocol": protocol.name, "data": protocol.layout or "imagenet"}
                value = replace(of_network[0], value=nan, std=None)
                published.append(replace(value, **facts))  # type: ignore[arg-type]
        plan += [replace(value, pretraining="") for value in published]
    return plan


def on_a_laptop() -> list[PublishedValue]:
    """The values of DINOv2's ViT-S/14 on CIFAR-10 and Flowers-102 by few-shot and by full logistic regression."""
    few_shot = [*values_of("mieb:cifar10"), *values_of("mieb:flowers-mieb")]
    full = [value for value in values_of("dinov2:table8") if value.data in DOWNLOADS]
    # MIEB's cut of Flowers-102 is nowhere but on the Hub: the official split stands in for it, and the table says so.
    official = {"flowers-mieb": "flowers102"}
    plan = [replace(value, data=official.get(value.data, value.data)) for value in [*few_shot, *full]]
    plan.sort(key=lambda value: value.data == "cifar10")  # last, as it has seven times as many images
    return [value for value in plan if value.checkpoint == "dinov2-s"]


def unmeasured(value: PublishedValue) -> str:
    """Why a value cannot be measured with the protocols of this installation; "" if it can."""
    if value.protocol == LOG:
        return "it depends on the machine: `log.jsonl` of a pretraining has its time and memory"
    try:
        protocol_of(value)
    except ValueError as error:
        return str(error)
    return ""


def protocol_of(value: PublishedValue) -> ChosenProtocol:
    """The protocol that measures a value, with its settings. ValueError if there is no such protocol or setting."""
    if value.protocol not in protocols():
        raise ValueError(
            f"there is no protocol {value.protocol}" if value.protocol else "no protocol here matches its source's"
        )
    changes = [f"{value.protocol}.{change}" for change in value.settings.split()]
    return changed_protocols([protocols()[value.protocol]], changes)[0] if changes else protocols()[value.protocol]


def untrained(value: PublishedValue) -> str:
    """Why the weights of a value cannot be trained with the methods of this installation; "" if they can."""
    method, recipe, changes = trained_by(value)
    if not method:
        return "no method here trains these weights"
    if method not in source_files("methods"):
        return f"there is no method {method}"
    recipes = load_extension("methods", method).RECIPES
    if recipe not in recipes:
        return f"{method} has no recipe {recipe}"
    try:
        changed_recipe(recipes[recipe], changes, method)
    except ValueError as error:
        return str(error)
    return ""


def trained_by(value: PublishedValue) -> tuple[str, str, Sequence[str]]:
    """Method, recipe and changed settings `FIELD=VALUE` that train a value's weights; empty if no method here does."""
    method, recipe, *changes = [*value.pretraining.split(), "", ""]
    return method, recipe, list(filter(None, changes))


START = "start"  # folder of a pretraining with its initial weights, and the `network` of values measured on these


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The weights and images of the user, and the folder and processes for the commands."""

    checkpoints: Mapping[str, str]  # name of published weights -> reference
    data: Mapping[str, str]  # name of a published image set -> URL
    out: Path  # folder of results and trainings
    processes: int = 1  # of torchrun; 1: without torchrun

    def url(self, data: str) -> str:
        """The user's URL of a published image set, that of a download, or an example URL."""
        if data in DOWNLOADS and data not in self.data:
            return f"torchvision:{DOWNLOADS[data]}:{self.downloads / DOWNLOADS[data]}"
        return self.data.get(data, SETS[data].url)

    @property
    def downloads(self) -> Path:
        """The folder that image sets which are not given are downloaded into."""
        return self.out / "data"

    def training(self, value: PublishedValue) -> Path:
        """The folder of the training of a value's weights."""
        return self.out / "pretraining" / value.checkpoint

    def training_images(self, value: PublishedValue) -> str:
        """The user's URL of the images that the weights were pretrained on, or an example URL."""
        name, example = PRETRAINED_ON[value.images]
        return self.data.get(name, example)

    def export(self, value: PublishedValue) -> Path:
        """The export, in the training's folder, of the network on which the value was measured."""
        names = {"": EXPORT, START: START}
        return self.training(value) / names.get(value.network, f"{EXPORT}-{value.network}")

    def reference(self, value: PublishedValue) -> str:
        """The user's reference to the value's network or its checkpoint, or timm's copy; "" if there is none."""
        timm = "" if value.network else WEIGHTS.get(value.checkpoint, "")
        return self.checkpoints.get(run_name(value)) or self.checkpoints.get(value.checkpoint) or timm


def run_name(value: PublishedValue) -> str:
    """The name of the weights in results: that of the checkpoint, followed by the network's unless it is the first."""
    return value.checkpoint + (f"-{value.network}" if value.network not in ("", START) else "")


def named_checkpoints(texts: Sequence[str], values: Iterable[PublishedValue]) -> dict[str, str]:
    """`--checkpoints NAME=REFERENCE ...` as a mapping. ValueError for a name that does not occur in `values`."""
    names = {name for value in values for name in (value.checkpoint, run_name(value))}
    references = named_values(texts, "checkpoints", f"NAME=PATH, for example {min(names)}=/data/weights.pth")
    for name in references.keys() - names:
        hint = did_you_mean(name, sorted(names))
        raise UserError("checkpoints", f"no weights here are called {name!r}{hint}", f"{name}={references[name]}")
    return references


def named_data(texts: Sequence[str]) -> dict[str, str]:
    """`--data NAME=URL ...` as a mapping. ValueError for a name that does not occur in the tables."""
    names = {*SETS, *(name for name, _ in PRETRAINED_ON.values() if name)}
    urls = named_urls(texts, "") if texts else {}
    if unknown := [name for name in urls if name not in names]:
        raise UserError("data", f"no table uses images of this name; choose {', '.join(sorted(names))}", unknown[0])
    return urls


def commands_of(values: Sequence[PublishedValue], setup: Setup) -> list[list[str]]:
    """The commands that measure values of one network, settings and image set, in order, each as a list of words.

    Empty if they cannot be measured.
    """
    first = values[0]
    if unmeasured(first):
        return []
    commands, reference = weights_of(first, setup)
    names = list(dict.fromkeys(value.protocol for value in values))
    words = command(
        "run",
        checkpoint=reference,
        name=run_name(first),
        suite=",".join(names),
        data=f"{first.data}={setup.url(first.data)}",
        image_size=image_size_of(first),
        out=setup.out,
        set=[f"{name}.{change}" for name in names for change in first.settings.split()],
    )
    return [*commands, with_torchrun(words, setup)]


def image_size_of(value: PublishedValue) -> int | None:
    """The side of the images, if the value's source names one: `--image-size` of its importer. Not of dense tasks."""
    _, _, size = value.importer.partition(" --image-size ")
    return int(size) if size and not protocol_of(value).layout else None


def weights_of(value: PublishedValue, setup: Setup) -> tuple[list[list[str]], str]:
    """The commands that obtain the weights, and the reference to them for `bench run --checkpoint`."""
    if reference := setup.reference(value):
        return _import_if_needed(value, reference, setup)
    if untrained(value):
        return [], f"PATH-OF-{run_name(value)}"
    method, recipe, changes = trained_by(value)
    options = {"recipe": recipe, "images": setup.training_images(value), "out": setup.training(value)}
    words = command("pretrain", method, **options, resume=True, set=changes)
    return [with_torchrun(words, setup)], str(setup.export(value))


def with_torchrun(words: list[str], setup: Setup) -> list[str]:
    """The command, started by torchrun if there are several processes."""
    if setup.processes == 1:
        return words
    return ["torchrun", "--nproc-per-node", str(setup.processes), "--no-python", *words]


def _import_if_needed(value: PublishedValue, reference: str, setup: Setup) -> tuple[list[list[str]], str]:
    """`weights_of` for the user's weights: no command, or the `bench import` that an option such as --branch needs."""
    scheme, importer = reference.partition(":")[0], value.importer.partition(" --image-size ")[0].split()
    is_file = scheme not in (*source_files("importers"), *TIMM_SCHEMES) and not Path(reference).expanduser().is_dir()
    source = f"{importer[0]}:{reference}" if is_file and importer else reference
    is_of_network = run_name(value) in setup.checkpoints and run_name(value) != value.checkpoint
    branch = [] if is_of_network or value.network in ("", START) else ["--branch", value.network]
    options = [*branch, *importer[1:]]
    if not options or scheme in TIMM_SCHEMES or is_export(Path(reference).expanduser()):
        return [], source
    folder = str(setup.out / "imports" / run_name(value))
    return [[*command("import", source, out=folder), *options]], folder


def other_weights(value: PublishedValue, method: str, architecture: str) -> str:
    """How weights differ from the published ones: `of mae, not moca`; "" if no difference is known.

    method: of the export or the importer; timm and transformers do not name one.
    """
    if method in (SCHEME, "pixels"):
        return "not a checkpoint of a pretraining method, so its weights cannot be identified"
    differences, published_methods = [], {*value.importer.split()[:1], trained_by(value)[0]} - {""}
    if method not in ("", "timm", "transformers", *published_methods):
        differences.append(f"of {method}, not {' or '.join(sorted(published_methods)) or value.model}")
    if architecture and not architecture.startswith(value.architecture):
        differences.append(f"a {architecture}, not a {value.architecture}")
    return ", ".join(differences)


def missing(plan: Sequence[PublishedValue], setup: Setup) -> Iterator[str]:
    """Lines `missing: ...` about images and weights that the commands need, and `note: ...` about differences."""
    absent: dict[object, str] = {}  # path that does not exist -> the first weights that need it
    without: dict[str, None] = {}  # names of weights that are neither given nor trained
    data: dict[str, None] = {}
    for value in plan:
        reference, name = setup.reference(value), run_name(value)
        if unmeasured(value):
            continue
        if not reference and untrained(value):
            without[name] = None
            continue
        data[value.data] = None
        if reference.startswith(f"{SCHEME}:"):  # code of the user's, which is no file
            continue
        if path := absent_file(reference) if reference else absent_images(setup.training_images(value)):
            absent.setdefault(path, name)
    yield from (f"note: {name}: no weights; give --checkpoints {name}=PATH" for name in without)
    yield from (f"missing: {path} does not exist, for {name}" for path, name in absent.items())
    for name in data:
        space, published = Workspace(cache=setup.out / "cache", data=setup.url(name)), SETS[name].images
        try:
            images = open_data(name, space.data, space, val_alone=True).images
            if not published.items() <= images.items():
                yield f"note: {name} has {_counts(images)} images, the published set {_counts(published)}"
        except ValueError as error:
            yield f"missing: {in_one_line(error)}"


def script(name: str, plan: Sequence[PublishedValue], setup: Setup, suite: str | None = None) -> Iterator[str]:
    """The lines of a shell script that measures a plan: values, and below them the commands that measure them.

    suite: by which `plan_of` chose the values. Each value of LAPTOP has a command of its own, and is compared at once:
    somebody waits for it.
    """
    out, one_by_one = str(setup.out), name == LAPTOP
    data = [f"{data}={url}" for data, url in setup.data.items()]
    checkpoints = [f"{weights}={reference}" for weights, reference in setup.checkpoints.items()]
    yield from ("#!/usr/bin/env bash", f"# {name}: {caption_of(name)}")
    yield "# Every command, and the script, can be repeated: finished work is skipped, interrupted work is resumed."
    yield from ("set -euo pipefail", "")
    for key, downloaded in DOWNLOADS.items():
        if key not in setup.data and any(value.data == key for value in plan):
            yield command_line("data", "get", downloaded, out=setup.downloads)
    yield "# Lists what is missing, and stops if anything is."
    yield command_line("reproduce", name, check=True, suite=suite, data=data, checkpoints=checkpoints, out=out)
    runs: dict[tuple[str, ...], list[PublishedValue]] = {}
    for value in plan:
        weights = (run_name(value), value.network, value.pretraining, value.importer)
        own = value.protocol if one_by_one else ""
        runs.setdefault((*weights, value.settings, value.data, own, unmeasured(value)), []).append(value)
    written: set[str] = set()
    compare = command_line("reproduce", name, suite=suite, out=out)
    for number, values in enumerate(runs.values()):
        if one_by_one and number:
            yield compare
        yield ""
        for value in values:
            published = "not published" if isnan(value.value) else f"published {value.value:g}"
            yield printable(f"# {value.what}: {value.measured_by}, {published}")
        if reason := unmeasured(values[0]):
            yield f"# not here: {reason}"
        for line in map(shlex.join, commands_of(values, setup)):
            if "PATH-OF-" in line:
                yield f"# weights: give --checkpoints {run_name(values[0])}=PATH"
                yield f"# {line}"
            elif line not in written:
                yield line
                written.add(line)
    yield ""
    yield f"{compare} | tee {shlex.quote(f'{out}-published.md')}"
    if any(" run " in line for line in written):
        yield command_line("record", out, to=f"{out}-record")


def run_script(name: str, plan: Sequence[PublishedValue], setup: Setup, suite: str | None = None) -> NoReturn:
    """Write the script of a plan to OUT/NAME.sh, say what it takes, and become it: the process ends with the script."""
    path = setup.out / f"{name.replace(':', '-')}.sh"
    check_writable(setup.out)
    write_atomic(path, "\n".join([*script(name, plan, setup, suite), ""]))
    say(f"{path}: {caption_of(name)}")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.execvpe("bash", ["bash", str(path)], {**os.environ, "PATH": programs})


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A number measured here."""

    number: float
    unit: str
    interval: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()  # why it may not be comparable with the published one


def measurement(value: PublishedValue, results: Sequence[StoredResult]) -> Measurement | None:
    """The number measured here for a published value, the mean over seeds; None if there is none."""
    matching = [stored.result for stored in results if _is_of(stored.result, value)]
    if not matching:
        return None

    def distance(result: Result) -> tuple[object, ...]:
        """Sort key: of the published weights, on the published images and with the fewest variations first."""
        differs = bool(_difference_of_weights(result, value)), not _on_published_images(result, value)
        return *differs, len(result.variant), result.group, result.checkpoint.digest

    first = min(matching, key=distance)
    own = [result for result in matching if result.checkpoint.key == first.checkpoint.key]
    column = first.group, value.metric or next(iter(first.metrics))
    cell = next(cells[column] for cells in leaderboard_of(own).rows.values() if column in cells)
    return Measurement(number=cell.mean, unit=cell.unit, interval=cell.interval, remarks=_remarks(first, value))


def _on_published_images(result: Result, value: PublishedValue) -> bool:
    return set_name(result.data) == value.data


def _is_of(result: Result, value: PublishedValue) -> bool:
    """Whether a result measures a published value: the same weights, protocol, settings and image set."""
    if result.protocol.name != value.protocol or result.checkpoint.name != run_name(value):
        return False
    protocol = protocol_of(value)
    return (
        result.status == "ok"
        and result.limit is None
        and (value.metric in result.metrics or not value.metric)
        and result.protocol.version == protocol.protocol.version
        and dict(result.protocol.changes) == dict(protocol.changes)
        and (result.data.name == value.data or _on_published_images(result, value))
    )


def _remarks(result: Result, value: PublishedValue) -> tuple[str, ...]:
    """Known differences of a result from the published measurement."""
    remarks = [f"computed in {result.precision}"] if result.precision != "float32" else []
    difference = _difference_of_weights(result, value)
    remarks += [f"the weights are {difference}"] if difference else []
    remarks += [f"images of {result.chosen_size} px (--image-size)"] if result.chosen_size else []
    remarks += [f"images by the {result.decode} decoder"] if result.decode != "exact" else []
    remarks += [f"{result.skipped} images left out"] if result.skipped else []
    if not _on_published_images(result, value):
        measured, published = (_counts(images) for images in (result.data.images, SETS[value.data].images))
        is_ambiguous = value.data in set_names(result.data)
        remarks.append(
            f"{value.data} by its name alone: its counts are those of {' and '.join(set_names(result.data))}"
            if is_ambiguous
            else f"on other images: {measured}, {value.data} has {published}"
        )
    return tuple(remarks)


def _difference_of_weights(result: Result, value: PublishedValue) -> str:
    """How a network is obviously not the published one; "" if it may be."""
    return other_weights(value, result.checkpoint.method, result.checkpoint.architecture)


def _counts(images: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {split}" for split, count in images.items())


HEADS = ("weights", "what", "measured by", "published", "measured", "difference", "in standard errors", "source")


def table(pairs: Sequence[tuple[PublishedValue, Measurement | None]]) -> Iterator[str]:
    """A Markdown table of values: published, measured, and their difference."""
    rows = []
    for value, measured in pairs:
        spread = f" +- {value.std:g}" if value.std is not None else ""
        published = "" if isnan(value.value) else f"{value.value:g}{suffix(value.unit)}{spread}"
        cells = differences(value, measured)
        source = "; ".join(filter(None, (value.source, value.note)))
        rows.append((run_name(value), value.what, value.measured_by, published, *cells, source))
    yield from markdown_table([HEADS, *(map(in_markdown, row) for row in rows)])
    notes = {
        "+-: the standard deviation that is published.": any(value.std is not None for value, _ in pairs),
        "In brackets: 95 % intervals over the validation images.": any(m and m.interval for _, m in pairs),
        "Standard errors are of these images; published numbers are taken as exact.": any(row[-2] for row in rows),
    }
    shown = [note for note, is_shown in notes.items() if is_shown]
    yield from ["", *shown] if shown else []


def differences(value: PublishedValue, measured: Measurement | None) -> tuple[str, str, str]:
    """The measured value with its interval and remarks, the difference, and the difference in standard errors."""
    if measured is None:
        return "not measured", "", ""
    text = "; ".join([number_with_interval(measured.number, measured.unit, measured.interval), *measured.remarks])
    if isnan(value.value):
        return text, "", ""
    difference, digits = measured.number - value.value, interval_decimals(value.value, value.unit) + 1
    low, high = measured.interval or (0.0, 0.0)
    errors = f"{difference * 2 * Z95 / (high - low):+.1f}" if high > low else ""
    return text, f"{difference:+.{digits}f}", errors


COUNTS = ("plan", "values", "measured here", "trained here")


def caption_of(name: str) -> str:
    """What a plan measures."""
    plans = {
        TODAY: f"{len(WEIGHTS)} current networks by {SUITE.replace(',', ', ')}",
        LAPTOP: f"DINOv2's ViT-S/14 on CIFAR-10 and Flowers-102: {LAPTOP_NEEDS}",
    }
    return (plans | TABLES)[name]


def listing() -> Iterator[str]:
    """The counts of every table and of all tables, as a text table."""
    counts = {table: count_of(values_of(table)) for table in TABLES}
    rows: list[tuple[object, ...]] = [(name, *counts[name], caption_of(name)) for name in TABLES]
    rows.append(("all", *(sum(column) for column in zip(*counts.values(), strict=True)), ""))
    rows += [(plan, *[""] * (len(COUNTS) - 1), caption_of(plan)) for plan in (LAPTOP, TODAY)]
    yield from text_table([(*COUNTS, "what"), *rows], right=range(1, len(COUNTS)))
    yield from ("", "trained here: weights that a recipe pretrains, even if they are published")
    yield "published beside measured: bench reproduce PLAN; the commands: bench reproduce --plan PLAN"


def count_of(values: Sequence[PublishedValue]) -> list[int]:
    """Number of values, of those that can be measured, and of those whose weights can be trained."""
    measured = [value for value in values if not unmeasured(value)]
    trained = [value for value in values if not untrained(value)]
    return [len(values), len(measured), len(trained)]
