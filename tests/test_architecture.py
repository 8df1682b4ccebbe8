"""Rules of docs/architecture.md that no linter checks: who may import whom."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVEL = {
    "engine": 0,
    "imagesets": 1,
    "checkpoints": 1,
    "probes": 2,
    "downstream": 2,
    "pretrain": 2,
    "bench": 3,
    "tools": 4,
}
FILES = sorted(path for package in LEVEL for path in (ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, anywhere in it, and of what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # modules by their full names: ruff's TID252
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_imports_point_downward():
    upward = []
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        targets = {name.split(".")[0] for name in imports(path)} & LEVEL.keys() - {package}
        upward += [f"{path.relative_to(ROOT)}: {target}" for target in targets if LEVEL[target] >= LEVEL[package]]
    assert not upward


def imported_files() -> dict[str, set[str]]:
    """Dotted name of every file of the product -> those that it imports."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    return {name: imports(path) & names.keys() - {name} for name, path in names.items()}


def wing(name: str) -> str:
    """bench.run.prepare -> bench.run; a file that lies in a package itself is a wing of its own."""
    return ".".join(name.split(".")[:2])


def wings_of(files: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, wanted in files.items():
        found.setdefault(wing(name), set()).update(map(wing, wanted))
    return {name: wanted - {name} for name, wanted in found.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The names of one circle, first and last the same; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_files_or_wings_import_each_other_in_a_circle():
    files = imported_files()
    assert circle(files) == []
    assert circle(wings_of(files)) == []


def test_circles_are_found():
    files = {"a.x.one": {"a.y.two"}, "a.y.two": set(), "a.y.three": {"a.x.one"}}
    assert circle(files) == []
    assert set(circle(wings_of(files))) == {"a.x", "a.y"}
    assert set(circle(files | {"a.y.two": {"a.x.one"}})) == {"a.x.one", "a.y.two"}


def test_source_is_ascii():
    assert not [str(path) for path in [*FILES, *(ROOT / "tests").rglob("*.py")] if not path.read_text().isascii()]
