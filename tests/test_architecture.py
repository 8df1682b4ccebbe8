"""Rules of docs/architecture.md that no linter checks: who may import whom, and what starts without heavy libraries."""

import ast
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


def test_imports_point_downward():
    upward = []
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        targets = {name.split(".")[0] for name, _ in imports(path)} & LEVEL.keys() - {package}
        upward += [f"{path.relative_to(ROOT)}: {target}" for target in targets if LEVEL[target] >= LEVEL[package]]
    assert not upward


def imported_files() -> dict[str, set[str]]:
    """Dotted name of every file of the product -> those that it imports, anywhere in it."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = {target for target, _ in imports(path)}
        for node in ast.walk(ast.parse(path.read_text())):  # `from package import file`
            if isinstance(node, ast.ImportFrom):
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = wanted & names.keys() - {name}
    return found


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


def test_the_command_line_imports_nothing_heavy():
    for path in [ROOT / "bench/__main__.py", ROOT / "bench/cli/main.py", ROOT / "engine/extensions.py"]:
        assert not HEAVY & {name.split(".")[0] for name, _ in imports(path, top_only=True)}
