"""The learning rate of every optimiser group at every step of a fine-tuning, as four families of code compute it.

All are a linear warm-up and half a cosine; they differ in where the warm-up ends, what the cosine runs over, and
whether the floor is scaled by layer decay. Steps count optimiser updates from 0.
"""

from dataclasses import dataclass
from typing import Literal

from engine.schedules import half_cosine

Family = Literal["mae", "beit", "simmim", "deit"]


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """Warm-up and cosine of one of four families.

    mae: the formula at fractional epochs, from 0 (MAE util/lr_sched.py:9-21; MOCA, LUT).
    beit: a table, whose last warm-up value is `lr` itself (BEiT, ExtreMA finetune/utils.py:386-403; iBOT).
    simmim: timm 0.4's CosineLRScheduler, stepped after the update, with its cosine over all steps: it drops where the
    warm-up ends, and neither start nor floor is scaled by layer (SimMIM lr_scheduler.py, main_finetune.py:219-222).
    deit: the same over epochs, stepped after each (DeiT main.py; iBOT
    evaluation/semi_supervised/eval_cls.py:782-787, 860).
    """

    family: Family
    lr: float  # peak
    epochs: int  # of the whole training
    warmup_epochs: float
    steps_per_epoch: int
    floor: float  # rate at the end of the cosine
    start: float = 0.0  # rate at the start of timm's warm-up (simmim, deit); the others start at 0

    @property
    def steps(self) -> int:
        """Updates of the whole training."""
        return self.epochs * self.steps_per_epoch

    def at(self, step: int, scale: float = 1.0) -> float:
        """The rate of update `step` for a group whose layer decay is `scale`."""
        warmup = int(self.warmup_epochs * self.steps_per_epoch)
        if self.family == "simmim":
            return self._timm(max(0, step - 1), warmup, self.steps, scale * self.lr)
        if self.family == "deit":
            whole = step // self.steps_per_epoch
            return self._timm(max(0, whole - 1), self.warmup_epochs, self.epochs, scale * self.lr)
        if self.family == "mae":
            epoch = step / self.steps_per_epoch
            return scale * half_cosine(self.lr, epoch, self.epochs, self.warmup_epochs, self.floor)
        if step < warmup:
            return scale * self.lr * step / max(1, warmup - 1)
        return scale * half_cosine(self.lr, step, self.steps, warmup, self.floor)

    def _timm(self, time: int, warmup: float, end: int, lr: float) -> float:
        """The rate that timm's scheduler gives for `time` of `end`, in updates or epochs."""
        if time < warmup:
            return self.start + time * (lr - self.start) / warmup
        return half_cosine(lr, time, end, 0.0, self.floor)
