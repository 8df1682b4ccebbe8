"""Train heads together, evaluate each after every epoch and keep the best; resumable after a kill.

The heads may be divided among the processes (probes/linear/company.py): each trains and evaluates its own on all
batches. States name what they hold by head, so that they are read by any number of processes.
H heads, h of them in this process, E epochs, V images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.training.schedules import Schedule, TrainProgress
from engine.training.states import State, load_state
from probes.features.kinds import FeatureKind
from probes.linear.batches import EpochPlan, Readouts, Table
from probes.linear.heads import LR_BATCH, Head, Heads
from probes.scores import Hits, hits_of

CountHits = Callable[[Heads], Tensor]  # heads -> number of selection images that each own head gets right (h,)


class Counted(NamedTuple):
    """What one process knows of its heads after an epoch, in their order: (h,) each."""

    hits: np.ndarray  # selection images right
    diverged: np.ndarray  # first step with a loss that was not finite, -1 where there is none


@dataclass(kw_only=True)
class Sweep:
    """A training of several heads, of which this process has its share."""

    heads: Heads
    plan: EpochPlan
    rows: np.ndarray  # (n,) images of the set that it trains on
    kinds: Sequence[FeatureKind]  # that all heads read
    readouts: Readouts  # that the heads of this process read
    count_hits: CountHits
    epochs: int  # of the whole training
    schedule: Schedule  # of the learning rates
    folder: Path  # of the training states
    history: np.ndarray = field(init=False)  # (E, H) selection images right after each epoch, -1 once diverged
    diverged: np.ndarray = field(init=False)  # (H,) first step with a loss that was not finite, -1 where there is none
    epoch: int = 0  # epochs done
    iteration: int = 0  # batches done of the next epoch
    best: Heads | None = None  # copy of the best head so far, the first of equals, if it is this process's
    best_place: int = -1  # its place among the heads
    best_epoch: int = -1  # the epoch, from 0, that it is from
    skipped: dict[int, str] = field(default_factory=dict)  # image -> why it could not be read
    followed: int = 0  # augmented images that went through the backbone in its epochs of this run
    forwards: int = 0  # its share of them, where other sweeps read them too
    error: ValueError | None = None  # why it cannot go on

    def __post_init__(self) -> None:
        self.history = np.full((self.epochs, len(self.heads.heads)), -1, np.int64)
        self.diverged = np.full(len(self.heads.heads), -1, np.int64)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.error is not None or self.epoch == self.epochs

    @property
    def progress(self) -> TrainProgress:
        """How far the training is."""
        step = self.epoch * self.plan.count + self.iteration
        return TrainProgress(step=step, steps_per_epoch=self.plan.count, epochs=self.epochs)

    def step(self, number: int, features: Mapping[str, Tensor], labels: Tensor) -> None:
        """Train the own heads on batch `number` of the epoch: features (B, D) of every readout, labels (B,)."""
        self.iteration = number
        if self.heads.own:
            self.heads.step(features, labels, self.schedule.at(1.0, self.progress))
        self.iteration = number + 1

    def counted(self) -> Counted:
        """Evaluate the own heads."""
        none = np.empty(0, np.int64)
        hits = self.count_hits(self.heads).cpu().numpy() if self.heads.own else none
        return Counted(hits, self.heads.diverged.cpu().numpy())

    def end_epoch(self, parts: Sequence[Counted]) -> None:
        """Record what all processes counted, in the order of ranks, and copy the best head. Sets `error` if all heads
        have diverged."""
        self.diverged = np.concatenate([part.diverged for part in parts])
        alive = self.diverged < 0
        if not alive.any():
            self.error = self.refusal()
            return
        hits = np.where(alive, np.concatenate([part.hits for part in parts]), -1)
        self.history[self.epoch] = hits
        place = int(hits.argmax())
        kept = self.best_place >= 0 and alive[self.best_place]
        if not kept or hits[place] > self.history[self.best_epoch, self.best_place]:
            self.best = self.heads.alone(place) if place in self.heads.own else None
            self.best_place, self.best_epoch = place, self.epoch
        self.epoch, self.iteration = self.epoch + 1, 0

    def refusal(self) -> ValueError:
        place = int(self.diverged.argmax())
        head: Head = self.heads.heads[place]
        return ValueError(
            f"the loss is no finite number from step {self.diverged[place]} on, with learning rate {head.lr:g} on "
            f"{head.readout}, nor for any other head; give smaller learning rates (lrs)"
        )

    @property
    def last_place(self) -> int:
        """The head that is best after the last epoch."""
        return int(self.history[-1].argmax())

    def chosen(self, table: Table, world: World) -> dict[str, Hits]:
        """The hits of the best head and of the last epoch's best on every image of a table, in every process."""

        def found() -> dict[str, Hits]:
            heads = {"top1": self.best} if self.best is not None else {}
            if self.last_place in self.heads.own:
                heads["top1_last"] = self.heads.alone(self.last_place)
            return {name: hits_in(head, table) for name, head in heads.items()}

        everywhere = {name: hits for part in world.gather_results(found) for name, hits in part.items()}
        return {name: everywhere[name] for name in ("top1", "top1_last")}

    def record(self, evaluated: int) -> dict[str, Any]:
        """JSON values: accuracy of every head on the `evaluated` selection images in percent, and the selected one."""
        grid = [self.record_of(place, evaluated) for place in range(len(self.heads.heads))]
        return {
            "selection_images": evaluated,
            "training_images": self.plan.rows,
            "batch": self.plan.size,
            "steps_per_epoch": self.plan.count,
            "chosen": grid[self.best_place] | {"epoch": self.best_epoch + 1},
            "chosen_history": (100 * self.history[:, self.best_place] / evaluated).tolist(),  # after each epoch
            "chosen_last": grid[self.last_place],
            "grid": grid,
        }

    def record_of(self, place: int, evaluated: int) -> dict[str, Any]:
        head, diverged = self.heads.heads[place], int(self.diverged[place])
        asked = head.lr * LR_BATCH / self.plan.size
        settings = {"readout": head.readout, "lr": asked, "weight_decay": head.weight_decay, "lr_effective": head.lr}
        if diverged >= 0:
            return settings | {"diverged_at_step": diverged}
        scores = 100 * self.history[:, place] / evaluated
        best = int(scores.argmax())
        return settings | {"best": float(scores[best]), "best_epoch": best + 1, "last": float(scores[-1])}

    def tensors(self) -> dict[str, Tensor]:
        """This process's part of a state."""
        found = {f"heads.{name}": value for name, value in self.heads.state().items()}
        return found | ({f"best.{name}": value for name, value in self.best.state().items()} if self.best else {})

    def state(self, parts: Sequence[Mapping[str, Tensor]]) -> State:
        """The whole state. parts: the `tensors` of all processes."""
        tensors = {name: value for part in parts for name, value in part.items()}
        tensors["history"] = torch.from_numpy(self.history)
        facts = {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "best_place": self.best_place,
            "best_epoch": self.best_epoch,
            "skipped": {str(index): reason for index, reason in self.skipped.items()},
        }
        return State(tensors=tensors, facts=facts)

    def load(self, path: Path) -> None:
        """Go on from a state, whichever processes had which heads in it."""
        state = load_state(path)
        facts = state.facts
        heads = state.under("heads.")
        self.heads.load(heads)
        self.diverged = np.array([int(heads[f"{place}.diverged"]) for place in range(len(self.heads.heads))])
        self.epoch, self.iteration = facts["epoch"], facts["iteration"]
        self.best_place, self.best_epoch = facts["best_place"], facts["best_epoch"]
        self.skipped.update({int(index): reason for index, reason in facts["skipped"].items()})
        if self.best_place in self.heads.own:
            self.best = self.heads.alone(self.best_place)
            self.best.load(state.under("best."))
        self.history = state.tensors["history"].numpy().copy()


def hits_in(head: Heads, table: Table) -> Hits:
    """Of a single head, on every image of a table."""
    blocks = table.blocks(np.arange(len(table.labels)))
    parts = [hits_of(head.logits(features)[:, 0], labels) for features, labels in blocks]
    return Hits(*(np.concatenate(part) for part in zip(*parts, strict=True)))
