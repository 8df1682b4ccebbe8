"""Hooks of mkdocs, which builds the documentation site (mkdocs.yml), and an extension of griffe for the API reference.

The hooks add the files of the repository that pages link to, the boards of records/, which `bench site` checks, and
pages generated from the code at every build: methods with their recipes and numbers, importers, image sets, scene
layouts, and the meaning of every setting. A new extension appears on them without a change here.

The extension of griffe makes the comment of a dataclass field its docstring.
"""

import dataclasses
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench.pretraining.recipes import recipe_summary
from bench.published.values import LOG, PublishedValue, published_values
from bench.reports.contents import ReportContents, contents
from bench.reports.drawing import svg_of
from bench.reports.figures import training_figure
from bench.reports.leaderboard import cell_text, leaderboard_of_stored
from bench.reports.record import bibtex_entries, cited, recorded_results
from bench.reports.site import about, starts_of, training_log, write_site
from bench.run.index import choices_of
from checkpoints.spec import ViTSpec
from downstream.data.scenes import TINY
from engine.extensions import load_extensions
from engine.printing import markdown_table
from engine.settings import meanings, setting_text
from pretrain.recipe import Recipe
from tools.board import Record, companion_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATED = "This page is made from the code.\n"
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "records"
BOARDS = "boards"  # folder of the site with the pages of records, if there are any


def reference_pages() -> dict[str, str]:
    """Path in the site -> Markdown of each generated page."""
    methods = load_extensions("methods")
    tasks = load_extensions("probes") | load_extensions("downstream")
    return {
        "index.md": home_page(),
        "recipes.md": "\n".join(recipes_page(methods)),
        **method_pages(methods),
        "importers.md": "\n".join(importers_page(load_extensions("importers"))),
        "imagesets.md": "\n".join(image_sets_page(load_extensions("imagesets"), load_extensions("layouts"))),
        "settings.md": "\n".join(settings_page(tasks)),
        **{f"settings/{key}.md": "\n".join(task_settings_page(key, module)) for key, module in tasks.items()},
    }


def records() -> list[Path]:
    """The folders of RECORDS."""
    return sorted(path.parent for path in RECORDS.glob("*/record.json"))


def pretraining_boards() -> list[Record]:
    """The boards among the records, the largest budget first."""
    candidates = [Record(folder=folder) for folder in records() if companion_file(folder, "json").is_file()]
    with_budget = [record for record in candidates if "tflop" in record.about]  # not records of published networks
    return sorted(with_budget, key=lambda record: -float(record.about["tflop"]))


CARDS = """
<div class="grid cards" markdown>

- **Evaluate a checkpoint**

    A published one, your own, or any `nn.Module`: k-NN, probes, fine-tuning, dense tasks.

    [Tutorial](tutorial.md) &middot; [Image sets](data.md) &middot; [Protocols](protocols.md)

- **Pretrain**

    24 methods with the recipes of their papers, on a laptop or a cluster.

    [Pretraining](pretraining.md) &middot; [Methods](recipes.md) &middot; [Costs](scale.md)

- **Share numbers that others can check**

    Leaderboards with paired tests, model cards, records.

    [Reading a leaderboard](reading-a-leaderboard.md) &middot; [Boards](boards.md) &middot; [Sharing](sharing.md)

</div>
"""

HOME_SECTIONS = ("What has been validated", "Compared with other tools")  # of README


def home_page() -> str:
    """README's opening, its picture of a board drawn from the record, three ways on, and what stands beside them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    board_part = next(part for part in text.split("\n\n") if "](docs/board.png)" in part)
    opening, *sections = text.split("\n## ")
    paragraphs = [part for part in opening.split("\n\n") if part != board_part and not part.startswith("[![")]
    picture, _, caption = board_part.partition("\n")
    boards = pretraining_boards()
    paragraphs += [board_figure(boards[0]) if boards else picture, caption]
    above = "\n\n".join(paragraphs)
    by_title = {part.partition("\n")[0]: part for part in sections}
    below = "".join(f"\n## {by_title[title]}" for title in HOME_SECTIONS)
    above, below = (with_site_links("docs/index.md", part, at="README.md") for part in (above, below))
    return f"{above}\n{CARDS}{below}"


def board_figure(record: Record, method: str = "") -> str:
    """The figure of a board as HTML, with the row of a method shaded."""
    return figure_on_white(record.figure(method), f"accuracies of small ViTs, {about(record.folder)[0]}")


def figure_on_white(figure: "Figure", name: str) -> str:
    """A figure as HTML, on white also where the page is dark; narrow screens scroll it."""
    return f'<div class="paper">{" ".join(svg_of(figure, name).split())}</div>'


def recipes_page(methods: Mapping[str, ModuleType]) -> Iterator[str]:
    """All methods, linked to their pages, with their recipes."""
    yield f"# Methods and recipes\n\n`bench pretrain METHOD --recipe RECIPE` trains with one of these. {GENERATED}"
    rows = (
        (f"[{key}](methods/{key}.md)", first_paragraph(module), ", ".join(f"`{name}`" for name in module.RECIPES))
        for key, module in methods.items()
    )
    yield from markdown_rows(("method", "description", "recipes"), rows)


def method_pages(methods: Mapping[str, ModuleType]) -> dict[str, str]:
    """Path in the site -> page of each method: a command, its recipes, and its numbers, measured and published."""
    pages, boards = {}, pretraining_boards()
    boards_of = {record: leaderboard_of_stored(recorded_results(record)[0]) for record in records()}
    measured = {record: contents(board, starts=starts_of(record)) for record, board in boards_of.items()}
    for key, module in methods.items():
        papers = [f"Paper: {paper_link(bibtex_entries()[paper][0])}\n" for paper in cited([key])]
        first = next(iter(module.RECIPES))
        lines = [f"# {method_title(module)}\n\n{docstring_in(module)}\n", *papers]
        lines.append(f"```\nbench pretrain {key} --recipe {first} --images imagenet:/data --out runs/{key}\n```\n")
        lines.append(f"`bench list {key}` shows all values of a recipe; `--set` changes the settings below.\n")
        rows = ((f"`{name}`", recipe_summary(recipe), recipe.source) for name, recipe in module.RECIPES.items())
        lines += markdown_rows(("recipe", "what it takes", "source"), rows)
        lines += measured_section(key, measured, boards)
        published = [
            value
            for value in published_values()
            if value.pretraining.partition(" ")[0] == key and value.protocol != LOG  # a log has costs, not results
        ]
        if published:
            lines.append("## Published\n")
            numbers = (
                (described(value), f"{value.value:g} {value.unit}", f"`{value.measured_by}`", value.source)
                for value in published
            )
            lines += markdown_rows(("what", "number", "what measures it here", "source"), numbers)
        lines.append("## Settings\n")
        recipe = module.RECIPES[first]
        choices = {path.removeprefix("settings."): text for path, text in choices_of(recipe).items()}
        lines += settings_table(type(recipe.settings), choices)
        lines.append("Those of every recipe and of the encoder: [settings](../settings.md#of-pretraining).")
        pages[f"methods/{key}.md"] = "\n".join(lines)
    return pages


def described(value: PublishedValue) -> str:
    """What a published value is of, with a note if no protocol measures it here."""
    return value.what if value.protocol else f"{value.what} ({value.note})"


def method_title(module: ModuleType) -> str:
    """The name of a method, with which the docstring of its file begins: `MAE (He et al. 2022): ...`."""
    return re.split(r"[,:] | \(", first_paragraph(module))[0]


def measured_section(method: str, measured: Mapping[Path, ReportContents], boards: Sequence[Record]) -> Iterator[str]:
    """The numbers and curves of a method's trainings on each record, and the picture of the first board that has it.

    measured: record -> its report.
    """
    pictured = next((board for board in boards if method in board.networks), None)
    for record, report in measured.items():
        board = report.board
        trained = [used for used, kind in board.kinds.items() if used.method == method and kind == "measured"]
        if not trained:
            continue
        initial = report.tables[0].starts.get(trained[0].key)
        columns = {used.name: used for used in trained} | ({"initial weights": initial} if initial else {})
        yield f'## Measured: {about(record)[0]}\n\nOn <a href="../{board_file(record)}">its page</a> beside the others.'
        yield f"Recipe `{trained[0].recipe}`. 95 % intervals are over validation images.\n"
        rows = []
        for table in report.tables:
            cells = [table.cells.get(used) for used in columns.values()]
            if any(cells):
                rows.append((f"{table.title} on {table.result.data.name}, {table.metrics[0]}", *map(cell_text, cells)))
        yield from markdown_rows(("protocol, metric", *columns), rows)
        logs = {used.name: log for used in trained if (log := training_log(record, used))}
        if svg := svg_of(training_figure(logs), f"curves of {method}"):
            yield f"<div>{' '.join(svg.split())}</div>\n"
        if pictured and pictured.folder == record:
            yield f"{board_figure(pictured, method)}\n"


def board_file(record: Path) -> str:
    """Path in the site of a record's page."""
    return f"{BOARDS}/{'index' if len(records()) == 1 else record.name}.html"


def paper_link(entry: str) -> str:
    """Title, venue and year of a BibTeX entry, with a link to arXiv if the paper is there."""
    pairs = re.findall(r"^  (\w+) = {(.*)},$", entry, re.MULTILINE)
    fields = {name: re.sub(r"[{}]", "", value) for name, value in pairs}
    title = f"[{fields['title']}](https://arxiv.org/abs/{fields['eprint']})" if "eprint" in fields else fields["title"]
    return f"{title}, {fields.get('booktitle') or fields.get('journal') or 'preprint'} {fields['year']}"


def importers_page(importers: Mapping[str, ModuleType]) -> Iterator[str]:
    """All importers: the files that they read, the networks in a file, and the tensors that are dropped."""
    yield f"# Importers\n\n`bench import IMPORTER:PATH --out FOLDER` reads checkpoints of these sources. {GENERATED}"
    yield "Every tensor of a file is used, or dropped for one of the reasons below. The first branch is taken unless"
    yield "`--branch` names another.\n"
    rows = (
        (
            f"`{key}`",
            first_paragraph(module),
            ", ".join(module.BRANCHES),
            ", ".join(dict.fromkeys(module.DROPPED.values())) or "nothing",
            module.SOURCE,
        )
        for key, module in importers.items()
    )
    yield from markdown_rows(("importer", "what it reads", "branches", "dropped", "official code"), rows)


def image_sets_page(sets: Mapping[str, ModuleType], layouts: Mapping[str, ModuleType]) -> Iterator[str]:
    """All schemes of URLs, of image sets and of scene sets."""
    yield "# Image sets and scenes\n\n`--data NAME=URL`, `--images URL` and `bench data check URL` take these."
    yield f"{GENERATED}\n## Image sets\n"
    for key, module in sets.items():
        yield f"### {key}:{module.PLACE}\n\n{docstring_in(module)}\n\nSplits: {', '.join(module.SPLITS)}.\n"
    yield f"## Scenes\n\nFor dense tasks. `{TINY}NAME:` is a tiny generated set of each.\n"
    for key, module in layouts.items():
        yield f"### {key}:ROOT\n\n{docstring_in(module)}\n"


def settings_page(tasks: Mapping[str, ModuleType]) -> Iterator[str]:
    """Links to the settings of each task and method; the settings of every recipe, and of the encoder."""
    yield f"# Settings\n\n`--set` changes them, and results are marked. {GENERATED}"
    yield "`bench list NAME` shows the values of a protocol, or of the recipes of a method.\n"
    yield "## Of evaluations\n\n`bench run --set TASK.NAME=VALUE`.\n"
    rows = ((f"[{key}](settings/{key}.md)", first_paragraph(module)) for key, module in tasks.items())
    yield from markdown_rows(("task", "what it measures"), rows)
    yield "## Of pretraining\n\n`bench pretrain METHOD --set NAME=VALUE`; [methods](recipes.md) have their own.\n"
    yield "### Every recipe\n"
    yield from settings_table(Recipe, {})
    yield "### The encoder\n"
    yield from settings_table(ViTSpec, {})


def task_settings_page(key: str, module: ModuleType) -> Iterator[str]:
    """The settings of a task; of several, if protocols of its file have different classes."""
    yield f"# Settings of {key}\n\n{literal(first_paragraph(module))} Its [protocols](../protocols.md#{key}).\n"
    for task in {type(protocol.task): protocol.task for protocol in module.PROTOCOLS.values()}.values():
        yield from settings_table(type(task), choices_of(task))


def settings_table(kind: type, choices: Mapping[str, str]) -> Iterator[str]:
    """A table of the fields of a dataclass: default, meaning, choices. All recipes set the fields without a default."""
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
    """The default of a field in the syntax of `--set`; "" if there is none."""
    if field.default is not dataclasses.MISSING:
        return setting_text(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return type(field.default_factory()).__name__
    return ""


def markdown_rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table, and an empty line. Cells are literal text, apart from code between backticks."""
    yield from markdown_table([header, *(map(literal, row) for row in rows)])
    yield ""


def first_paragraph(module: ModuleType) -> str:
    """The first paragraph of a file's docstring."""
    return (module.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")


def docstring_in(module: ModuleType) -> str:
    """The whole docstring of a file as Markdown; indented lines are code."""
    lines = (module.__doc__ or "").strip().split("\n")
    return "\n".join(line if line.startswith("    ") else literal(line) for line in lines)


def literal(text: str) -> str:
    """Text with the special characters of Markdown and HTML escaped, apart from code between backticks."""
    escapes: dict[str, str | int | None] = {"*": "&#42;", "<": "&lt;", "|": "&#124;"}
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.translate(str.maketrans(escapes)) for part in parts)


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


def on_config(config: MkDocsConfig) -> None:
    """Hook of mkdocs: put the pages of methods and of settings below their overviews in the navigation."""
    methods = {method_title(module): f"methods/{key}.md" for key, module in load_extensions("methods").items()}
    tasks = {key: f"settings/{key}.md" for key in load_extensions("probes") | load_extensions("downstream")}
    below = {"recipes.md": methods, "settings.md": tasks}
    for section in (pages for entry in config.nav or () for pages in entry.values() if isinstance(pages, list)):
        for number, entry in enumerate(section):
            ((title, page),) = entry.items() if isinstance(entry, dict) else (("", entry),)
            if page in below:
                inside = sorted(below[page].items(), key=lambda item: item[0].lower())
                section[number] = {title: [page, *({name: path} for name, path in inside)]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Hook of mkdocs: add the pages that are not files of docs/."""
    for uri, text in reference_pages().items():
        files.append(File.generated(config, uri, content=text))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = with_site_links(f"docs/{SITE_NAMES[name]}", (ROOT / name).read_text(encoding="utf-8"), at=name)
        files.append(File.generated(config, SITE_NAMES[name], content=text))
    files.append(File.generated(config, SITE_NAMES[NOTEBOOK], content=notebook_page()))
    for path in sorted(linked_sources(files)):
        uri = site_uri(path)
        if uri.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            if path.endswith(".md"):
                text = with_site_links(f"docs/{uri}", text, at=path)
            else:
                text = f"# {path}\n\n````{LANGUAGES[Path(path).suffix]}\n{text}````\n"
            files.append(File.generated(config, uri, content=text))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Hook of mkdocs: add the boards of the records. PluginError for a record that does not agree with its results."""
    if records():
        try:
            write_site(records(), Path(config.site_dir) / BOARDS, back="../boards.html")
        except ValueError as error:
            raise PluginError(str(error)) from error


def notebook_page() -> str:
    """The cells of the notebook as Markdown, without outputs."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    codes = [cell["cell_type"] == "code" for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in zip(texts, codes, strict=True))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Hook of mkdocs: point links outside of docs/ to pages of the site; link boards; hide the log from searches."""
    if page.file.src_uri == "log.md":
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri == "boards.md":
        markdown = markdown.replace("\n<a id=", "\n" + "\n".join(board_links()) + "\n\n<a id=", 1)
        for board in pretraining_boards()[:1]:
            drawn = {
                "board.png": board_figure(board),
                "board-curves.png": figure_on_white(board.curves(), "k-NN accuracy"),
            }
            for file, html in drawn.items():
                end = markdown.index(f"]({file})")
                markdown = f"{markdown[: markdown.rindex('![', 0, end)]}{html}\n{markdown[end + len(f']({file})') :]}"
    return with_site_links(f"docs/{page.file.src_uri}", markdown, at=f"docs/{page.file.src_uri}")


def board_links() -> Iterator[str]:
    """A list of the pages of records, each with what it is."""
    for record in records():
        title, introduction = about(record)
        yield f'- <a href="{board_file(record)}">{literal(title)}</a>: {literal(introduction)}'


CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
WORD = re.compile(r"[^\s,]+,?")
INTERVAL = re.compile(r"\[-?[\d.]+, -?[\d.]+\]")
WHOLE = r'<span class="whole">\g<0></span>'  # (docs/extra.css)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Hook of mkdocs: let code in tables break at spaces and after commas, not within words, and intervals nowhere."""

    def whole_words(code: re.Match[str]) -> str:
        return "<code>" + WORD.sub(f"{WHOLE}<wbr>", code[1]) + "</code>"

    def whole_parts(cell: re.Match[str]) -> str:
        return INTERVAL.sub(WHOLE, re.sub(r"<code>([^<]*)</code>", whole_words, cell[0]))

    return CELL.sub(whole_parts, html)


def linked_sources(files: Files) -> set[str]:
    """Files of the repository, outside docs/, that pages of docs/ link to."""
    paths = set()
    for file in files.documentation_pages():
        if file.abs_src_path:
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            paths |= {target_of(link, f"docs/{file.src_uri}") for link, _ in LINK.findall(text)}
    return {path for path in paths if not path.startswith(("docs/", "..")) and path not in SITE_NAMES}


def target_of(link: str, at: str) -> str:
    """The path in the repository to which a link in the file `at` points."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(at), link))


def site_uri(path: str) -> str:
    """The path in the site of a file of the repository."""
    if path in SITE_NAMES:
        return SITE_NAMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else f"source/{path}"


def with_site_links(page: str, markdown: str, at: str) -> str:
    """The Markdown of the file `at` for a page of the site: links point to the pages of the site with their targets.

    page: path of the page in the site, with docs/ before it.
    """

    def site_link(match: re.Match[str]) -> str:
        uri = posixpath.relpath(f"docs/{site_uri(target_of(match[1], at))}", posixpath.dirname(page))
        return f"]({uri}{match[2] or ''})"

    return LINK.sub(site_link, markdown)


class FieldComments(griffe.Extension):
    """Uses the comment on the line of a field, or on the lines above, as the field's docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text(encoding="utf-8").splitlines()
            comment_on_line = lines[(attr.endlineno or attr.lineno) - 1].partition("  # ")[2]
            if comment := comment_on_line or comment_above(lines[: attr.lineno - 1]):
                attr.docstring = griffe.Docstring(comment, parent=attr)


def comment_above(lines: Sequence[str]) -> str:
    """The text of the comment at the end of `lines`; "" if there is none."""
    comment = list(takewhile(lambda line: line.startswith("#"), (line.strip() for line in reversed(lines))))
    return " ".join(line.lstrip("# ") for line in reversed(comment))
