"""`python -m tools.protocols` records versions and digests of all protocols, prints changes, writes the index of
bench/index.json and docs/protocols.md.

`tests/golden/protocols.json` maps a protocol to [version, digest of its settings]. tests/test_task_contract.py compares
it with the code, so that no setting changes unnoticed. docs/protocols.md lists every protocol with its version, suites,
settings and source.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.run.index import FILE, TASK_KINDS, write_index
from engine.errors import on_command_line
from engine.extensions import FOLDERS, load_extension, source_files
from engine.files import digest, write_atomic
from engine.printing import say
from engine.tasks import AS_REPORTED, Protocol, Task, settings_of, with_reported

ROOT = Path(__file__).parents[1]  # of the checkout
RECORD = Path("tests/golden/protocols.json")

Versions = Mapping[str, tuple[int, str]]  # protocol -> version, digest of its settings


def own_tasks() -> dict[str, ModuleType]:
    """Key of a task -> module of its file, without the tasks of plugins, which keep their own records."""
    return {
        key: load_extension(kind, key)
        for kind in TASK_KINDS
        for key, path in source_files(kind).items()
        if path.parent == ROOT.joinpath(*FOLDERS[kind].split("."))
    }


def protocol_versions(tasks: Mapping[str, ModuleType]) -> Versions:
    """Versions and digests of the code, those of variants NAME_paper included, as the record should have them."""
    protocols = {name: value for module in tasks.values() for name, value in with_reported(module.PROTOCOLS).items()}
    return {name: (protocols[name].version, digest(settings_of(protocols[name].task))) for name in sorted(protocols)}


def read_record(root: Path) -> Versions:
    """The record of a checkout."""
    record = json.loads((root / RECORD).read_text())
    return {name: (version, value) for name, (version, value) in record.items()}


def update_record(root: Path, now: Versions) -> list[str]:
    """Write the record; returns a line for each difference. ValueError, without writing, for a silent change."""
    before = read_record(root)
    refuse_silent_changes(before, now)
    _write(root / RECORD, json.dumps(now, indent=1) + "\n")
    return list(record_differences(before, now))


def update_page(root: Path, tasks: Mapping[str, ModuleType]) -> bool:
    """Write docs/protocols.md; returns whether it changed."""
    sections = [
        *_index(tasks),
        *_suites(tasks),
        *(line for key, module in tasks.items() for line in _task(key, module)),
    ]
    return _write(root / PAGE, "\n".join([INTRODUCTION, *sections]))


def _write(path: Path, text: str) -> bool:
    """Write a file unless it has this text; returns whether it changed."""
    if path.exists() and path.read_text() == text:
        return False
    write_atomic(path, text)
    return True


def refuse_silent_changes(before: Versions, now: Versions) -> None:
    """ValueError for protocols whose settings changed under the same version, or whose version was lowered."""
    changed = []
    for name in sorted(before.keys() & now.keys()):
        (version_before, digest_before), (version, settings_digest) = before[name], now[name]
        if version < version_before:
            raise ValueError(f"versions only rise: set that of {name} to {version_before} or more")
        if version == version_before and settings_digest != digest_before:
            changed.append(name)
    if changed:
        raise ValueError(
            f"settings of {', '.join(changed)} changed and the version did not: raise `version` in PROTOCOLS, or "
            "put the settings back (a new default of the dataclass changes every protocol that does not set the field)"
        )


def record_differences(before: Versions, now: Versions) -> Iterator[str]:
    """A line for each protocol that is new, gone or of another version."""
    for name in sorted(before.keys() | now.keys()):
        if name not in before:
            yield f"new: {name}, version {now[name][0]}"
        elif name not in now:
            yield f"gone: {name}, version {before[name][0]}"
        elif before[name] != now[name]:
            settings = "other settings" if before[name][1] != now[name][1] else "the same settings"
            yield f"changed: {name}, version {before[name][0]} -> {now[name][0]}, {settings}"


PAGE = Path("docs/protocols.md")
MAX_SHOWN = 12  # values of a setting; of a longer sweep only the first and last are shown
INTRODUCTION = """# Protocols

<!-- Written by `python -m tools.protocols`: edits are lost. -->

A protocol is a task with the settings of one source, such as `knn@dino`. Its version rises when a setting changes; the
digest of its settings is recorded and held by a test. `bench run --suite NAME` takes a suite, a task or a protocol, or
several with commas between them.

Where a source trains on all training images and reports the epoch or head that is best on the validation images,
`linear@x_paper` does the same (`--select val`), and `linear@x` chooses on held-out training images. A task's name does
not select the variants `_paper`.
"""


def _index(tasks: Mapping[str, ModuleType]) -> Iterator[str]:
    """A row for each task: what it measures, on what images, and in how many protocols."""
    yield from ("| task | measures | images | protocols |", "|---|---|---|---|")
    for key, module in tasks.items():
        layouts = dict.fromkeys(protocol.task.LAYOUT for protocol in module.PROTOCOLS.values())
        images = ", ".join(f"`{layout}:`" for layout in layouts if layout) or "an image set"
        measures = str(module.__doc__).strip().partition("\n\n")[0].replace("\n", " ")
        yield _row(f"[{key}](#{key})", measures, images, len(module.PROTOCOLS))
    yield ""


def _suites(tasks: Mapping[str, ModuleType]) -> Iterator[str]:
    yield "## Suites\n"
    yield from ("| suite | protocols |", "|---|---|")
    for suite in sorted({suite for module in tasks.values() for suite in module.SUITES}):
        names = [name for module in tasks.values() for name in module.SUITES.get(suite, ())]
        yield f"| `{suite}` | {', '.join(f'`{name}`' for name in names)} |"
    yield ""


def _task(key: str, module: ModuleType) -> Iterator[str]:
    yield f"## {key}\n"
    yield f"{str(module.__doc__).strip()}\n"
    by_class = groupby(module.PROTOCOLS.items(), key=lambda item: type(item[1].task))
    for kind, protocols in by_class:
        yield f"Defaults: {_settings(_defaults(kind))}.\n"
        yield from ("| protocol | version | suites | settings that differ | source |", "|---|---|---|---|---|")
        for name, protocol in protocols:
            suites = ", ".join(suite for suite, names in module.SUITES.items() if name in names)
            yield _row(f"`{name}`", protocol.version, suites or "none", _settings(_changes(protocol)), protocol.source)
        yield ""
    if variants := [_variant(name, protocol) for name, protocol in module.PROTOCOLS.items() if protocol.reported]:
        yield f"`NAME{AS_REPORTED}`, with its version and what differs: {', '.join(variants)}.\n"


def _variant(name: str, protocol: Protocol) -> str:
    """`linear_sgd@moca` (1: `select=val`, `lrs=0.04`)"""
    assert protocol.reported is not None
    own, values = vars(protocol.task), vars(protocol.reported.task)
    changes = {setting: value for setting, value in values.items() if value != own[setting]}
    return f"`{name}` ({protocol.reported.version}: {_settings(changes)})"


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in cells)} |"


def _defaults(kind: type[Task]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: default for name, default in defaults.items() if default is not dataclasses.MISSING}


def _changes(protocol: Protocol) -> dict[str, Any]:
    """The settings of a protocol that differ from the defaults of its task."""
    values = {field.name: getattr(protocol.task, field.name) for field in dataclasses.fields(protocol.task)}
    defaults = _defaults(type(protocol.task))
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={_value(value)}`" for name, value in values.items()) or "none"


def _value(value: Any) -> str:
    """A value in the syntax of `--set`; of a long sweep the first and last value."""
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > MAX_SHOWN:
        return f"{value[0]},...,{value[-1]} ({len(value)} values)"
    return ",".join(map(str, value)) or "()"


@on_command_line()
def main() -> None:
    """Record the protocols of the code, write the page, and print what changed."""
    tasks = own_tasks()
    lines = update_record(ROOT, protocol_versions(tasks))
    update_page(ROOT, tasks)
    write_index()
    say(*(lines or ["no protocol changed"]), f"written: {RECORD}, {PAGE}, bench/{FILE.name}")


if __name__ == "__main__":
    main()
