"""The documentation site is built without a warning: no broken link, no missing page, nothing from elsewhere."""

import re
import sys
from pathlib import Path

import pytest

from engine.extensions import source_files

ROOT = Path(__file__).parents[1]
FROM_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^\">]*")
RECORD = "real"  # the smallest: tests/test_boards.py checks all of them
# Kind of extension -> the page that has every one of them, made from the code.
MADE_FROM = {
    "methods": "recipes.html",
    "importers": "importers.html",
    "imagesets": "imagesets.html",
    "layouts": "imagesets.html",
    "probes": "settings.html",
    "downstream": "settings.html",
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_site_is_built_without_warnings(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install -e '.[dev]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    site = tmp_path / "site"
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True)
    (tmp_path / "records").mkdir()
    for name in (RECORD, f"{RECORD}.json"):
        (tmp_path / "records" / name).symlink_to(ROOT / "records" / name)
    monkeypatch.setattr(sys.modules["tools/site.py"], "RECORDS", tmp_path / "records")  # as mkdocs calls this hook
    build(config)  # Abort at the first warning
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {
        "index.html",
        "tutorial.html",
        "extending/probe.html",
        "recipes.html",
        "changelog.html",
        "notebook.html",
    } <= pages.keys()
    assert not [found for text in pages.values() for found in FROM_ELSEWHERE.findall(text)]
    for kind, page in (
        ("methods", "recipes"),
        ("importers", "importers"),
        ("imagesets", "imagesets"),
        ("probes", "settings"),
    ):
        assert all(key in pages[f"{page}.html"] for key in source_files(kind)), page
    assert all(f"methods/{key}.html" in pages for key in source_files("methods"))
    assert "83.7" in pages["methods/moca.html"] and "vit_b" in pages["methods/moca.html"]  # published, and a recipe
    assert '<span class="whole">linear_sgd@ibot_base_cached</span>' in pages["protocols.html"]
    assert "neighbours" in pages["settings/knn.html"]  # what a setting means, from the comment beside it
    for name in ("evaluate_suite", "compare", "FeatureSet", "interval"):
        assert name in pages["api.html"]
    assert "low and high end, in <code>unit</code>" in pages["api.html"]
