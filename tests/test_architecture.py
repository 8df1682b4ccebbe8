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
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, anywhere in it, and of what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
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


# Functions of libraries, and methods of any object, that read a file. `open_regular`, `read_regular`, `read_text`,
# `read_json` and `read_json_lines` of engine/files.py refuse pipes and devices, limit sizes, and name the file.
FUNCTIONS = {f"{module}.load" for module in ("json", "np", "pickle", "torch")} | {"load_file", "safe_open"}
METHODS = ("read_text", "read_bytes", "loadtxt", "genfromtxt", "memmap", "FileIO")
OPENED = "open_regular opened the file, or looked at it before"
PACKAGE, KERNEL = "a file of an installed package", "a file of the kernel"
OWN = "a file that this process or an earlier command wrote for itself, after is_file or under its lock"
BOUNDED = "a few kilobytes inside another file; RecursionError is caught"
READS = {  # FILE FUNCTION CALL -> why it may read without them
    "bench/commands/list.py _docstring extension.path.read_text": PACKAGE,
    "bench/run/index.py write_index FILE.read_bytes": PACKAGE,
    "bench/published/values.py _rows open": PACKAGE,
    "bench/reports/page.py page_of read_text": PACKAGE,
    "bench/results/record.py read_arrays np.load": OPENED,
    "bench/reports/card.py _template read_text": PACKAGE,
    "bench/reports/record.py bibtex_entries TABLE.read_text": PACKAGE,
    "checkpoints/export.py read_tensors load_file": OPENED,
    "checkpoints/frozen.py own_network file.read_bytes": PACKAGE,
    "checkpoints/importers/transformers.py file_of json.loads": "text that transformers just made",
    "checkpoints/reading.py _read_safetensors safe_open": OPENED,
    "checkpoints/reading.py _read_torch torch.load": OPENED,
    "checkpoints/reading.py tensor_in torch.load": "bytes in memory",
    "downstream/loop/running.py _read_result np.load": OPENED,
    "downstream/frozen/patches.py extract_patches np.load": OWN,
    "engine/blas_kernel.py processor_flags file.read_text": KERNEL,
    "engine/distributed.py signal_of open": KERNEL,
    "engine/extensions.py _docstring path.read_text": PACKAGE,
    "engine/files.py _decoded json.loads": "the reader itself",
    "engine/files.py _decoded msgspec.json.decode": "the reader itself",
    "engine/machine.py cpu_model read_text": KERNEL,
    "engine/machine.py memory_bytes read_text": KERNEL,
    "engine/training/states.py load_state json.loads": OPENED,
    "engine/training/states.py load_state safe_open": OPENED,
    "engine/training/states.py write_state open": OWN,
    "imagesets/label_tables.py _from_json_lines json.loads": "lines of a text of read_text; RecursionError is caught",
    "imagesets/schemes/digits.py open_split np.loadtxt": PACKAGE,
    "imagesets/schemes/imagenet.py read_devkit json.loads": "text that a child process of ours just printed",
    "imagesets/walk.py _load np.load": OPENED,
    "imagesets/schemes/parquet.py class_names json.loads": BOUNDED,
    "imagesets/schemes/wds.py _parse_label json.loads": BOUNDED,
    "imagesets/schemes/wds.py _read_shard tarfile.open": OPENED,
    "imagesets/stored.py cached_index np.load": OPENED,
    "probes/features/store.py forget_changed np.load": OPENED,
    "probes/features/store.py rows np.memmap": OWN,
}


def dotted_name(node: ast.expr) -> str:
    """`json.load` of the node of `json.load`; of what is no name its last part, `read_text` of `(a / b).read_text`."""
    if isinstance(node, ast.Attribute):
        parent = dotted_name(node.value)
        return f"{parent}.{node.attr}" if parent else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_read(call: ast.Call) -> bool:
    """Whether a call reads a file or JSON in a way that can block, fill the memory or fail without naming the file."""
    name = dotted_name(call.func)
    parents, _, last = name.rpartition(".")
    if last == "open" and parents not in ("os", "Image"):  # the former opens locks and folders, the latter bytes
        position = 1 if not isinstance(call.func, ast.Attribute) or parents in ("io", "tarfile") else 0
        modes = [*call.args[position:][:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        return not any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax") for mode in modes)
    if name in ("json.loads", "msgspec.json.decode"):  # deep values raise RecursionError; those of json.dumps are ours
        return not (isinstance(call.args[0], ast.Call) and dotted_name(call.args[0].func) == "json.dumps")
    return name in FUNCTIONS or (last in METHODS and isinstance(call.func, ast.Attribute))


def reads(node: ast.AST, function: str = "-") -> set[str]:
    """`FUNCTION CALL` of every such call below a node, in the function that it is in."""
    found = {f"{function} {dotted_name(node.func)}"} if isinstance(node, ast.Call) and is_read(node) else set()
    inner = node.name if isinstance(node, ast.FunctionDef) else function
    return found.union(*(reads(child, inner) for child in ast.iter_child_nodes(node)))


def test_files_from_outside_are_read_by_engine_files():
    product = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tools"]  # tools read this repository
    found = {f"{path.relative_to(ROOT)} {read}" for path in product for read in reads(tree(path))}
    assert sorted(found - READS.keys()) == [], "read it by engine/files.py, or say in READS why not"
    assert sorted(READS.keys() - found) == [], "no longer there: remove it from READS"


def test_bare_reads_are_recognised():
    for code, bare in [
        ("open(path)", True),
        ("open(path, 'rb')", True),
        ("open(path, mode='r')", True),
        ("Path(path).open()", True),
        ("path.read_text(encoding='utf-8')", True),
        ("(folder / name).read_bytes()", True),
        ("json.load(file)", True),
        ("json.loads(text)", True),
        ("msgspec.json.decode(text)", True),
        ("np.load(path)", True),
        ("tarfile.open(path)", True),
        ("open(path, 'w')", False),
        ("path.open('ab')", False),
        ("read_text(path)", False),
        ("read_json(path)", False),
        ("open_regular(path)", False),
        ("json.loads(json.dumps(value))", False),
        ("Image.open(file)", False),
    ]:
        assert is_read(ast.parse(code, mode="eval").body) is bare
