"""The record of every protocol's version and settings, and what changed since it was written.

`tests/golden/protocols.json` maps a protocol to [version, digest of its settings]. tests/test_task_contract.py compares
it with the code, so that no setting changes unnoticed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from bench.run.suites import KINDS
from engine.extensions import FOLDERS, load_extension, source_files
from engine.files import digest, write_atomic
from engine.tasks import settings_of

ROOT = Path(__file__).parents[2]  # of the checkout
RECORD = Path("tests/golden/protocols.json")

Versions = Mapping[str, tuple[int, str]]  # protocol -> version, digest of its settings


def own_tasks() -> dict[str, ModuleType]:
    """Task file -> module, of this project alone: other packages keep records of their own."""
    return {
        key: load_extension(kind, key)
        for kind in KINDS
        for key, path in source_files(kind).items()
        if path.parent == ROOT.joinpath(*FOLDERS[kind].split("."))
    }


def protocol_versions(tasks: Mapping[str, ModuleType]) -> Versions:
    """What the record should hold now."""
    found = {name: protocol for module in tasks.values() for name, protocol in module.PROTOCOLS.items()}
    return {name: (found[name].version, digest(settings_of(found[name].task))) for name in sorted(found)}


def read_record(root: Path) -> Versions:
    """The record of a checkout. ValueError where there is none."""
    path = root / RECORD
    if not path.exists():
        raise ValueError(f"{path} does not exist; run this in a checkout that pip install -e installed")
    return {name: (version, value) for name, (version, value) in json.loads(path.read_text()).items()}


def update_record(root: Path, now: Versions) -> list[str]:
    """Write the record; returns a line for each difference. ValueError, and nothing is written, for a refused one."""
    before = read_record(root)
    refuse_silent_changes(before, now)
    write_atomic(root / RECORD, json.dumps(now, indent=1) + "\n")
    return list(record_differences(before, now))


def refuse_silent_changes(before: Versions, now: Versions) -> None:
    """ValueError for protocols whose settings changed under the same version, or whose version fell."""
    shared = before.keys() & now.keys()
    if fallen := sorted(name for name in shared if now[name][0] < before[name][0]):
        raise ValueError(f"versions only rise: set that of {fallen[0]} to {before[fallen[0]][0]} or more")
    kept = sorted(name for name in shared if now[name][0] == before[name][0] and now[name][1] != before[name][1])
    if kept:
        raise ValueError(
            f"settings of {', '.join(kept)} changed and the version did not: raise `version` in PROTOCOLS, or "
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
            what = "other settings" if before[name][1] != now[name][1] else "the same settings"
            yield f"changed: {name}, version {before[name][0]} -> {now[name][0]}, {what}"
