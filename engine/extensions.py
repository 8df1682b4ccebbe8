"""Extension folders: every file in one is an extension, the file's name is its key, and the folder is the registry.

Other packages add extensions, called plugins, by entry points of the groups `bench.KIND`, such as `bench.probes`; the
kinds are the keys of FOLDERS. A plugin can replace neither a built-in extension nor another plugin. Listing reads the
first docstring line of each file with `ast` and imports nothing, so that `bench list` does not wait for torch.
"""

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.printing import closest, did_you_mean, say

FOLDERS = {
    "methods": "pretrain.methods",
    "probes": "probes.tasks",
    "downstream": "downstream.tasks",
    "importers": "checkpoints.importers",
    "imagesets": "imagesets.schemes",
    "layouts": "downstream.layouts",
}
NOUNS = {  # kind -> what messages call an extension of it
    "methods": "method",
    "probes": "task",
    "downstream": "task",
    "importers": "importer",
    "imagesets": "image set",
    "layouts": "scene layout",
}
SCHEMES = ("imagesets", "layouts")  # kinds whose keys are schemes of URLs, so that the keys of both must differ
REQUIRED_NAMES: dict[str, dict[str, Any]] = {  # kind -> names that its files must define, with their types
    "methods": {"METHOD": object, "RECIPES": Mapping},  # see docs/architecture.md
    "probes": {"PROTOCOLS": Mapping, "SUITES": Mapping},
    "downstream": {"PROTOCOLS": Mapping, "SUITES": Mapping},
    "importers": {"SOURCE": str, "BRANCHES": Iterable, "DROPPED": Iterable, "recognise": Callable},
    "imagesets": {"PLACE": str, "SPLITS": Iterable, "open_split": Callable},
    "layouts": {"IMAGES": Mapping, "recognised": Callable, "listed": Callable, "write_tiny": Callable},
}
OPTIONAL_NAMES: dict[str, Any] = {"OPTIONS": Iterable, "SERVES": Iterable}  # of any kind, likewise


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One file of an extension folder, or a plugin."""

    kind: str  # a key of FOLDERS
    key: str
    module: str
    path: Path
    plugin: str = ""  # the installed package that brings it, `benchtoys 1.0`; empty for built-in ones

    @property
    def title(self) -> str:
        """Its name in messages: `importer 'dino'`, `task 'toy' of benchtoys 1.0`."""
        return f"{NOUNS[self.kind]} {self.key!r}" + (f" of {self.plugin}" if self.plugin else "")


def extensions(kind: str) -> dict[str, Extension]:
    """Key -> extension, of all usable ones of `kind`, built-in ones first; none is imported."""
    refused = refused_plugins(kind)
    return _built_in(kind) | {plugin.key: plugin for plugin in _plugins(kind) if plugin not in refused}


def refused_plugins(kind: str) -> dict[Extension, str]:
    """Plugins that cannot be used because their key is taken -> the reason, and how to resolve it."""
    kinds = SCHEMES if kind in SCHEMES else (kind,)
    built_in_keys = {key for scheme in kinds for key in _built_in(scheme)}
    plugins = [plugin for scheme in kinds for plugin in _plugins(scheme)]
    reasons = {}
    for plugin in plugins:
        if plugin.kind != kind:
            continue
        namesakes = [other.plugin for other in plugins if other.key == plugin.key and other != plugin]
        if plugin.key in built_in_keys:
            package = plugin.plugin
            reasons[plugin] = f"bench has one of that name; it needs another name in the entry points of {package}"
        elif namesakes:
            reasons[plugin] = f"{', '.join(namesakes)} has one of that name too; uninstall one of the packages"
    return reasons


def _built_in(kind: str) -> dict[str, Extension]:
    """Key -> extension of each file in the folder of `kind`."""
    package = importlib.util.find_spec(FOLDERS[kind])
    folders = filter(os.path.isdir, (package and package.submodule_search_locations) or ())
    return _extensions_of(kind, tuple(os.path.join(folder, name) for folder in folders for name in os.listdir(folder)))


@cache
def _extensions_of(kind: str, files: tuple[str, ...]) -> dict[str, Extension]:
    """Key -> extension of each Python file; cached, because it is called many times."""
    extensions_by_key = {}
    for path in map(Path, sorted(files)):
        if path.suffix == ".py" and path.stem != "__init__":
            key = path.stem.rstrip("_")  # a file may be called lambda_.py, as a module cannot be called lambda
            extensions_by_key[key] = Extension(kind=kind, key=key, module=f"{FOLDERS[kind]}.{path.stem}", path=path)
    return extensions_by_key


@cache
def _entry_points(kind: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Entry points of a kind's group, of all packages on sys.path; `path` is sys.path, the key of the cache."""
    return sorted(entry_points(group=f"bench.{kind}"), key=lambda point: (point.name, point.module))


def _plugins(kind: str) -> list[Extension]:
    """All plugins of `kind`, usable or not."""
    plugins = []
    for point in _entry_points(kind, tuple(sys.path)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        plugins.append(
            Extension(kind=kind, key=point.name, module=point.module, path=_path(point.module), plugin=package)
        )
    return plugins


def _path(module: str) -> Path:
    """Path of a plugin's module, which is not imported; the module's name if it cannot be found."""
    parent, _, leaf = module.rpartition(".")
    try:  # finding a package imports the packages around it, which may do anything
        package = importlib.util.find_spec(parent) if parent else None
    except Exception:
        return Path(module)
    folders = package.submodule_search_locations if package else sys.path
    return next((path for folder in folders or () if (path := Path(folder) / f"{leaf}.py").exists()), Path(module))


def source_files(kind: str) -> dict[str, Path]:
    """Key -> path of every extension of `kind`, without importing any of them."""
    return {key: extension.path for key, extension in extensions(kind).items()}


def one_line(path: Path) -> str:
    """First line of a file's docstring; empty if the file is not valid Python."""
    return _docstring(path).partition("\n")[0]


def opening_paragraphs(path: Path) -> str:
    """First two paragraphs of a file's docstring as one line; empty if the file is not valid Python."""
    return " ".join(" ".join(_docstring(path).split("\n\n")[:2]).split())


def _docstring(path: Path) -> str:
    try:
        return ast.get_docstring(ast.parse(path.read_text())) or ""
    except (OSError, SyntaxError, ValueError):
        return ""


def load_extension(kind: str, key: str) -> ModuleType:
    """Import one extension. Raises ValueError if the key is unknown, with the choices, or the file cannot be used."""
    known = extensions(kind)
    if key not in known:
        refused = {plugin.title: reason for plugin, reason in refused_plugins(kind).items() if plugin.key == key}
        reasons = [f"{title} is left out: {reason}" for title, reason in refused.items()]
        raise ValueError("; ".join(reasons) or f"no {NOUNS[kind]} called {key!r}{did_you_mean(key, list(known))}")
    try:
        return import_extension(known[key])
    except ValueError as error:
        raise ValueError(f"{known[key].title}: {error}") from error


def import_extension(extension: Extension) -> ModuleType:
    """Import an extension's module. Raises ValueError, without the extension's name, if its code fails or a required
    name is missing."""
    try:
        module = importlib.import_module(extension.module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(extension.path)]
        place = f" ({extension.path.name}, line {lines[-1]})" if lines else ""
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}{place}") from error
    missing = [name for name in REQUIRED_NAMES[extension.kind] if not hasattr(module, name)]
    if missing:
        names = [name for name in vars(module) if name.isupper() == missing[0].isupper()]
        similar = closest(missing[0], names)
        hint = f"; rename {similar}" if similar else ""
        raise ValueError(f"does not define {', '.join(missing)}{hint}")
    for name, kind in (REQUIRED_NAMES[extension.kind] | OPTIONAL_NAMES).items():
        if hasattr(module, name) and not isinstance(value := getattr(module, name), kind):
            raise ValueError(f"its {name} is {value!r}, which is no {kind.__name__}")
    return module


def load_extensions(kind: str) -> dict[str, ModuleType]:
    """Import all extensions of `kind`: key -> module.

    A plugin that cannot be used is left out with a warning. A built-in one raises ValueError: without one of the
    importers, for example, a checkpoint could be taken for that of another source.
    """
    modules, left_out = {}, refused_plugins(kind)
    for key, extension in extensions(kind).items():
        try:
            modules[key] = import_extension(extension)
        except ValueError as error:
            if not extension.plugin:
                raise ValueError(f"{extension.title}: {error}") from error
            left_out[extension] = str(error)
    warn_of(left_out)
    return modules


def warn_of(left_out: Mapping[Extension, str]) -> None:
    """Print a warning for each extension that is left out, with the reason."""
    for extension, reason in left_out.items():
        say(f"bench: warning: {extension.title} is left out: {' '.join(reason.split())}", errors=True)


def extension_of(kind: str, module: ModuleType) -> Extension:
    """The extension that a module belongs to."""
    return next(extension for extension in extensions(kind).values() if extension.module == module.__name__)
