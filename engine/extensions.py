"""Extension folders: every file in one is an extension, its name is the key, and the folder is the registry.

Third parties add one by an entry point of the group named here. Listing reads the files' first docstring line with
`ast` and imports nothing, so that `bench list` does not wait for torch.
"""

import ast
import importlib
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

FOLDERS = {
    "methods": "pretrain.methods",
    "probes": "probes.tasks",
    "downstream": "downstream.tasks",
    "importers": "checkpoints.importers",
}


def source_files(kind: str) -> dict[str, Path]:
    """Key -> path of every extension of `kind`, without importing any of them."""
    found = {}
    package = importlib.util.find_spec(FOLDERS[kind])
    for folder in package.submodule_search_locations if package else ():
        for path in sorted(Path(folder).glob("*.py")):
            if path.stem != "__init__":
                found[path.stem.rstrip("_")] = path
    for point in entry_points(group=f"bench.{kind}"):
        parent, _, leaf = point.module.rpartition(".")
        package = importlib.util.find_spec(parent) if parent else None
        folders = package.submodule_search_locations if package else [""]
        found[point.name] = next((p for f in folders if (p := Path(f) / f"{leaf}.py").exists()), Path(point.module))
    return found


def one_line(path: Path) -> str:
    """First line of a file's docstring; empty when the file cannot be read as Python source."""
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except (OSError, SyntaxError):
        return ""


def load_extension(kind: str, key: str) -> ModuleType:
    """Import one extension. Raises ValueError, with the choices, for an unknown key."""
    for point in entry_points(group=f"bench.{kind}"):
        if point.name == key:
            return importlib.import_module(point.module)
    files = source_files(kind)
    if key not in files:
        raise ValueError(f"no {kind.rstrip('s')} called {key!r}; there are: {', '.join(files) or 'none'}")
    return importlib.import_module(f"{FOLDERS[kind]}.{files[key].stem}")


def load_extensions(kind: str) -> dict[str, ModuleType]:
    """Import all extensions of `kind`."""
    return {key: load_extension(kind, key) for key in source_files(kind)}
