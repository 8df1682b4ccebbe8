"""The folder of a run: run.json identifies the training, and only the same training may resume in it.

No file is touched before the folder is known to belong to a run.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints.runs import RUN
from engine.errors import option
from engine.files import locked_or_refused, read_json, write_atomic
from engine.training.states import states
from imagesets.sets import contents_differ

# Images of a forward pass, if the loss depends on them; earlier versions did not record it.
FORWARD_IMAGES = "forward_images"
CONTENTS = "contents"  # digests of the images' files (imagesets.sets.contents_digest); likewise
# These may differ on resuming: the images may have moved, and a newer version may use other words. The last two are
# checked separately below.
NOT_COMPARED = ("data.url", "settings.source", "init.assumed", FORWARD_IMAGES, f"data.{CONTENTS}")
# Patterns of temporary files and folders that a killed process leaves behind (engine/files.py).
TEMPORARY_RUN_JSON = f".{RUN}.*"
LEFTOVERS = (TEMPORARY_RUN_JSON, ".log.jsonl.*", ".export.*", ".export-*.*", ".start.*", ".wandb-id.*")
LOCK = "lock"
MAX_DIFFERENCES = 4  # differences that an error message names
MAX_CHARACTERS = 40  # of a value in an error message
REPLACED = ("start", "log.jsonl", "tensorboard", "wandb-id")  # outputs of a run before its first training state
CLUSTER = "cluster"  # the jobs submitted with --cluster, written before the run begins
BEFORE_FIRST_STATE = {RUN, LOCK, CLUSTER, "wandb", "states", *REPLACED}  # all that a run may hold until then


@contextmanager
def locked_run_folder(
    folder: Path, identity: Mapping[str, Any], resume: bool, defaults: Mapping[str, Any]
) -> Iterator[None]:
    """Lock `folder` for a new run, or to resume this run in it.

    A run that failed before its first training state is replaced.

    Args:
        folder: of the run.
        identity: the contents of run.json.
        resume: whether to continue a run in the folder.
        defaults: of the settings, see `check_resume`.

    Raises:
        ValueError: the folder holds another run (the message names the differences) or other files, or another process
            trains in it.
    """
    requested = json.loads(json.dumps(identity))
    check_resume(folder, requested, resume, defaults)
    with locked_or_refused(folder / LOCK, f"another training is running in {folder}; choose another --out"):
        resumes = check_resume(folder, requested, resume, defaults)  # again: another process may have trained here
        outdated = _leftovers(folder)
        if not resumes:
            outdated |= {folder / name for name in REPLACED}
        for path in outdated:
            _remove(path)
        if not resumes:
            write_atomic(folder / RUN, json.dumps(requested, indent=2) + "\n")
        yield


def check_resume(folder: Path, requested: Mapping[str, Any], resume: bool, defaults: Mapping[str, Any]) -> bool:
    """Whether to resume the run in `folder`; False: start a new one. Raises ValueError if neither is possible.

    requested: the contents of run.json for this run, `forward_images` only if the processes are known. resume: whether
    the user asked to resume. defaults: of the settings; they stand for settings that a run of an earlier version did
    not record.
    """
    path = folder / RUN
    contents = set(folder.iterdir()) - set(folder.glob(TEMPORARY_RUN_JSON)) if folder.exists() else set()
    if not path.exists():
        if contents - {folder / LOCK, folder / CLUSTER}:
            raise ValueError(f"{folder} holds other files: choose a new folder for {option('out')}")
        return False
    recorded = _read(path)
    replaceable = {folder / name for name in BEFORE_FIRST_STATE} | _leftovers(folder)
    is_similar = recorded.keys() ^ requested.keys() <= {FORWARD_IMAGES}
    if is_similar and contents <= replaceable and not states(folder / "states"):
        return False
    if isinstance(settings := recorded.get("settings"), dict):
        recorded["settings"] = _filled(settings, json.loads(json.dumps(defaults)))
    differences = json_differences(recorded, requested)
    if differences:
        rest = f"; and {len(differences) - MAX_DIFFERENCES} more" if len(differences) > MAX_DIFFERENCES else ""
        listed = "; ".join(differences[:MAX_DIFFERENCES])
        raise ValueError(f"{folder} holds another run: {listed}{rest}; choose another {option('out')}")
    if contents_differ(*(run["data"].get(CONTENTS, "") for run in (recorded, requested))):
        raise ValueError(
            f"{folder} holds a run on other images, as files of {requested['data']['url']} were overwritten since it "
            f"began: restore them, choose another {option('out')}, or, if their pixels are the same, delete "
            f"data.{CONTENTS} in {path}"
        )
    before, now = recorded.get(FORWARD_IMAGES), requested.get(FORWARD_IMAGES)
    if None not in (before, now) and before != now:
        raise ValueError(
            f"{folder} holds a run whose forward passes have {before} images, not {now}, and its loss depends on them: "
            f"give {option('micro_batch')} as before, or choose another {option('out')}"
        )
    if not resume:
        raise ValueError(
            f"{folder} holds this run already; add {option('resume', True)} to continue it, or choose another "
            f"{option('out')}"
        )
    return True


def _leftovers(folder: Path) -> set[Path]:
    """Temporary files and folders of killed processes."""
    return {path for pattern in LEFTOVERS for path in folder.glob(pattern)}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """The contents of a run.json. ValueError if it cannot be read."""
    try:
        return read_json(path, type=dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{error}: it does not describe a run; choose another {option('out')}") from error


def _filled(recorded: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`recorded`, completed with the defaults of missing values."""
    nested = {
        name: _filled(values, defaults[name])
        for name, values in recorded.items()
        if isinstance(values, dict) and isinstance(defaults.get(name), dict)
    }
    return {**defaults, **recorded, **nested}


def json_differences(recorded: Any, requested: Any, name: str = "") -> list[str]:
    """The differences between two JSON values, a phrase for each leaf. name: of the values, for the phrases."""
    if name in NOT_COMPARED:
        return []
    if isinstance(recorded, dict) and isinstance(requested, dict):
        keys = recorded | requested
        pairs = {f"{name}.{key}" if name else key: (recorded.get(key), requested.get(key)) for key in keys}
        return [phrase for place, pair in pairs.items() for phrase in json_differences(*pair, place)]
    return [] if recorded == requested else [f"{name} is {_short(recorded)}, asked for {_short(requested)}"]


def _short(value: Any) -> str:
    """A value for a message; long ones, such as digests, are shortened."""
    text = str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:12]}..."
