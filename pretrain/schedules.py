"""What a recipe's rates are written with: the schedules of pretraining alone, beside those that other trainings share.

Learning rate, weight decay and the momentum of a teacher, as each source computes them (engine/training/schedules.py).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.settings import Fraction, NonNegativeFloat, OneOrMore
from engine.training.schedules import Schedule, ScheduleSettings, TableCosine, TrainProgress, WarmupCosine, half_cosine

__all__ = ["Constant", "CosineTo", "CountedCosine", "Multistep", "Schedule", "TableCosine", "WarmupCosine", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak, always."""

    def at(self, peak: float, progress: TrainProgress) -> float:
        return peak


@dataclass(frozen=True, kw_only=True)
class Multistep(ScheduleSettings):
    """SimMIM's (main_simmim.py:150-171, 217-230): linear from `start` * peak, then times `factor` at each milestone.

    Its scheduler moves after the update, so that update i gets the rate of i - 1.
    """

    warmup: NonNegativeFloat  # epochs
    start: NonNegativeFloat  # share of the peak
    milestones: tuple[NonNegativeFloat, ...]  # epochs
    factor: NonNegativeFloat = 0.1  # of the rate at each milestone

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

    warmup: NonNegativeFloat  # epochs
    start: NonNegativeFloat  # share of the peak
    floor: NonNegativeFloat = 0.0  # rate at the cosine's end
    stretch: OneOrMore = 1.25  # where that is, in times the training's epochs

    def at(self, peak: float, progress: TrainProgress) -> float:
        number, warmup = progress.step + 1, int(self.warmup * progress.steps_per_epoch)
        if number < warmup:
            return self.start * peak + number / warmup * (1.0 - self.start) * peak
        return half_cosine(peak, number, int(self.stretch * progress.steps), warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class CosineTo(ScheduleSettings):
    """Half a cosine from the peak to `end` over all updates, which it reaches only after the last one: weight decay of
    DINO, MOCA and MSN, momenta of ExtreMA (main.py:408-411), MOCA and DINO."""

    PREFIX: ClassVar[str] = "weight_decay_schedule."

    end: NonNegativeFloat  # value after the last update
    stretch: OneOrMore = 1.0  # over so many times the updates (MSN 1.25)
    first: Literal[0, 1] = 0  # number of the first update (MSN counts from 1)

    def at(self, peak: float, progress: TrainProgress) -> float:
        return cosine(peak, self.end, (progress.step + self.first) / int(self.stretch * progress.steps))


@dataclass(frozen=True, kw_only=True)
class TruncatedCosine(ScheduleSettings):
    """A table whose warm-up begins with 0 and ends with the peak, which is repeated, and of whose half cosine towards
    `floor` the last part is left out (CAPI utils.py, WarmupThenCosine)."""

    warmup: NonNegativeFloat  # epochs
    floor: NonNegativeFloat = 0.0  # rate at the cosine's end
    cut: Fraction = 0.8  # share of the cosine that the training covers

    def at(self, peak: float, progress: TrainProgress, start: float = 0.0) -> float:
        """start: the first value."""
        warmup = round(self.warmup * progress.steps_per_epoch)
        if progress.step < warmup:
            return start + (peak - start) * progress.step / max(1, warmup - 1)
        return cosine(peak, self.floor, self.cut * (progress.step - warmup) / (progress.steps - warmup))


def cosine(start: float, end: float, done: float) -> float:
    """Half a cosine from `start` to `end`; done: 0 to 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done))


def ramp(step: int, *, start: float, peak: float, end: float, warmup: int, cosine_steps: int) -> float:
    """Linear from `start` over `warmup` updates to `peak`, then half a cosine of `cosine_steps` updates, the last of
    which has `end`, as have all after it (DINOv3's weights of losses)."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    done = step - warmup
    return cosine(peak, end, done / max(1, cosine_steps - 1)) if done < cosine_steps else end
