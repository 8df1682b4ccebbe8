"""Whose a run's folder is: run.json says what is trained there, and only the same training may go on in it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.files import write_atomic

# They decide nothing: the images may have moved, a source may have been worded anew.
UNCOMPARED = ("data.url", "settings.source")
# What a kill leaves of files and folders that are written beside their place (engine/files.py).
LEFTOVERS = (".run.json.*", ".log.jsonl.*", ".export*", ".start.*")


def claim(folder: Path, identity: Mapping[str, Any], resume: bool) -> None:
    """Begin a new run in `folder`, or check that the one there is this one. ValueError names what differs."""
    path, asked = folder / "run.json", json.loads(json.dumps(identity))
    for leftover in [found for pattern in LEFTOVERS for found in folder.glob(pattern)]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other files: choose a new folder for --out")
        write_atomic(path, json.dumps(asked, indent=2) + "\n")
        return
    if not resume:
        raise ValueError(f"{folder} holds a run already; add --resume to go on, or choose another --out")
    different = differences(_read(path), asked)
    if different:
        raise ValueError(f"{folder} holds another run, {'; '.join(different)}; choose another --out")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}); choose another --out") from error


def differences(there: Any, asked: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, a phrase for each leaf."""
    if name in UNCOMPARED:
        return []
    if isinstance(there, dict) and isinstance(asked, dict):
        pairs = {f"{name}.{key}" if name else key: (there.get(key), asked.get(key)) for key in there | asked}
        return [phrase for place, pair in pairs.items() for phrase in differences(*pair, place)]
    return [] if there == asked else [f"{name} is {there}, asked for {asked}"]
