"""`bench reproduce`: published numbers, the numbers measured here, and the commands that measure them.

A published value can be measured by a named protocol, by a protocol with changed settings, or, for a stated reason, not
at all; its weights are given by the user, or trained first. Measurements are read from the results in a folder, or from
the log of a training.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from bench.names import absent_file, absent_images
from bench.pretraining.recipes import changed_recipe
from bench.published.values import (
    LOG,
    PRETRAINED_ON,
    SETS,
    TABLES,
    PublishedValue,
    published_values,
    set_name,
    values_of,
)
from bench.reports.leaderboard import leaderboard_of
from bench.results.record import Result, interval_decimals, suffix
from bench.results.store import StoredResult
from bench.run.prepare import named_urls
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols
from bench.settings import named_values
from checkpoints.export import is_export
from checkpoints.frozen import SCHEME
from checkpoints.import_options import TIMM_SCHEMES
from checkpoints.runs import EXPORT, finished_export, identity_in, is_run
from checkpoints.spec import ViTSpec
from engine.extensions import load_extension, source_files, warn_of
from engine.files import read_json
from engine.printing import did_you_mean, printable
from engine.printing import table as text_table
from pretrain.loop.records import cost_of

Status = Literal["named", "set", "none"]
STATUSES: tuple[Status, ...] = ("named", "set", "none")


@cache
def protocols() -> Mapping[str, ChosenProtocol]:
    """All protocols of this installation by name; prints a warning for each task file that cannot be loaded."""
    known = catalogue()
    warn_of(known.broken)
    return known.protocols


def statuses(value: PublishedValue) -> tuple[Status, Status]:
    """How a value can be measured here, and how its weights can be trained.

    Each is "named" (by a named protocol or recipe), "set" (with settings changed by --set) or "none".
    """
    _, _, recipe_changes = trained_by(value)
    return (
        "none" if unmeasured(value) else "set" if value.settings else "named",
        "none" if untrained(value) else "set" if recipe_changes else "named",
    )


def unmeasured(value: PublishedValue) -> str:
    """Why a value cannot be measured with the protocols of this installation; "" if it can."""
    if value.protocol == LOG:
        return untrained(value)
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
HEADER = """#!/usr/bin/env bash
# {table}: {caption}
# Every command can be repeated: finished work is skipped, interrupted work is resumed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The weights and images of the user, and the folder and processes for the commands."""

    checkpoints: Mapping[str, str]  # name of published weights -> reference
    data: Mapping[str, str]  # name of a published image set -> URL
    out: Path  # folder of results and trainings
    processes: int = 1  # of torchrun; 1: without torchrun

    def url(self, data: str) -> str:
        """The user's URL of a published image set, or an example URL."""
        return self.data.get(data, SETS[data].url)

    def training(self, value: PublishedValue) -> Path:
        """The folder of the training of a value's weights."""
        return self.out / "pretraining" / value.checkpoint

    def export(self, value: PublishedValue) -> Path:
        """The export, in the training's folder, of the network on which the value was measured."""
        names = {"": EXPORT, START: START}
        return self.training(value) / names.get(value.network, f"{EXPORT}-{value.network}")

    def reference(self, value: PublishedValue) -> str:
        """The user's reference to the value's network, or else to its checkpoint; "" if there is none."""
        return self.checkpoints.get(run_name(value)) or self.checkpoints.get(value.checkpoint, "")


def run_name(value: PublishedValue) -> str:
    """The name of the weights in results: that of the checkpoint, followed by the network's unless it is the first."""
    return value.checkpoint + (f"-{value.network}" if value.network not in ("", START) else "")


def named_checkpoints(texts: Sequence[str], values: Iterable[PublishedValue]) -> dict[str, str]:
    """`--checkpoints NAME=REFERENCE ...` as a mapping. ValueError for a name that does not occur in `values`."""
    names = {name for value in values for name in (value.checkpoint, run_name(value))}
    references = named_values(texts, "--checkpoints", f"NAME=PATH, for example {min(names)}=/data/weights.pth")
    for name in references.keys() - names:
        hint = did_you_mean(name, sorted(names))
        raise ValueError(f"--checkpoints {name}={references[name]}: no weights here are called {name!r}{hint}")
    return references


def named_data(texts: Sequence[str]) -> dict[str, str]:
    """`--data NAME=URL ...` as a mapping. ValueError for a name that does not occur in the tables."""
    names = {*SETS, *(name for name, _ in PRETRAINED_ON.values() if name)}
    urls = named_urls(texts, "") if texts else {}
    if unknown := [name for name in urls if name not in names]:
        raise ValueError(f"--data {unknown[0]}: no table uses images of this name; choose {', '.join(sorted(names))}")
    return urls


def commands_of(value: PublishedValue, setup: Setup) -> list[list[str]]:
    """The commands that measure a value, in order, each as a list of words; empty if it cannot be measured."""
    if unmeasured(value):
        return []
    commands, reference = weights_of(value, setup)
    if value.protocol == LOG:
        return commands
    return [*commands, run_command(reference, run_name(value), [value.protocol], value.settings, [value.data], setup)]


def run_command(
    reference: str, name: str, protocols: Sequence[str], settings: str, data: Iterable[str], setup: Setup
) -> list[str]:
    """The words of the `bench run` that evaluates a checkpoint.

    settings: changes `FIELD=VALUE ...` of each of the protocols. data: names of published image sets.
    """
    words = ["bench", "run", "--checkpoint", reference, "--name", name, "--suite", ",".join(protocols)]
    words += ["--data", *(f"{image_set}={setup.url(image_set)}" for image_set in data), "--out", str(setup.out)]
    if settings:
        words += ["--set", *(f"{protocol}.{change}" for protocol in protocols for change in settings.split())]
    return with_torchrun(words, setup)


def weights_of(value: PublishedValue, setup: Setup) -> tuple[list[list[str]], str]:
    """The commands that obtain the weights, and the reference to them for `bench run --checkpoint`."""
    if (reference := setup.reference(value)) and value.protocol != LOG:
        return _import_if_needed(value, reference, setup)
    if not untrained(value):
        return [with_torchrun(_pretrain_command(value, setup), setup)], str(setup.export(value))
    return [], f"PATH-OF-{run_name(value)}"


def _pretrain_command(value: PublishedValue, setup: Setup) -> list[str]:
    method, recipe, changes = trained_by(value)
    name, example = PRETRAINED_ON[value.images]
    words = ["bench", "pretrain", method, "--recipe", recipe, "--images", setup.data.get(name, example)]
    words += ["--out", str(setup.training(value)), "--resume"]
    return [*words, "--set", *changes] if changes else words


def with_torchrun(words: list[str], setup: Setup) -> list[str]:
    """The command, started by torchrun if there are several processes."""
    if setup.processes == 1:
        return words
    return ["torchrun", "--nproc-per-node", str(setup.processes), "--no-python", *words]


def _import_if_needed(value: PublishedValue, reference: str, setup: Setup) -> tuple[list[list[str]], str]:
    """`weights_of` for the user's weights: no command, or the `bench import` that an option such as --branch needs."""
    scheme, importer = reference.partition(":")[0], value.importer.split()
    is_file = scheme not in (*source_files("importers"), *TIMM_SCHEMES) and not Path(reference).expanduser().is_dir()
    source = f"{importer[0]}:{reference}" if is_file and importer else reference
    is_of_network = run_name(value) in setup.checkpoints and run_name(value) != value.checkpoint
    branch = [] if is_of_network or value.network in ("", START) else ["--branch", value.network]
    options = [*branch, *importer[1:]]
    if scheme in TIMM_SCHEMES:  # timm's models lack only the image size at which the weights were evaluated
        options = importer[1:] if importer[1:2] == ["--image-size"] else []
    if not options or is_export(Path(reference).expanduser()):
        return [], source
    folder = str(setup.out / "imports" / run_name(value))
    return [["bench", "import", source, "--out", folder, *options]], folder


def other_weights(value: PublishedValue, method: str, architecture: str, epochs: float = 0) -> str:
    """How weights differ from the published ones: `of mae, not moca`; "" if no difference is known.

    method: of the export or the importer; timm and transformers do not name one. epochs: 0 if unknown.
    """
    if method in (SCHEME, "pixels"):
        return "not a checkpoint of a pretraining method, so its weights cannot be identified"
    differences, published_methods = [], {*value.importer.split()[:1], trained_by(value)[0]} - {""}
    if method not in ("", "timm", "transformers", *published_methods):
        differences.append(f"of {method}, not {' or '.join(sorted(published_methods)) or value.model}")
    if architecture and not architecture.startswith(value.architecture):
        differences.append(f"a {architecture}, not a {value.architecture}")
    if epochs and value.epochs and abs(epochs - float(value.epochs)) >= 1:
        differences.append(f"after {epochs:g} epochs, not {value.epochs}")
    return ", ".join(differences)


def _difference_of(value: PublishedValue, reference: str) -> str:
    """`other_weights` for a reference: from the facts of an export or training, or the scheme; no weights are read."""
    scheme, path = reference.partition(":")[0], Path(reference).expanduser()
    if is_run(path):
        path = finished_export(path) or path
    if is_export(path):
        facts = read_json(path / "config.json")["vit_export"]
        spec = ViTSpec(**facts["spec"])
        return other_weights(value, str(facts.get("method") or ""), spec.label, facts.get("epochs") or 0)
    if is_run(path):
        return other_weights(value, identity_in(path)["method"], "")
    return other_weights(value, scheme, "") if scheme in (*source_files("importers"), SCHEME, "pixels") else ""


def missing_for(value: PublishedValue, setup: Setup) -> list[str]:
    """What is missing to measure a value: `weights`, `data`, or a protocol or method; empty if nothing is missing."""
    if reason := unmeasured(value):
        return list(dict.fromkeys(filter(None, (reason, untrained(value)))))
    if value.protocol == LOG:
        return _missing_data(PRETRAINED_ON[value.images][0], setup)
    return [*_missing_weights(value, setup), *_missing_data(value.data, setup)]


def _missing_weights(value: PublishedValue, setup: Setup) -> list[str]:
    if reference := setup.reference(value):
        if path := None if reference.startswith(f"{SCHEME}:") else absent_file(reference):
            return [f"weights, as {path} does not exist"]
        difference = _difference_of(value, reference)
        return [f"these weights, as {reference} is {difference}"] if difference else []
    return [] if is_export(setup.export(value)) else ["weights"]


def _missing_data(name: str, setup: Setup) -> list[str]:
    if name not in setup.data:
        return ["data"]
    path = absent_images(setup.data[name])
    return [f"data, as {path} does not exist"] if path else []


def _example_comments(table: str, setup: Setup) -> Iterator[str]:
    """A comment for every example URL in the script that the user has to replace."""
    urls = {value.data: SETS[value.data].url for value in values_of(table) if value.data}
    urls |= dict(PRETRAINED_ON[value.images] for value in values_of(table) if value.pretraining and value.images)
    for name, url in urls.items():
        if name not in setup.data:
            yield f"# {url} is an example: change it to where yours are, or give --data {name}=URL"


def script(table: str, setup: Setup) -> Iterator[str]:
    """The lines of a shell script that measures a table: every command once, below the value that it measures."""
    yield HEADER.format(table=table, caption=TABLES[table])
    yield from _example_comments(table, setup)
    yield "set -euo pipefail"
    written: set[str] = set()
    for value in values_of(table):
        commands = [shlex.join(words) for words in commands_of(value, setup)]
        yield ""
        yield printable(f"# {value.what}: {value.measured_by}, published {value.value:g}")
        missing = missing_for(value, setup)
        yield from (f"# not here: {reason}" for reason in missing if not commands or reason.startswith("these weights"))
        without_weights = [command for command in commands if "PATH-OF-" in command]
        yield from ("# weights: give --checkpoints NAME=PATH" for _ in without_weights)
        yield from (f"# {command}" for command in without_weights)
        for command in commands:
            if command not in without_weights and command not in written:
                yield command
                written.add(command)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A number measured here."""

    number: float  # in the unit of the published one
    interval: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()  # why it may not be comparable with the published one


def measurement(
    value: PublishedValue,
    results: Sequence[StoredResult],
    setup: Setup,
) -> Measurement | None:
    """The number measured here for a published value, the mean over seeds; None if there is none."""
    if value.protocol == LOG:
        return measured_cost(setup.training(value), value.metric)
    matching = [stored.result for stored in results if _is_of(stored.result, value)]
    if not matching:
        return None
    group = min(matching, key=lambda result: _distance(result, value)).group
    column = group, value.metric
    cell = next(cells[column] for cells in leaderboard_of(matching).rows.values() if column in cells)
    first = next(result for result in matching if result.group == group)
    return Measurement(number=cell.mean, interval=cell.interval, remarks=_remarks(first, value))


def _distance(result: Result, value: PublishedValue) -> tuple[bool, int, str]:
    """Sort key of results, the closest to the published measurement first: on the published images, with the fewest
    variations such as a lower precision, by name."""
    return not _on_published_images(result, value), len(result.variant), result.group


def _on_published_images(result: Result, value: PublishedValue) -> bool:
    return set_name(result.data.images) == value.data


def _is_of(result: Result, value: PublishedValue) -> bool:
    """Whether a result measures a published value: the same weights, protocol, settings and image set."""
    if result.protocol.name != value.protocol or result.checkpoint.name != run_name(value):
        return False
    protocol = protocol_of(value)
    return (
        result.status == "ok"
        and result.limit is None
        and value.metric in result.metrics
        and result.protocol.version == protocol.protocol.version
        and dict(result.protocol.changes) == dict(protocol.changes)
        and (result.data.name == value.data or _on_published_images(result, value))
    )


def _remarks(result: Result, value: PublishedValue) -> tuple[str, ...]:
    """Known differences of a result from the published measurement."""
    remarks = [f"computed in {result.precision}"] if result.precision != "float32" else []
    difference = other_weights(value, result.checkpoint.method, result.checkpoint.architecture)
    remarks += [f"the weights are {difference}"] if difference else []
    remarks += [f"images by the {result.decode} decoder"] if result.decode != "exact" else []
    remarks += [f"{result.skipped} images left out"] if result.skipped else []
    if not _on_published_images(result, value):
        measured, published = (_counts(images) for images in (result.data.images, SETS[value.data].images))
        remarks.append(f"on other images: {measured}, {value.data} has {published}")
    return tuple(remarks)


def _counts(images: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {split}" for split, count in images.items())


def measured_cost(folder: Path, metric: str) -> Measurement | None:
    """Hours, minutes of an epoch, or GPU memory (GB) of the training in `folder`; None if unknown.

    Hours are extrapolated to all epochs from the speed so far.
    """
    if not is_run(folder):
        return None
    identity = identity_in(folder)
    spent, epochs = cost_of(folder, identity), identity["settings"]["epochs"]
    name, scale = {
        "hours": ("seconds_per_epoch", epochs / 3600),
        "minutes_per_epoch": ("seconds_per_epoch", 1 / 60),
        "gpu_memory": ("gpu_memory_gib", 1.0),  # papers print what drivers show, which is GiB, as GB
    }[metric]
    remarks = (f"on {spent['devices']}",) if spent.get("devices") else ()
    return Measurement(number=spent[name] * scale, remarks=remarks) if name in spent else None


HEADS = ("table", "values", *("measured by: protocol", "--set", "nothing"), *("trained by: recipe", "--set", "nothing"))
LEGEND = (
    "measured by: a named protocol (for a cost: the log of a training), or one with settings changed by --set.",
    "trained by: how the weights can be pretrained here, even if they are published.",
)


def listing() -> Iterator[str]:
    """A line for each table: id, number of values, how many can be measured in which way, caption."""
    width = max(map(len, TABLES))
    for table, caption in TABLES.items():
        values, named, changed, none, *_ = count_of(table)
        counts = f"{values:3} values: {named:3} by a named protocol, {changed:2} by --set, {none:2} not at all;"
        yield f"{table:{width}}  {counts}  {caption}"
    yield ""
    yield "one of them, value by value, with the commands: bench reproduce TABLE"


def summary() -> Iterator[str]:
    """The counts of every table and of all tables, and why the other values cannot be measured or trained here."""
    counts = {table: count_of(table) for table in TABLES}
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    yield from text_table([HEADS, *((name, *row) for name, row in counts.items())], right=range(1, len(HEADS)))
    yield from ("", *LEGEND)
    for title, reason_of in (("not measured here", unmeasured), ("weights not trained here", untrained)):
        yield from _count_reasons(title, [(value.table, reason_of(value)) for value in published_values()])


def count_of(table: str) -> list[int]:
    """Number of values of a table, and of those with each status of measuring and each status of training."""
    pairs = [statuses(value) for value in values_of(table)]
    counts = map(Counter, zip(*pairs, strict=True))
    return [len(pairs), *(count[status] for count in counts for status in STATUSES)]


def _count_reasons(title: str, reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each reason, with its number of values and their tables. reasons: (table, reason or "") per value."""
    tables_by_reason: dict[str, list[str]] = {}
    for table, reason in reasons:
        if reason:
            tables_by_reason.setdefault(reason, []).append(table)
    for reason, tables in tables_by_reason.items():
        yield f"{title}: {len(tables)}, {reason} ({', '.join(dict.fromkeys(tables))})"


def table_lines(table: str, setup: Setup, results: Sequence[StoredResult]) -> Iterator[str]:
    """For each value of a table: published and measured number, difference and interval, commands, what is missing."""
    values = values_of(table)
    yield f"{table}: {TABLES[table]}; {values[0].source}"
    heading = ""
    for value in values:
        if value.what != heading:
            yield from ("", f"{value.what}; weights {value.checkpoint}")
            heading = value.what
        spread = f" +- {value.std:g}" if value.std is not None else ""
        published = f"{value.value:g}{suffix(value.unit)}{spread}"
        yield f"  {value.measured_by}: published {published}; {_compared(measurement(value, results, setup), value)}"
        if value.note:
            yield f"    note: {value.note}"
        yield f"    missing: {', '.join(missing_for(value, setup)) or 'nothing'}"
        yield from (f"    {shlex.join(words)}" for words in commands_of(value, setup))


def _compared(measured: Measurement | None, value: PublishedValue) -> str:
    """The measured value, and its difference from the published one with the interval of the difference."""
    if measured is None:
        return "not measured here"
    difference = measured.number - value.value
    digits = interval_decimals(measured.number, value.unit)
    ends = [f"{end - value.value:+.{digits}f}" for end in measured.interval or ()]
    interval = f" [{', '.join(ends)}]" if ends else ""
    text = f"measured {measured.number:.2f}{suffix(value.unit)}, difference {difference:+.2f}{interval}"
    return "; ".join([text, *measured.remarks])
