"""A few steps of a dense training under the very Runner that will do it, timed; and a few evaluated images."""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook

from downstream.loop.hooks import KeepEvaluations, KeepState, SeedIterations, SetRates, StopAtDivergence
from downstream.loop.running import RunnerConfig, TrainingSetup, runner_of
from engine.distributed import World
from engine.training.schedules import TrainProgress
from engine.work import Kind

SECONDS = 3.0  # of the timed steps, about
STEPS = 20  # of them, at most
WARMING = 2  # steps before them, which are slower
EVALUATED = 3  # images, the first of which is slower and does not count
NEVER = 10**9


class Stamps(Hook):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.times.append(time.perf_counter())


@dataclass(kw_only=True)
class Rehearsal:
    """A training whose steps can be timed."""

    setup: TrainingSetup
    config: RunnerConfig  # whose batch is one micro-batch

    def units(self) -> dict[Kind, float]:
        """Seconds until a training begins, of an image forward and back, of a saved state, of an evaluated image."""
        _, first, _ = self.run(WARMING)
        begun, steps, saved = self.run(1 + int(min(STEPS, max(WARMING, SECONDS / min(first)))))
        found: dict[Kind, float] = {"start": begun, "training": fmean(steps) / self.config.batch}
        return found | {"states": saved, "evaluation": self.evaluated()}

    def run(self, steps: int) -> tuple[float, list[float], float]:
        """Seconds until the first of so many steps has begun, of each step after it, and of a saved state."""
        config = replace(self.config, start=TrainProgress(step=0, steps_per_epoch=steps, epochs=1))
        for group in self.setup.optimiser.param_groups:
            group.setdefault("base_lr", group["lr"])
        world = World()
        evaluations = KeepEvaluations(config.folder, self.setup.metric, NEVER, "")
        stamps = Stamps()
        hooks = [SetRates(config.schedule, config.start, 1), SeedIterations(config.seed), StopAtDivergence(1), stamps]
        started = time.perf_counter()
        runner = runner_of(self.setup, hooks, evaluations, config, world)
        runner.train()
        taken = [after - before for before, after in pairwise(stamps.times)]
        trained = time.perf_counter()
        KeepState(config.folder / "rehearsed", 1, 1, "", world).save(runner)
        begun = max(stamps.times[0] - started - min(taken), 0.0)
        return begun, taken, time.perf_counter() - trained

    def evaluated(self) -> float:
        """Of one image, read and scored."""
        model, _, _, images, metric = self.setup
        model.eval()
        seconds = []
        for index in range(EVALUATED):
            started = time.perf_counter()
            batch = pseudo_collate([images[index % len(images)]])
            with torch.no_grad():
                found = [sample.to_dict() for sample in model.val_step(batch)]
            metric.process(batch, found)  # type: ignore[attr-defined]
            seconds.append(time.perf_counter() - started)
        return sum(seconds[1:]) / (EVALUATED - 1)
