"""How long a unit of work takes, measured on a machine (`Calibration`), and the seconds of a task's work from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.work import Kind, Part, Work

# What a part without a measured unit is estimated by, from its operations: the like that is measured.
LIKE: Mapping[Kind, str] = {
    "features": "forward",
    "crops": "forward",
    "evaluation": "forward",
    "training": "training",
    "head steps": "product",
    "head images": "product",
    "comparisons": "product",
    "fit rows": "product",
}


class Speed(Protocol):
    """A machine, measured or assumed."""

    def seconds(self, part: Part, protocol: str) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on one machine, with one architecture, device and precision."""

    date: str  # ISO 8601, UTC
    took: float  # seconds of measuring
    machine: Mapping[str, Any]  # as results say it
    device: str
    precision: str
    architecture: str
    units: Mapping[Kind, float] = field(default_factory=dict)  # kind of work -> seconds of a unit, for all tasks
    # protocol -> kind of work -> seconds of a unit, as its task rehearsed it
    of_task: Mapping[str, Mapping[Kind, float]] = field(default_factory=dict)
    # forward, training, product -> floating-point operations a second
    flops: Mapping[str, float] = field(default_factory=dict)
    # protocol -> kind of work -> operations of a unit, of models that a task builds
    models: Mapping[str, Mapping[Kind, float]] = field(default_factory=dict)
    reading: float = 0.0  # seconds that a core takes to read, decode and crop an image
    memory_free: float = 0.0  # bytes

    def unit(self, kind: Kind, protocol: str) -> float | None:
        """Of one unit, where it was measured."""
        return self.of_task.get(protocol, {}).get(kind, self.units.get(kind))

    def seconds(self, part: Part, protocol: str) -> float:
        """Of a part; from its operations where its unit was not measured."""
        unit = self.unit(part.kind, protocol)
        if unit is None:
            rate = self.flops.get(LIKE.get(part.kind, ""), 0.0)
            unit = part.flops / rate if rate else 0.0
        return unit * part.count


def seconds_of_work(work: Work, speed: Speed, protocol: str) -> float:
    """All parts one after the other, as a task does them."""
    return sum(speed.seconds(part, protocol) for part in work.parts)
