"""The one training loop: recipe + method + images -> exports; resumable at any step, alone or under torchrun.

A run's folder holds
    run.json      what is trained on what; a restart must ask for the same
    states/       the two newest training states
    log.jsonl, tensorboard/
    lock          held while a training runs here
    export/       the encoder as the source evaluates it; export-BRANCH/ the method's other networks
    start/        the encoder before the first update: the floor that a training has to beat
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from checkpoints.export import ViTExport
from engine.distributed import World
from engine.progress import Progress
from engine.seeding import START, seeded
from engine.training.interruptions import Timer, listening
from engine.training.states import State, load_optimizer, load_state, newest_whole, optimizer_tensors, save_state
from imagesets.sets import ImageSet
from pretrain.loop.exporting import exports_of, facts_of
from pretrain.loop.images import MicroBatch, MicroBatches, batch_plan, default_workers, piece_of, stream
from pretrain.loop.learning import Learning
from pretrain.loop.records import Averages, Records
from pretrain.loop.run_folder import claimed
from pretrain.loop.updates import Precision, Updates
from pretrain.method import Method, TrainProgress
from pretrain.parts.batch_norm import synchronised
from pretrain.recipe import Recipe

LOG_EVERY = 2.0  # seconds between two lines of the log, at least

# (export of the first branch, progress) -> values for the log, such as an online k-NN accuracy. Every process calls it,
# so that they may share its work, and gets the same values.
Monitor = Callable[[ViTExport, TrainProgress], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how to train. micro_batch: most images of one process in a forward pass, None for its whole share.

    save_minutes: between two training states. export_every, monitor_every: epochs, 0 for the end alone or never.
    """

    out: Path
    device: str = "cpu"
    precision: Precision = "float32"
    seed: int = 0
    workers: int | None = None
    micro_batch: int | None = None
    skip_bad: bool = False
    resume: bool = False
    save_minutes: float = 10.0
    export_every: int = 0
    monitor_every: int = 0
    monitor: Monitor | None = None
    wandb: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # for run.json and the exports: recipe's name, changes


class Trainer:
    """A pretraining of the method in file `module` named `name`. Raises ValueError for what cannot be trained."""

    def __init__(self, name: str, module: ModuleType, recipe: Recipe, images: ImageSet, run: Run, world: World) -> None:
        self.name, self.recipe, self.images, self.run, self.world = name, recipe, images, run, world
        if module.METHOD.needs_labels:
            require_labels(images, recipe.settings.classes)
        method = build(module, recipe, run.seed)
        self.plan = batch_plan(
            len(images), recipe.batch, world.size, run.micro_batch, run.seed, images.url, method.repeats
        )
        if method.sync_batch_norm and world.size > 1:
            method = synchronised(method, run.device)
        if self.plan.micro_batch_size < method.min_batch:
            raise ValueError(
                f"{method.min_batch_setting} needs {method.min_batch} images in a process's forward pass, but batch="
                f"{recipe.batch} in {world.size} x {self.plan.micro_batches} (processes x micro-batches) leaves "
                f"{self.plan.micro_batch_size}; "
                "raise --micro-batch or batch, or change the setting"
            )
        self.updates = Updates(method, recipe, device=run.device, precision=run.precision, seed=run.seed, world=world)
        self.step, self.unreadable, self.asked_to_stop = 0, {}, False
        self.learning, self.last_views = Learning(), {}

    @property
    def method(self) -> Method:
        return self.updates.method

    def progress(self, micro_batch: int = 0) -> TrainProgress:
        return TrainProgress(
            step=self.step,
            steps_per_epoch=self.plan.steps_per_epoch,
            epochs=self.recipe.epochs,
            micro_batch=micro_batch,
            micro_batches=self.plan.micro_batches,
        )

    def train(self) -> Literal["finished", "stopped"]:
        """Train to the end, or until a signal asks to stop: then the state is saved, and another call goes on."""
        with ExitStack() as held:
            self.world.on_rank0(lambda: held.enter_context(claimed(self.run.out, self.identity(), self.run.resume)))
            self.load()
            if self.step == 0:
                self.world.on_rank0(lambda: self.first_export().save(self.run.out / "start"))
            if self.step < self.progress().steps:
                with listening(self.stop):
                    self.loop()
            if self.step < self.progress().steps:
                return "stopped"
            self.export()
            return "finished"

    def stop(self) -> None:
        """Save and leave after this update."""
        self.asked_to_stop = True

    def loop(self) -> None:
        """All updates that are left, or as many as there are until it is asked to stop. The state is saved then."""
        self.asked_to_stop = False
        records, averages = self.world.on_all_ranks(self.records), Averages()
        saving = Timer(self.run.save_minutes * 60.0)
        todo = range(self.step, self.progress().steps)

        def requests() -> dict[str, bool]:
            speaks = self.world.is_rank0
            log = speaks and averages.seconds >= LOG_EVERY
            return {"stop": self.asked_to_stop, "save": speaks and saving.is_due(), "log": log}

        bar = Progress(self.name, todo.stop * self.recipe.batch, quiet=not self.world.is_rank0)
        with closing(records), closing(self.micro_batches(todo)) as micro_batches, bar:
            bar.resume(todo.start * self.recipe.batch)
            while self.step < todo.stop:
                asked = self.update(micro_batches, averages, requests)
                bar.label = f"{self.name}, epoch {self.progress().time:.1f}, loss {self.updates.losses[-1]:.4g}"
                bar.advance(self.recipe.batch)
                leave = asked["stop"] or self.step == todo.stop
                save, epoch_over = leave or asked["save"], self.step % self.plan.steps_per_epoch == 0
                assessed = self.assess(bar) if epoch_over else {}
                if save or asked["log"] or epoch_over:  # a state's updates have all been written down when it is saved
                    warnings = self.learning.warnings.values() if epoch_over else ()
                    self.write(records, averages.taken(self.recipe.batch) | assessed, tuple(warnings))
                if epoch_over:
                    self.after_epoch(records)
                if save:
                    with saving:
                        self.save()
                if leave:
                    return

    def records(self) -> Records:
        return Records(self.run.out, self.step, self.run.wandb, self.identity(), quiet=not self.world.is_rank0)

    def write(self, records: Records, values: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Into the log, from the first process."""
        self.world.on_rank0(lambda: records.write(self.step, values, warnings))

    def update(
        self, micro_batches: Iterator[MicroBatch], averages: Averages, requests: Callable[[], Mapping[str, bool]]
    ) -> dict[str, bool]:
        """One update on the next images. Returns which requests some process has."""
        progress, started = self.progress(), time.monotonic()
        try:
            logs = self.updates.run(self.views(micro_batches, averages), progress, requests)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"out of memory in update {self.step} on {self.run.device}: lower --micro-batch "
                f"(now {self.plan.micro_batch_size}); the recipe's batch stays {self.recipe.batch}"
            ) from error
        lr, decay = self.updates.rates(progress)
        last = {"epoch": progress.time, "lr": lr, "weight_decay": decay}
        asked = {name: logs.pop(name) > 0 for name in requests()}
        averages.add(logs, last, time.monotonic() - started)
        if self.world.is_rank0:
            self.learning.add(self.step, logs)
        self.step += 1
        return asked

    def views(self, micro_batches: Iterator[MicroBatch], averages: Averages) -> Iterator[Mapping[str, Tensor]]:
        """Those of one update, by micro-batch. Where one process has no images, all of them stop here, with its
        error."""
        ends_epoch = (self.step + 1) % self.plan.steps_per_epoch == 0
        for _ in range(self.plan.micro_batches):
            started = time.monotonic()
            micro_batch = self.world.on_all_ranks(lambda: next(micro_batches))
            averages.waited += time.monotonic() - started
            self.unreadable |= {str(place): why for place, why in micro_batch.unreadable.items()}
            self.last_views = micro_batch.views if ends_epoch else {}
            yield micro_batch.views

    def assess(self, bar: Progress) -> dict[str, float]:
        """Whether the epoch has taught anything, by the first process's last images; values for the log."""
        views, before = self.last_views, set(self.learning.warnings)
        self.last_views = {}
        found = self.world.on_rank0(
            lambda: self.learning.assess(self.method, self.recipe, views, self.progress(), self.run.precision)
        )
        for subject, warning in self.learning.warnings.items():
            if subject not in before:
                bar.say(f"warning: epoch {self.progress().epoch}: {warning}")
        return found

    def after_epoch(self, records: Records) -> None:
        """Export and monitor, where either is due."""
        run, epoch = self.run, self.step // self.plan.steps_per_epoch
        last = epoch == self.recipe.epochs
        if run.export_every and epoch % run.export_every == 0 and not last:
            self.export()
        if run.monitor and run.monitor_every and (epoch % run.monitor_every == 0 or last):
            self.write(records, run.monitor(self.first_export(), self.progress()))

    def micro_batches(self, steps: range) -> Generator[MicroBatch]:
        """What this process sees during `steps`."""
        run = self.run
        workers = default_workers(run.device) if run.workers is None else run.workers
        micro_batches = MicroBatches(
            image_set=self.images,
            views=self.method.views(),
            plan=self.plan,
            rank=self.world.rank,
            steps=steps,
            size=piece_of(self.method.spec.image_size, self.plan.micro_batch_size),
            labelled=self.method.needs_labels,
        )
        return stream(micro_batches, workers, run.device, run.skip_bad)

    def identity(self) -> dict[str, Any]:
        """What a training state belongs to."""
        return {
            "method": self.name,
            **self.run.facts,
            "settings": self.recipe.to_json(),
            "data": {"url": self.images.url, "fingerprint": self.images.fingerprint, "images": len(self.images)},
            "seed": self.run.seed,
            "precision": self.run.precision,
            **({"uses_labels": True} if self.method.needs_labels else {}),
        }

    def save(self) -> None:
        """The training state, from the first process."""
        self.share_unreadable()
        self.world.on_rank0(lambda: save_state(self.run.out / "states", self.step, self.state()))

    def share_unreadable(self) -> None:
        """Every process learns of the images that another one could not read."""
        for found in self.world.gather_objects(self.unreadable):
            self.unreadable |= found

    def state(self) -> State:
        """Everything that the next update depends on."""
        tensors = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        tensors |= optimizer_tensors(self.updates.optimizer)
        facts = {
            "step": self.step,
            "losses": list(self.updates.losses),
            "norm": self.updates.norm,
            "unreadable": self.unreadable,
            "scaler": self.updates.scaler.state_dict(),
            "learning": self.learning.state(),
        }
        return State(tensors=tensors, facts=facts)

    def load(self) -> None:
        """Take up the newest training state, where there is one."""
        path = self.world.on_rank0(lambda: newest_whole(self.run.out / "states"))
        if path is None:
            return
        state = self.world.on_all_ranks(lambda: load_state(path))
        self.method.load_state_dict(state.under("method."))
        load_optimizer(self.updates.optimizer, state)
        self.updates.scaler.load_state_dict(state.facts["scaler"])
        self.updates.losses.extend(state.facts["losses"])
        self.updates.norm = state.facts["norm"]
        self.step, self.unreadable = state.facts["step"], dict(state.facts["unreadable"])
        self.learning = Learning(**state.facts.get("learning", {}))  # states before it came have none

    def exports(self) -> Iterator[tuple[str, ViTExport]]:
        """Folder name and export of each of the method's networks as they are now."""
        warnings = tuple(self.learning.warnings.values())
        return exports_of(self.method, facts_of(self.identity(), self.step, len(self.unreadable), warnings))

    def first_export(self) -> ViTExport:
        """That of the network which the method's source evaluates."""
        return next(self.exports())[1]

    def export(self) -> None:
        """Write all exports, from the first process."""
        self.share_unreadable()
        self.world.on_rank0(self._export)

    def _export(self) -> None:
        for name, export in self.exports():
            export.save(self.run.out / name)


def require_labels(images: ImageSet, classes: int) -> None:
    """ValueError for images without labels, or with another number of classes than the method was set to."""
    if not images.classes:
        raise ValueError(
            f"{images.url} has no labels, which this method learns from: name a labelled set, such as folder:PATH, or "
            "take a method that needs none"
        )
    if (count := len(images.classes)) != classes:
        raise ValueError(f"classes={classes}, but {images.url} has {count}; add --set classes={count}")


def build(module: ModuleType, recipe: Recipe, seed: int) -> Method:
    """The method with its initial weights, the same in every process."""
    with seeded(START, seed):
        return module.METHOD(recipe.spec, recipe.settings)
