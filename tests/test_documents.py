"""The documents: every link leads somewhere, and the table of methods is whole."""

import re
from pathlib import Path

from bench.pretraining.recipes import names_by_path
from bench.run.suites import catalogue
from engine.extensions import load_extension, source_files

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


def test_readme_counts_and_names_every_method_and_its_protocols_exist():
    text = (ROOT / "README.md").read_text()
    methods = set(source_files("methods"))
    assert f"| pretraining methods | {len(methods)} |" in text
    assert methods <= set(re.findall(r"\w+", text.partition("## Pretraining")[2].lower().replace("-", "")))
    assert set(re.findall(r"`(\w+@\w+)`", text)) <= set(catalogue().protocols)


def test_every_method_is_in_the_table_of_methods_with_settings_that_it_has():
    text = (ROOT / "docs/pretraining.md").read_text().partition("## The methods")[2].partition("\n## ")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", text, flags=re.MULTILINE)}
    assert sorted(rows) == sorted(source_files("methods"))
    for method, description in rows.items():
        recipes = load_extension("methods", method).RECIPES
        known = {name for recipe in recipes.values() for name in names_by_path(recipe).values()} | recipes.keys()
        assert {word.partition("=")[0] for word in re.findall(r"`([a-z][\w=]*)`", description)} <= known, method
