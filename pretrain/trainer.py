"""The one training loop: recipe + method + images -> exports; resumable at any step, alone or under torchrun.

A run's folder holds
    run.json      what is trained on what; a restart must ask for the same
    states/       the two newest training states
    log.jsonl, tensorboard/
    export/       the encoder as the source evaluates it; export-BRANCH/ the method's other networks
    start/        the encoder before the first update: the floor that a training has to beat
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

from torch import Tensor, nn

from checkpoints.export import ViTExport
from engine.distributed import World
from engine.files import write_atomic
from engine.progress import Progress
from engine.seeding import START, seeded
from imagesets.sets import ImageSet
from pretrain.batch_norm import synchronised
from pretrain.checkpointing import State, load_newest, save_state
from pretrain.images import Part, Parts, cut_of, default_workers, stream
from pretrain.method import Clock, Encoder, Method
from pretrain.recipe import Recipe
from pretrain.records import Records
from pretrain.updates import Precision, Updates

SAVE_SHARE = 0.02  # of the time at most goes into saving, whatever was asked
LOG_EVERY = 2.0  # seconds between two lines of the log, at least
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's: save and leave

# (export of the first branch, clock) -> values for the log, such as an online k-NN accuracy.
Monitor = Callable[[ViTExport, Clock], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how to train. at_once: most images of one process in a forward pass, None for its whole share.

    save_minutes: between two training states. export_every, monitor_every: epochs, 0 for the end alone or never.
    """

    out: Path
    device: str = "cpu"
    precision: Precision = "float32"
    seed: int = 0
    workers: int | None = None
    at_once: int | None = None
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
        self.cut = cut_of(len(images), recipe.batch, world.size, run.at_once, run.seed, images.url)
        method = build(module, recipe, run.seed)
        if method.sync_batch_norm and world.size > 1:
            method = synchronised(method)
        if self.cut.part_size < 2 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in method.modules()):
            raise ValueError(
                "one image at a time has no statistics for this method's batch norms; use a batch of at least 2 images "
                "for each process and forward pass"
            )
        self.updates = Updates(method, recipe, device=run.device, precision=run.precision, seed=run.seed, world=world)
        self.step, self.unreadable, self.asked_to_stop = 0, {}, False

    @property
    def method(self) -> Method:
        return self.updates.method

    def clock(self, part: int = 0) -> Clock:
        return Clock(
            step=self.step,
            steps_per_epoch=self.cut.steps_per_epoch,
            epochs=self.recipe.epochs,
            part=part,
            parts=self.cut.parts,
        )

    def train(self) -> Literal["finished", "stopped"]:
        """Train to the end, or until a signal asks to stop: then the state is saved, and another call goes on."""
        self.world.first(self.claim)
        self.load()
        if self.step == self.clock().steps and (self.run.out / "export").exists():
            return "finished"
        if self.step == 0:
            self.world.first(lambda: self.exports(first_only=True)["export"].save(self.run.out / "start"))
        with listening(self.stop):
            finished = self.loop()
        if finished:
            self.export()
        return "finished" if finished else "stopped"

    def stop(self) -> None:
        """Save and leave after this update."""
        self.asked_to_stop = True

    def loop(self) -> bool:
        """All updates that are left; False if it was asked to stop before."""
        records = Records(self.run.out, self.step, self.run.wandb, self.identity()) if self.world.is_first else None
        steps, batch = self.clock().steps, self.recipe.batch
        parts = self.parts(range(self.step, steps))
        saving = Timer(self.run.save_minutes * 60.0)
        averages = Averages()
        try:
            with Progress(self.name, (steps - self.step) * batch, quiet=not self.world.is_first) as progress:
                while self.step < steps:
                    wishes = {"stop": self.asked_to_stop, "save": self.world.is_first and saving.is_due()}
                    logs = self.update(parts, averages, wishes)
                    progress.label = f"{self.name}, epoch {self.clock().time:.1f}, loss {logs['loss']:.4g}"
                    progress.advance(batch)
                    self.write(records, averages)
                    self.after_epoch(records)
                    stop = logs["stop"] > 0 and self.step < steps
                    if stop or self.step == steps or logs["save"] > 0:
                        with saving:
                            self.save()
                    if stop:
                        return False
        finally:
            if records is not None:
                records.close()
        return True

    def update(self, parts: Iterator[Part], averages: "Averages", wishes: Mapping[str, bool]) -> dict[str, float]:
        """One update on the next images."""
        clock, started = self.clock(), time.monotonic()
        batches = [next(parts) for _ in range(self.cut.parts)]
        waited = time.monotonic() - started
        for batch in batches:
            self.unreadable |= {str(place): why for place, why in batch.unreadable.items()}
        logs = self.updates.run((batch.views for batch in batches), clock, wishes)
        lr, decay = self.updates.rates(clock)
        seconds = time.monotonic() - started
        averages.add({name: value for name, value in logs.items() if name not in wishes}, seconds, waited)
        averages.last = {"epoch": clock.time, "lr": lr, "weight_decay": decay}
        self.step += 1
        return logs

    def write(self, records: Records | None, averages: "Averages") -> None:
        """A line of the log where the last one is old enough, an epoch is over or the training is."""
        if records is not None and (averages.seconds >= LOG_EVERY or self.step % self.cut.steps_per_epoch == 0):
            records.write(self.step, averages.taken(self.recipe.batch))

    def after_epoch(self, records: Records | None) -> None:
        """Export and monitor, where this update ended an epoch after which that is due."""
        epoch, within = divmod(self.step, self.cut.steps_per_epoch)
        if within:
            return
        run, last = self.run, epoch == self.recipe.epochs
        if run.export_every and epoch % run.export_every == 0 and not last:
            self.export()
        if run.monitor and run.monitor_every and (epoch % run.monitor_every == 0 or last):
            found = self.world.first(lambda: dict(run.monitor(self.exports(first_only=True)["export"], self.clock())))
            if records is not None:
                records.write(self.step, found)

    def parts(self, steps: range) -> Iterator[Part]:
        """What this process sees during `steps`."""
        run = self.run
        workers = default_workers(run.device) if run.workers is None else run.workers
        parts = Parts(image_set=self.images, views=self.method.views(), cut=self.cut, rank=self.world.rank, steps=steps)
        return stream(parts, workers, run.device, run.skip_bad)

    def identity(self) -> dict[str, Any]:
        """What a training state belongs to."""
        return {
            "method": self.name,
            **self.run.facts,
            "settings": self.recipe.to_json(),
            "data": {"url": self.images.url, "fingerprint": self.images.fingerprint, "images": len(self.images)},
            "seed": self.run.seed,
            "precision": self.run.precision,
        }

    def claim(self) -> None:
        """Begin a new run in `out`, or check that the one there is this one."""
        path, own = self.run.out / "run.json", json.loads(json.dumps(self.identity()))
        if not path.exists():
            if self.run.out.exists() and any(self.run.out.iterdir()):
                raise ValueError(f"{self.run.out} holds other files: choose a new folder for --out")
            write_atomic(path, json.dumps(own, indent=2) + "\n")
            return
        if not self.run.resume:
            raise ValueError(f"{self.run.out} holds a run already; add --resume to go on, or choose another --out")
        there = json.loads(path.read_text(encoding="utf-8"))
        own["data"].pop("url"), there["data"].pop("url")  # the images may have moved
        different = differences(there, own)
        if different:
            raise ValueError(f"{self.run.out} holds another run, {'; '.join(different)}; choose another --out")

    def save(self) -> None:
        """The training state, from the first process."""
        self.world.first(lambda: save_state(self.run.out / "states", self.step, self.state()))

    def state(self) -> State:
        """Everything that the next update depends on."""
        tensors = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        for place, entry in self.updates.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{name}": tensor for name, tensor in entry.items()}
        facts = {
            "step": self.step,
            "losses": list(self.updates.losses),
            "norm": self.updates.norm,
            "unreadable": self.unreadable,
            "scaler": self.updates.scaler.state_dict(),
        }
        return State(tensors=tensors, facts=facts)

    def load(self) -> None:
        """Take up the newest training state, where there is one."""
        state = self.world.each(lambda: load_newest(self.run.out / "states"))
        if state is None:
            return
        self.method.load_state_dict(state.under("method."))
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.under("optimizer.").items():
            place, _, kind = name.partition(".")
            entries.setdefault(int(place), {})[kind] = tensor
        optimizer = self.updates.optimizer
        optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})
        self.updates.scaler.load_state_dict(state.facts["scaler"])
        self.updates.losses.extend(state.facts["losses"])
        self.updates.norm = state.facts["norm"]
        self.step, self.unreadable = state.facts["step"], dict(state.facts["unreadable"])

    def exports(self, first_only: bool = False) -> dict[str, ViTExport]:
        """Folder name -> export of each of the method's networks."""
        found = {}
        for number, (branch, encoder) in enumerate(self.method.encoders().items()):
            found["export" if number == 0 else f"export-{branch}"] = self.exported(branch, encoder)
            if first_only:
                break
        return found

    def exported(self, branch: str, encoder: Encoder) -> ViTExport:
        """One network as an export, with where it comes from."""
        facts = {
            "method": self.name,
            "branch": branch,
            "official_code": self.recipe.source,
            "epochs": self.clock().time,
            "data": self.images.url,
            "data_fingerprint": self.images.fingerprint,
            "seed": self.run.seed,
            "precision": self.run.precision,
            "skipped_images": len(self.unreadable),
            **self.run.facts,
        }
        export = ViTExport.from_vit(encoder.vit, self.method.preparation, facts)
        if not encoder.extra:
            return export
        extra = {name: tensor.detach().cpu().clone() for name, tensor in encoder.extra.items()}
        return ViTExport.make(export.spec, export.preparation, export.tensors, {**export.extra, **extra}, facts)

    def export(self) -> None:
        """Write all exports, from the first process."""
        self.world.first(self._export)

    def _export(self) -> None:
        for name, export in self.exports().items():
            export.save(self.run.out / name)


def build(module: ModuleType, recipe: Recipe, seed: int) -> Method:
    """The method with its initial weights, the same in every process."""
    with seeded(START, seed):
        return module.METHOD(recipe.spec, recipe.settings)


def differences(there: Any, asked: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, a line for each leaf."""
    if isinstance(there, dict) and isinstance(asked, dict):
        names = dict.fromkeys([*there, *asked])
        return [
            line
            for key in names
            for line in differences(there.get(key), asked.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if there == asked else [f"{name} is {there}, asked for {asked}"]


@contextmanager
def listening(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at a scheduler's signals, for the length of a block."""

    def heard(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, heard) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Timer:
    """Says when to save: every `seconds`, less often where saving is slow. A context around the saving itself."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.last, self.cost = seconds, time.monotonic(), 0.0

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= max(self.seconds, self.cost / SAVE_SHARE)

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.last = time.monotonic()
        self.cost = self.last - self.started


class Averages:
    """Means of the logs over the updates since they were last taken."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0
        self.last: dict[str, float] = {}

    def add(self, logs: Mapping[str, float], seconds: float, waited: float) -> None:
        for name, value in logs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.updates, self.seconds, self.waited = self.updates + 1, self.seconds + seconds, self.waited + waited

    def taken(self, batch: int) -> dict[str, float]:
        """The means, images a second, and the share of the time that was spent waiting for images."""
        found = {
            **self.last,
            **{name: value / self.updates for name, value in self.sums.items()},
            "images_per_second": self.updates * batch / self.seconds,
            "waiting": self.waited / self.seconds,
        }
        self.__init__()
        return found
