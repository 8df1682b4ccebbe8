"""The fact "cost" of an export: what our own pretraining of it took."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Number of TrainingCost -> how it is told to people.
COST_UNITS = {
    "hours": "hours",
    "seconds_per_epoch": "s an epoch",
    "images_per_second": "images/s",
    "gflop_per_image": "GFLOP an image",
    "memory_gib": "GiB",
    "gpu_memory_gib": "GiB of a GPU",
}


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """As pretrain/loop/cost.py measures it; empty of a checkpoint that was not trained here."""

    hours: float | None = None  # of updates on `devices`, waiting for images included
    seconds_per_epoch: float | None = None  # mean
    images_per_second: float | None = None  # mean
    gflop_per_image: float | None = None  # 1e9 floating-point operations, forward and back, of all networks
    memory_gib: float | None = None  # peak of the hungriest process, without its loaders
    gpu_memory_gib: float | None = None  # peak of a GPU's tensors
    devices: str = ""  # such as `8 x NVIDIA A100-SXM4-80GB`

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "TrainingCost":
        """That of an export's facts, as far as they are numbers."""
        cost = facts.get("cost")
        known = cost if isinstance(cost, dict) else {}
        numbers = {name: value for name in COST_UNITS if type(value := known.get(name)) in (int, float)}
        return cls(**numbers, devices=str(known.get("devices") or ""))

    @property
    def text(self) -> str:
        """`60.2 hours, 722 s an epoch, ... on 8 x V100`; what is known of it, empty where nothing is."""
        known = {unit: getattr(self, name) for name, unit in COST_UNITS.items() if name != "hours"}
        numbers = [f"{value:.4g} {unit}" for unit, value in known.items() if value is not None]
        spent = [] if self.hours is None else [_span(3600 * self.hours)]
        return ", ".join([*spent, *numbers]) + (f" on {self.devices}" if self.devices else "")


def _span(seconds: float) -> str:
    """`60.2 hours`; less than one in minutes or seconds, as 0.0002 hours say little."""
    if seconds < 60:
        return f"{seconds:.4g} s"
    return f"{seconds / 3600:.4g} hours" if seconds >= 3600 else f"{seconds / 60:.4g} min"
