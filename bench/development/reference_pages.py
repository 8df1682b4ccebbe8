"""Pages of the documentation site that are made from the code each time it is built: recipes, importers, image sets and
scene layouts, and what every setting means.

`bench list` tells the same on a terminal. A new extension is on these pages without anybody's doing.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from bench.about import choices_of
from bench.cli.meanings import meanings
from bench.cli.settings import setting_text
from bench.pretraining.recipes import costs
from checkpoints.spec import ViTSpec
from downstream.data.scenes import TINY
from engine.extensions import load_extensions
from pretrain.recipe import Recipe

WRITTEN = "This page is made from the code.\n"


def reference_pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    return {
        "recipes.md": "\n".join(recipes_page(load_extensions("methods"))),
        "importers.md": "\n".join(importers_page(load_extensions("importers"))),
        "imagesets.md": "\n".join(image_sets_page(load_extensions("imagesets"), load_extensions("layouts"))),
        "settings.md": "\n".join(settings_page()),
    }


def recipes_page(methods: Mapping[str, ModuleType]) -> Iterator[str]:
    """Every method with its recipes."""
    yield f"# Recipes\n\n`bench pretrain METHOD --recipe RECIPE` trains with one of these; {SETTINGS}. {WRITTEN}"
    for key, module in methods.items():
        yield f"## {key}\n\n{literal(what_it_is(module))}\n"
        rows = ((f"`{name}`", costs(recipe), recipe.source) for name, recipe in module.RECIPES.items())
        yield from markdown_rows(("recipe", "what it takes", "source"), rows)


SETTINGS = "[settings](settings.md) lists what `--set` changes"


def importers_page(importers: Mapping[str, ModuleType]) -> Iterator[str]:
    """Every importer: what it reads, which networks of a file, and what it drops."""
    yield f"# Importers\n\n`bench import IMPORTER:PATH --out FOLDER` reads checkpoints of these sources. {WRITTEN}"
    yield "Every tensor of a file is used, or dropped for one of the reasons below. The first branch is taken unless"
    yield "`--branch` names another.\n"
    rows = (
        (
            f"`{key}`",
            what_it_is(module),
            ", ".join(module.BRANCHES),
            ", ".join(dict.fromkeys(module.DROPPED.values())) or "nothing",
            module.SOURCE,
        )
        for key, module in importers.items()
    )
    yield from markdown_rows(("importer", "what it reads", "branches", "dropped", "official code"), rows)


def image_sets_page(sets: Mapping[str, ModuleType], layouts: Mapping[str, ModuleType]) -> Iterator[str]:
    """Every scheme of URLs."""
    yield "# Image sets and scenes\n\n`--data NAME=URL`, `--images URL` and `bench data check URL` take these."
    yield f"{WRITTEN}\n## Image sets\n"
    for key, module in sets.items():
        yield f"### {key}:{module.PLACE}\n\n{docstring_in(module)}\n\nSplits: {', '.join(module.SPLITS)}.\n"
    yield f"## Scenes\n\nFor dense tasks. `{TINY}NAME:` is a tiny generated set of each.\n"
    for key, module in layouts.items():
        yield f"### {key}:ROOT\n\n{docstring_in(module)}\n"


def settings_page() -> Iterator[str]:
    """Every setting of tasks, methods, recipes and the encoder, with its default and what it means."""
    yield f"# Settings\n\n`--set` changes them, and marks what came of it. {WRITTEN}"
    yield "`bench list NAME` shows the values of a protocol, or of the recipes of a method.\n"
    yield "## Of evaluations\n\n`bench run --set TASK.NAME=VALUE`.\n"
    for module in (load_extensions("probes") | load_extensions("downstream")).values():
        tasks = {type(protocol.task): protocol.task for protocol in module.PROTOCOLS.values()}
        for task in tasks.values():
            yield f"### {module.__name__.rpartition('.')[2]}\n\n{literal(what_it_is(module))}\n"
            yield from settings_table(type(task), choices_of(task))
    yield "## Of pretraining\n\n`bench pretrain METHOD --set NAME=VALUE`.\n"
    yield "### Every recipe\n"
    yield from settings_table(Recipe, {})
    yield "### The encoder\n"
    yield from settings_table(ViTSpec, {})
    for key, module in load_extensions("methods").items():
        recipe = next(iter(module.RECIPES.values()))
        choices = {path.removeprefix("settings."): text for path, text in choices_of(recipe).items()}
        yield f"### {key}\n\n{literal(what_it_is(module))}\n"
        yield from settings_table(type(recipe.settings), choices)


def settings_table(kind: type, choices: Mapping[str, str]) -> Iterator[str]:
    """Rows: field, default, meaning; a field without a default is set by every recipe."""
    texts = meanings(kind)
    rows = (
        (
            f"`{field.name}`",
            f"`{default_of(field)}`" if default_of(field) else "",
            texts.get(field.name, ""),
            choices.get(field.name, ""),
        )
        for field in dataclasses.fields(kind)
    )
    yield from markdown_rows(("setting", "default", "meaning", "choices"), rows)


def default_of(field: "dataclasses.Field[Any]") -> str:
    """As `--set` takes it; empty where there is none."""
    if field.default is not dataclasses.MISSING:
        return setting_text(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return type(field.default_factory()).__name__
    return ""


def markdown_rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table, and an empty line; a backtick begins and ends what is code already."""
    cells = tuple(header)
    yield f"| {' | '.join(cells)} |"
    yield f"|{'---|' * len(cells)}"
    for row in rows:
        yield f"| {' | '.join(literal(cell) for cell in row)} |"
    yield ""


def what_it_is(module: ModuleType) -> str:
    """The first paragraph of a file's docstring."""
    return (module.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")


def docstring_in(module: ModuleType) -> str:
    """The whole docstring of a file as Markdown, in which indented lines are code."""
    lines = (module.__doc__ or "").strip().split("\n")
    return "\n".join(line if line.startswith("    ") else literal(line) for line in lines)


def literal(text: str) -> str:
    """Text in which signs of Markdown and HTML stand for themselves; what is between backticks stays code."""
    signs: dict[str, str | int | None] = {"*": "&#42;", "<": "&lt;", "|": "&#124;"}
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.translate(str.maketrans(signs)) for part in parts)
