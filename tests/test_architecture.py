"""Guards of docs/architecture.md: who may import whom, how long a file may be, and that the source stays ASCII."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVEL = {"engine": 0, "imagesets": 1, "checkpoints": 1, "probes": 2, "downstream": 2, "pretrain": 2, "bench": 3}
FILES = sorted(path for package in LEVEL for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
HEAVY = {"mmseg", "mmdet", "mmengine", "mmcv", "faiss", "cyanure", "matplotlib", "torch", "timm", "sklearn", "scipy"}


def imports(path: Path, top_only: bool = False) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path):
    package = path.relative_to(ROOT).parts[0]
    for name, relative in imports(path):
        assert relative == 0, f"{path}: relative import"
        target = name.split(".")[0]
        if target in LEVEL and target != package:
            assert LEVEL[target] < LEVEL[package], f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_ascii(path):
    text = path.read_text(encoding="ascii")
    assert len(text.splitlines()) <= 400
    assert path.stem not in {"utils", "misc", "helpers", "common", "base"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are(path):
    if path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_the_command_line_imports_nothing_heavy():
    for path in [ROOT / "bench/__main__.py", ROOT / "bench/cli/main.py", ROOT / "engine/extensions.py"]:
        assert not HEAVY & {name.split(".")[0] for name, _ in imports(path, top_only=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_printed_raw(path):
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    if path != ROOT / "engine" / "printing.py":
        assert "print" not in [call.id for call in calls if isinstance(call, ast.Name)], (
            f"{path}: use engine.printing.say"
        )
