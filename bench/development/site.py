"""What mkdocs calls while it builds the documentation site (mkdocs.yml). It adds pages made from the code, pages at the
root of the repository, and the source files that pages link to.

Also an extension of griffe, which reads the code for the API's reference: the comment beside a field of a dataclass is
what the field means, as everywhere in this project.
"""

import json
import posixpath
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench.development.reference_pages import reference_pages

ROOT = Path(__file__).parents[2]
NOTEBOOK = "docs/notebook.ipynb"
# Files of the repository whose pages in the site are called otherwise.
CALLED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    NOTEBOOK: "notebook.md",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
SHOWN = {".py": "python", ".toml": "toml", ".ini": "ini"}  # files that get a page; others are copied


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for uri, text in reference_pages().items():
        files.append(File.generated(config, uri, content=text))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = linked_from(f"docs/{CALLED[name]}", (ROOT / name).read_text(encoding="utf-8"), at=name)
        files.append(File.generated(config, CALLED[name], content=text))
    files.append(File.generated(config, CALLED[NOTEBOOK], content=notebook_page()))
    for path in sorted(linked_sources(files)):
        uri = site_uri(path)
        if uri.endswith(".md"):
            code = (ROOT / path).read_text(encoding="utf-8")
            text = f"# {path}\n\n````{SHOWN[Path(path).suffix]}\n{code}````\n"
            files.append(File.generated(config, uri, content=text))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def notebook_page() -> str:
    """The cells of the notebook, without what they showed."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    codes = [cell["cell_type"] == "code" for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in zip(texts, codes, strict=True))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ lead to the pages that stand for their targets."""
    return linked_from(f"docs/{page.file.src_uri}", markdown, at=f"docs/{page.file.src_uri}")


def linked_sources(files: Files) -> set[str]:
    """Files of the repository, outside docs/, that pages of docs/ link to."""
    found = set()
    for file in files.documentation_pages():
        if file.abs_src_path:
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            found |= {target_of(link, f"docs/{file.src_uri}") for link, _ in LINK.findall(text)}
    return {path for path in found if not path.startswith(("docs/", "..")) and path not in CALLED}


def target_of(link: str, at: str) -> str:
    """The path in the repository that a link in the file `at` means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(at), link))


def site_uri(path: str) -> str:
    """Where the site has a file of the repository, relative to docs/."""
    if path in CALLED:
        return CALLED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if Path(path).suffix in SHOWN else f"source/{path}"


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
            if found := text or comment_above(lines[: attr.lineno - 1]):
                attr.docstring = griffe.Docstring(found, parent=attr)


def comment_above(lines: Sequence[str]) -> str:
    """The comment with which the lines end."""
    above = list(takewhile(lambda line: line.startswith("#"), (line.strip() for line in reversed(lines))))
    return " ".join(line.lstrip("# ") for line in reversed(above))
