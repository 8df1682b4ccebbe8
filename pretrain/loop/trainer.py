"""The training loop of all methods: recipe + method + images -> exports. It resumes at any step, and runs
in one process or under torchrun.

A run's folder holds
    run.json      method, settings and images; a restart must have the same
    states/       the two newest training states
    log.jsonl, tensorboard/
    lock          held while a training runs here
    export/       the encoder as the source evaluates it; export-BRANCH/ the method's other networks
    start/        the encoder before the first update, as a baseline
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from checkpoints.export import ViTExport
from engine.distributed import World
from engine.errors import option
from engine.printing import say
from engine.progress import Progress
from engine.seeding import START, seeded
from engine.training.interruptions import Timer, listening
from engine.training.states import State, load_optimizer, load_state, newest_intact, optimizer_tensors, save_state
from engine.work import count_flops
from imagesets.sets import ImageSet
from imagesets.stored import shards_digest, shards_of, with_shuffle_window
from pretrain.loop.exporting import exports_of, facts_of
from pretrain.loop.images import (
    BatchPlan,
    MicroBatch,
    MicroBatches,
    batch_plan,
    default_workers,
    load_micro_batches,
    piece_of,
)
from pretrain.loop.initial_weights import InitialWeights
from pretrain.loop.learning import Learning
from pretrain.loop.records import Averages, Records, cost_of, devices_of, is_counted, peak_memory
from pretrain.loop.run_folder import CONTENTS, FORWARD_IMAGES, locked_run_folder
from pretrain.loop.updates import Precision, Updates
from pretrain.method import Method, TrainProgress, check_chunks
from pretrain.parts.batch_norm import synchronised
from pretrain.recipe import Recipe

LOG_EVERY = 2.0  # least seconds between two lines of the log

# (export of the first branch, progress) -> values for the log, such as an online k-NN accuracy, and optionally
# "warnings", a list of texts. Every process calls it and gets the same values, so that processes can share its work.
Monitor = Callable[[ViTExport, TrainProgress], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how to train: everything that is not part of the recipe."""

    out: Path  # the folder of this run alone
    device: str = "cpu"  # cpu, cuda or cuda:N
    precision: Precision = "float32"  # of matrix products
    compiled: bool = False  # compile transformer blocks with torch.compile, which rounds differently
    decode: Literal["exact", "fast"] = "exact"  # fast: torchvision decodes and crops JPEG (docs/images.md)
    seed: int = 0  # of everything random
    shuffle_window: int = 0  # shards among which images are shuffled (docs/images.md); 0: among all images
    workers: int | None = None  # loader processes; None: chosen for the machine
    micro_batch: int | None = None  # most images of one process in a forward pass; None: its whole share of a batch
    skip_bad: bool = False  # replace and count unreadable images
    resume: bool = False  # continue the training in `out`
    save_minutes: float = 10.0  # between two training states
    export_every: int = 0  # epochs; 0: only at the end
    monitor_every: int = 0  # epochs; 0: never
    monitor: Monitor | None = None  # evaluates the encoder for the log
    health_every: int = 0  # epochs; 0: never
    health: Monitor | None = None  # another monitor, whose values are not accuracies
    wandb: str | None = None  # project of Weights & Biases
    init: InitialWeights | None = None  # weights that the encoder starts from, instead of random ones
    facts: Mapping[str, Any] = field(default_factory=dict)  # for run.json and the exports: recipe's name, changes


class Trainer:
    """A pretraining.

    Args:
        name: the method's name.
        module: the method's file, which defines METHOD.
        recipe: encoder, settings and schedule of the training.
        images: training images.
        run: where and how to train.
        world: the connected processes.

    Raises:
        ValueError: the recipe cannot be trained with these images, processes or micro-batches.
    """

    def __init__(self, name: str, module: ModuleType, recipe: Recipe, images: ImageSet, run: Run, world: World) -> None:
        self.name, self.recipe, self.images, self.run, self.world = name, recipe, images, run, world
        if module.METHOD.needs_labels:
            require_labels(images, recipe.settings.classes)
        method = build(module, recipe, run.seed)
        if run.init:
            run.init.load_into(method)
        self.plan = batch_plan(
            len(images), recipe.batch, world.size, run.micro_batch, run.seed, images.url, method.repeats
        )
        if run.shuffle_window:
            self.images = with_shuffle_window(images, run.shuffle_window, world.size)
            self.plan = replace(self.plan, shards=shards_of(self.images), window=run.shuffle_window)
        if method.sync_batch_norm and world.size > 1:
            method = synchronised(method, run.device)
        if self.plan.micro_batch_size < method.min_batch:
            raise ValueError(
                f"{method.min_batch_setting} needs {method.min_batch} images in a process's forward pass, but batch="
                f"{recipe.batch} in {world.size} x {self.plan.micro_batches} (processes x micro-batches) leaves "
                f"{self.plan.micro_batch_size}; raise {option('micro_batch')} or batch, or change the setting"
            )
        check_chunks(self.forward_images, method.chunks)
        self.updates = Updates(
            method,
            recipe,
            device=run.device,
            precision=run.precision,
            compiled=run.compiled,
            seed=run.seed,
            world=world,
            frozen_epochs=run.init.frozen_epochs if run.init else 0,
        )
        self.step = 0  # updates done
        self.asked_to_stop = False  # whether this process got a signal
        self.unreadable: dict[str, str] = {}  # index of an unreadable image, as text for JSON -> reason
        require_a_rate(recipe, self.progress())
        self.learning = Learning()
        self.last_views: Mapping[str, Tensor] = {}  # of the last micro-batch of an epoch, for `assess`
        self.counted = False  # whether the log has the floating-point operations of an update

    @property
    def method(self) -> Method:
        return self.updates.method

    @property
    def forward_images(self) -> int:
        """Images of a forward pass, of all processes together."""
        return self.plan.micro_batch_size * self.world.size

    def progress(self, micro_batch: int = 0) -> TrainProgress:
        return TrainProgress(
            step=self.step,
            steps_per_epoch=self.plan.steps_per_epoch,
            epochs=self.recipe.epochs,
            micro_batch=micro_batch,
            micro_batches=self.plan.micro_batches,
        )

    def train(self, begun: Callable[[], None] = lambda: None) -> Literal["finished", "stopped"]:
        """Train to the end, or until a signal stops the training, which then saves its state; another call resumes.

        begun: called in the first process once the folder is known to belong to this run.
        """
        folder = locked_run_folder(self.run.out, self.identity(), self.run.resume, self.recipe.defaults())
        with self.world.held_by_rank0(folder):
            self.world.on_rank0(begun)
            self.load()
            if self.step == 0:
                self.world.on_rank0(self.begin)
            if self.step < self.progress().steps:
                self.asked_to_stop = False
                with listening(self.stop):
                    self.loop()
            if self.step < self.progress().steps:
                return "stopped"
            self.export()
            return "finished"

    def begin(self) -> None:
        """Before the first update, in the first process: fit the method to images, and export its encoder to start/."""
        if self.method.fitted_on:
            plan = replace(self.plan, processes=1, micro_batches=self.plan.processes * self.plan.micro_batches)
            steps = min(ceil(self.method.fitted_on / plan.batch), plan.steps_per_epoch)
            say(f"fitting {self.name} to {steps * plan.batch} images before the first update")
            with closing(self.micro_batches(range(steps), plan)) as micro_batches:
                self.method.fit(micro_batch.views for micro_batch in micro_batches)
        self.first_export().save(self.run.out / "start")

    def stop(self) -> None:
        """Ask the loop to save and stop after the current update."""
        self.asked_to_stop = True

    def loop(self) -> None:
        """Run the remaining updates, or those until `stop` is called; then save the state."""
        records, averages = self.world.on_all_ranks(self.records), Averages()
        self.counted = is_counted(self.run.out)
        saving = Timer(self.run.save_minutes * 60.0)
        steps = range(self.step, self.progress().steps)

        def requests() -> dict[str, bool]:
            is_rank0 = self.world.is_rank0
            log = is_rank0 and averages.seconds >= LOG_EVERY
            return {"stop": self.asked_to_stop, "save": is_rank0 and saving.is_due(), "log": log}

        bar = Progress(self.name, steps.stop * self.recipe.batch)
        with closing(records), closing(self.micro_batches(steps)) as micro_batches, bar:
            bar.resume(steps.start * self.recipe.batch)
            if self.run.init and self.step == 0:
                self.learning.start = self.monitor(self.run.monitor, self.run.monitor_every, records, bar)
            while self.step < steps.stop:
                requested = self.update(micro_batches, averages, requests)
                bar.label = f"{self.name}, epoch {self.progress().time:.1f}, loss {self.updates.losses[-1]:.4g}"
                bar.advance(self.recipe.batch)
                stops = requested["stop"] or self.step == steps.stop
                saves, epoch_over = stops or requested["save"], self.step % self.plan.steps_per_epoch == 0
                epoch_values = self.assess(bar) | self.epoch_cost(averages) if epoch_over else {}
                if saves or requested["log"] or epoch_over:  # all updates of a saved state are in the log
                    self.write(records, averages.take(self.recipe.batch) | epoch_values, epoch_over)
                if epoch_over:
                    self.after_epoch(records, bar)
                if saves:
                    with saving:
                        self.save()
                if stops:
                    return

    def records(self) -> Records:
        """The log of this run, which only rank 0 writes."""
        return Records(self.run.out, self.step, self.run.wandb, self.identity(), quiet=not self.world.is_rank0)

    def write(self, records: Records, values: Mapping[str, float], epoch_over: bool = False) -> None:
        """Write a line of the log from rank 0, at the end of an epoch with warnings and devices."""
        warnings = tuple(self.learning.warnings.values()) if epoch_over else ()
        devices = devices_of(self.run.device, self.world.size) if epoch_over else None
        self.world.on_rank0(lambda: records.write(self.step, values, warnings, devices))

    def update(
        self, micro_batches: Iterator[MicroBatch], averages: Averages, requests: Callable[[], Mapping[str, bool]]
    ) -> dict[str, bool]:
        """One update on the next images. Returns name -> whether any process requests it: to stop, to save, to log."""
        progress, started = self.progress(), time.monotonic()
        try:
            views = self.views(micro_batches, averages)
            logs = self.count_work(lambda: self.updates.run(views, progress, requests), averages)
        except torch.OutOfMemoryError as error:
            effect = ", which changes this method's loss, so not on resuming" if self.method.batch_statistics else ""
            raise ValueError(
                f"out of memory in update {self.step} on {self.run.device}: lower {option('micro_batch')} "
                f"(now {self.plan.micro_batch_size}){effect}; the recipe's batch stays {self.recipe.batch}"
            ) from error
        lr, decay = self.updates.rates(progress)
        newest_values = {"epoch": progress.time, "lr": lr, "weight_decay": decay}
        requested = {name: logs.pop(name) > 0 for name in requests()}
        averages.add(logs, newest_values, time.monotonic() - started)
        if self.world.is_rank0:
            self.learning.add(self.step, logs)
        self.step += 1
        return requested

    def count_work(self, run: Callable[[], dict[str, float]], averages: Averages) -> dict[str, float]:
        """Run an update and return its logs; count the floating-point operations of the first one for the log."""
        if self.counted:
            return run()
        logs, operations = count_flops(run)
        averages.once["gflop_per_image"] = operations / 1e9 * self.world.size / self.recipe.batch
        self.counted = True
        return logs

    def views(self, micro_batches: Iterator[MicroBatch], averages: Averages) -> Iterator[Mapping[str, Tensor]]:
        """The views of the micro-batches of one update. If a process cannot read its images, all processes raise its
        error here."""
        ends_epoch = (self.step + 1) % self.plan.steps_per_epoch == 0
        for _ in range(self.plan.micro_batches):
            started = time.monotonic()
            micro_batch = self.world.on_all_ranks(lambda: next(micro_batches))
            averages.waited += time.monotonic() - started
            self.unreadable |= {str(place): why for place, why in micro_batch.unreadable.items()}
            self.last_views = micro_batch.views if ends_epoch else {}
            yield micro_batch.views

    def assess(self, bar: Progress) -> dict[str, float]:
        """Assess on rank 0's last images whether anything is learned, and print new warnings. Returns values for the
        log."""
        views, known_warnings = self.last_views, set(self.learning.warnings)
        self.last_views = {}
        values = self.world.on_rank0(
            lambda: self.learning.assess(self.method, self.recipe, views, self.progress(), self.run.precision)
        )
        for subject, warning in self.learning.warnings.items():
            if subject not in known_warnings:
                bar.say(f"warning: epoch {self.progress().epoch}: {warning}")
        return values

    def epoch_cost(self, averages: Averages) -> dict[str, float]:
        """Values for the log: seconds of the epoch that has ended, and the highest peak memory of a process."""
        peaks = self.world.gather_objects(peak_memory(self.run.device))
        highest = {name: max(peak[name] for peak in peaks) for name in peaks[0]}
        return {"seconds_per_epoch": averages.seconds_per_epoch(self.plan.steps_per_epoch), **highest}

    def after_epoch(self, records: Records, bar: Progress) -> None:
        """Export and monitor if due after this epoch, and print the monitor's values."""
        run, epoch = self.run, self.step // self.plan.steps_per_epoch
        last = epoch == self.recipe.epochs
        if run.export_every and epoch % run.export_every == 0 and not last:
            self.export()
        if run.monitor_every and (epoch % run.monitor_every == 0 or last):
            for warning in self.learning.fallen(self.monitor(run.monitor, run.monitor_every, records, bar)):
                bar.say(f"warning: epoch {epoch}: {warning}")
        if run.health_every and (epoch % run.health_every == 0 or last):
            self.monitor(run.health, run.health_every, records, bar)

    def monitor(self, monitor: Monitor | None, every: int, records: Records, bar: Progress) -> dict[str, float]:
        """Print, log and return a monitor's values for the current encoder; empty without a monitor."""
        if not (monitor and every):
            return {}
        values = dict(monitor(self.first_export(), self.progress()))
        warnings, epoch = values.pop("warnings", ()), self.step // self.plan.steps_per_epoch
        if values:
            bar.say(f"epoch {epoch}: {', '.join(f'{name} {value:.2f}' for name, value in values.items())}")
        for warning in warnings:
            bar.say(f"warning: epoch {epoch}: {warning}")
        self.world.on_rank0(lambda: records.write(self.step, values, warnings))
        return values

    def micro_batches(self, steps: range, plan: BatchPlan | None = None) -> Generator[MicroBatch]:
        """The micro-batches of this process during `steps`. plan: None for the training's own."""
        run, plan = self.run, plan or self.plan
        workers = default_workers(run.device) if run.workers is None else run.workers
        micro_batches = MicroBatches(
            image_set=self.images,
            views=self.method.views(),
            plan=plan,
            rank=self.world.rank,
            steps=steps,
            size=piece_of(self.method.spec.side, plan.micro_batch_size),
            labelled=self.method.needs_labels,
            decode=run.decode,
            unfinished=torch.device(run.device).type == "cuda",
        )
        return load_micro_batches(micro_batches, workers, run.device, run.skip_bad)

    def identity(self) -> dict[str, Any]:
        """The contents of run.json: everything that identifies the training to which a state belongs."""
        return {
            "method": self.name,
            **self.run.facts,
            "settings": self.recipe.to_json(),
            "data": {
                "url": self.images.url,
                "fingerprint": self.images.fingerprint,
                "images": len(self.images),
                **({CONTENTS: self.images.contents} if self.images.contents else {}),
            },
            "seed": self.run.seed,
            "precision": self.run.precision,
            **({"compiled": True} if self.run.compiled else {}),
            **({"decode": self.run.decode} if self.run.decode != "exact" else {}),
            **({"shuffle_window": self.plan.window, "shards": shards_digest(self.images)} if self.plan.window else {}),
            **({"uses_labels": True} if self.method.needs_labels else {}),
            **({FORWARD_IMAGES: self.forward_images} if self.method.batch_statistics else {}),
            **({"init": self.run.init.facts(self.method)} if self.run.init else {}),
        }

    def save(self) -> None:
        """Save the training state, from rank 0."""
        self.share_unreadable()
        self.world.on_rank0(lambda: save_state(self.run.out / "states", self.step, self.state()))

    def share_unreadable(self) -> None:
        """Merge the unreadable images of all processes, in every process."""
        for unreadable in self.world.gather_objects(self.unreadable):
            self.unreadable |= unreadable

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
            "learning": asdict(self.learning),
        }
        return State(tensors=tensors, facts=facts)

    def load(self) -> None:
        """Load the newest training state, if there is one."""
        path = self.world.on_rank0(lambda: newest_intact(self.run.out / "states"))
        if path is None:
            return
        state = self.world.on_all_ranks(lambda: load_state(path))
        self.method.load_state_dict(state.under("method."))
        load_optimizer(self.updates.optimizer, state)
        self.updates.scaler.load_state_dict(state.facts["scaler"])
        self.updates.losses.extend(state.facts["losses"])
        self.updates.norm = state.facts["norm"]
        self.step, self.unreadable = state.facts["step"], dict(state.facts["unreadable"])
        self.learning = Learning(**state.facts.get("learning", {}))  # older states have none

    def exports(self) -> Iterator[tuple[str, ViTExport]]:
        """Folder name and export of each of the method's networks."""
        warnings, cost = tuple(self.learning.warnings.values()), cost_of(self.run.out, self.identity())
        return exports_of(self.method, facts_of(self.identity(), self.step, len(self.unreadable), warnings, cost))

    def first_export(self) -> ViTExport:
        """The export of the network that the method's source evaluates."""
        return next(self.exports())[1]

    def export(self) -> None:
        """Write all exports, from rank 0."""
        self.share_unreadable()
        self.world.on_rank0(lambda: [export.save(self.run.out / name) for name, export in self.exports()])


def require_labels(images: ImageSet, classes: int) -> None:
    """Raise ValueError for images without labels, with several labels each, or with another number of classes than
    `classes`, the method's setting."""
    if not images.classes:
        raise ValueError(
            f"{images.url} has no labels, which this method learns from: give a labelled set, such as folder:PATH, or "
            "use a method that needs none"
        )
    if images.has_several_labels:
        raise ValueError(f"{images.url}: its images have several labels each, and this method learns from one")
    if (count := len(images.classes)) != classes:
        raise ValueError(
            f"classes={classes}, but {images.url} has {count}; add {option('settings', {'classes': count})}"
        )


def require_a_rate(recipe: Recipe, progress: TrainProgress) -> None:
    """Raise ValueError if all updates of the training have a learning rate of 0: a warm-up begins with it."""
    if not any(recipe.schedule.at(recipe.peak, replace(progress, step=step)) for step in range(progress.steps)):
        warmup = getattr(recipe.schedule, "warmup", 0)
        raise ValueError(
            f"schedule.warmup={warmup} with epochs={recipe.epochs} of {progress.steps_per_epoch} updates: the learning "
            "rate is 0 in every update; set schedule.warmup=0, lower batch or raise epochs"
        )


def build(module: ModuleType, recipe: Recipe, seed: int) -> Method:
    """The method with its initial weights, the same in every process."""
    with seeded(START, seed):
        return module.METHOD(recipe.spec, recipe.settings)
