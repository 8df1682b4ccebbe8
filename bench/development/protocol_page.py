"""docs/protocols.md, written from the code: every protocol with its version, suites, settings and source."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.tasks import Protocol, Task

PAGE = Path("docs/protocols.md")
MAX_SHOWN = 12  # values of a setting; a sweep of 45 rates says less than its ends
INTRODUCTION = """# Protocols

A protocol is a task with the settings of one source, such as `knn@dino`. Its version rises when a setting changes; the
digest of its settings is recorded and held by a test. `bench run --suite NAME` takes a suite, a task or a protocol, or
several with commas between them.

`bench dev protocols` writes this page from the code: do not edit it by hand.
"""


def protocol_page(tasks: Mapping[str, ModuleType]) -> str:
    """The whole page, of task files by name."""
    return "\n".join([INTRODUCTION, *_suites(tasks), *(line for key in tasks for line in _task(key, tasks[key]))])


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


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in cells)} |"


def _defaults(kind: type[Task]) -> dict[str, Any]:
    return {entry.name: entry.default for entry in _fields(kind) if entry.default is not dataclasses.MISSING}


def _changes(protocol: Protocol) -> dict[str, Any]:
    values = {entry.name: (getattr(protocol.task, entry.name), entry.default) for entry in _fields(type(protocol.task))}
    return {name: value for name, (value, default) in values.items() if value != default}


def _fields(kind: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(kind)


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={_value(value)}`" for name, value in values.items()) or "none"


def _value(value: Any) -> str:
    """As `--set` takes it; a long sweep by its ends."""
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > MAX_SHOWN:
        return f"{value[0]},...,{value[-1]} ({len(value)} values)"
    return ",".join(map(str, value)) or "()"
