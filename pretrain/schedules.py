"""Schedules of learning rate, weight decay and a teacher's momentum that only pretraining uses, as each source computes
them. Those that all trainings share are in engine/training/schedules.py and are re-exported here.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from engine.settings import Fraction, NonNegativeFloat, OneOrMore, ReadIf, UnitInterval
from engine.training.schedules import Schedule, ScheduleSettings, TableCosine, TrainProgress, WarmupCosine, half_cosine

__all__ = ["Constant", "CosineTo", "CountedCosine", "Multistep", "Schedule", "TableCosine", "WarmupCosine", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak, at any time."""

    def at(self, peak: float, progress: TrainProgress) -> float:
        return peak


@dataclass(frozen=True, kw_only=True)
class Multistep(ScheduleSettings):
    """SimMIM's (main_simmim.py:150-171, 217-230): linear from `start` * peak, then times `factor` at each milestone.

    Its scheduler steps after the update, so that update i gets the rate of i - 1.
    """

    warmup: NonNegativeFloat  # epochs of the warm-up
    # learning rate at the start of the warm-up, as a share of the peak
    start: Annotated[UnitInterval, ReadIf("warmup")]
    milestones: tuple[NonNegativeFloat, ...]  # epochs at which the rate is multiplied by `factor`
    # factor by which the rate is multiplied at each milestone
    factor: Annotated[NonNegativeFloat, ReadIf("milestones")] = 0.1

    def at(self, peak: float, progress: TrainProgress) -> float:
        done, warmup = max(0, progress.step - 1), int(self.warmup * progress.steps_per_epoch)
        if done < warmup:
            return self.start * peak + done * (1.0 - self.start) * peak / warmup
        passed = sum(done >= int(milestone * progress.steps_per_epoch) for milestone in self.milestones)
        return peak * self.factor**passed


@dataclass(frozen=True, kw_only=True)
class CountedCosine(ScheduleSettings):
    """MSN's (src/utils.py, WarmupCosineSchedule), which counts updates from 1: linear from `start` * peak, then half a
    cosine to `floor` at epoch stretch * E."""

    warmup: NonNegativeFloat  # epochs of the warm-up
    # learning rate at the start of the warm-up, as a share of the peak
    start: Annotated[UnitInterval, ReadIf("warmup")]
    floor: NonNegativeFloat = 0.0  # learning rate at the end of the cosine
    stretch: OneOrMore = 1.25  # length of the schedule, as a multiple of the training's epochs E

    def at(self, peak: float, progress: TrainProgress) -> float:
        number, warmup = progress.step + 1, int(self.warmup * progress.steps_per_epoch)
        if number < warmup:
            return self.start * peak + number / warmup * (1.0 - self.start) * peak
        return half_cosine(peak, number, int(self.stretch * progress.steps), warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class CosineTo(ScheduleSettings):
    """Half a cosine from the peak to `end`, which it reaches only after the last update: weight decay of DINO, MOCA and
    MSN, momenta of ExtreMA (main.py:408-411), MOCA and DINO."""

    PREFIX: ClassVar[str] = "weight_decay_schedule."

    end: NonNegativeFloat  # value after the last update
    stretch: OneOrMore = 1.0  # length of the cosine, as a multiple of the training's updates (MSN 1.25)
    first: Literal[0, 1] = 0  # number of the first update (MSN counts from 1)

    def at(self, peak: float, progress: TrainProgress) -> float:
        return cosine(peak, self.end, (progress.step + self.first) / int(self.stretch * progress.steps))


@dataclass(frozen=True, kw_only=True)
class TruncatedCosine(ScheduleSettings):
    """Linear warm-up from 0 to the peak, then the first part of half a cosine from the peak to `floor` (CAPI utils.py,
    WarmupThenCosine). The peak occurs twice, at the end of the warm-up and at the start of the cosine."""

    warmup: NonNegativeFloat  # epochs of the warm-up
    floor: NonNegativeFloat = 0.0  # value at the end of the whole cosine
    cut: Fraction = 0.8  # share of the cosine that the training covers

    def at(self, peak: float, progress: TrainProgress, start: float = 0.0) -> float:
        """The value at `progress`. start: the first value of the warm-up."""
        warmup = round(self.warmup * progress.steps_per_epoch)
        if progress.step < warmup:
            return start + (peak - start) * progress.step / max(1, warmup - 1)
        return cosine(peak, self.floor, self.cut * (progress.step - warmup) / (progress.steps - warmup))


def cosine(start: float, end: float, done: float) -> float:
    """Half a cosine from `start` to `end`. done: position on it, from 0 to 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done))


def ramp(step: int, *, start: float, peak: float, end: float, warmup: int, cosine_steps: int) -> float:
    """DINOv3's schedule of loss weights: linear from `start` to `peak` over `warmup` updates, then half a cosine of
    `cosine_steps` updates whose last value is `end`, then `end`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    done = step - warmup
    return cosine(peak, end, done / max(1, cosine_steps - 1)) if done < cosine_steps else end
