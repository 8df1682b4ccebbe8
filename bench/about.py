"""`bench list NAME`: the description of a suite, a protocol or an extension, with its settings and their meanings.

If several of these have the same name, all are described.
"""

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Literal, get_args, get_origin

from bench.cli.output import table
from bench.cli.settings import alternatives, meanings, setting_text, types_of
from bench.pretraining.recipes import names_by_path, recipe_summary, values_by_path
from bench.run.suites import Catalogue, ChosenProtocol, catalogue
from downstream.data.scenes import TINY, served_layouts
from engine.extensions import Extension, extensions, load_extension, warn_of
from engine.printing import did_you_mean
from engine.tasks import Task
from pretrain.recipe import Recipe

LISTED_BY = "`bench list` or `bench list --protocols`"
MAX_VALUE = 40  # characters of a value on a line of a terminal


def about(name: str) -> Iterator[str]:
    """Lines that describe everything with this name. ValueError, suggesting a similar name, if there is nothing."""
    known = catalogue()
    warn_of(known.broken)
    by_kind = {kind: extensions(kind) for kind in DESCRIBED}
    layout = name.removeprefix(TINY).rstrip(":") if name.startswith(TINY) else ""
    if layout in by_kind["layouts"]:
        yield f"{TINY}{layout}: is a tiny generated set of this scene layout:"
        yield from _layout(by_kind["layouts"][layout])
        return
    if name not in (names := [*known.names(), *chain(*by_kind.values())]):
        raise ValueError(f"bench list: nothing is called {name!r}{did_you_mean(name, names, LISTED_BY)}")
    if name in known.suites:
        yield from _suite(name, known)
    if name in known.protocols:
        yield from _protocol(known.protocols[name], known)
    if protocols := [chosen for chosen in known.protocols.values() if name in (chosen.key, chosen.family)]:
        yield from _task(name, protocols, known)
    for kind, describe in DESCRIBED.items():
        if name in by_kind[kind]:
            yield from describe(by_kind[kind][name])


def _suite(name: str, known: Catalogue) -> Iterator[str]:
    protocols = [chosen for key, chosen in known.protocols.items() if key in known.suites[name]]
    yield f"suite {name}: {len(protocols)} protocols, in the order in which they run"
    yield from table([(chosen.name, f"task {chosen.key}{_needs(chosen)}") for chosen in protocols], indent=2)


def _needs(chosen: ChosenProtocol) -> str:
    return f", on scenes: --data {chosen.layout}={chosen.layout}:ROOT" if chosen.layout else ""


def _protocol(chosen: ChosenProtocol, known: Catalogue) -> Iterator[str]:
    suites = [suite for suite, names in known.suites.items() if chosen.name in names]
    yield f"protocol {chosen.name}, version {chosen.protocol.version}, of task {chosen.key}{_needs(chosen)}"
    yield _row("source", chosen.protocol.source)
    yield _row("suites", ", ".join(suites) or f"none; select it by --suite {chosen.name}")
    yield from _plugin(chosen.plugin)
    yield f"  settings, changed by --set {chosen.name}.NAME=VALUE:"
    task = chosen.task
    values = {field.name: setting_text(getattr(task, field.name)) for field in dataclasses.fields(task)}
    yield from _settings(values, meanings(type(task)), choices_of(task))


def _task(name: str, protocols: Sequence[ChosenProtocol], known: Catalogue) -> Iterator[str]:
    kind = "downstream" if protocols[0].layout else "probes"
    yield f"task {protocols[0].key}{_needs(protocols[0])}"
    yield from _docstring(extensions(kind)[protocols[0].key])
    yield from _plugin(protocols[0].plugin)
    yield "  protocols:"
    yield from table([(chosen.name, chosen.protocol.source) for chosen in protocols], indent=4)
    yield f"  settings, changed by --set {name}.NAME=VALUE; the most frequent value, and how many protocols have it:"
    task = protocols[0].task
    values = {
        field.name: _most_frequent(
            [setting_text(getattr(protocol.task, field.name, "")) or "(empty)" for protocol in protocols]
        )
        for field in dataclasses.fields(task)
    }
    yield from _settings(values, meanings(type(task)), choices_of(task))


def _importer(extension: Extension) -> Iterator[str]:
    module = load_extension("importers", extension.key)
    yield f"importer {extension.key}: bench import {extension.key}:PATH --out FOLDER"
    yield from _docstring(extension)
    yield _row("source", module.SOURCE)
    yield _row("branches", f"{', '.join(module.BRANCHES)}; the first unless --branch names another")
    yield _row("dropped", ", ".join(dict.fromkeys(module.DROPPED.values())) or "nothing")
    yield from _plugin(extension.plugin)


def _method(extension: Extension) -> Iterator[str]:
    recipes = load_extension("methods", extension.key).RECIPES
    yield f"method {extension.key}: bench pretrain {extension.key} --recipe NAME --images URL --out DIR"
    yield from _docstring(extension)
    yield from _plugin(extension.plugin)
    yield "  recipes:"
    yield from table(
        [(name, f"{recipe_summary(recipe)}; {recipe.source}") for name, recipe in recipes.items()], indent=4
    )
    yield "  settings, changed by --set NAME=VALUE:"
    by_recipe = {name: _values(recipe) for name, recipe in recipes.items()}
    names = dict.fromkeys(name for values in by_recipe.values() for name in values)
    values = {
        name: _value_or_values({recipe: values[name] for recipe, values in by_recipe.items() if name in values})
        for name in names
    }
    yield from _settings(values, _meanings_in(recipes.values()), _choices_in(recipes.values()))


def _image_set(extension: Extension) -> Iterator[str]:
    module = load_extension("imagesets", extension.key)
    yield f"image set {extension.key}: bench data check {extension.key}:{module.PLACE}"
    yield from _docstring(extension)
    yield _row("splits", ", ".join(module.SPLITS))
    yield from _plugin(extension.plugin)


def _layout(extension: Extension) -> Iterator[str]:
    key = extension.key
    layouts = (key, *served_layouts(key))
    protocols = [protocol for protocol in catalogue().protocols.values() if protocol.layout in layouts]
    tasks = dict.fromkeys(protocol.key for protocol in protocols)
    names = sorted(protocol.name for protocol in protocols)
    yield f"scene layout {key}: bench data check {key}:ROOT, or {TINY}{key}: for a tiny generated set"
    yield from _docstring(extension)
    yield _row("tasks", ", ".join(tasks) or "none")
    yield _row("protocols", ", ".join(names) or "none")
    yield from _plugin(extension.plugin)


# Kind of extension -> function that describes one; tasks are described by `_task`.
DESCRIBED = {"importers": _importer, "methods": _method, "imagesets": _image_set, "layouts": _layout}


def _values(recipe: Recipe) -> dict[str, str]:
    """Name of a setting, as in `--set` -> its value in a recipe."""
    names = names_by_path(recipe)
    return {names[path]: setting_text(value) for path, value in values_by_path(recipe).items()}


def _meanings_in(recipes: Iterable[Recipe]) -> dict[str, str]:
    """Name of a setting, as in `--set` -> its meaning."""
    texts: dict[str, str] = {}
    for recipe in recipes:
        for path, name in names_by_path(recipe).items():
            *parents, field = path.split(".")
            text = meanings(type(reduce(getattr, parents, recipe))).get(field)
            texts |= {name: text} if text else {}
    return texts


def _choices_in(recipes: Iterable[Recipe]) -> dict[str, str]:
    """Name of a setting, as in `--set` -> its possible values."""
    choices: dict[str, str] = {}
    for recipe in recipes:
        names = names_by_path(recipe)
        choices |= {names[path]: text for path, text in choices_of(recipe).items() if path in names}
    return choices


def choices_of(settings: Task | Recipe) -> dict[str, str]:
    """Path of a setting -> its possible values, for settings that have a fixed set of choices."""
    types = types_of(settings)
    choices = {path: ", ".join(map(str, get_args(kind))) for path, kind in types.items() if get_origin(kind) is Literal}
    return choices | {name: ", ".join(kinds) for name, kinds in alternatives(settings).items()}


def _most_frequent(values: Sequence[str]) -> str:
    """The value that all protocols have; or the most frequent one with its count: `cls (5 of 8)`."""
    ((value, count),) = Counter(values).most_common(1)
    return value if count == len(values) else f"{value} ({count} of {len(values)})"


def _value_or_values(values: Mapping[str, str]) -> str:
    """The value that all recipes have; or every value with its recipes: `100 (smoke); 800 (vit_b, vit_l)`.

    values: recipe -> value.
    """
    recipes: dict[str, list[str]] = {}
    for recipe, value in values.items():
        recipes.setdefault(value, []).append(recipe)
    if len(recipes) == 1:
        return next(iter(recipes))
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in recipes.items())


def _docstring(extension: Extension) -> Iterator[str]:
    """The indented docstring of an extension's file."""
    text = ast.get_docstring(ast.parse(extension.path.read_text())) or ""
    yield from (f"  {line}".rstrip() for line in text.splitlines())


def _plugin(package: str) -> Iterator[str]:
    if package:
        yield _row("plugin", f"of the package {package}")


def _row(name: str, text: str, width: int = 8) -> str:
    return "\n".join(table([(f"{name:{width}}", text)], indent=2))


def _settings(values: Mapping[str, str], texts: Mapping[str, str], choices: Mapping[str, str]) -> list[str]:
    rows = []
    for name, value in values.items():
        choice = f"[{choices[name]}]" if name in choices else ""
        rows.append((name, value or "(empty)", f"{texts.get(name, '')} {choice}".strip()))
    return table(rows, indent=4, wrapped={1: MAX_VALUE})
