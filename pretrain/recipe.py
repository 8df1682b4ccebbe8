"""A recipe: everything that decides about a pretraining besides images, seed and machine. Values, not files.

`--set field=value` reaches the recipe's own fields, the method's settings and the encoder's spec by the bare name.
"""

import dataclasses
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal

from checkpoints.spec import ViTSpec
from engine import checks
from pretrain.schedules import Constant, Schedule

Rule = Literal["linear", "root"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """source: paper or code of the numbers, and what in them is ours. spec: encoder. settings: the method's own.

    batch: images in an update, over all processes and accumulated parts. lr: peak at `lr_batch` images in an update,
    by which it scales, or by the root of which, as `lr_rule` says; as it is where `lr_batch` is 0. clip: norm of the
    gradient, 0 for any; with `clip_each` every parameter is clipped by its own norm (DINO utils.py:132-141).
    """

    source: str
    spec: ViTSpec
    settings: Any
    epochs: int
    batch: int
    lr: float
    lr_batch: int = 256
    lr_rule: Rule = "linear"
    schedule: Schedule
    weight_decay: float
    weight_decay_schedule: Schedule = field(default_factory=Constant)
    optimizer: Literal["adamw", "lars"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9  # of LARS
    clip: float = 0.0
    clip_each: bool = False

    def __post_init__(self) -> None:
        checks.annotations(self)
        checks.counts(self, "epochs", "batch")
        checks.positive(self, "lr")
        checks.amounts(self, "lr_batch", "weight_decay", "clip")
        checks.below_one(self, "betas", "momentum")
        warmup = getattr(self.schedule, "warmup", 0)
        if warmup >= self.epochs:
            raise ValueError(
                f"schedule.warmup={warmup} with epochs={self.epochs}: nothing is left after the warm-up; lower "
                "schedule.warmup below epochs"
            )

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        scale = self.batch / self.lr_batch if self.lr_batch else 1.0
        return self.lr * (sqrt(scale) if self.lr_rule == "root" else scale)

    def to_json(self) -> dict[str, Any]:
        """All values as JSON; a schedule is its fields under its class's name."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("schedule", "weight_decay_schedule"):
            plain[name] = {"name": type(plain[name]).__name__, **dataclasses.asdict(plain[name])}
        plain |= {"spec": self.spec.to_json(), "settings": dataclasses.asdict(self.settings)}
        return plain
