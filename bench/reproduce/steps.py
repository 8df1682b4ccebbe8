"""The commands that would measure a published value: of weights that are given, or that are trained first.

What can measure it: names alone, names with changed settings, or nothing, with the reason.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bench.cli.settings import absent_file, absent_images
from bench.pretraining.recipes import changed_recipe
from bench.published.values import LOG, PRETRAINED_ON, SETS, TABLES, PublishedValue, values_of
from bench.run.prepare import named_urls
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols
from checkpoints.export import is_export
from checkpoints.frozen import SCHEME
from checkpoints.import_options import TIMM_SCHEMES
from checkpoints.spec import ViTSpec
from engine.extensions import load_extension, source_files, warn_of
from engine.printing import did_you_mean, printable
from pretrain.loop.exporting import EXPORT, finished_export, identity_in, is_run

Status = Literal["named", "set", "none"]
STATUSES: tuple[Status, ...] = ("named", "set", "none")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What there is to measure with."""

    protocols: Mapping[str, ChosenProtocol]
    methods: Mapping[str, ModuleType]
    importers: Mapping[str, ModuleType]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a published value can be measured here, by a named protocol or recipe, by settings, or not at all.

    evaluation: of existing weights. training: of such weights. unmeasured, untrained: why not; "" where it can be.
    """

    evaluation: Status
    training: Status
    unmeasured: str = ""
    untrained: str = ""

    @property
    def lacking(self) -> list[str]:
        """Both phrases, as far as there are any."""
        return [phrase for phrase in (self.unmeasured, self.untrained) if phrase]


@cache
def known() -> Known:
    """Protocols, methods and importers of this installation."""
    found = catalogue()
    warn_of(found.broken)
    methods, importers = (
        {key: load_extension(kind, key) for key in source_files(kind)} for kind in ("methods", "importers")
    )
    return Known(protocols=found.protocols, methods=methods, importers=importers)


def availability(value: PublishedValue, there: Known) -> Availability:
    """Whether `value` can be measured with the protocols, methods and importers of `there`."""
    training, untrained = _training(value, there)
    evaluation: Status
    if value.protocol == LOG:
        evaluation, unmeasured = ("none", untrained) if training == "none" else ("named", "")
    else:
        evaluation, unmeasured = _evaluation(value, there)
    return Availability(evaluation=evaluation, training=training, unmeasured=unmeasured, untrained=untrained)


def chosen(value: PublishedValue, there: Known) -> ChosenProtocol:
    """The protocol of a value, with its settings. ValueError where there is no such protocol or setting."""
    if value.protocol not in there.protocols:
        raise ValueError(
            f"there is no protocol {value.protocol}" if value.protocol else "no protocol here is that of its source"
        )
    texts = [f"{value.protocol}.{change}" for change in value.settings.split()]
    return changed_protocols([there.protocols[value.protocol]], texts)[0] if texts else there.protocols[value.protocol]


def _evaluation(value: PublishedValue, there: Known) -> tuple[Status, str]:
    try:
        chosen(value, there)
    except ValueError as error:
        return "none", str(error)
    return ("set" if value.settings else "named"), ""


def _training(value: PublishedValue, there: Known) -> tuple[Status, str]:
    method, recipe, changes = trained_by(value)
    if not method:
        return "none", "no method here trains these weights"
    if method not in there.methods:
        return "none", f"there is no method {method}"
    recipes: Mapping[str, Any] = there.methods[method].RECIPES
    if recipe not in recipes:
        return "none", f"{method} has no recipe {recipe}"
    try:
        changed_recipe(recipes[recipe], changes, method)
    except ValueError as error:
        return "none", str(error)
    return ("set" if changes else "named"), ""


def trained_by(value: PublishedValue) -> tuple[str, str, Sequence[str]]:
    """Method, recipe and changes; empty where nothing here trains it."""
    method, recipe, *changes = [*value.pretraining.split(), "", ""]
    return method, recipe, list(filter(None, changes))


START = "start"  # folder of a training that holds its initial weights, and the network of a value that is of these
HEADER = """#!/usr/bin/env bash
# {table}: {caption}
# Every command can be repeated: what is done is skipped or goes on."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What there is: checkpoint name -> reference, image set name -> URL. processes: of torchrun; 1 runs without."""

    checkpoints: Mapping[str, str]
    data: Mapping[str, str]
    out: Path
    processes: int = 1

    def training(self, value: PublishedValue) -> Path:
        """The folder of the training of a value's weights."""
        return self.out / "pretraining" / value.checkpoint

    def export(self, value: PublishedValue) -> Path:
        """The export of the network that was evaluated: that of the training's end, or of its start."""
        names = {"": EXPORT, START: START}
        return self.training(value) / names.get(value.network, f"{EXPORT}-{value.network}")

    def given(self, value: PublishedValue) -> str:
        """The reference that the user gave for it; "" for none. One of the network itself goes before."""
        return self.checkpoints.get(run_name(value)) or self.checkpoints.get(value.checkpoint, "")


def run_name(value: PublishedValue) -> str:
    """The name of the weights in results: that of the checkpoint and, where it is not the usual one, the network."""
    return value.checkpoint + (f"-{value.network}" if value.network not in ("", START) else "")


def named_checkpoints(texts: Sequence[str], values: Iterable[PublishedValue]) -> dict[str, str]:
    """`NAME=REFERENCE ...` as a mapping. ValueError for a name that no value has."""
    names = {name for value in values for name in (value.checkpoint, run_name(value))}
    found: dict[str, str] = {}
    for text in texts:
        name, equals, reference = text.partition("=")
        if not (equals and reference):
            raise ValueError(f"--checkpoints {text}: write NAME=PATH, for example {min(names)}=/data/weights.pth")
        if name not in names:
            raise ValueError(
                f"--checkpoints {text}: no weights here are called {name!r}{did_you_mean(name, sorted(names))}"
            )
        found[name] = reference
    return found


def named_data(texts: Sequence[str]) -> dict[str, str]:
    """`--data NAME=URL ...` as a mapping. ValueError for a name that no value has."""
    names = {*SETS, *(name for name, _ in PRETRAINED_ON.values() if name)}
    found = named_urls(texts, "") if texts else {}
    if unknown := [name for name in found if name not in names]:
        raise ValueError(f"--data {unknown[0]}: the tables know images by other names: {_listed(names)}")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def commands_of(value: PublishedValue, setup: Setup, there: Known) -> list[list[str]]:
    """The words of each command, in order; empty for what cannot be measured."""
    if availability(value, there).evaluation == "none":
        return []
    found, reference = weights_of(value, setup, there)
    if value.protocol == LOG:
        return found
    words = ["bench", "run", "--checkpoint", reference, "--name", run_name(value), "--suite", value.protocol]
    words += ["--data", f"{value.data}={setup.data.get(value.data, SETS[value.data].url)}", "--out", str(setup.out)]
    words += ["--set", *(f"{value.protocol}.{change}" for change in value.settings.split())] if value.settings else []
    return [*found, _launched(words, setup)]


def weights_of(value: PublishedValue, setup: Setup, there: Known) -> tuple[list[list[str]], str]:
    """The commands that make the weights, and what `bench run --checkpoint` then takes."""
    if (reference := setup.given(value)) and value.protocol != LOG:
        return _imported(value, reference, setup, there)
    if availability(value, there).training != "none":
        return [_launched(_pretrain(value, setup), setup)], str(setup.export(value))
    return [], f"PATH-OF-{run_name(value)}"


def _pretrain(value: PublishedValue, setup: Setup) -> list[str]:
    method, recipe, changes = trained_by(value)
    words = ["bench", "pretrain", method, "--recipe", recipe, "--images", images_of(value, setup)]
    words += ["--out", str(setup.training(value)), "--resume"]
    return [*words, "--set", *changes] if changes else words


def images_of(value: PublishedValue, setup: Setup) -> str:
    """URL of the images to pretrain on: given, or an example."""
    name, example = PRETRAINED_ON[value.images]
    return setup.data.get(name, example)


def _launched(words: list[str], setup: Setup) -> list[str]:
    if setup.processes == 1:
        return words
    return ["torchrun", "--nproc-per-node", str(setup.processes), "--no-python", *words]


def _imported(value: PublishedValue, reference: str, setup: Setup, there: Known) -> tuple[list[list[str]], str]:
    """An import of its own where the file alone does not say what to take of it."""
    scheme, importer = reference.partition(":")[0], value.importer.split()
    is_file = scheme not in (*there.importers, *TIMM_SCHEMES) and not Path(reference).expanduser().is_dir()
    named = f"{importer[0]}:{reference}" if is_file and importer else reference
    own_network = run_name(value) in setup.checkpoints and run_name(value) != value.checkpoint
    branch = [] if own_network or value.network in ("", START) else ["--branch", value.network]
    options = [*branch, *importer[1:]]
    if not options or is_export(Path(reference).expanduser()) or scheme in TIMM_SCHEMES:
        return [], named
    folder = str(setup.out / "imports" / run_name(value))
    return [["bench", "import", named, "--out", folder, *options]], folder


def other_weights(value: PublishedValue, method: str, architecture: str, epochs: float = 0) -> str:
    """How weights differ from the published ones, as far as is known of them: `of mae, not moca`; "" for nothing.

    method: of the export or the importer; timm's and transformers' say none. epochs: 0 where they are not known.
    """
    found, own = [], {*value.importer.split()[:1], trained_by(value)[0]} - {""}
    if method in (SCHEME, "pixels"):
        return "no checkpoint of a method: nothing says which weights these are"
    if method not in ("", "timm", "transformers", *own):
        found.append(f"of {method}, not {' or '.join(sorted(own)) or value.model}")
    if architecture not in ("", value.architecture):
        found.append(f"a {architecture}, not a {value.architecture}")
    if epochs and value.epochs and abs(epochs - float(value.epochs)) >= 1:
        found.append(f"after {epochs:g} epochs, not {value.epochs}")
    return ", ".join(found)


def _other_than(value: PublishedValue, reference: str, there: Known) -> str:
    """The same of a reference, without reading weights: of the facts of an export or a training, or of its scheme."""
    scheme, path = reference.partition(":")[0], Path(reference).expanduser()
    if is_run(path):
        path = finished_export(path) or path
    if is_export(path):
        facts = json.loads((path / "config.json").read_bytes())["vit_export"]
        spec = ViTSpec(**facts["spec"])
        return other_weights(value, str(facts.get("method") or ""), spec.label, facts.get("epochs") or 0)
    if is_run(path):
        return other_weights(value, identity_in(path)["method"], "")
    return other_weights(value, scheme, "") if scheme in (*there.importers, SCHEME, "pixels") else ""


def missing_for(value: PublishedValue, setup: Setup, there: Known) -> list[str]:
    """What there is not yet to measure it with: `weights`, `data`, or what is not in this tool; empty for nothing."""
    within = availability(value, there)
    if within.evaluation == "none":
        return list(dict.fromkeys(within.lacking))
    if value.protocol == LOG:
        return _missing_data(PRETRAINED_ON[value.images][0], setup)
    return [*_missing_weights(value, setup, there), *_missing_data(value.data, setup)]


def _missing_weights(value: PublishedValue, setup: Setup, there: Known) -> list[str]:
    if reference := setup.given(value):
        if place := None if reference.startswith(f"{SCHEME}:") else absent_file(reference):
            return [f"weights, as {place} does not exist"]
        other = _other_than(value, reference, there)
        return [f"these weights, as {reference} is {other}"] if other else []
    return [] if is_export(setup.export(value)) else ["weights"]


def _missing_data(name: str, setup: Setup) -> list[str]:
    if name not in setup.data:
        return ["data"]
    place = absent_images(setup.data[name])
    return [f"data, as {place} does not exist"] if place else []


def _examples(table: str, setup: Setup) -> Iterator[str]:
    """A comment on every place in the script that stands for the user's own."""
    urls = {value.data: SETS[value.data].url for value in values_of(table) if value.data}
    urls |= dict(PRETRAINED_ON[value.images] for value in values_of(table) if value.pretraining and value.images)
    for name, url in urls.items():
        if name not in setup.data:
            yield f"# {url} is an example: change it to where yours are, or give --data {name}=URL"


def script(table: str, setup: Setup) -> Iterator[str]:
    """The lines of a shell script with every command of a table once, and what it is for."""
    yield HEADER.format(table=table, caption=TABLES[table])
    yield from _examples(table, setup)
    yield "set -euo pipefail"
    written: set[str] = set()
    for value in values_of(table):
        found = [shlex.join(words) for words in commands_of(value, setup, known())]
        yield ""
        yield printable(f"# {value.what}: {value.measured_by}, published {value.value:g}")
        missing = missing_for(value, setup, known())
        yield from (f"# not here: {reason}" for reason in missing if not found or reason.startswith("these weights"))
        without = [line for line in found if "PATH-OF-" in line]
        yield from ("# weights: give --checkpoints NAME=PATH" for _ in without)
        yield from (f"# {line}" for line in without)
        for line in found:
            if line not in without and line not in written:
                yield line
                written.add(line)
