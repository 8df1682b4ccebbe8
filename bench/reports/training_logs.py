"""The logs of pretrainings, from which training curves are drawn."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.reports.contents import ReportContents
from engine.files import read_json, read_json_lines

TrainingLog = Sequence[Mapping[str, float]]  # lines of a log.jsonl, each with the numbers in it by key


def training_logs(report: ReportContents) -> dict[str, TrainingLog]:
    """Name -> log of each network of a report whose pretraining is on this machine."""
    logs = {
        str(checkpoint["name"]): read_log(Path(str(checkpoint["source"])).parent / "log.jsonl")
        for checkpoint in report.checkpoints
        if checkpoint["kind"] == "measured"
    }
    return {name: lines for name, lines in logs.items() if lines}


def read_log(path: Path) -> TrainingLog:
    """Lines of a training's log.jsonl, each with epoch, images and hours if known; empty if there is no such file.

    An incomplete last line is left out. Lines of the k-NN monitor hold only the number of updates; their epoch is
    computed from the updates per epoch.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError):
        for entry in read_json_lines(path):
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    with_epoch = [line for line in lines if line.get("epoch") and line.get("step")]
    first, last = (with_epoch[0], with_epoch[-1]) if with_epoch else ({}, {})
    updates = (last["step"] - first["step"]) if with_epoch else 0
    epochs_per_update = (last["epoch"] - first["epoch"]) / updates if updates else 0.0
    batch, hours = _batch_size(path.parent), 0.0
    for line in lines:
        if "step" not in line:
            continue
        if "epoch" not in line and epochs_per_update:
            line["epoch"] = last["epoch"] + (line["step"] - last["step"]) * epochs_per_update
        if batch:
            line["images"] = line["step"] * batch
            if line.get("images_per_second"):
                hours += line.get("updates", 1) * batch / line["images_per_second"] / 3600
            line["hours"] = hours
    return lines


def _batch_size(run: Path) -> int:
    """Batch size of the pretraining in a folder; 0 if its run.json does not have it."""
    try:
        return int(read_json(run / "run.json")["settings"]["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
