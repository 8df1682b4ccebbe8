"""Rates over a pretraining: learning rate, weight decay and the momentum of a teacher, as each source computes them.

A schedule is asked with the peak and the progress. t: epochs done, fractional. E: epochs. i: updates done. N: all
updates.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from engine import checks
from engine.schedules import half_cosine
from engine.step_rates import StepRates
from pretrain.method import TrainProgress


class Schedule(Protocol):
    """How a value goes over training."""

    def at(self, peak: float, progress: TrainProgress) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak, always."""

    def at(self, peak: float, progress: TrainProgress) -> float:
        return peak


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """peak t / warmup, then half a cosine to `floor` at epoch stretch * E (MAE lr_sched.py:9-21, ExtreMA
    main.py:388-396, LUT; MOCA MI:484-501 with stretch 1.25)."""

    warmup: float  # epochs
    floor: float = 0.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        checks.amounts(self, "warmup", "floor", prefix="schedule.")
        if not 1 <= self.stretch < math.inf:
            raise ValueError(f"schedule.stretch={self.stretch}: must be 1 or more, or the rate would rise again")

    def at(self, peak: float, progress: TrainProgress) -> float:
        return half_cosine(peak, progress.time, int(self.stretch * progress.epochs), self.warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class TableCosine:
    """DINO's table (utils.py:187-198): the warm-up's last value is the peak itself, which the cosine then repeats."""

    warmup: float  # epochs
    floor: float = 0.0

    def __post_init__(self) -> None:
        checks.amounts(self, "warmup", "floor", prefix="schedule.")

    def at(self, peak: float, progress: TrainProgress) -> float:
        warmup = int(self.warmup * progress.steps_per_epoch)
        if progress.step < warmup:
            return peak * progress.step / max(1, warmup - 1)
        return half_cosine(peak, progress.step, progress.steps, warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class EpochCosine:
    """DeiT's (main.py: timm's CosineLRScheduler, stepped after each epoch): constant within an epoch, the first two of
    which have `start`."""

    warmup: float  # epochs
    start: float = 1e-6  # rate that the warm-up begins at, whatever the batch
    floor: float = 1e-5  # what the cosine falls to, whatever the batch

    def __post_init__(self) -> None:
        checks.amounts(self, "warmup", "start", "floor", prefix="schedule.")

    def at(self, peak: float, progress: TrainProgress) -> float:
        rates = StepRates(
            family="deit",
            lr=peak,
            epochs=progress.epochs,
            warmup_epochs=self.warmup,
            steps_per_epoch=progress.steps_per_epoch,
            floor=self.floor,
            start=self.start,
        )
        return rates.at(progress.step)


@dataclass(frozen=True, kw_only=True)
class Multistep:
    """SimMIM's (main_simmim.py:150-171, 217-230): linear from `start` * peak, then times `factor` at each milestone.

    Its scheduler moves after the update, so that update i gets the rate of i - 1.
    """

    warmup: float  # epochs
    start: float  # share of the peak
    milestones: tuple[float, ...]  # epochs
    factor: float = 0.1

    def __post_init__(self) -> None:
        checks.amounts(self, "warmup", "start", "milestones", "factor", prefix="schedule.")

    def at(self, peak: float, progress: TrainProgress) -> float:
        done, warmup = max(0, progress.step - 1), int(self.warmup * progress.steps_per_epoch)
        if done < warmup:
            return self.start * peak + done * (1.0 - self.start) * peak / warmup
        passed = sum(done >= int(milestone * progress.steps_per_epoch) for milestone in self.milestones)
        return peak * self.factor**passed


@dataclass(frozen=True, kw_only=True)
class CosineTo:
    """Half a cosine from the peak to `end` over all updates, which it reaches only after the last one: weight decay of
    DINO and MOCA, momenta of ExtreMA (main.py:408-411), MOCA and DINO."""

    end: float

    def __post_init__(self) -> None:
        checks.amounts(self, "end", prefix="weight_decay_schedule.")  # the only field of a recipe with this schedule

    def at(self, peak: float, progress: TrainProgress) -> float:
        return cosine(peak, self.end, progress.step / progress.steps)


def cosine(start: float, end: float, done: float) -> float:
    """Half a cosine from `start` to `end`; done: 0 to 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done))
