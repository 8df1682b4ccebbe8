"""The documents: every link leads somewhere, and the table of methods is whole."""

import re
from pathlib import Path

from bench.pretraining.recipes import names_by_path
from bench.run.suites import catalogue
from engine.extensions import load_extension, source_files
from engine.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: lower case, spaces to hyphens, no other signs."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_have_targets():
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith(("http://", "https://")) or (
                target.exists() and (not anchor or anchor in anchors(target))
            ):
                continue
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_readme_has_the_number_of_methods_and_its_protocols_exist():
    """The test writes a number that is out of date, so that the next run passes: commit it."""
    text = (ROOT / "README.md").read_text()
    counted = re.sub(r"\d+(?= methods)|(?<=pretraining methods \| )\d+", str(len(source_files("methods"))), text)
    if text != counted:
        write_atomic(ROOT / "README.md", counted)
    assert text == counted
    assert set(re.findall(r"`(\w+@\w+)`", text)) <= set(catalogue().protocols)


def test_the_table_of_methods_has_settings_that_exist():
    text = (ROOT / "docs/pretraining.md").read_text().partition("## The methods")[2].partition("\n## ")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", text, flags=re.MULTILINE)}
    assert rows.keys() <= set(source_files("methods"))
    for method, description in rows.items():
        recipes = load_extension("methods", method).RECIPES
        known = {name for recipe in recipes.values() for name in names_by_path(recipe).values()} | recipes.keys()
        assert {word.partition("=")[0] for word in re.findall(r"`([a-z][\w=]*)`", description)} <= known, method
