"""Train heads together, evaluate each after every epoch and keep the best; resumable after a kill.

Several sweeps can train on the same batches of images, each to its own end. The heads of all of them are divided among
the processes: each process trains and evaluates its own on all batches. A signal to one process stops all after the
same batch, with the states saved. A state names what it holds by head and depends on nothing but its sweep's settings,
so a sweep goes on alone or beside others, on any number of processes.

H heads, h of them in this process, E epochs, V images.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.files import locked
from engine.progress import Progress
from engine.training.interruptions import Stopped, StopRequest, Timer, listening
from engine.training.schedules import TrainProgress
from engine.training.states import State, load_state, newest_intact, save_state, states
from probes.features.kinds import FeatureKind
from probes.linear.augmented import Augmentation
from probes.linear.batches import CachedBatches, EpochPlan, Readouts
from probes.linear.heads import LR_BATCH, Head, Heads

# A step of heads on features (B, D) of every readout and labels (B,).
StepHeads = Callable[[Any, Mapping[str, Tensor], Tensor, TrainProgress], object]
CountHits = Callable[[Any], Tensor]  # heads -> number of selection images that each own head gets right (h,)


@dataclass(kw_only=True)
class Sweep:
    """A training of several heads, of which this process has its share."""

    heads: Any  # Heads, or AttentiveHeads, which have the same functions
    plan: EpochPlan
    rows: np.ndarray  # (n,) images of the set that it trains on
    kinds: Sequence[FeatureKind]  # that all heads read
    readouts: Readouts  # that the heads of this process read
    step_heads: StepHeads
    count_hits: CountHits
    epochs: int  # of the whole training
    folder: Path  # of the training states
    augmentation: Augmentation  # of the images that it trains on, unless they are cached features
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
            self.step_heads(self.heads, features, labels, self.progress)
        self.iteration = number + 1

    def counted(self) -> np.ndarray:
        """Of the own heads (2, h): selection images right, and `diverged`."""
        return np.stack([self.count_hits(self.heads).cpu().numpy(), self.heads.diverged.cpu().numpy()])

    def end_epoch(self, parts: Sequence[np.ndarray]) -> None:
        """Record what all processes `counted`, in the order of ranks, and copy the best head. Sets `error` if
        all heads have diverged."""
        counts, self.diverged = np.concatenate(parts, axis=1)
        alive = self.diverged < 0
        if not alive.any():
            place = int(self.diverged.argmax())
            head: Head = self.heads.heads[place]
            self.error = ValueError(
                f"the loss is no finite number from step {self.diverged[place]} on, with learning rate {head.lr:g} on "
                f"{head.readout}, nor for any other head; give smaller learning rates (lrs)"
            )
            return
        hits = np.where(alive, counts, -1)
        self.history[self.epoch] = hits
        place = int(hits.argmax())
        kept = self.best_place >= 0 and alive[self.best_place]
        if not kept or hits[place] > self.history[self.best_epoch, self.best_place]:
            self.best = self.heads.alone(place) if place in self.heads.own else None
            self.best_place, self.best_epoch = place, self.epoch
        self.epoch, self.iteration = self.epoch + 1, 0

    @property
    def last_place(self) -> int:
        """The head that is best after the last epoch."""
        return int(self.history[-1].argmax())

    def own_chosen(self) -> dict[str, Heads]:
        """By metric, the best head and the last epoch's best, those that are this process's."""
        heads = {"top1": self.best} if self.best is not None else {}
        if self.last_place in self.heads.own:
            heads["top1_last"] = self.heads.alone(self.last_place)
        return heads

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
        tensors = {f"heads.{name}": value for name, value in self.heads.state().items()}
        return tensors | ({f"best.{name}": value for name, value in self.best.state().items()} if self.best else {})

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


SAVE_EVERY = 10.0  # least seconds between two states; that of 45 heads of 1000 classes is a file of 140 MB

# Gives sweeps the rest of their batches of an epoch, and calls the function between batches.
TrainEpoch = Callable[[int, Sequence[Sweep], Callable[[], None]], None]


def divided(costs: Sequence[Sequence[int]], world: World) -> list[range]:
    """The heads of every sweep that this process trains: neighbours, of nearly the same cost as those of the others.

    costs: of every head of every sweep. A head belongs to the process in whose share of the whole cost its middle lies.
    """
    total, before, shares = sum(map(sum, costs)), 0, []
    for head_costs in costs:
        middles = [2 * (before + end) - cost for end, cost in zip(accumulate(head_costs), head_costs, strict=True)]
        ranks = [min(middle * world.size // (2 * total), world.size - 1) for middle in middles]
        start = sum(rank < world.rank for rank in ranks)
        shares.append(range(start, start + ranks.count(world.rank)))
        before += sum(head_costs)
    return shares


def from_cache(batches: CachedBatches) -> TrainEpoch:
    """Epochs of one sweep on cached features."""

    def train(epoch: int, sweeps: Sequence[Sweep], pause: Callable[[], None]) -> None:
        (sweep,) = sweeps

        def step(number: int, features: Mapping[str, Tensor], labels: Tensor) -> None:
            pause()
            sweep.step(number, features, labels)

        batches.run(epoch, step, sweep.iteration)

    return train


@dataclass(kw_only=True)
class ConcurrentSweeps:
    """Sweeps of different folders, and what trains them for an epoch."""

    sweeps: Sequence[Sweep]
    train_epoch: TrainEpoch
    label: str  # for the user
    world: World = field(default_factory=World)
    request: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.saving = Timer(SAVE_EVERY)
        self.kept = {sweep.folder for sweep in self.sweeps}  # of the sweeps that were not yielded yet
        self.saved: dict[Path, tuple[int, int]] = {}  # folder -> epoch and iteration of its newest state

    def run(self) -> Iterator[Sweep]:
        """Train all to the end, from the newest state of each; yield each as soon as it is over, or failed.

        Stopped, after saving the states, where a signal asks to stop.
        Waits while another run does one of these trainings, and then finds its state.
        """
        with ExitStack() as held:
            self.world.on_rank0(lambda: self.lock(held))
            for sweep in self.sweeps:
                self.resume(sweep)
            self.bar = held.enter_context(Progress(self.label, self.steps, "steps", quiet=not self.world.is_rank0))
            self.bar.resume(self.done)
            held.enter_context(listening(self.request.ask))
            try:
                yield from self.train()
            except Stopped:
                self.save(self.kept)
                raise

    def lock(self, held: ExitStack) -> None:
        """Keep other runs from the same trainings until `held` is left."""
        for folder in sorted(sweep.folder for sweep in self.sweeps):
            held.enter_context(locked(folder.with_suffix(".lock"), "it trains the same heads"))

    def resume(self, sweep: Sweep) -> None:
        """Load the newest state of the same training."""
        try:
            path = self.world.on_rank0(lambda: newest_intact(sweep.folder))
        except ValueError as error:  # all its states are broken: the others can still train
            sweep.error = error
            return
        if path is not None:
            self.world.on_all_ranks(lambda: sweep.load(path))
            self.saved[sweep.folder] = sweep.epoch, sweep.iteration

    @property
    def steps(self) -> int:
        return sum(sweep.progress.steps for sweep in self.sweeps)

    @property
    def done(self) -> int:
        return sum(sweep.progress.step for sweep in self.sweeps)

    def train(self) -> Iterator[Sweep]:
        """Train for the remaining epochs. A sweep whose state is ahead of the others waits for them."""
        yield from self.yield_finished([sweep for sweep in self.sweeps if sweep.is_over])
        while left := [sweep for sweep in self.sweeps if not sweep.is_over]:
            epoch = min(sweep.epoch for sweep in left)
            now = [sweep for sweep in left if sweep.epoch == epoch]
            self.train_epoch(epoch, now, self.pause)
            self.end_epoch(now)
            self.pause()
            over = [sweep for sweep in now if sweep.is_over]
            self.save_finished([sweep.folder for sweep in over])
            yield from self.yield_finished(over)

    def save_finished(self, folders: Sequence[Path]) -> None:
        """Save the end of trainings of which a state is on disk: it should not be older than the end."""
        self.save(self.world.on_rank0(lambda: [folder for folder in folders if states(folder)]))

    def end_epoch(self, sweeps: Sequence[Sweep]) -> None:
        """Evaluate the heads of some sweeps, each process its own."""
        parts = self.world.gather_results(lambda: [sweep.counted() for sweep in sweeps])
        for sweep, of_sweep in zip(sweeps, zip(*parts, strict=True), strict=True):
            sweep.end_epoch(of_sweep)

    def yield_finished(self, over: Sequence[Sweep]) -> Iterator[Sweep]:
        for sweep in over:
            self.kept.discard(sweep.folder)
            yield sweep

    def pause(self) -> None:
        """Between batches: stop if a signal asked one of the processes to, and save if it is time to."""
        self.bar.advance(self.done - self.bar.done)
        flags = self.world.gather_results(lambda: (self.request.asked, self.saving.is_due()))
        if any(asked for asked, _ in flags):
            folder = self.sweeps[0].folder
            raise Stopped.after(self.done, self.steps, self.label, folder if len(self.sweeps) == 1 else folder.parent)
        if flags[0][1]:
            self.save(self.kept)

    def save(self, folders: Collection[Path]) -> None:
        """Write the states of the sweeps of some folders, unless they are as they were written or read last."""
        due = [sweep for sweep in self.sweeps if sweep.folder in folders and not sweep.error]
        with self.saving if due else nullcontext():
            for sweep in due:
                at = sweep.epoch, sweep.iteration
                if self.saved.get(sweep.folder) != at:
                    self.write(sweep)
                    self.saved[sweep.folder] = at

    def write(self, sweep: Sweep) -> None:
        parts = self.world.gather_on_rank0(
            {name: tensor.cpu().contiguous() for name, tensor in sweep.tensors().items()}
        )
        # An epoch's last batch and its evaluation are two places, the later one the newer state.
        place = sweep.epoch * (sweep.plan.count + 1) + sweep.iteration
        self.world.on_rank0(lambda: save_state(sweep.folder, place, sweep.state(parts)))
