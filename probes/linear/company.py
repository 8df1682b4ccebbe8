"""Sweeps that train in company: on the same batches of images, each to its own end, over all processes.

Their heads are divided among the processes, each of which trains its own on all batches. A signal to one process stops
all after the same batch, with the states saved. A sweep's state depends on nothing but its own settings, so it goes on
in other company, alone, and on another number of processes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from engine.distributed import World
from engine.files import locked
from engine.progress import Progress
from engine.training.interruptions import Stopped, StopRequest, Timer, listening
from engine.training.states import newest_whole, save_state, states
from probes.linear.batches import CachedBatches
from probes.linear.sweep import Sweep

SAVE_EVERY = 10.0  # least seconds between two states; that of 45 heads of 1000 classes is a file of 140 MB

# Gives sweeps the rest of their batches of an epoch, and calls the function between batches.
TrainEpoch = Callable[[int, Sequence[Sweep], Callable[[], None]], None]


def divided(costs: Sequence[Sequence[int]], world: World) -> list[range]:
    """The heads of every sweep that this process trains: neighbours, of nearly the same cost as those of the others.

    costs: of every head of every sweep. A head belongs to the process in whose share of the whole cost its middle lies.
    """
    whole, before, found = sum(map(sum, costs)), 0, []
    for each in costs:
        middles = [2 * (before + end) - cost for end, cost in zip(accumulate(each), each, strict=True)]
        ranks = [min(middle * world.size // (2 * whole), world.size - 1) for middle in middles]
        start = sum(rank < world.rank for rank in ranks)
        found.append(range(start, start + ranks.count(world.rank)))
        before += sum(each)
    return found


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
class Company:
    """Sweeps of different folders, and what trains them for an epoch."""

    sweeps: Sequence[Sweep]
    train_epoch: TrainEpoch
    label: str  # for the user
    world: World = field(default_factory=World)
    request: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.saving = Timer(SAVE_EVERY)
        self.kept = {sweep.folder for sweep in self.sweeps}  # of the sweeps that were not given out
        self.saved: dict[Path, tuple[int, int]] = {}  # folder -> epoch and iteration of its newest state

    def run(self) -> Iterator[Sweep]:
        """Train all to the end, from the newest state of each; give each out as soon as it is over, or failed.

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
            path = self.world.on_rank0(lambda: newest_whole(sweep.folder))
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
        yield from self.given_out([sweep for sweep in self.sweeps if sweep.is_over])
        while left := [sweep for sweep in self.sweeps if not sweep.is_over]:
            epoch = min(sweep.epoch for sweep in left)
            now = [sweep for sweep in left if sweep.epoch == epoch]
            self.train_epoch(epoch, now, self.pause)
            self.end_epoch(now)
            self.pause()
            over = [sweep for sweep in now if sweep.is_over]
            self.save(self.begun(over))
            yield from self.given_out(over)

    def begun(self, sweeps: Sequence[Sweep]) -> list[Path]:
        """The folders that hold a state, which should not be older than the end of the training."""
        folders = [sweep.folder for sweep in sweeps]
        return self.world.on_rank0(lambda: [folder for folder in folders if states(folder)])

    def end_epoch(self, sweeps: Sequence[Sweep]) -> None:
        """Evaluate the heads of some sweeps, each process its own."""
        parts = self.world.gather_results(lambda: [sweep.counted() for sweep in sweeps])
        for sweep, counted in zip(sweeps, zip(*parts, strict=True), strict=True):
            sweep.end_epoch(counted)

    def given_out(self, over: Sequence[Sweep]) -> Iterator[Sweep]:
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
        parts = self.world.gather_on_rank0({name: each.cpu().contiguous() for name, each in sweep.tensors().items()})
        # An epoch's last batch and its evaluation are two places, the later one the newer state.
        place = sweep.epoch * (sweep.plan.count + 1) + sweep.iteration
        self.world.on_rank0(lambda: save_state(sweep.folder, place, sweep.state(parts)))
