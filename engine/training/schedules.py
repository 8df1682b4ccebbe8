"""Progress of a training, learning-rate schedules as each source computes them, micro-batches, and the check for losses
or gradients that are not finite.

A schedule's `at(peak, progress)` returns the rate: of a recipe in pretraining, of each layer in fine-tuning and dense
tasks, and in linear sweeps a factor on the rates of all heads. Weight decay and momenta have the same interface.

Letters: t epochs done, fractional; E epochs of the training; i updates done; N updates of the training.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from engine.settings import NonNegativeFloat, NonNegativeInt, OneOrMore, PositiveFloat, ReadIf, UnitInterval, Validated

Pace = Literal["epoch", "iteration"]


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """Progress of a training. For a source that counts only updates, an epoch is one update."""

    step: int  # updates done
    steps_per_epoch: int  # updates per epoch
    epochs: int  # of the whole training
    micro_batch: int = 0  # number of the forward pass in this update, 0 to micro_batches - 1 (accumulation)
    micro_batches: int = 1  # forward passes per update

    @property
    def steps(self) -> int:
        """Updates of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.step // self.steps_per_epoch

    @property
    def time(self) -> float:
        """Epochs done, fractional, at the start of this update."""
        return self.step / self.steps_per_epoch

    @property
    def is_first_micro_batch(self) -> bool:
        return self.micro_batch == 0

    @property
    def is_last_micro_batch(self) -> bool:
        return self.micro_batch == self.micro_batches - 1


class Schedule(Protocol):
    """A value, such as the learning rate, over a training."""

    def at(self, peak: float, progress: TrainProgress) -> float: ...


class LayerSchedule(Schedule, Protocol):
    """A schedule with layer decay: `scale` multiplies only the peak, or the whole schedule, depending on the source."""

    def at(self, peak: float, progress: TrainProgress, scale: float = 1.0) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Validated):
    """Base of schedules, whose fields are the settings `schedule.NAME` of a recipe."""

    PREFIX: ClassVar[str] = "schedule."


def half_cosine(lr: float, epoch: float, epochs: float, warmup: float = 0.0, minimum: float = 0.0) -> float:
    """Rate of a linear warm-up and half a cosine (MAE util/lr_sched.py:9-21).

    With e = `epoch`, E = `epochs` and W = `warmup` it is lr e / W before W, from then on
    min + (lr - min) (1 + cos(pi (e - W) / (E - W))) / 2. e counts from 0, in whole or fractional epochs or in updates.
    """
    if epoch < warmup:
        return lr * epoch / warmup
    done = (epoch - warmup) / (epochs - warmup)
    return minimum + (lr - minimum) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(ScheduleSettings):
    """A linear warm-up from start * peak, then half a cosine to `floor` at epoch stretch * E (MAE lr_sched.py:9-21,
    ExtreMA main.py:388-396, LUT; MOCA MI:484-501 with stretch 1.25; MaskFeat slowfast/utils/lr_policy.py with a
    start)."""

    warmup: NonNegativeFloat  # epochs of the warm-up
    floor: NonNegativeFloat = 0.0  # learning rate at the end of the cosine
    stretch: OneOrMore = 1.0  # end of the cosine, as a multiple of the training's epochs
    # learning rate at the start of the warm-up, as a share of the peak
    start: Annotated[UnitInterval, ReadIf("warmup")] = 0.0

    def at(self, peak: float, progress: TrainProgress, scale: float = 1.0) -> float:
        if progress.time < self.warmup:
            return scale * (self.start * peak + (1.0 - self.start) * peak * progress.time / self.warmup)
        end = int(self.stretch * progress.epochs)
        return scale * half_cosine(peak, progress.time, end, self.warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class TableCosine(ScheduleSettings):
    """A table of updates whose warm-up ends with the peak, with which the cosine then starts again (DINO
    utils.py:187-198; BEiT, ExtreMA finetune/utils.py:386-403; iBOT)."""

    warmup: NonNegativeFloat  # epochs of the warm-up
    floor: NonNegativeFloat = 0.0  # learning rate at the end

    def at(self, peak: float, progress: TrainProgress, scale: float = 1.0) -> float:
        warmup = int(self.warmup * progress.steps_per_epoch)
        if progress.step < warmup:
            return scale * peak * progress.step / max(1, warmup - 1)
        return scale * half_cosine(peak, progress.step, progress.steps, warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class TimmCosine(ScheduleSettings):
    """timm 0.4's CosineLRScheduler, stepped after each update (SimMIM lr_scheduler.py, main_finetune.py:219-222) or
    after each epoch (DeiT main.py; iBOT evaluation/semi_supervised/eval_cls.py:782-787, 860).

    Its cosine covers the whole training, warm-up included, so the rate drops at the end of the warm-up. Layer decay
    scales neither `start` nor `floor`. As it is stepped afterwards, the first two updates (or epochs) have the rate
    `start`.
    """

    warmup: NonNegativeFloat  # epochs of the warm-up
    floor: NonNegativeFloat  # learning rate at the end
    start: NonNegativeFloat  # learning rate at the start of the warm-up
    told: Literal["update", "epoch"]  # how often the rate changes

    def at(self, peak: float, progress: TrainProgress, scale: float = 1.0) -> float:
        by_update = self.told == "update"
        time, end = (progress.step, progress.steps) if by_update else (progress.epoch, progress.epochs)
        warmup = int(self.warmup * progress.steps_per_epoch) if by_update else self.warmup
        last_step, peak = max(0, time - 1), scale * peak
        if last_step < warmup:
            return self.start + last_step * (peak - self.start) / warmup
        return half_cosine(peak, last_step, end, 0.0, self.floor)


@dataclass(frozen=True, kw_only=True)
class CosineToTheEnd(ScheduleSettings):
    """A table of updates that starts at 0, reaches the peak at the end of the warm-up, repeats it, and ends exactly at
    the floor (capi eval_classification.py:441-444)."""

    warmup: NonNegativeFloat  # epochs of the warm-up
    floor: NonNegativeFloat = 0.0  # learning rate of the last update

    def at(self, peak: float, progress: TrainProgress) -> float:
        warmup = int(self.warmup * progress.steps_per_epoch)
        if progress.step < warmup:
            return peak * progress.step / max(1, warmup - 1)
        return half_cosine(peak, progress.step, max(progress.steps - 1, warmup + 1), warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class CosineAhead(ScheduleSettings):
    """Half a cosine that is stepped before each update: update i has the value of i + 1, and the last one exactly the
    floor; the warm-up is linear from `start` (vjepa2 evals/image_classification_frozen/eval.py)."""

    warmup: NonNegativeFloat = 0.0  # epochs of the warm-up
    start: NonNegativeFloat = 0.0  # learning rate at the start of the warm-up
    floor: NonNegativeFloat = 0.0  # learning rate of the last update

    def at(self, peak: float, progress: TrainProgress) -> float:
        warmup, step = int(self.warmup * progress.steps_per_epoch), progress.step + 1
        if step < warmup:
            return self.start + step / warmup * (peak - self.start)
        return half_cosine(peak, step, max(progress.steps, warmup + 1), warmup, self.floor)


@dataclass(frozen=True, kw_only=True)
class PacedCosine(ScheduleSettings):
    """Half a cosine to 0 that changes every epoch (torch's CosineAnnealingLR: DINO, iBOT and MOCA's linear probes) or
    every iteration (MAE, MoCo-v3; DINOv2 and MSN without a warm-up)."""

    warmup: NonNegativeFloat = 0.0  # epochs of the warm-up
    pace: Pace = "iteration"  # how often the rate changes

    def at(self, peak: float, progress: TrainProgress) -> float:
        iteration = progress.step % progress.steps_per_epoch
        within = iteration / progress.steps_per_epoch if self.pace == "iteration" else 0.0
        return half_cosine(peak, progress.epoch + within, progress.epochs, self.warmup)


@dataclass(frozen=True, kw_only=True)
class Polynomial(ScheduleSettings):
    """Polynomial decay: (1 - i / N)^power of the peak, down to `floor` (mmcv 1.7 runner/hooks/lr_updater.py;
    rstrudel/segmenter segm/optim/scheduler.py)."""

    power: PositiveFloat = 1.0  # 1: linear
    floor: NonNegativeFloat = 0.0  # learning rate at the end

    def at(self, peak: float, progress: TrainProgress) -> float:
        return (peak - self.floor) * (1 - progress.step / progress.steps) ** self.power + self.floor


@dataclass(frozen=True, kw_only=True)
class StepDecay(ScheduleSettings):
    """A rate that is multiplied by `factor` at each milestone (mmcv 1.7 runner/hooks/lr_updater.py)."""

    milestones: tuple[NonNegativeInt, ...]  # epochs at which the rate is multiplied by `factor`
    factor: NonNegativeFloat = 0.1  # factor by which the rate is multiplied at each milestone

    def at(self, peak: float, progress: TrainProgress) -> float:
        return peak * self.factor ** sum(progress.epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class MultipliedWarmup(ScheduleSettings):
    """mmcv 1's warm-up: a factor that rises from `start` to 1, applied to a schedule that already decays.

    mmengine's LinearLR followed by PolyLR differs from it by up to 9 % in the first hundred of 800 steps; both are
    recorded in tests/golden/lr_sched.
    """

    schedule: Schedule  # schedule of the value after the warm-up
    updates: NonNegativeInt  # updates of the warm-up
    start: UnitInterval = 1e-6  # factor at the start of the warm-up

    def at(self, peak: float, progress: TrainProgress) -> float:
        full = self.schedule.at(peak, progress)
        if progress.step >= self.updates:
            return full
        return full * (1 - (1 - progress.step / self.updates) * (1 - self.start))


@dataclass(frozen=True, kw_only=True)
class FallingOneCycle:
    """DINOv3's learning rate of linear heads (dinov3 eval/segmentation/schedulers.py, eval/depth/schedulers.py): a
    warm-up on top of half a cosine that decays from the first step on, so the rate drops at the end of the warm-up.

    start > 0: the warm-up rises linearly from this share of a rate that decays linearly. start = 0: the warm-up adds
    peak / division to a growing share of the cosine.
    """

    warmup: int  # updates of the warm-up
    start: float = 0.0  # learning rate at the start of the warm-up, as a share of the peak; 0: see above
    division: float = math.inf  # the last rate is the peak divided by 25 times this
    delayed: bool = False  # the scheduler's first step is skipped, as in segmentation's train.py
    momenta: tuple[float, float] | None = None  # AdamW's beta1 after the warm-up and at the end; None: constant

    def at(self, peak: float, progress: TrainProgress) -> float:
        step, steps = self._step(progress), progress.steps
        if step >= self.warmup:
            last = peak / 25 / self.division
            return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * (step + 1) / steps))
        if self.start:
            return peak * (1 - (1 - step / self.warmup) * (1 - self.start)) * (1 - step / steps)
        return peak / self.division + peak * (1 + math.cos(math.pi * step / steps)) / 2 * step / self.warmup

    def beta1_at(self, progress: TrainProgress) -> float:
        """AdamW's beta1, which the depth scheduler sets at every step: 0 in the warm-up."""
        step, steps = self._step(progress), progress.steps
        if step < self.warmup:
            return 0.0
        assert self.momenta is not None
        first, last = self.momenta
        done = (step - self.warmup) / (steps - self.warmup)
        return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))

    def _step(self, progress: TrainProgress) -> int:
        return max(progress.step - 1, 0) if self.delayed else progress.step


def share_of(batch: int, processes: int) -> int:
    """Images of a batch per process. ValueError if the processes cannot share the batch equally."""
    if batch % processes:
        near = batch // processes * processes or processes
        raise ValueError(f"batch={batch} cannot be shared by {processes} processes; set batch={near}")
    return batch // processes


def micro_batch_size(share: int, largest: int, even: bool = False) -> int:
    """The largest divisor of `share` up to `largest`; with `even`, the largest even one; 0 if there is none."""
    sizes = [size for size in range(1, min(share, largest) + 1) if share % size == 0 and not (even and size % 2)]
    return max(sizes, default=0)


MAX_SHOWN_LOSSES = 5  # previous losses that the message of a value that is not finite shows


def check_finite(value: float, what: str, where: str, losses: Iterable[float], advice: str) -> None:
    """Check that a loss or gradient is finite; ValueError with one line otherwise.

    what: its name, "loss". where: "step 3 of 20 (epoch 0.15, rate 0.001)". losses: previous ones, the newest last.
    """
    if math.isfinite(value):
        return
    before = ", ".join(f"{loss:.4g}" for loss in list(losses)[-MAX_SHOWN_LOSSES:]) or "none"
    raise ValueError(f"the {what} is {value} in {where}, losses before: {before}; {advice}")
