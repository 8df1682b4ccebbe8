"""The index of protocols: what lists and checks of names need of the task files, without importing them and torch.
Also the checks of what `--suite`, `--data` and `--checkpoint` name, before torch is imported.

index.json holds an entry for each task file of this package, with the file's digest; `python -m tools.protocols` writes
it, and a test compares it with the code. A file that is not in it as it is, or is a plugin's, is imported.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from bench.options import absent_images, named_url
from engine.errors import UserError
from engine.extensions import Extension, extensions, import_extension, refused_plugins
from engine.files import json_bytes, read_json, sha256_of_file, write_atomic
from engine.printing import did_you_mean
from engine.settings import alternatives, meanings, setting_text, types_of

FILE = Path(__file__).parents[1] / "index.json"
TASK_KINDS = ("probes", "downstream")  # of extensions that are files of tasks


class ProtocolEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A protocol of a task file."""

    version: int
    source: str
    suites: tuple[str, ...]
    cost: float  # of its task: cheap ones run first
    layout: str  # of the scenes that it needs; "" for an image set
    task_class: str
    settings: dict[str, str]  # name -> value in the syntax of `--set`, where it is not the default of the class
    is_reported: bool = False  # a variant NAME_paper, as the source reports it


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A task file. classes: name of a class of tasks -> setting -> its default and its meaning."""

    digest: str  # of the file
    protocols: dict[str, ProtocolEntry]
    classes: dict[str, dict[str, tuple[str, str]]]

    @property
    def listed(self) -> dict[str, ProtocolEntry]:
        """The protocols by name, without the variants NAME_paper."""
        return {name: protocol for name, protocol in self.protocols.items() if not protocol.is_reported}

    def settings(self, entry: ProtocolEntry) -> dict[str, str]:
        """Setting -> value of a protocol, in the order of the class."""
        defaults = {name: default for name, (default, _) in self.classes[entry.task_class].items()}
        return defaults | entry.settings


@cache
def stored_index() -> dict[str, TaskEntry]:
    """Task -> entry in index.json."""
    return read_json(FILE, type=dict[str, TaskEntry])


def is_stored(extension: Extension) -> bool:
    """Whether index.json describes a task file as it is."""
    entry = stored_index().get(extension.key)
    return bool(entry and not extension.plugin and entry.digest == sha256_of_file(extension.path))


def task_entries() -> tuple[dict[Extension, TaskEntry], dict[Extension, str]]:
    """Every task file with its entry, and those that cannot be used with the reason."""
    broken = {extension: reason for kind in TASK_KINDS for extension, reason in refused_plugins(kind).items()}
    entries: dict[Extension, TaskEntry] = {}
    for kind in TASK_KINDS:
        for extension in extensions(kind).values():
            try:
                stored = is_stored(extension)
                entries[extension] = stored_index()[extension.key] if stored else entry_of(extension)
            except Exception as error:  # a plugin may raise anything; the other files must stay usable
                broken[extension] = " ".join(str(error).split())
    return entries, broken


def suites_of(entries: Iterable[TaskEntry]) -> dict[str, list[str]]:
    """Suite -> names of its protocols."""
    suites: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        for name, protocol in entry.protocols.items():
            for suite in protocol.suites:
                suites[suite].append(name)
    return dict(suites)


@cache
def tasks_by_word() -> dict[str, set[str]]:
    """Every word of `--suite` that the index knows, a suite, task, family or protocol -> its task files."""
    tasks: dict[str, set[str]] = defaultdict(set)
    for key, entry in stored_index().items():
        for name, protocol in entry.protocols.items():
            for word in (key, name, name.partition("@")[0], *protocol.suites):
                tasks[word].add(key)
    return dict(tasks)


def refuse_unknown(suite: str) -> None:
    """ValueError for a word of `--suite` that is the name of no suite, task or protocol.

    Nothing is refused if a task file is not in the index, since its names are known only when it is imported.
    """
    tasks = [extension for kind in TASK_KINDS for extension in extensions(kind).values()]
    if not all(map(is_stored, tasks)):
        return
    words = tasks_by_word()
    for word in filter(None, map(str.strip, suite.split(","))):
        if word not in words:
            raise UserError(
                "suite",
                f"no suite, task or protocol {word!r}{did_you_mean(word, sorted(words), '`bench list protocols`')}",
            )


def check_names(checkpoints: Sequence[str], suite: str, data: Sequence[str]) -> None:
    """ValueError for the first name that is certainly unknown; the rest is checked later, when torch is loaded."""
    from checkpoints.import_options import check_reference
    from imagesets.sets import open_set, parse_url

    refuse_unknown(suite)
    layouts = extensions("layouts")
    for text in data:
        _, url = named_url(text)
        if url.partition(":")[0].removeprefix("tiny-") in layouts:
            continue
        try:
            parse_url(url, dict.fromkeys(layouts, "ROOT") | {f"tiny-{layout}": "" for layout in layouts})
            if absent_images(url):
                open_set(url, "train")  # raises the scheme's own message about what is missing
        except ValueError as error:
            raise UserError("data", str(error).removeprefix(f"{url}: "), text) from error
    for reference in checkpoints:
        try:
            check_reference(reference)
        except ValueError as error:
            raise UserError("checkpoint", str(error), reference) from error


def entry_of(extension: Extension) -> TaskEntry:
    """Import a task file and describe it. ValueError if it cannot be used."""
    from engine.tasks import with_reported

    module = import_extension(extension)
    classes: dict[str, dict[str, tuple[str, str]]] = {}
    protocols = {}
    for name, protocol in with_reported(module.PROTOCOLS).items():
        kind = type(protocol.task)
        defaults = {
            entry.name: "" if entry.default is MISSING else setting_text(entry.default) for entry in fields(kind)
        }
        texts = with_choices(meanings(kind), choices_of(protocol.task))
        classes[kind.__name__] = {setting: (default, texts.get(setting, "")) for setting, default in defaults.items()}
        values = {setting: setting_text(getattr(protocol.task, setting)) for setting in defaults}
        protocols[name] = ProtocolEntry(
            version=protocol.version,
            source=protocol.source,
            suites=tuple(suite for suite, names in module.SUITES.items() if name in names),
            cost=protocol.task.COST,
            layout=protocol.task.LAYOUT,
            task_class=kind.__name__,
            settings={setting: value for setting, value in values.items() if value != defaults[setting]},
            is_reported=name not in module.PROTOCOLS,
        )
    digest = "" if extension.plugin else sha256_of_file(extension.path)
    return TaskEntry(digest=digest, protocols=protocols, classes=classes)


def choices_of(settings: Any) -> dict[str, str]:
    """Path of a setting of a task or recipe -> its possible values, where these are a fixed set."""
    types = types_of(settings)
    choices = {path: ", ".join(map(str, get_args(kind))) for path, kind in types.items() if get_origin(kind) is Literal}
    return choices | {name: ", ".join(kinds) for name, kinds in alternatives(settings).items()}


def with_choices(texts: Mapping[str, str], choices: Mapping[str, str]) -> dict[str, str]:
    """Setting -> its meaning, followed by its choices in brackets."""
    brackets = {name: f"[{text}]" for name, text in choices.items()}
    return {
        name: f"{texts.get(name, '')} {brackets.get(name, '')}".strip() for name in dict.fromkeys([*texts, *brackets])
    }


def write_index() -> bool:
    """Write index.json from the code, without plugins; returns whether it changed."""
    own = [extension for kind in TASK_KINDS for extension in extensions(kind).values() if not extension.plugin]
    index = {extension.key: entry_of(extension) for extension in own}
    content = msgspec.json.format(json_bytes(index), indent=1) + b"\n"
    if FILE.exists() and FILE.read_bytes() == content:
        return False
    write_atomic(FILE, content)
    return True
