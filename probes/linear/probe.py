"""A linear probe of one export on one image set: its features, its training, its outcome; and several together."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from checkpoints.backbone import Backbone
from checkpoints.flops import frozen_bytes
from checkpoints.frozen import FrozenExport
from engine.rows import are_equal
from engine.tasks import Outcome, SelectOn, Task, Workspace, settings_of
from engine.work import Kind, Part, Scale, Work, seconds_of
from imagesets.sets import ImageSet, kept_folder
from probes.features.extract import FeatureSet, extract, forward_batch, transform_of
from probes.features.fallbacks import record_fallback
from probes.features.kinds import FLOAT, feature_bytes, feature_pass
from probes.linear.augmented import AugmentedStream
from probes.linear.batches import BLOCK, CachedBatches, EpochPlan, Table
from probes.linear.settings import LinearSettings, SweepSettings
from probes.linear.sweep import ConcurrentSweeps, Sweep, TrainEpoch, divided, from_cache
from probes.scores import Hits, accuracy, cost, log_likelihood, prediction_arrays, with_class_means
from probes.splits import check_labels, held_out, open_splits, without_held_out

# Of a training's state on disk; raise it when the same settings would train otherwise. 2: the order of augmented images
# without those held out is that of all images.
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A task on one export and image set: the features that it selects by and is reported on, its training, and its
    outcome."""

    task: SweepSettings  # with readouts that the network has
    read: Mapping[str, str]  # readout asked for -> the one read
    export: FrozenExport
    space: Workspace
    train: ImageSet
    val: ImageSet
    held: np.ndarray  # (n,) images held out
    gallery: FeatureSet  # of the training images, with augmentation of those held out alone
    queries: FeatureSet  # of the validation images

    @classmethod
    def of(cls, task: SweepSettings, export: FrozenExport, space: Workspace) -> Self:
        """Extract what is not on disk. ValueError for classes that cannot be held out, or have no training image."""
        supported, read = task.with_supported_readouts(export.spec)
        train, val = open_splits(space)
        held = held_out(train, task.holdout, space.seed) if task.select == "holdout" else np.empty(0, np.int64)
        transform = transform_of(export, space, supported)
        queries = extract(export, val, supported.kinds, space, transform)
        # With augmentation, plain features are needed for the held-out images alone.
        images = train.subset(held, f"held-out-{task.holdout:g}-seed{space.seed}") if task.augment else train
        gallery = extract(export, images, supported.kinds, space, transform) if len(images) else queries
        check_labels(train.labels if task.augment else gallery.labels, queries.labels, train)
        return cls(
            task=supported,
            read=read,
            export=export,
            space=space,
            train=train,
            val=val,
            held=held,
            gallery=gallery,
            queries=queries,
        )

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the bits of a training depend on."""
        return {
            "version": VERSION,
            "export": self.export.digest,
            "settings": settings_of(self.task),
            "train": self.train.fingerprint,
            "plain": self.gallery.facts,
            "val": self.queries.facts,
            "skip_bad": self.space.skip_bad,
            "seed": self.space.seed,
            "device": torch.device(self.space.device).type,
            **({"crops": "fast"} if self.space.decode == "fast" and self.task.augment else {}),
        }

    @cached_property
    def folder(self) -> Path:
        """Of the training's states. All processes ask for it together."""
        return self.space.world.on_rank0(
            lambda: kept_folder(self.space.cache / "linear", self.key, [self.train, self.val])
        )

    @cached_property
    def rows(self) -> np.ndarray:
        """Images of the training set (n,) to train on; without augmentation, rows of their features."""
        if self.task.augment:
            return np.setdiff1d(np.arange(len(self.train)), self.held)
        return np.flatnonzero(~np.isin(self.gallery.indices, self.held))

    @property
    def plan(self) -> EpochPlan:
        task = self.task
        return EpochPlan(rows=len(self.rows), asked=task.batch, drop_last=task.drop_last, seed=self.space.seed)

    @property
    def costs(self) -> list[int]:
        """Of a step of each head, in proportion."""
        widths = self.task.widths(self.export.spec.width).values()
        return [width * len(self.train.classes) for width in widths for _ in self.task.rates]

    def table(self, features: FeatureSet, readouts: Collection[str]) -> Table:
        """What heads on these readouts read, and nothing else."""
        kinds = {name: of_one for name, of_one in self.task.kinds_by_readout.items() if name in readouts}
        arrays = {kind: features.arrays[kind] for of_one in kinds.values() for kind in of_one}
        return Table(arrays=arrays, labels=features.labels, readouts=kinds, device=self.space.device)

    @cached_property
    def evaluated(self) -> tuple[FeatureSet, np.ndarray]:
        """The features that head and epoch are selected by, and their rows."""
        if self.task.select == "val":
            return self.queries, np.arange(len(self.queries))
        everything = np.arange(len(self.gallery))
        plain = np.isin(self.gallery.indices, self.held)
        return self.gallery, everything if self.task.augment else np.flatnonzero(plain)

    def sweep(self, own: range) -> Sweep:
        """The training; this process has its heads `own`."""
        task, (features, rows) = self.task, self.evaluated
        heads = task.heads(self.export.spec.width, len(self.train.classes), self.plan.size, self.space, own)
        table = self.table(features, heads.readouts)
        return Sweep(
            heads=heads,
            plan=self.plan,
            rows=self.rows,
            kinds=task.kinds,
            readouts=table.readouts,
            count_hits=lambda heads: sum(heads.hits(*block) for block in table.blocks(rows)),
            epochs=task.epochs,
            schedule=task.schedule,
            folder=self.folder,
            augmentation=task.augmentation,
        )

    def stream(self) -> AugmentedStream:
        """Of the training images."""
        space = self.space
        return AugmentedStream(
            image_set=self.train,
            backbone=Backbone(self.export, space.device, space.precision, space.compiled),
            seed=space.seed,
            chunk=self.chunk,
            skip_bad=space.skip_bad,
            workers=space.workers,
            decode=space.decode,
            world=space.world,
        )

    @property
    def chunk(self) -> int:
        """Images of a forward pass."""
        return self.space.batch_size or forward_batch(self.space.device)

    def trained_on(self, sweep: Sweep) -> Mapping[str, Any]:
        """The facts of the training images; with augmentation, in the form of `FeatureSet.facts`."""
        if not self.task.augment:
            return self.gallery.facts
        train = self.train
        skipped = {train.path(index): sweep.skipped[index] for index in sorted(sweep.skipped)}
        skipped |= self.gallery.facts["skipped"] if self.task.select == "holdout" else {}
        return {
            "url": train.url,
            "split": train.split,
            "fingerprint": train.fingerprint,
            "images": len(train),
            "skipped": skipped,
            # A policy's images, whose name follows, are always decoded exactly.
            "transform": re.sub("exact$", self.space.decode, self.task.augmentation.name),
            "precision": self.space.precision,
            "batch_size": self.chunk,
            **({"compiled": True} if self.space.compiled else {}),
        }

    def warnings(self) -> list[str]:
        """Why to doubt the numbers, a line each."""
        lines, train, plan = [], self.train, self.plan
        if plan.size < plan.asked:
            lines.append(
                f"batches of {plan.size}, all there is to train on, and not of {plan.asked}; rates are scaled by it"
            )
        if self.task.select == "holdout" and (warning := without_held_out(train.labels, train.classes)):
            lines.append(warning)
        absent = np.setdiff1d(np.arange(len(train.classes)), self.queries.labels)
        if len(absent):
            first = train.classes[absent[0]]
            lines.append(f"{len(absent)} of {len(train.classes)} classes have no validation image, {first} first")
        gallery = self.gallery
        if constant := [kind.name for kind in self.task.kinds if are_equal(gallery[kind])]:
            lines.append(f"the features {', '.join(constant)} are the same for all images: nothing can be learnt")
        return lines

    def hits(self, sweep: Sweep) -> dict[str, Hits]:
        """Of the chosen heads on the validation images."""
        return sweep.chosen(self.table(self.queries, sweep.heads.readouts), self.space.world)

    def spending(self, sweep: Sweep, spent: bool) -> dict[str, float]:
        """What the run cost. The sum over results is what was computed; beside it stands what was shared."""
        spending = cost(self.gallery, self.queries)
        if self.task.augment:
            spending |= {"augmented_forwards": sweep.forwards * spent, "stream_forwards": sweep.followed}
        return spending

    def outcome(self, sweep: Sweep, spent: bool = True) -> Outcome:
        """Accuracies on the validation images of a finished training, and what they rest on. spent: with its cost,
        which one result alone has where several tasks asked for the same training."""
        metrics, queries, by_val = {}, self.queries, self.task.select == "val"
        hits = self.hits(sweep)
        for name, head_hits in hits.items():
            for metric, correct in ((name, head_hits.top1), (name.replace("top1", "top5"), head_hits.top5)):
                metrics[metric] = accuracy(correct, queries.indices, len(self.val), chosen_on_val=by_val)
        facts = {
            "train": self.trained_on(sweep),
            "val": queries.facts,
            "selection": self.task.select,
            **sweep.record(len(self.evaluated[1])),
            "warnings": self.warnings(),
        }
        best, spending = hits["top1"], self.spending(sweep, spent)
        metrics["nll"] = log_likelihood(best.nll, queries.indices, len(self.val), by_val)
        arrays = prediction_arrays(best.predicted, best.confidence, queries.indices, len(self.val))
        outcome = Outcome(metrics=with_class_means(metrics, self.val), arrays=arrays, facts=facts, cost=spending)
        return record_fallback(outcome, self.read, self.export.spec)


def concurrent_sweeps(probes: Sequence[Probe]) -> ConcurrentSweeps:
    """Their trainings, together: on one stream of augmented images, or one on cached features."""
    first = probes[0]
    world, train = first.space.world, first.train
    shares = divided([probe.costs for probe in probes], world)
    sweeps = [probe.sweep(own) for probe, own in zip(probes, shares, strict=True)]
    epochs: TrainEpoch
    if first.task.augment:
        epochs = first.stream().run
    else:
        table = first.table(first.gallery, sweeps[0].heads.readouts)
        epochs = from_cache(CachedBatches(table=table, rows=first.rows, plan=first.plan))
    what = "linear heads" if len(probes) == 1 else f"{len(probes)} linear probes"
    return ConcurrentSweeps(
        sweeps=sweeps, train_epoch=epochs, label=f"{what} on {train.url} {train.split}", world=world
    )


@dataclass(frozen=True, kw_only=True)
class SweepTask(SweepSettings, Task):
    """Base of probes that train a sweep of heads; several of one stream of augmented images train together."""

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    def probe(self, export: FrozenExport, space: Workspace) -> Probe:
        """The training on one export and image set."""
        return Probe.of(self, export, space)

    def completed(self, outcome: Outcome, export: FrozenExport, space: Workspace) -> Outcome:
        """The outcome with what follows its training."""
        return outcome

    def stream(self, export: FrozenExport, space: Workspace) -> str:
        return self.augmentation.name if self.augment else ""

    def selecting(self, select: SelectOn) -> Self:
        return replace(self, select=select)

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        ((_, outcome),) = self.together([self], export, space)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @classmethod
    def together(
        cls, tasks: Sequence["SweepTask"], export: FrozenExport, space: Workspace
    ) -> Iterator[tuple[int, Outcome | Exception]]:
        space = replace(space, wanted=wanted_by(tasks, export, space))
        probes: dict[Path, list[tuple[int, Probe]]] = {}  # folder of a training -> who asks for it
        for place, task in enumerate(tasks):
            try:
                probe = task.probe(export, space)
            except Exception as error:  # of this task alone
                yield place, error
            else:
                probes.setdefault(probe.folder, []).append((place, probe))
        if not probes:
            return
        for sweep in concurrent_sweeps([asking[0][1] for asking in probes.values()]).run():
            for number, (place, probe) in enumerate(probes[sweep.folder]):
                if sweep.error:
                    yield place, sweep.error
                else:
                    yield place, tasks[place].completed(probe.outcome(sweep, spent=not number), export, space)


def wanted_by(tasks: Sequence[SweepTask], export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
    """What these tasks, beside others of the run, read of images without augmentation; one pass extracts it for all."""
    kinds_of = dict(space.wanted)
    for task in tasks if len(tasks) > 1 else ():
        with suppress(ValueError):  # a task that does not suit the network fails on its own
            name, kinds = transform_of(export, space, task).name, task.with_supported_readouts(export.spec)[0].kinds
            kinds_of[name] = tuple(dict.fromkeys([*kinds_of.get(name, ()), *kinds]))
    return kinds_of


def work_of_heads(task: LinearSettings, scale: Scale) -> Work:
    """All heads, trained on the training images and judged by those held out, or else by those of validation.

    A step costs two products with the features, one for the logits and one for the gradient.
    """
    spec, train, val, classes = scale.spec, scale.images["train"], scale.images["val"], scale.classes
    plan, held = task.divided_images(train)
    widths = [width for width in task.widths(spec.width).values() for _ in task.rates]
    seen = min(plan.rows, plan.count * plan.size)
    product = 2.0 * sum(widths) * classes
    passes = (
        (feature_pass(spec, task.epochs * seen, "augmented", "crops"), feature_pass(spec, held, "held out"))
        if task.augment
        else (feature_pass(spec, train, "train"),)
    )
    parts = (
        *passes,
        feature_pass(spec, val, "val"),
        Part(kind="head steps", count=task.epochs * plan.count, flops=2 * product * plan.size),
        Part(kind="head images", count=task.epochs * (held or val) + val, flops=product),
    )
    kept = feature_bytes(spec, val + (held if task.augment else train), len(task.kinds))
    weights = 3 * FLOAT * sum(widths) * classes  # with momentum and gradient
    passing = frozen_bytes(spec, scale.batch_size or forward_batch(scale.device))
    memory = passing + weights + FLOAT * plan.size * (sum(widths) / len(widths) + 3 * classes)
    return Work(parts=parts, iterations=task.epochs * plan.count, memory=memory, disk=kept + 2 * weights)


def seconds_of_heads(
    task: LinearSettings, width: int, train: ImageSet, space: Workspace, seconds: float
) -> dict[Kind, float]:
    """Seconds of a step of all heads and of classifying one image, on noise around class means. width: of the network.

    Heads become sure of such features within a few steps, as in training: their gradients underflow, and subnormal
    numbers make a step up to four times as slow on some CPUs.
    """
    batch, classes = min(task.batch, len(train)), len(train.classes)
    heads = task.heads(width, classes, batch, space)
    labels = torch.randint(classes, (batch,), device=space.device)
    inputs = {
        name: torch.randn(classes, size, device=space.device)[labels] + torch.randn(batch, size, device=space.device)
        for name, size in task.widths(width).items()
    }
    step = seconds_of(lambda: heads.step(inputs, labels, 1.0).sum().item(), seconds / 2)
    few = {name: value[:BLOCK] for name, value in inputs.items()}
    judging = seconds_of(lambda: heads.hits(few, labels[:BLOCK]).sum().item(), seconds / 2)
    return {"head steps": step, "head images": judging / min(batch, BLOCK)}
