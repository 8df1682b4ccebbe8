"""How are several heads trained together, and which of them is reported?

All heads of a sweep train on the same batches. They are evaluated after each epoch, and the best head so far is copied.
Several sweeps can train side by side, each to its own end. Their heads are divided among the processes: each process
trains and evaluates its own heads, on all images.

A signal to one process stops all of them after the same batch, with the states saved. A state names its tensors by head
and depends on nothing but its sweep's settings. So a sweep can be resumed alone or beside others, on any number of
processes.

H heads, h of them in this process, E epochs, B images of a batch, D width.
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
from probes.linear.batches import EpochPlan, Readouts
from probes.linear.heads import LR_BATCH, Head
from probes.linear.train_transform import Augmentation

# A training step of heads on features (B, D) of every readout and labels (B,).
StepHeads = Callable[[Any, Mapping[str, Tensor], Tensor, TrainProgress], object]
# For heads, how many selection images each own head classifies correctly (h,).
CountHits = Callable[[Any], Tensor]


@dataclass(kw_only=True)
class Sweep:
    """The training of several heads, some of them in this process. Selection images choose head and epoch."""

    heads: Any  # Heads or AttentiveHeads, which have the same methods
    plan: EpochPlan
    train_indices: np.ndarray  # (n,) images of the set that it trains on
    kinds: Sequence[FeatureKind]  # features that all heads read
    readouts: Readouts  # features that the heads of this process read
    step_heads: StepHeads
    count_hits: CountHits
    epochs: int  # of the whole training
    folder: Path  # of the training states
    augmentation: Augmentation  # of the training images; unused with cached features
    history: np.ndarray = field(init=False)  # (E, H) correct selection images after each epoch; -1 once diverged
    diverged: np.ndarray = field(init=False)  # (H,) first step with a loss that is not finite; -1: none
    epoch: int = 0  # epochs done
    iteration: int = 0  # batches done of the next epoch
    best_copy: Any = None  # copy of the best head so far, the first of equals; None if another process trains it
    best_index: int = -1  # of the best head
    best_epoch: int = -1  # epoch, from 0, after which it was best
    skipped: dict[int, str] = field(default_factory=dict)  # image -> why it could not be read
    stream_forwards: int = 0  # forward passes, in augmented images, during its epochs of this run
    augmented_forwards: int = 0  # its share of them, if other sweeps train on the same images
    error: ValueError | None = None  # why the training cannot go on

    def __post_init__(self) -> None:
        self.history = np.full((self.epochs, len(self.heads.heads)), -1, np.int64)
        self.diverged = np.full(len(self.heads.heads), -1, np.int64)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train, at the end or after an error."""
        return self.error is not None or self.epoch == self.epochs

    @property
    def progress(self) -> TrainProgress:
        step = self.epoch * self.plan.steps_per_epoch + self.iteration
        return TrainProgress(step=step, steps_per_epoch=self.plan.steps_per_epoch, epochs=self.epochs)

    def step(self, number: int, features: Mapping[str, Tensor], labels: Tensor) -> None:
        """Train the own heads on batch `number` of the epoch: features (B, D) of every readout, labels (B,)."""
        self.iteration = number
        if self.heads.own:
            self.step_heads(self.heads, features, labels, self.progress)
        self.iteration = number + 1

    def evaluate(self) -> np.ndarray:
        """For each own head the number of correct selection images, and its entry in `diverged` (2, h)."""
        return np.stack([self.count_hits(self.heads).cpu().numpy(), self.heads.diverged.cpu().numpy()])

    def finish_epoch(self, evaluations: Sequence[np.ndarray]) -> None:
        """Record an epoch and copy the best head. Sets `error` if all heads have diverged.

        evaluations: what `evaluate` returned in each process, in the order of ranks.
        """
        counts, self.diverged = np.concatenate(evaluations, axis=1)
        converging = self.diverged < 0
        if not converging.any():
            last = int(self.diverged.argmax())
            head: Head = self.heads.heads[last]
            self.error = ValueError(
                f"the loss is not finite from step {self.diverged[last]} on, with learning rate {head.lr:g} on "
                f"{head.readout}, the last head to diverge; give smaller learning rates (lrs)"
            )
            return
        hits = np.where(converging, counts, -1)
        self.history[self.epoch] = hits
        best = int(hits.argmax())
        has_best = self.best_index >= 0 and converging[self.best_index]  # a head that diverges later does not count
        if not has_best or hits[best] > self.history[self.best_epoch, self.best_index]:
            self.best_copy = self.heads.copy_head(best) if best in self.heads.own else None
            self.best_index, self.best_epoch = best, self.epoch
        self.epoch, self.iteration = self.epoch + 1, 0

    @property
    def best_last_index(self) -> int:
        """The head that is best after the last epoch."""
        return int(self.history[-1].argmax())

    def own_reported_heads(self) -> dict[str, Any]:
        """Metric -> the head that it reports: the best head and epoch, of those since the last best head diverged, and
        the best after the last epoch.

        Only heads that this process trains.
        """
        heads = {"top1": self.best_copy} if self.best_copy is not None else {}
        if self.best_last_index in self.heads.own:
            heads["top1_last"] = self.heads.copy_head(self.best_last_index)
        return heads

    def warnings(self) -> list[str]:
        """A line if the best head diverged after an epoch in which another, which was not copied, was better than the
        chosen one."""
        if self.history[:, self.diverged < 0].max() <= self.history[self.best_epoch, self.best_index]:
            return []
        return [
            f"the best head before epoch {self.best_epoch + 1} diverged, so that the best head since then was chosen, "
            "and others had been better: leave out the learning rates that diverged (lrs; facts.grid names them)"
        ]

    def record(self, selection_images: int) -> dict[str, Any]:
        """JSON values: accuracies in percent on the `selection_images`, of every head and of the selected one."""
        grid = [self.head_record(index, selection_images) for index in range(len(self.heads.heads))]
        return {
            "selection_images": selection_images,
            "training_images": self.plan.images,
            "batch": self.plan.batch,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "chosen": grid[self.best_index] | {"epoch": self.best_epoch + 1},
            "chosen_history": (100 * self.history[:, self.best_index] / selection_images).tolist(),  # after each epoch
            "chosen_last": grid[self.best_last_index],
            "grid": grid,
        }

    def head_record(self, index: int, selection_images: int) -> dict[str, Any]:
        """JSON values of one head: its settings, and accuracies in percent or when it diverged."""
        head, diverged_at = self.heads.heads[index], int(self.diverged[index])
        lr = head.lr * LR_BATCH / self.plan.batch  # as set
        settings = {"readout": head.readout, "lr": lr, "weight_decay": head.weight_decay, "lr_effective": head.lr}
        if diverged_at >= 0:
            return settings | {"diverged_at_step": diverged_at}
        accuracies = 100 * self.history[:, index] / selection_images
        best = int(accuracies.argmax())
        return settings | {"best": float(accuracies[best]), "best_epoch": best + 1, "last": float(accuracies[-1])}

    def tensors(self) -> dict[str, Tensor]:
        """This process's tensors of a state."""
        tensors = {f"heads.{name}": value for name, value in self.heads.state().items()}
        if self.best_copy:
            tensors |= {f"best.{name}": value for name, value in self.best_copy.state().items()}
        return tensors

    def state(self, tensors_by_rank: Sequence[Mapping[str, Tensor]]) -> State:
        """The whole state, from the `tensors` of all processes."""
        tensors = {name: value for own_tensors in tensors_by_rank for name, value in own_tensors.items()}
        tensors["history"] = torch.from_numpy(self.history)
        facts = {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "best_place": self.best_index,
            "best_epoch": self.best_epoch,
            "skipped": {str(index): reason for index, reason in self.skipped.items()},
        }
        return State(tensors=tensors, facts=facts)

    def load(self, path: Path) -> None:
        """Resume from a state, however the heads were divided among processes when it was written."""
        state = load_state(path)
        facts = state.facts
        head_tensors = state.under("heads.")
        self.heads.load(head_tensors)
        self.diverged = np.array([int(head_tensors[f"{index}.diverged"]) for index in range(len(self.heads.heads))])
        self.epoch, self.iteration = facts["epoch"], facts["iteration"]
        self.best_index, self.best_epoch = facts["best_place"], facts["best_epoch"]
        self.skipped.update({int(index): reason for index, reason in facts["skipped"].items()})
        if self.best_index in self.heads.own:
            self.best_copy = self.heads.copy_head(self.best_index)
            self.best_copy.load(state.under("best."))
        self.history = state.tensors["history"].numpy().copy()


SAVE_EVERY = 10.0  # least seconds between two states; that of 45 heads of 1000 classes is a file of 140 MB

# Trains sweeps on the remaining batches of an epoch, and calls the function between batches.
TrainEpoch = Callable[[int, Sequence[Sweep], Callable[[], None]], None]


def divide_heads(costs: Sequence[Sequence[int]], world: World) -> list[range]:
    """For each sweep the heads that this process trains. All processes have about the same cost, of neighbouring heads.

    costs: of each head of each sweep, which lie side by side. A head goes to the process whose equal share of the total
    cost contains its middle.
    """
    total, before, shares = sum(map(sum, costs)), 0, []
    for head_costs in costs:
        # Twice the middles, so that they are integers.
        middles = [2 * (before + end) - cost for end, cost in zip(accumulate(head_costs), head_costs, strict=True)]
        ranks = [min(middle * world.size // (2 * total), world.size - 1) for middle in middles]
        start = sum(rank < world.rank for rank in ranks)
        shares.append(range(start, start + ranks.count(world.rank)))
        before += sum(head_costs)
    return shares


@dataclass(kw_only=True)
class ConcurrentSweeps:
    """Sweeps that train side by side, with a folder of states each. All processes call all methods together."""

    sweeps: Sequence[Sweep]
    train_epoch: TrainEpoch
    label: str  # of the progress bar and of messages
    world: World = field(default_factory=World)
    request: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.save_timer = Timer(SAVE_EVERY)
        self.unfinished = {sweep.folder for sweep in self.sweeps}  # folders of the sweeps that were not yielded yet
        self.saved_at: dict[Path, tuple[int, int]] = {}  # folder -> epoch and iteration of its newest state

    def run(self) -> Iterator[Sweep]:
        """Train all sweeps to the end, from their newest states; yield each as soon as it is finished or has failed.

        A second run of the same trainings waits for the first one, and then finds its states. Raises Stopped after
        saving all states if a signal asks to stop.
        """
        with ExitStack() as stack:
            self.world.on_rank0(lambda: self.lock(stack))
            for sweep in self.sweeps:
                self.resume(sweep)
            bar = Progress(self.label, self.total_steps, "steps")
            self.bar = stack.enter_context(bar)
            self.bar.resume(self.steps_done)
            stack.enter_context(listening(self.request.ask))
            try:
                yield from self.train()
            except Stopped:
                self.save(self.unfinished)
                raise

    def lock(self, stack: ExitStack) -> None:
        """Keep other runs from these trainings until `stack` is closed."""
        for folder in sorted(sweep.folder for sweep in self.sweeps):
            stack.enter_context(locked(folder.with_suffix(".lock"), "it trains the same heads"))

    def resume(self, sweep: Sweep) -> None:
        """Load the sweep's newest state, if there is one."""
        try:
            path = self.world.on_rank0(lambda: newest_intact(sweep.folder))
        except ValueError as error:  # all its states are broken: the others can still train
            sweep.error = error
            return
        if path is not None:
            self.world.on_all_ranks(lambda: sweep.load(path))
            self.saved_at[sweep.folder] = sweep.epoch, sweep.iteration

    @property
    def total_steps(self) -> int:
        return sum(sweep.progress.steps for sweep in self.sweeps)

    @property
    def steps_done(self) -> int:
        return sum(sweep.progress.step for sweep in self.sweeps)

    def train(self) -> Iterator[Sweep]:
        """Train the remaining epochs. A sweep whose state is ahead of the others waits for them."""
        yield from self.yield_finished(self.sweeps)
        while remaining := [sweep for sweep in self.sweeps if not sweep.is_finished]:
            epoch = min(sweep.epoch for sweep in remaining)
            current = [sweep for sweep in remaining if sweep.epoch == epoch]
            self.train_epoch(epoch, current, self.save_or_stop)
            self.finish_epoch(current)
            self.save_or_stop()
            self.save_ends(current)
            yield from self.yield_finished(current)

    def finish_epoch(self, sweeps: Sequence[Sweep]) -> None:
        """Evaluate the heads after an epoch, each process its own."""
        evaluations_by_rank = self.world.gather_results(lambda: [sweep.evaluate() for sweep in sweeps])
        for sweep, evaluations in zip(sweeps, zip(*evaluations_by_rank, strict=True), strict=True):
            sweep.finish_epoch(evaluations)

    def save_ends(self, sweeps: Sequence[Sweep]) -> None:
        """Save finished sweeps that have a state on disk, so that the next run does not repeat their last epochs."""
        folders = [sweep.folder for sweep in sweeps if sweep.is_finished]
        self.save(self.world.on_rank0(lambda: [folder for folder in folders if states(folder)]))

    def yield_finished(self, sweeps: Sequence[Sweep]) -> Iterator[Sweep]:
        for sweep in sweeps:
            if sweep.is_finished:
                self.unfinished.discard(sweep.folder)
                yield sweep

    def save_or_stop(self) -> None:
        """Save the states if it is time to; raise Stopped if any process was asked to stop. Called between batches."""
        self.bar.advance(self.steps_done - self.bar.done)
        flags = self.world.gather_results(lambda: (self.request.asked, self.save_timer.is_due()))
        if any(asked for asked, _ in flags):
            folder = self.sweeps[0].folder
            where = folder if len(self.sweeps) == 1 else folder.parent
            raise Stopped.after(self.steps_done, self.total_steps, self.label, where)
        _, is_due_on_rank0 = flags[0]
        if is_due_on_rank0:
            self.save(self.unfinished)

    def save(self, folders: Collection[Path]) -> None:
        """Write the states of the sweeps of some folders, unless nothing has changed since their last states."""
        sweeps = [sweep for sweep in self.sweeps if sweep.folder in folders and not sweep.error]
        with self.save_timer if sweeps else nullcontext():
            for sweep in sweeps:
                now = sweep.epoch, sweep.iteration
                if self.saved_at.get(sweep.folder) != now:
                    self.write_state(sweep)
                    self.saved_at[sweep.folder] = now

    def write_state(self, sweep: Sweep) -> None:
        tensors_by_rank = self.world.gather_on_rank0(
            {name: tensor.cpu().contiguous() for name, tensor in sweep.tensors().items()}
        )
        # An epoch has one number more than batches: after its last batch, and after its evaluation.
        number = sweep.epoch * (sweep.plan.steps_per_epoch + 1) + sweep.iteration
        self.world.on_rank0(lambda: save_state(sweep.folder, number, sweep.state(tensors_by_rank)))
