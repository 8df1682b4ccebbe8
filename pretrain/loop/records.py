"""The log of a pretraining: log.jsonl, one JSON object every few updates, and the same values in TensorBoard.

A line with `updates` holds means over that many updates up to `step`; other lines hold the values of a monitor. A
restart first drops the lines of updates that it repeats, so that every update is logged once.

The cost of a pretraining is computed from the log, in the units of papers: hours (ExtreMA table 8, MOCA tables 5k and
10), time and memory of an epoch (MOCA tables 1, 2d, 2e), and floating-point operations per image of all networks,
forward and backward (engine/work.py).
"""

import json
import math
import resource
import secrets
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine.files import read_json_lines, read_text, write_atomic
from engine.optional import require

LOG = "log.jsonl"
GIB = 2**30
DIGITS = 4  # significant digits of a cost; timings are not more precise


class Records:
    """The log of one run.

    Args:
        folder: of the run.
        step: updates done so far; lines of later updates are dropped.
        wandb: project of Weights & Biases, or None.
        run: the contents of run.json, for Weights & Biases.
        quiet: write nothing, as in every process but rank 0.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        wandb: str | None = None,
        run: Mapping[str, Any] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.path, self.quiet, self.tensorboard, self.wandb = folder / LOG, quiet, None, None
        if quiet:
            return
        lines = [line for line in lines_in(folder) if line["step"] <= step]
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        self.wandb = _wandb(wandb, folder, run or {}) if wandb else None

    def write(
        self, step: int, values: Mapping[str, float], warnings: Sequence[str] = (), devices: str | None = None
    ) -> None:
        """Append a line of values after `step` updates. devices: the devices that they ran on, see `devices_of`."""
        if self.quiet:
            return
        line: dict[str, Any] = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        if devices:
            line["devices"] = devices
        if warnings:
            line["warnings"] = list(warnings)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            if warnings:
                self.tensorboard.add_text("warnings", "\n\n".join(warnings), step)
        if self.wandb is not None:
            self.wandb.log(dict(values), step=step)

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


class Averages:
    """Means of the logged values since the last line.

    Attributes:
        updates: number of updates since the last line.
        seconds: that they took.
        waited: seconds of these spent waiting for images.
        epoch: seconds of each update since the start of the epoch or of this process, whichever is later.
        once: values for the next line only.
    """

    def __init__(self) -> None:
        self.epoch: list[float] = []
        self.once: dict[str, float] = {}
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0

    def add(self, logs: Mapping[str, float], last: Mapping[str, float], seconds: float) -> None:
        """Add one update. last: values of which the newest is logged instead of the mean."""
        for name, value in logs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.last = dict(last)
        self.updates, self.seconds = self.updates + 1, self.seconds + seconds
        self.epoch.append(seconds)

    def take(self, batch: int) -> dict[str, float]:
        """The means, images per second, and the share of time spent waiting for images; then clear everything.

        batch: images in an update.
        """
        values = {
            "updates": self.updates,
            **self.last,
            **{name: value / self.updates for name, value in self.sums.items()},
            "images_per_second": self.updates * batch / self.seconds,
            "waiting": self.waited / self.seconds,
            **self.once,
        }
        self.once = {}
        self.clear()
        return values

    def seconds_per_epoch(self, updates: int) -> float:
        """Seconds of an epoch of `updates` updates, at the mean speed of the epoch that ends now."""
        mean, self.epoch = statistics.fmean(self.epoch), []
        return updates * mean


def lines_in(run: Path) -> list[dict[str, Any]]:
    """The lines of the log in a run's folder, without any that a kill cut short."""
    path = run / LOG
    return [value for value in read_json_lines(path) if "step" in value] if path.exists() else []


def _plain(value: float) -> float | str:
    """A number as JSON has it; "nan" and "inf" as texts."""
    return value if math.isfinite(value) else str(value)


def _wandb(project: str, folder: Path, run: Mapping[str, Any]) -> Any:
    """The W&B run of this folder, the same after a restart. W&B drops updates that it already has."""
    require("wandb")
    import wandb

    path = folder / "wandb-id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(8))
    return wandb.init(
        project=project,
        name=folder.name,
        dir=str(folder),
        config=dict(run),
        id=read_text(path),
        resume="allow",
        allow_val_change=True,  # the images may have moved
    )


def peak_memory(device: str) -> dict[str, float]:
    """Peak memory so far, in GiB: of this process without its loaders, and of its tensors on the GPU."""
    kilobyte = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes on Linux
    memory = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte / GIB}
    if torch.device(device).type == "cuda":
        memory["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
    return memory


def devices_of(device: str, processes: int) -> str:
    """The devices of a training, such as `8 x NVIDIA A100-SXM4-80GB` or `2 x CPU, 1 thread`."""
    if torch.device(device).type == "cpu":
        threads = torch.get_num_threads()
        return f"{processes} x CPU, {threads} thread{'s' if threads > 1 else ''}"
    return f"{processes} x {torch.cuda.get_device_name(device)}"


def is_counted(run: Path) -> bool:
    """Whether the log of this run already has the floating-point operations per image."""
    return bool(_values(lines_in(run), "gflop_per_image"))


def cost_of(run: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The cost so far of the run in this folder; empty before the first line of its log. identity: of its run.json.

    hours: of updates, waiting for images included, without exports, states and monitors. seconds_per_epoch,
    images_per_second: means. memory_gib, gpu_memory_gib: peaks of the process with the highest. gflop_per_image.
    devices: those of the newest epoch.
    """
    batch, images = identity["settings"]["batch"], identity["data"]["images"]
    lines = lines_in(run)
    updates = [line for line in lines if "updates" in line]
    if not updates:
        return {}
    done = sum(line["updates"] for line in updates)
    seconds = sum(line["updates"] * batch / line["images_per_second"] for line in updates)
    cost = {
        "hours": seconds / 3600,
        "seconds_per_epoch": seconds / done * (images // batch),
        "images_per_second": done * batch / seconds,
    }
    for name in ("memory_gib", "gpu_memory_gib", "gflop_per_image"):
        if values := _values(lines, name):
            cost[name] = max(values)
    rounded: dict[str, Any] = {name: float(f"{value:.{DIGITS}g}") for name, value in cost.items()}
    if devices := _values(lines, "devices"):
        rounded["devices"] = devices[-1]
    return rounded


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of `name` in the lines that have one."""
    return [line[name] for line in lines if name in line]
