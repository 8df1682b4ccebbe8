"""The folder of a pretraining: whether a folder is one, what it trains, and which exports it holds.

It contains run.json, which identifies the training, and at its end `export` and an `export-BRANCH` for each further
network. Before the end, the encoder of its newest state is built by pretrain/loop/exporting.py.
"""

from pathlib import Path
from typing import Any

from checkpoints.export import is_export
from engine.files import read_json

RUN = "run.json"
EXPORT = "export"  # folder of the first branch; those of the others are export-BRANCH


def is_run(folder: Path | str) -> bool:
    """Whether a folder has a run.json, possibly of another program, and is not a model itself."""
    return (Path(folder) / RUN).is_file() and not (Path(folder) / "config.json").exists()


def identity_in(folder: Path) -> dict[str, Any]:
    """The contents of run.json in `folder`. Raises ValueError if it does not describe a training."""
    path = folder / RUN
    try:
        identity = read_json(path)
        settings, data = identity["settings"], identity["data"]
        for values, names in (
            (identity, ("method",)),
            (settings, ("source", "spec", "settings", "epochs", "batch")),
            (data, ("url", "fingerprint", "images")),
        ):
            for name in names:
                values[name]  # raises an error if it is missing
        1 / (data["images"] // settings["batch"])  # updates of an epoch
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} does not describe a training ({type(error).__name__}: {error})") from error
    return identity


def finished_export(folder: Path) -> Path | None:
    """The folder of the first branch's export of a finished run; None before the end, even if an earlier epoch was
    exported."""
    path = folder / EXPORT
    if not is_export(path):
        return None
    facts = read_json(path / "config.json")["vit_export"]
    return path if facts.get("epochs", 0) >= identity_in(folder)["settings"]["epochs"] else None
