"""List suites and extensions of every kind, or describe one of them: bench list NAME."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from bench.options import CommandOptions, Positional
from bench.run.index import ProtocolEntry, TaskEntry, choices_of, suites_of, task_entries, with_choices
from engine.errors import UserError, in_one_line
from engine.extensions import (
    Extension,
    extensions,
    load_extension,
    one_line,
    refused_plugins,
    warn_of,
)
from engine.printing import did_you_mean, say, table
from engine.settings import setting_text

# Name on the command line -> kind of extension.
SECTIONS = {
    "tasks": "probes",
    "downstream": "downstream",
    "importers": "importers",
    "methods": "methods",
    "imagesets": "imagesets",
    "layouts": "layouts",
}
HEADINGS = {"tasks": " (probes, on image sets)", "downstream": " (dense tasks, on scene sets)"}
EPILOG = """examples:
  bench list                          tasks, importers, methods, image sets and layouts
  bench list knn@dino                 a protocol: its source, its settings, their values and what they mean
  bench list suites                   the suites
  bench list protocols                every protocol with its version and source
  bench list recipes                  every recipe of the methods with its sizes and source
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench list`."""

    # NAME: tasks, downstream, importers, methods, imagesets, layouts, suites, protocols or recipes; or the name of one
    name: Positional[str | None] = None


def run(options: Options) -> int:
    """Print each name with its one-line description, without importing the files; other listings import them."""
    name = options.name
    if name in LISTS:
        LISTS[name]()
        return 0
    if name and name not in SECTIONS:
        for entry in about(name):
            say(*entry.split("\n"))  # one entry may fill several lines
        return 0
    for title in [name] if name else SECTIONS:
        files = extensions(SECTIONS[title])
        heading = title + HEADINGS.get(title, "")
        say(f"{heading}:" if files else f"{heading}: none yet")
        plugins = {key: f"  [plugin: {extension.plugin}]" * bool(extension.plugin) for key, extension in files.items()}
        rows = [(key, one_line(extension.path) + plugins[key]) for key, extension in sorted(files.items())]
        say(*table(rows, indent=2))
        warn_of(refused_plugins(SECTIONS[title]))
    if not name:
        say(f"more: bench list {' | '.join(LISTS)}", "details of any of these, or of a protocol: bench list NAME")
    return 0


def _list_suites() -> None:
    entries, broken = task_entries()
    warn_of(broken)
    for suite, names in suites_of(entries.values()).items():
        say(f"{suite}: {len(names)} protocols; to list them: bench list {suite}")


def _list_protocols() -> None:
    entries, broken = task_entries()
    warn_of(broken)
    say(f"suites: {', '.join(suites_of(entries.values()))}")
    rows = []
    for name, protocol in sorted(chain.from_iterable(entry.listed.items() for entry in entries.values())):
        rows.append((name, f"version {protocol.version}  suites: {', '.join(protocol.suites) or 'none'}"))
        rows.append(("", protocol.source))
    say(*table(rows))
    say("NAME_paper is NAME as its source reports it, chosen on the validation images: bench list NAME_paper")


def _list_recipes() -> None:
    for extension in sorted(extensions("methods").values(), key=lambda extension: extension.key):
        try:
            lines = [f"{extension.key}  {one_line(extension.path)}".rstrip(), *_recipes(extension, indent=2)]
        except Exception as error:  # a plugin may fail in any way; the other methods are still listed
            say(f"bench: warning: method {extension.key!r} is left out: {in_one_line(error)}", errors=True)
            continue
        say(*lines)


LISTS = {"suites": _list_suites, "protocols": _list_protocols, "recipes": _list_recipes}


def _recipes(extension: Extension, indent: int) -> list[str]:
    from bench.pretraining.recipes import recipe_summary

    recipes = load_extension("methods", extension.key).RECIPES
    return table(
        [(name, f"{recipe_summary(recipe)}; {recipe.source}") for name, recipe in recipes.items()], indent=indent
    )


LISTED_BY = "`bench list` or `bench list protocols`"
MAX_VALUE = 40  # characters of a value on a line of a terminal
TINY = "tiny-"  # before a layout's name: its generated set
Tasks = Mapping[Extension, TaskEntry]


def about(name: str) -> Iterator[str]:
    """Lines that describe everything with this name. ValueError, suggesting a similar name, if there is nothing."""
    tasks, broken = task_entries()
    warn_of(broken)
    suites = suites_of(tasks.values())
    by_kind = {kind: extensions(kind) for kind in DESCRIBED}
    layout = name.removeprefix(TINY).rstrip(":") if name.startswith(TINY) else ""
    if layout in by_kind["layouts"]:
        yield f"{TINY}{layout}: is a tiny generated set of this scene layout:"
        yield from _layout(by_kind["layouts"][layout])
        return
    words = {task.key: None for task in tasks}
    words |= {word: None for entry in tasks.values() for key in entry.protocols for word in (_family(key), key)}
    if name not in (names := [*suites, *words, *chain(*by_kind.values())]):
        raise UserError("name", f"nothing is called {name!r}{did_you_mean(name, names, LISTED_BY)}")
    if name in suites:
        yield from _suite(name, suites[name], tasks)
    for task, entry in tasks.items():
        if name in entry.protocols:
            yield from _protocol(name, task, entry, suites)
        if own := [key for key in entry.listed if name in (task.key, _family(key))]:
            yield from _task(name, own, task, entry)
    for kind, describe in DESCRIBED.items():
        if name in by_kind[kind]:
            yield from describe(by_kind[kind][name])


def _family(protocol: str) -> str:
    """`upernet` of `upernet@mae`."""
    return protocol.partition("@")[0]


def _suite(name: str, members: Sequence[str], tasks: Tasks) -> Iterator[str]:
    yield f"suite {name}: {len(members)} protocols, in the order in which they run"
    rows = [
        (protocol.cost, key, f"task {task.key}{_needs(protocol)}")
        for task, entry in tasks.items()
        for key, protocol in entry.protocols.items()
        if key in members
    ]
    rows.sort(key=lambda row: row[0])
    yield from table([row[1:] for row in rows], indent=2)


def _needs(protocol: ProtocolEntry) -> str:
    return f", on scenes: --data {protocol.layout}={protocol.layout}:ROOT" if protocol.layout else ""


def _protocol(name: str, task: Extension, entry: TaskEntry, suites: Mapping[str, Sequence[str]]) -> Iterator[str]:
    protocol = entry.protocols[name]
    own = [suite for suite, names in suites.items() if name in names]
    yield f"protocol {name}, version {protocol.version}, of task {task.key}{_needs(protocol)}"
    yield _row("source", protocol.source)
    yield _row("suites", ", ".join(own) or f"none; select it by --suite {name}")
    yield from _plugin(task.plugin)
    yield f"  settings, changed by --set {name}.NAME=VALUE:"
    texts = {setting: text for setting, (_, text) in entry.classes[protocol.task_class].items()}
    yield from _settings(entry.settings(protocol), texts)


def _task(name: str, protocols: Sequence[str], task: Extension, entry: TaskEntry) -> Iterator[str]:
    yield f"task {task.key}{_needs(entry.protocols[protocols[0]])}"
    yield from _docstring(task)
    yield from _plugin(task.plugin)
    yield "  protocols:"
    yield from table([(protocol, entry.protocols[protocol].source) for protocol in protocols], indent=4)
    if variants := [key for key in entry.protocols if key not in entry.listed and key.rpartition("_")[0] in protocols]:
        yield f"  as their sources report them, chosen on the validation images: {', '.join(variants)}"
    yield f"  settings of a protocol: bench list {protocols[0]}"


def _importer(extension: Extension) -> Iterator[str]:
    module = load_extension("importers", extension.key)
    yield f"importer {extension.key}: bench import {extension.key}:PATH --out FOLDER"
    yield from _docstring(extension)
    yield _row("source", module.SOURCE)
    yield _row("branches", f"{', '.join(module.BRANCHES)}; the first unless --branch names another")
    yield _row("dropped", ", ".join(dict.fromkeys(module.DROPPED.values())) or "nothing")
    yield from _plugin(extension.plugin)


def _method(extension: Extension) -> Iterator[str]:
    from bench.pretraining.recipes import meanings_of, names_by_path, values_by_path

    recipes = load_extension("methods", extension.key).RECIPES
    yield f"method {extension.key}: bench pretrain {extension.key} --recipe NAME --images URL --out DIR"
    yield from _docstring(extension)
    yield from _plugin(extension.plugin)
    yield "  recipes:"
    yield from _recipes(extension, indent=4)
    yield "  settings, changed by --set NAME=VALUE:"
    values: dict[str, dict[str, str]] = {}  # setting -> recipe -> value
    texts: dict[str, str] = {}
    for recipe_name, recipe in recipes.items():
        names, choices = names_by_path(recipe), choices_of(recipe)
        for path, value in values_by_path(recipe).items():
            values.setdefault(names[path], {})[recipe_name] = setting_text(value)
        texts |= with_choices(
            meanings_of(recipe), {names[path]: text for path, text in choices.items() if path in names}
        )
    yield from _settings({name: _value_or_values(of_recipes) for name, of_recipes in values.items()}, texts)


def _image_set(extension: Extension) -> Iterator[str]:
    module = load_extension("imagesets", extension.key)
    yield f"image set {extension.key}: bench data check {extension.key}:{module.PLACE}"
    yield from _docstring(extension)
    yield _row("splits", ", ".join(module.SPLITS))
    yield from _plugin(extension.plugin)


def _layout(extension: Extension) -> Iterator[str]:
    key = extension.key
    layouts = (key, *getattr(load_extension("layouts", key), "SERVES", ()))
    names: dict[str, list[str]] = {}  # task -> its protocols on these scenes
    for task, entry in task_entries()[0].items():
        if own := [name for name, protocol in entry.listed.items() if protocol.layout in layouts]:
            names[task.key] = own
    yield f"scene layout {key}: bench data check {key}:ROOT, or {TINY}{key}: for a tiny generated set"
    yield from _docstring(extension)
    yield _row("tasks", ", ".join(names) or "none")
    yield _row("protocols", ", ".join(sorted(chain(*names.values()))) or "none")
    yield from _plugin(extension.plugin)


# Kind of extension -> function that describes one; tasks are described by `_task`.
DESCRIBED = {"importers": _importer, "methods": _method, "imagesets": _image_set, "layouts": _layout}


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


def _settings(values: Mapping[str, str], texts: Mapping[str, str]) -> list[str]:
    rows = [(name, value or "(empty)", texts.get(name, "")) for name, value in values.items()]
    return table(rows, indent=4, wrapped={1: MAX_VALUE})
