"""Train heads together, evaluate each after every epoch and keep the best; resumable after a kill.

The state of a training is saved at the end of an epoch, and where a signal stops it (engine/training/states.py).
H heads, E epochs, V images.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.files import locked
from engine.progress import Progress
from engine.training.interruptions import Stopped, StopRequest, Timer, listening
from engine.training.schedules import Schedule, TrainProgress
from engine.training.states import State, load_state, newest_whole, save_state, states
from probes.linear.batches import Batches, Table
from probes.linear.heads import Head, Heads

LR_BATCH = 256  # batch that learning rates are stated for, in every source
SAVE_EVERY = 10.0  # least seconds between two states; that of 45 heads of 1000 classes is a file of 140 MB

Found = TypeVar("Found")
CountHits = Callable[[Heads], Tensor]  # heads -> number of selection images that each gets right (H,)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Length and schedule of a training."""

    epochs: int  # of the whole training
    schedule: Schedule  # of the learning rates
    folder: Path  # of the training states


@dataclass(kw_only=True)
class Sweep:
    """A training of several heads."""

    heads: Heads
    batches: Batches
    count_hits: CountHits
    config: SweepConfig
    history: np.ndarray = field(init=False)  # (E, H) selection images right after each epoch, -1 once diverged
    epoch: int = 0  # epochs done
    iteration: int = 0  # batches done of the next epoch
    request: StopRequest = field(default_factory=StopRequest)
    best: Heads | None = None  # copy of the best head so far, the first of equals
    best_place: int = -1  # its place among the heads
    best_epoch: int = -1  # the epoch, from 0, that it is from

    def __post_init__(self) -> None:
        self.history = np.full((self.config.epochs, len(self.heads.heads)), -1, np.int64)

    def run(self, label: str) -> None:
        """Train to the end, from the newest state of the same training.

        ValueError if all heads diverge; Stopped, after saving the state, where a signal asks to stop.
        Waits while another process does the same training, and then finds its state.
        """
        with locked(self.config.folder.with_suffix(".lock"), "it trains the same heads"):
            if (path := newest_whole(self.config.folder)) is not None:
                self.load(path)
            with listening(self.request.ask):
                try:
                    self.train(label)
                except Stopped:
                    self.save()
                    raise

    def train(self, label: str) -> None:
        """Train for the remaining epochs."""
        saving = Timer(SAVE_EVERY)
        with Progress(label, self.progress().steps, "steps") as bar:
            bar.resume(self.progress().step)
            while self.epoch < self.config.epochs:
                self.train_epoch(bar)
                self.evaluate_epoch()
                self.epoch, self.iteration = self.epoch + 1, 0
                over = self.epoch == self.config.epochs
                if saving.is_due() or (over and states(self.config.folder)):
                    with saving:
                        self.save()
            self.leave_if_asked(label)

    def progress(self) -> TrainProgress:
        """How far the training is."""
        count = self.batches.plan.count
        step = self.epoch * count + self.iteration
        return TrainProgress(step=step, steps_per_epoch=count, epochs=self.config.epochs)

    def leave_if_asked(self, label: str) -> None:
        if self.request.asked:
            progress = self.progress()
            raise Stopped.after(progress.step, progress.steps, label, self.config.folder)

    def train_epoch(self, bar: Progress) -> None:
        """Train for the rest of the current epoch."""

        def step(number: int, features: Mapping[str, Tensor], labels: Tensor) -> None:
            self.leave_if_asked(bar.label)
            self.iteration = number
            self.heads.step(features, labels, self.config.schedule.at(1.0, self.progress()))
            self.iteration = number + 1
            bar.advance(1)

        self.batches.run(self.epoch, step, self.iteration)

    def evaluate_epoch(self) -> None:
        """Record how many images every head gets right, and copy the best one."""
        alive = self.alive()
        if not alive.any():
            self.refuse()
        hits = np.where(alive, self.count_hits(self.heads).cpu().numpy(), -1)
        self.history[self.epoch] = hits
        if self.best is not None and not alive[self.best_place]:
            self.best = None
        place = int(hits.argmax())
        if self.best is None or hits[place] > self.history[self.best_epoch, self.best_place]:
            self.best, self.best_place, self.best_epoch = self.heads.alone(place), place, self.epoch

    def alive(self) -> np.ndarray:
        """Which heads have not diverged (H,)."""
        return self.heads.diverged.cpu().numpy() < 0

    def refuse(self) -> None:
        steps = self.heads.diverged.cpu().numpy()
        place = int(steps.argmax())
        head: Head = self.heads.heads[place]
        raise ValueError(
            f"the loss is no finite number from step {steps[place]} on, with learning rate {head.lr:g} on "
            f"{head.readout}, nor for any other head; give smaller learning rates (lrs)"
        )

    @property
    def last_place(self) -> int:
        """The head that is best after the last epoch."""
        return int(self.history[-1].argmax())

    def record(self, evaluated: int) -> dict[str, Any]:
        """JSON values: accuracy of every head on the `evaluated` selection images in percent, and the selected one."""
        size = self.batches.plan.size
        grid = [self.record_of(place, evaluated, size) for place in range(len(self.heads.heads))]
        return {
            "selection_images": evaluated,
            "training_images": self.batches.plan.rows,
            "batch": size,
            "steps_per_epoch": self.batches.plan.count,
            "chosen": grid[self.best_place] | {"epoch": self.best_epoch + 1},
            "chosen_last": grid[self.last_place],
            "grid": grid,
        }

    def record_of(self, place: int, evaluated: int, batch: int) -> dict[str, Any]:
        head, diverged = self.heads.heads[place], int(self.heads.diverged[place])
        settings = {"readout": head.readout, "lr": head.lr * LR_BATCH / batch, "weight_decay": head.weight_decay}
        settings |= {"lr_effective": head.lr}
        if diverged >= 0:
            return settings | {"diverged_at_step": diverged}
        scores = 100 * self.history[:, place] / evaluated
        best = int(scores.argmax())
        return settings | {"best": float(scores[best]), "best_epoch": best + 1, "last": float(scores[-1])}

    def save(self) -> None:
        tensors = {f"heads.{name}": value for name, value in self.heads.state().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.state().items()} if self.best else {}
        tensors["history"] = torch.from_numpy(self.history)
        facts = {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "best_place": self.best_place,
            "best_epoch": self.best_epoch,
            "skipped": {str(index): reason for index, reason in self.batches.skipped.items()},
        }
        save_state(self.config.folder, self.progress().step, State(tensors=tensors, facts=facts))

    def load(self, path: Path) -> None:
        state = load_state(path)
        facts = state.facts
        self.heads.load(state.under("heads."))
        self.epoch, self.best_place, self.best_epoch = facts["epoch"], facts["best_place"], facts["best_epoch"]
        self.iteration = facts.get("iteration", 0)  # states before signals were heard are of whole epochs
        self.batches.skipped.update({int(index): reason for index, reason in facts["skipped"].items()})
        if self.best_place >= 0:
            self.best = self.heads.alone(self.best_place)
            self.best.load(state.under("best."))
        self.history = state.tensors["history"].numpy().copy()


def trained_by_rank0(world: World, train: Callable[[], Found]) -> Found:
    """The result of `train` in every process. Rank 0 trains alone; the others wait and ignore signals.

    A signal that stops a job reaches all its processes: rank 0 stops, and every process raises Stopped.
    """
    if world.is_rank0:
        return world.on_rank0(train)
    with listening(lambda: None):
        return world.on_rank0(train)


def ranked(head: Heads, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Top-1 and top-5 correctness (V,) bool of a single head on every image of a table."""
    first, five = [], []
    for features, labels in table.blocks(np.arange(len(table.labels))):
        logits = head.logits(features)[:, 0]
        found = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        first.append(found[:, 0])
        five.append(found.any(dim=1))
    return torch.cat(first).cpu().numpy(), torch.cat(five).cpu().numpy()
