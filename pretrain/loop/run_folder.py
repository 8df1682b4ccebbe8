"""The folder of a run: run.json identifies the training, and only the same one may resume in it.

No file is touched before the folder is known to be a run's.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.files import locked_or_refused, write_atomic
from engine.training.states import states

# These may differ on resuming: the images may have moved, and a newer version may cite a source in other words.
UNCOMPARED = ("data.url", "settings.source")
RUN = "run.json"
# Temporary files and folders that a kill leaves behind (engine/files.py).
TEMPORARY_RUN_JSON = f".{RUN}.*"
LEFTOVERS = (TEMPORARY_RUN_JSON, ".log.jsonl.*", ".export.*", ".export-*.*", ".start.*", ".wandb-id.*")
LOCK = "lock"
SHOWN, MAX_SHOWN = 4, 40  # differences that a refusal names; characters of a value in it
MADE_AGAIN = ("start", "log.jsonl", "tensorboard", "wandb-id")  # all that a run has before its first training state
CLUSTER = "cluster"  # what was submitted with --cluster, before the run began
BEGUN = {RUN, LOCK, CLUSTER, "wandb", "states", *MADE_AGAIN}


@contextmanager
def locked_run_folder(
    folder: Path, identity: Mapping[str, Any], resume: bool, defaults: Mapping[str, Any]
) -> Iterator[None]:
    """Lock `folder` for a new run, or to resume this run in it.

    A run that failed before its first training state is replaced. ValueError where the folder holds another run (it
    names what differs), other files, or another process that trains here.
    """
    requested = json.loads(json.dumps(identity))
    check_resume(folder, requested, resume, defaults)
    with locked_or_refused(folder / LOCK, f"another training is running in {folder}; choose another --out"):
        goes_on = check_resume(folder, requested, resume, defaults)  # again: another process may have trained here
        for path in _leftovers(folder) | (set() if goes_on else {folder / name for name in MADE_AGAIN}):
            _remove(path)
        if not goes_on:
            write_atomic(folder / RUN, json.dumps(requested, indent=2) + "\n")
        yield


def check_resume(folder: Path, requested: Mapping[str, Any], resume: bool, defaults: Mapping[str, Any]) -> bool:
    """Whether to resume the run in `folder`; False starts a new one. ValueError where neither is possible.

    defaults: of the settings, which a run of an earlier version has where it recorded none.
    """
    path = folder / RUN
    held = set(folder.iterdir()) - set(folder.glob(TEMPORARY_RUN_JSON)) if folder.exists() else set()
    if not path.exists():
        if held - {folder / LOCK, folder / CLUSTER}:
            raise ValueError(f"{folder} holds other files: choose a new folder for --out")
        return False
    recorded = _read(path)
    begun = {folder / name for name in BEGUN} | _leftovers(folder)
    if recorded.keys() == requested.keys() and held <= begun and not states(folder / "states"):
        return False
    if isinstance(settings := recorded.get("settings"), dict):
        recorded["settings"] = _filled(settings, json.loads(json.dumps(defaults)))
    different = json_differences(recorded, requested)
    if different:
        rest = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise ValueError(f"{folder} holds another run, {'; '.join(different[:SHOWN])}{rest}; choose another --out")
    if not resume:
        raise ValueError(f"{folder} holds this run already; add --resume to continue it, or choose another --out")
    return True


def _leftovers(folder: Path) -> set[Path]:
    return {path for pattern in LEFTOVERS for path in folder.glob(pattern)}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}); choose another --out") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a run's; choose another --out")
    return value


def _filled(recorded: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`recorded`, and the defaults of what it lacks."""
    nested = {
        name: _filled(values, defaults[name])
        for name, values in recorded.items()
        if isinstance(values, dict) and isinstance(defaults.get(name), dict)
    }
    return {**defaults, **recorded, **nested}


def json_differences(recorded: Any, requested: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, a phrase for each leaf."""
    if name in UNCOMPARED:
        return []
    if isinstance(recorded, dict) and isinstance(requested, dict):
        keys = recorded | requested
        pairs = {f"{name}.{key}" if name else key: (recorded.get(key), requested.get(key)) for key in keys}
        return [phrase for place, pair in pairs.items() for phrase in json_differences(*pair, place)]
    return [] if recorded == requested else [f"{name} is {_short(recorded)}, asked for {_short(requested)}"]


def _short(value: Any) -> str:
    """A value for a message; long ones, such as digests, are shortened."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:12]}..."
