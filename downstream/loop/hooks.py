"""Hooks of mmengine's Runner: learning rates, random numbers, progress, states, evaluations.

An iteration is one forward and backward pass; `accumulation` of them make an optimiser step.
"""

import io
import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from mmengine.dist import all_reduce, broadcast
from mmengine.hooks import Hook
from mmengine.runner import Runner

from engine.distributed import World
from engine.files import write_atomic
from engine.progress import Progress
from engine.seeding import DROP, stream_seeds
from engine.training.divergence import SHOWN, check_finite
from engine.training.interruptions import Stopped, StopRequest
from engine.training.schedules import Schedule, TrainProgress
from engine.training.states import keep_state

STATE_SUFFIX = ".pth"  # of mmengine's own format


class SetRates(Hook):
    """Sets every group's rate before each iteration. Rates depend on the step alone, so nothing is stored."""

    priority = "HIGHEST"

    def __init__(self, schedule: Schedule, start: TrainProgress, accumulation: int) -> None:
        self.schedule, self.start, self.accumulation = schedule, start, accumulation

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        progress = replace(self.start, step=batch_idx // self.accumulation)
        for group in runner.optim_wrapper.optimizer.param_groups:
            group["lr"] = self.schedule.at(group["base_lr"], progress)


class SeedIterations(Hook):
    """Seeds dropout and drop path with the iteration's number, so that a resumed run draws the same."""

    priority = "HIGHEST"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        torch.manual_seed(int(stream_seeds(DROP, self.seed, batch_idx, runner.rank)[2]))


class StopAtDivergence(Hook):
    """ValueError at the first loss that is not finite."""

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=SHOWN)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        mean = outputs["loss"].detach().clone()
        all_reduce(mean, "mean")  # so that all processes stop together
        loss = mean.item()
        where, advice = f"iteration {batch_idx} of {runner.max_iters}", "lower lr, or use float32 if this was bfloat16"
        check_finite(loss, "loss", where, self.before, advice)
        self.before.append(loss)


class ShowProgress(Hook):
    """Our progress bar in place of mmengine's log lines. The caller opens and closes `bar`."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar

    def before_train(self, runner: Runner) -> None:
        self.bar.resume(runner.iter)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        self.bar.advance(1)


class KeepState(Hook):
    """Saves the state every `interval` optimiser steps, and when a signal has asked any process to stop.

    Such a signal ends the training. The two newest states are kept, as in all trainings. Weights that are not finite
    are not saved: a broken update shows only in the next loss.
    """

    priority = "LOWEST"

    def __init__(self, folder: Path, interval: int, accumulation: int, label: str, world: World) -> None:
        self.folder, self.interval, self.accumulation = folder, interval, accumulation
        self.label, self.world, self.request = label, world, StopRequest()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        if not self.every_n_train_iters(runner, self.accumulation):
            return
        leaving = self.leaving()
        due = self.every_n_train_iters(runner, self.interval * self.accumulation) or self.is_last_train_iter(runner)
        if (due or leaving) and not runner.rank:
            self.save(runner)
        if leaving:
            raise self.stopped(runner.iter + 1, runner.max_iters)

    def after_train(self, runner: Runner) -> None:
        if self.leaving():  # asked during the last evaluation
            raise self.stopped(runner.iter, runner.max_iters)

    def leaving(self) -> bool:
        """Whether any process was asked to stop; all processes call this together."""
        return any(self.world.gather_objects(self.request.asked))

    def stopped(self, iteration: int, iterations: int) -> Stopped:
        step, steps = iteration // self.accumulation, iterations // self.accumulation
        return Stopped.after(step, steps, self.label, self.folder)

    def save(self, runner: Runner) -> None:
        if all(bool(parameter.isfinite().all()) for parameter in runner.model.parameters()):
            keep_state(self.folder, runner.iter + 1, partial(self.write, runner), STATE_SUFFIX)

    @staticmethod
    def write(runner: Runner, path: str) -> None:
        folder, name = os.path.split(path)
        runner.save_checkpoint(folder, name, by_epoch=False, save_param_scheduler=False)


class LibraryMetric(Protocol):
    """A metric of mmseg or mmdet that keeps the arrays from which its numbers can be recomputed."""

    dataset_meta: Mapping[str, Any]  # the library's own words on the images, such as their classes
    arrays: dict[str, np.ndarray]  # over the validation images, on rank 0 alone


class KeepEvaluations(Hook):
    """Writes the metrics of every evaluation, and the arrays of the one that counts, as soon as they are known.

    best: the metric whose highest value decides which evaluation counts; "" for the last evaluation.
    """

    def __init__(self, folder: Path, metric: LibraryMetric, every: int, best: str) -> None:
        self.folder, self.metric, self.every, self.best = folder, metric, every, best

    def before_train(self, runner: Runner) -> None:
        due = runner.iter and (runner.iter % self.every == 0 or runner.iter == runner.max_iters)
        if due and str(runner.iter) not in self.read():  # killed between the iteration's state and its evaluation
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        for buffer in runner.model.buffers():  # batch statistics, which differ between processes on CPU
            broadcast(buffer)

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float] | None = None) -> None:
        if runner.rank:
            return
        assert metrics is not None
        found = self.read() | {str(runner.iter): {name: float(value) for name, value in metrics.items()}}
        if self.counts(found) == str(runner.iter):
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **self.metric.arrays)  # type: ignore[arg-type]  # NumPy's: one might be a flag
            write_atomic(self.folder / "arrays.npz", arrays.getvalue())
        write_atomic(self.folder / "judgements.json", json.dumps(found))

    def read(self) -> dict[str, dict[str, float]]:
        """Iteration -> metrics."""
        path = self.folder / "judgements.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def counts(self, found: Mapping[str, Mapping[str, float]]) -> str:
        """The iteration whose evaluation is the result."""
        latest = max(found, key=int)
        return max(found, key=lambda step: (found[step][self.best], int(step))) if self.best else latest
