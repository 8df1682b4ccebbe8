"""Hooks of mmengine's Runner: learning rates, random numbers, progress, states, evaluations.

An iteration is one forward and backward pass; `accumulation` of them make an optimiser step.
"""

import io
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_reduce, broadcast
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from engine.distributed import World
from engine.files import write_atomic
from engine.printing import say
from engine.progress import Progress, span
from engine.seeding import DROP, stream_seeds
from engine.training.interruptions import Stopped
from engine.training.schedules import SHOWN, Schedule, TrainProgress, check_finite
from engine.training.states import keep_state

SAME_SIGNAL = 0.5  # seconds within which a second signal is the first one's copy, as torchrun passes them on
STATE_SUFFIX = ".pth"  # of mmengine's own format


class EachIteration(Hook):
    """Sets every group's rate and seeds dropout and drop path before an iteration, both by its number alone, so that a
    resumed training has the same bits. After it: ValueError for a loss that is not finite, and `bar` goes on, our
    progress bar in place of mmengine's log lines, which the caller opens and closes."""

    priority = "HIGHEST"

    def __init__(self, schedule: Schedule, start: TrainProgress, accumulation: int, seed: int, bar: Progress) -> None:
        self.schedule, self.start, self.accumulation, self.seed, self.bar = schedule, start, accumulation, seed, bar
        self.losses: deque[float] = deque(maxlen=SHOWN)

    def before_train(self, runner: Runner) -> None:
        self.bar.resume(runner.iter)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        progress = replace(self.start, step=batch_idx // self.accumulation)
        for group in runner.optim_wrapper.optimizer.param_groups:
            group["lr"] = self.schedule.at(group["base_lr"], progress)
        torch.manual_seed(int(stream_seeds(DROP, self.seed, batch_idx, runner.rank)[2]))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        mean = outputs["loss"].detach().clone()
        all_reduce(mean, "mean")  # so that all processes stop together
        where = f"step {batch_idx // self.accumulation} of {self.start.steps}"
        check_finite(mean.item(), "loss", where, self.losses, "lower lr, or use float32 if this was bfloat16")
        self.losses.append(mean.item())
        self.bar.advance(1)


class KeepState(Hook):
    """Saves the state every `interval` optimiser steps, and when a signal has asked any process to stop.

    Such a signal ends the training at the end of the step; a second one drops a step whose passes are not all done, and
    saves the state before it. What is waited for is said. The two newest states are kept, as in all trainings. Weights
    that are not finite are not saved: a broken update shows only in the next loss.
    """

    priority = "LOWEST"

    def __init__(self, folder: Path, interval: int, accumulation: int, label: str, world: World) -> None:
        self.folder, self.interval, self.accumulation = folder, interval, accumulation
        self.label, self.world = label, world
        self.asked: list[float] = []  # when signals came, by time.monotonic
        self.place = (0, 0)  # of the pass in work: its iteration, and how many there are
        self.begun, self.seconds, self.passes = time.monotonic(), 0.0, 0  # of that pass; all that were timed
        self.evaluating = False
        self.statistics: list[torch.Tensor] = []  # of batch norms before the step, which its passes change

    def ask(self) -> None:
        """At a signal: say from a thread, as this one may be in the middle of printing, what is waited for."""
        now = time.monotonic()
        if self.asked and now - self.asked[-1] < SAME_SIGNAL:
            return
        self.asked.append(now)
        if self.label and not self.world.rank:
            threading.Thread(target=say, args=(f"{self.label}: {self.waiting(now)}",), kwargs={"errors": True}).start()

    def waiting(self, now: float) -> str:
        """What a stop waits for, and about how long."""
        iteration, iterations = self.place
        if self.evaluating:
            return "asked to stop: waits for the evaluation" + (" and a step" if iteration < iterations else "")
        step, done = divmod(iteration, self.accumulation)
        drops = len(self.asked) > 1 and self.accumulation > 1
        left = 1 if drops else self.accumulation - done
        seconds = left * self.seconds / self.passes - (now - self.begun) if self.passes else None
        about = "" if seconds is None else f", about {span(max(seconds, 1.0))}"
        if drops:
            return f"drops step {step + 1}: waits for the pass in work{about}, and saves the state after step {step}"
        again = f"; a second signal drops this step ({done} of {self.accumulation} passes done)"
        return (
            f"asked to stop: waits for step {step + 1} of {iterations // self.accumulation}{about}, and saves the state"
            + (again if left > 1 else "")
        )

    def before_val(self, runner: Runner) -> None:
        self.evaluating = True

    def after_val(self, runner: Runner) -> None:
        self.evaluating, self.begun = False, time.monotonic()

    def before_train(self, runner: Runner) -> None:
        self.place, self.begun = (runner.iter, runner.max_iters), time.monotonic()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if self.accumulation > 1 and batch_idx % self.accumulation == 0:
            self.statistics = [buffer.clone() for buffer in norm_buffers(runner.model)]

    def drop_step(self, runner: Runner) -> None:
        """Drop the unfinished step, which has not changed the weights yet: go back to the end of the step before it."""
        for buffer, before in zip(norm_buffers(runner.model), self.statistics, strict=True):
            buffer.copy_(before)
        runner.train_loop._iter = runner.iter // self.accumulation * self.accumulation - 1
        if not runner.rank:
            self.save(runner)
        raise self.stopped(runner.iter + 1, runner.max_iters)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        now = time.monotonic()
        self.seconds, self.passes = self.seconds + now - self.begun, self.passes + 1
        self.place, self.begun = (batch_idx + 1, runner.max_iters), now
        if not self.every_n_train_iters(runner, self.accumulation):
            if any(count > 1 for count in self.world.gather_objects(len(self.asked))):
                self.drop_step(runner)
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
        return any(self.world.gather_objects(len(self.asked)))

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


def norm_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Running statistics of the batch norms."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


class KeepEvaluations(Hook):
    """Writes the metrics of every evaluation, and the arrays of the one that counts, as soon as they are known.

    metric: of mmseg or mmdet, with `arrays` from which its numbers can be recomputed, on rank 0 alone. best: the metric
    whose highest value decides which evaluation counts; "" for the last evaluation.
    """

    def __init__(self, folder: Path, metric: Any, every: int, best: str) -> None:
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
        evaluations = self.read() | {str(runner.iter): {name: float(value) for name, value in metrics.items()}}
        if self.counts(evaluations) == str(runner.iter):
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **self.metric.arrays)
            write_atomic(self.folder / "arrays.npz", arrays.getvalue())
        write_atomic(self.folder / "judgements.json", json.dumps(evaluations))

    def read(self) -> dict[str, dict[str, float]]:
        """Iteration -> metrics."""
        path = self.folder / "judgements.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def counts(self, evaluations: Mapping[str, Mapping[str, float]]) -> str:
        """The iteration whose evaluation is the result."""
        latest = max(evaluations, key=int)
        return max(evaluations, key=lambda step: (evaluations[step][self.best], int(step))) if self.best else latest
