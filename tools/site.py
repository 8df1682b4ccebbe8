"""Hooks of mkdocs for the documentation site (mkdocs.yml). They add pages made from the code, pages from the root of
the repository, and the source files that pages link to.

Also an extension of griffe, which reads the code for the API's reference: the comment beside a field of a dataclass is
what the field means, as everywhere in this project.

Pages made from the code each time: methods with their recipes and numbers, importers, image sets, scene layouts, and
what every setting means, as `bench list` tells on a terminal. A new extension is on these pages by itself. The site
holds the boards of records/, too, as `bench site` makes and checks them.
"""

import dataclasses
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench.about import choices_of
from bench.cli.settings import meanings, setting_text
from bench.leaderboards.tables import Leaderboard, cell_text, leaderboard_of
from bench.pretraining.recipes import costs
from bench.published.values import LOG, published_values
from bench.reporting.drawing import svg_of
from bench.reporting.figures import training_figure
from bench.reporting.site import merged_results, training_log, write_site
from bench.results.record import CheckpointUsed
from bench.sharing.record import bibtex_entries, cited
from checkpoints.spec import ViTSpec
from downstream.data.scenes import TINY
from engine.extensions import load_extensions
from pretrain.recipe import Recipe

WRITTEN = "This page is made from the code.\n"
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "records"
BOARDS = "boards"  # folder of the site with the pages of records, where there are some


def reference_pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    return {
        "recipes.md": "\n".join(recipes_page(load_extensions("methods"))),
        **method_pages(load_extensions("methods")),
        "importers.md": "\n".join(importers_page(load_extensions("importers"))),
        "imagesets.md": "\n".join(image_sets_page(load_extensions("imagesets"), load_extensions("layouts"))),
        "settings.md": "\n".join(settings_page()),
        "board.md": "\n".join(board_page()),
    }


def records() -> list[Path]:
    """Folders of RECORDS that the site shows; docs/boards.md has the table of further trainings of their networks."""
    folders = (path.parent for path in RECORDS.glob("*/record.json"))
    return sorted(folder for folder in folders if not folder.name.endswith("-seeds"))


def board_page() -> Iterator[str]:
    """The way to the boards, and what they are made of."""
    yield "# Boards\n"
    if records():
        names = ", ".join(f"`records/{record.name}`" for record in records())
        yield f'<a href="{BOARDS}/index.html">Overview, checkpoints and protocols</a> of {names}. Each number follows'
        yield "from a result file; the build of this site checks the records as `bench record --check` does.\n"
    else:
        yield "No record lies in `records/` yet.\n"
    yield "[Contribute a row](sharing.md#contribute-a-row) says how a checkpoint comes onto them."


def recipes_page(methods: Mapping[str, ModuleType]) -> Iterator[str]:
    """Every method, which leads to its page, with its recipes."""
    yield f"# Methods and recipes\n\n`bench pretrain METHOD --recipe RECIPE` trains with one of these. {WRITTEN}"
    rows = (
        (f"[{key}](methods/{key}.md)", what_it_is(module), ", ".join(f"`{name}`" for name in module.RECIPES))
        for key, module in methods.items()
    )
    yield from markdown_rows(("method", "what it is", "recipes"), rows)


def method_pages(methods: Mapping[str, ModuleType]) -> dict[str, str]:
    """Path in the site -> a method's recipes and the numbers of its trainings, measured here and published."""
    results, places = merged_results(records())
    board = leaderboard_of(stored.result for stored in results)
    pages = {}
    for key, module in methods.items():
        papers = [f"Paper: {paper_link(bibtex_entries()[paper][0])}\n" for paper in cited([key])]
        lines = [f"# {key}\n\n{docstring_in(module)}\n", *papers]
        lines.append(f"`bench list {key}` shows all values; {SETTINGS}.\n")
        rows = ((f"`{name}`", costs(recipe), recipe.source) for name, recipe in module.RECIPES.items())
        lines += markdown_rows(("recipe", "what it takes", "source"), rows)
        trained = [used for used in board.rows if used.method == key]
        if trained:
            lines.append(
                f'## Measured here\n\nOn the <a href="../{BOARDS}/index.html">boards</a>, with 95 % intervals.\n'
            )
            heads = {used: f"{used.name}, {places[used.key].name}" for used in trained}
            lines += measured_rows(board, heads)
            logs = {heads[used]: log for used in trained if (log := training_log(places[used.key], used))}
            if drawing := svg_of(training_figure(logs), f"curves of {key}"):
                lines.append(f"<div>{' '.join(drawing.split())}</div>\n")
        published = [
            value
            for value in published_values()
            if value.pretraining.partition(" ")[0] == key and value.protocol != LOG  # a log has costs, not results
        ]
        if published:
            lines.append("## Published\n")
            numbers = (
                (value.what, f"{value.value:g} {value.unit}", f"`{value.measured_by}`", value.source)
                for value in published
            )
            lines += markdown_rows(("what", "number", "what measures it here", "source"), numbers)
        pages[f"methods/{key}.md"] = "\n".join(lines).replace("](settings.md)", "](../settings.md)")
    return pages


def paper_link(entry: str) -> str:
    """Title, venue and year of a BibTeX entry; the title leads to arXiv where the paper is there."""
    pairs = re.findall(r"^  (\w+) = {(.*)},$", entry, re.MULTILINE)
    fields = {name: re.sub(r"[{}]", "", value) for name, value in pairs}
    title = f"[{fields['title']}](https://arxiv.org/abs/{fields['eprint']})" if "eprint" in fields else fields["title"]
    return f"{title}, {fields.get('booktitle') or fields.get('journal') or 'preprint'} {fields['year']}"


def measured_rows(board: Leaderboard, heads: Mapping[CheckpointUsed, str]) -> Iterator[str]:
    """A table of main metrics, protocols down and checkpoints across, under their heads."""
    rows = []
    for group, (metric, *_) in board.groups.items():
        cells = [board.rows[used].get((group, metric)) for used in heads]
        if any(cells):  # an interval does not break
            rows.append((f"`{group}`", metric, *(cell_text(cell).replace(", ", ",&nbsp;") for cell in cells)))
    yield from markdown_rows(("protocol", "metric", *heads.values()), rows)


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


NOTEBOOK = "docs/notebook.ipynb"
# File of the repository -> its page, where the site names it differently.
SITE_NAMES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    NOTEBOOK: "notebook.md",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".ini": "ini",
}  # of files that get a page; others are copied


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for uri, text in reference_pages().items():
        files.append(File.generated(config, uri, content=text))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = linked_from(f"docs/{SITE_NAMES[name]}", (ROOT / name).read_text(encoding="utf-8"), at=name)
        files.append(File.generated(config, SITE_NAMES[name], content=text))
    files.append(File.generated(config, SITE_NAMES[NOTEBOOK], content=notebook_page()))
    for path in sorted(linked_sources(files)):
        uri = site_uri(path)
        if uri.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            if path.endswith(".md"):
                text = linked_from(f"docs/{uri}", text, at=path)
            else:
                text = f"# {path}\n\n````{LANGUAGES[Path(path).suffix]}\n{text}````\n"
            files.append(File.generated(config, uri, content=text))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Add the boards of the records. PluginError for a record that does not agree with its results."""
    if records():
        try:
            write_site(records(), Path(config.site_dir) / BOARDS, "Boards")
        except ValueError as error:
            raise PluginError(str(error)) from error


def notebook_page() -> str:
    """The cells of the notebook, without what they showed."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    codes = [cell["cell_type"] == "code" for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in zip(texts, codes, strict=True))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ lead to the pages that stand for their targets."""
    return linked_from(f"docs/{page.file.src_uri}", markdown, at=f"docs/{page.file.src_uri}")


CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
WORD = re.compile(r"[^\s,]+,?")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Code in tables breaks at spaces and after commas, not within a word (docs/extra.css)."""

    def whole_words(code: re.Match[str]) -> str:
        return "<code>" + WORD.sub(r'<span class="whole">\g<0></span><wbr>', code[1]) + "</code>"

    return CELL.sub(lambda cell: re.sub(r"<code>([^<]*)</code>", whole_words, cell[0]), html)


def linked_sources(files: Files) -> set[str]:
    """Files of the repository, outside docs/, that pages of docs/ link to."""
    paths = set()
    for file in files.documentation_pages():
        if file.abs_src_path:
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            paths |= {target_of(link, f"docs/{file.src_uri}") for link, _ in LINK.findall(text)}
    return {path for path in paths if not path.startswith(("docs/", "..")) and path not in SITE_NAMES}


def target_of(link: str, at: str) -> str:
    """The path in the repository that a link in the file `at` means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(at), link))


def site_uri(path: str) -> str:
    """Where the site has a file of the repository, relative to docs/."""
    if path in SITE_NAMES:
        return SITE_NAMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else f"source/{path}"


def linked_from(place: str, markdown: str, at: str) -> str:
    """The Markdown of the file `at` as a page at `place`: every link leads where the site has its target."""

    def link(match: re.Match[str]) -> str:
        uri = posixpath.relpath(f"docs/{site_uri(target_of(match[1], at))}", posixpath.dirname(place))
        return f"]({uri}{match[2] or ''})"

    return LINK.sub(link, markdown)


class FieldComments(griffe.Extension):
    """The comment beside a field, or the lines of it above, as the field's docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text(encoding="utf-8").splitlines()
            text = lines[(attr.endlineno or attr.lineno) - 1].partition("  # ")[2]
            if comment := text or comment_above(lines[: attr.lineno - 1]):
                attr.docstring = griffe.Docstring(comment, parent=attr)


def comment_above(lines: Sequence[str]) -> str:
    """The comment with which the lines end."""
    above = list(takewhile(lambda line: line.startswith("#"), (line.strip() for line in reversed(lines))))
    return " ".join(line.lstrip("# ") for line in reversed(above))
