"""List suites and extensions of every kind, or describe one of them: bench list NAME."""

from dataclasses import dataclass

from bench.options import CommandOptions, Positional
from engine.extensions import extensions, one_line, refused_plugins, source_files, warn_of
from engine.printing import say, table

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
  bench list suites                   suites and their protocols
  bench list --protocols              every protocol with its version and source
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench list`."""

    # NAME: tasks, downstream, importers, methods, imagesets, layouts or suites; or the name of one of these
    name: Positional[str | None] = None
    protocols: bool = False  # list every protocol with its version and source
    recipes: bool = False  # list the methods' recipes with cost and source


def run(options: Options) -> int:
    """Print each name with its one-line description, without importing the files; other listings import them."""
    name = options.name
    if options.protocols and options.recipes:
        raise ValueError("--protocols and --recipes: give one of them; tasks have protocols, methods have recipes")
    if options.protocols:
        return _list_protocols(name)
    if options.recipes:
        return _list_recipes(name)
    if name in ("protocols", "recipes"):
        raise ValueError(f"bench list {name}: write bench list --{name}")
    if name == "suites":
        return _list_suites()
    if name and name not in SECTIONS:
        from bench.about import about

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
        say("suites: bench list suites", "details of any of these, or of a protocol: bench list NAME")
    return 0


def _list_suites() -> int:
    from bench.index import suites_of, task_entries

    entries, broken = task_entries()
    warn_of(broken)
    for suite, names in suites_of(entries.values()).items():
        say(f"{suite}: {len(names)} protocols; to list them: bench list {suite}")
    return 0


def _list_protocols(kind: str | None) -> int:
    from bench.index import KINDS, suites_of, task_entries

    if kind and kind not in SECTIONS:
        raise ValueError(f"--protocols lists those of tasks or downstream; for those of {kind} only: bench list {kind}")
    if kind and SECTIONS[kind] not in KINDS:
        raise ValueError(f"{kind} have no protocols; use: bench list tasks --protocols")
    entries, broken = task_entries()
    warn_of(broken)
    chosen = [entry for task, entry in entries.items() if not kind or task.kind == SECTIONS[kind]]
    say(f"suites: {', '.join(suites_of(chosen))}")
    rows = []
    for name, protocol in sorted((name, protocol) for entry in chosen for name, protocol in entry.protocols.items()):
        rows.append((name, f"version {protocol.version}  suites: {', '.join(protocol.suites) or 'none'}"))
        rows.append(("", protocol.source))
    say(*table(rows))
    if any(protocol.reported for entry in chosen for protocol in entry.protocols.values()):
        say("NAME_paper is NAME as its source reports it, chosen on the validation images: bench list NAME_paper")
    if not rows:
        say("no protocols yet")
    return 0


def _list_recipes(kind: str | None) -> int:
    from bench.pretraining.recipes import recipe_summary
    from engine.errors import in_one_line
    from engine.extensions import load_extension

    if kind and kind not in SECTIONS:
        raise ValueError(f"--recipes lists those of all methods; for those of {kind} only: bench list {kind}")
    if kind not in (None, "methods"):
        raise ValueError(f"{kind} have no recipes; use: bench list methods --recipes")
    for method, path in sorted(source_files("methods").items()):
        try:
            recipes = load_extension("methods", method).RECIPES
        except Exception as error:  # a plugin may fail in any way; the other methods are still listed
            say(f"bench: warning: method {method!r} is left out: {in_one_line(error)}", errors=True)
            continue
        say(f"{method}  {one_line(path)}".rstrip())
        rows = [
            row for name, recipe in recipes.items() for row in ((name, recipe_summary(recipe)), ("", recipe.source))
        ]
        say(*table(rows, indent=2))
    return 0
