"""Probes that train a sweep of heads: settings; features, training and outcome on one export and image set; several
together."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.rows import are_equal
from engine.settings import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    TwoOrMore,
    check_less,
)
from engine.tasks import ADDED, Outcome, SelectOn, Task, Workspace, settings_of
from engine.training.schedules import Schedule, TrainProgress
from imagesets.random_crops import CropRule
from imagesets.sets import ImageSet, cache_folder
from imagesets.stored import shards_digest, with_shuffle_window
from probes.features.extract import FeatureSet, extract, facts_of_pass, forward_batch, transform_of
from probes.features.fallbacks import record_fallback
from probes.features.kinds import FeatureKind
from probes.linear.augmented import Augmentation, AugmentedStream
from probes.linear.batches import CachedBatches, EpochPlan, Table
from probes.linear.sweep import ConcurrentSweeps, Sweep, TrainEpoch, divided, from_cache
from probes.scores import (
    Hits,
    accuracy,
    cost,
    hits_of,
    joined_hits,
    log_likelihood,
    prediction_arrays,
    with_class_means,
)
from probes.splits import check_labels, held_out, open_splits, without_held_out

# Of a training's state on disk; raise it when the same settings would train otherwise. 2: the order of augmented images
# without those held out is that of all images.
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class SweepTask(Task):
    """Base of probes that train a sweep of heads, one for every readout, learning rate and weight decay, on all but the
    images that select one of them; several of one stream of augmented images train together."""

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    lrs: OneOrMoreDifferent[PositiveFloat] = (0.001,)  # learning rates for 256 images; times batch / 256
    weight_decays: OneOrMoreDifferent[NonNegativeFloat] = (0.0,)  # of the heads
    norm: bool = True  # read behind the network's final norm
    crop_rule: CropRule = "torchvision"  # whose random crop it is
    train_interpolation: Literal["bilinear", "bicubic"] = "bilinear"  # of resizing the random crops
    batch: TwoOrMore = 1024  # images in a step; all training images where they are fewer
    epochs: PositiveInt = 100  # passes over the training images
    warmup_epochs: NonNegativeInt = 0  # over which the rate rises from 0
    drop_last: bool = False  # leave out the images of an epoch that do not fill a batch
    # shards of `wds:` or `parquet:` among which random crops are shuffled and read from start to end; 0: all images
    shuffle_window: NonNegativeInt = field(default=0, metadata=ADDED)
    select: SelectOn = "holdout"  # images that select head and epoch: held-out ones, or validation's
    holdout: ProperFraction = 0.1  # share of the training images that is held out for this
    crop: Fraction = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # of that resizing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_less(self, "warmup_epochs", "epochs")
        if self.shuffle_window and not self.augment:
            raise ValueError(f"shuffle_window={self.shuffle_window} is for heads that train on random crops: leave it")

    def divided_images(self, images: int) -> tuple[EpochPlan, int]:
        """An epoch of so many training images, as a plan counts it, and how many of them are held out."""
        held = round(self.holdout * images) if self.select == "holdout" else 0
        return EpochPlan(rows=images - held, asked=self.batch, drop_last=self.drop_last, seed=0), held

    @property
    def rates(self) -> list[tuple[float, float]]:
        """(weight decay, learning rate) of the heads of each readout."""
        return list(product(self.weight_decays, self.lrs))

    @property
    def augmentation(self) -> Augmentation:
        """Of the training images, where heads train on random crops."""
        return Augmentation(rule=self.crop_rule, interpolation=self.train_interpolation)

    @property
    def augment(self) -> bool:
        """Whether heads train on random crops."""
        return True

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        """Readout -> the features that a head reads side by side."""
        raise NotImplementedError

    @property
    def kinds(self) -> tuple[FeatureKind, ...]:
        """Everything that is read of images without augmentation, each once."""
        return tuple(dict.fromkeys(kind for kinds in self.kinds_by_readout.values() for kind in kinds))

    def widths(self, width: int) -> dict[str, int]:
        """Readout -> its width."""
        return {readout: width * len(kinds) for readout, kinds in self.kinds_by_readout.items()}

    @property
    def schedule(self) -> Schedule:
        """Of the learning rates."""
        raise NotImplementedError

    def heads(self, width: int, classes: int, batch: int, space: Workspace, own: range | None = None) -> Any:
        """All heads of the grid, Heads or AttentiveHeads. own: those of this process."""
        raise NotImplementedError

    def with_supported_readouts(self, spec: FrozenSpec) -> tuple[Self, dict[str, str]]:
        """These settings with readouts that the network supports, and protocol's readout -> the one that is read."""
        raise NotImplementedError

    def probe(self, export: FrozenExport, space: Workspace) -> "Probe":
        """The training on one export and image set."""
        return Probe.of(self, export, space)

    def completed(self, outcome: Outcome, probe: "Probe", sweep: Sweep) -> Outcome:
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
        trainings = sorted((asking[0][1] for asking in probes.values()), key=lambda probe: probe.task.shuffle_window)
        for _, together in groupby(trainings, lambda probe: probe.task.shuffle_window):  # of the same order
            for sweep in concurrent_sweeps(list(together)).run():
                for number, (place, probe) in enumerate(probes[sweep.folder]):
                    if sweep.error:
                        yield place, sweep.error
                    else:
                        yield place, tasks[place].completed(probe.outcome(sweep, spent=not number), probe, sweep)


def wanted_by(tasks: Sequence[SweepTask], export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
    """What these tasks, beside others of the run, read of images without augmentation; one pass extracts it for all."""
    kinds_of = dict(space.wanted)
    for task in tasks if len(tasks) > 1 else ():
        with suppress(ValueError):  # a task that does not suit the network fails on its own
            name, kinds = transform_of(export, space, task).name, task.with_supported_readouts(export.spec)[0].kinds
            kinds_of[name] = tuple(dict.fromkeys([*kinds_of.get(name, ()), *kinds]))
    return kinds_of


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A task on one export and image set: the features that it selects by and is reported on, its training, and its
    outcome."""

    task: SweepTask  # with readouts that the network has
    read: Mapping[str, str]  # readout asked for -> the one read
    export: FrozenExport
    space: Workspace
    train: ImageSet
    val: ImageSet
    held: np.ndarray  # (n,) images held out
    gallery: FeatureSet  # of the training images, with augmentation of those held out alone
    queries: FeatureSet  # of the validation images

    @classmethod
    def of(cls, task: SweepTask, export: FrozenExport, space: Workspace) -> Self:
        """Extract what is not on disk. ValueError for classes that cannot be held out, or have no training image."""
        supported, read = task.with_supported_readouts(export.spec)
        train, val = open_splits(space)
        if task.shuffle_window:
            train = with_shuffle_window(train, task.shuffle_window)
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
            **({"shards": shards_digest(self.train)} if self.task.shuffle_window else {}),
            **({"crops": "fast"} if self.space.decode == "fast" and self.task.augment else {}),
        }

    @cached_property
    def folder(self) -> Path:
        """Of the training's states. All processes ask for it together."""
        return self.space.world.on_rank0(
            lambda: cache_folder(self.space.cache / "linear", self.key, [self.train, self.val])
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
        task, readouts = self.task, self.task.kinds_by_readout
        heads = task.heads(self.export.spec.width, len(self.train.classes), self.plan.size, self.space, own)
        return Sweep(
            heads=heads,
            plan=self.plan,
            rows=self.rows,
            kinds=tuple(dict.fromkeys(kind for kinds in readouts.values() for kind in kinds)),
            readouts={name: kinds for name, kinds in readouts.items() if name in heads.readouts},
            step_heads=self.step_heads,
            count_hits=self.count_hits,
            epochs=task.epochs,
            folder=self.folder,
            augmentation=task.augmentation,
        )

    def step_heads(self, heads: Any, features: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> None:
        """A step of this process's heads on features (B, D) of every readout and labels (B,)."""
        heads.step(features, labels, self.task.schedule.at(1.0, progress))

    def count_hits(self, heads: Any) -> Tensor:
        """How many of the images that select a head each of this process's gets right (h,) int64."""
        if not heads.own:
            return torch.empty(0, dtype=torch.int64)
        features, rows = self.evaluated
        return sum(heads.hits(*block) for block in self.table(features, heads.readouts).blocks(rows))

    def stream(self) -> AugmentedStream:
        """Of the training images."""
        space = self.space
        backbone = Backbone(self.export, space.device, space.precision, space.compiled)
        window = self.task.shuffle_window
        return AugmentedStream(
            image_set=self.train, backbone=backbone, space=space, chunk=self.chunk, shuffle_window=window
        )

    @property
    def chunk(self) -> int:
        """Images of a forward pass."""
        return self.space.batch_size or forward_batch(self.space.device)

    def trained_on(self, sweep: Sweep) -> Mapping[str, Any]:
        """The facts of the training images; with augmentation, in the form of `FeatureSet.facts`."""
        if not self.task.augment:
            return self.gallery.facts
        # A policy's images, whose name follows, are always decoded exactly.
        transform = re.sub("exact$", self.space.decode, self.task.augmentation.name)
        facts = facts_of_pass(self.train, sweep.skipped, transform, self.space, self.chunk)
        if self.task.select == "holdout":
            facts["skipped"] |= self.gallery.facts["skipped"]
        return facts

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
        """Of the chosen heads on the validation images, in every process."""
        table = self.table(self.queries, sweep.heads.readouts)

        def of_head(head: Any) -> Hits:
            blocks = table.blocks(np.arange(len(table.labels)))
            return joined_hits([hits_of(head.logits(features)[:, 0], labels) for features, labels in blocks])

        return self.from_all(lambda: {name: of_head(head) for name, head in sweep.own_chosen().items()})

    def from_all(self, own: Callable[[], dict[str, Hits]]) -> dict[str, Hits]:
        """The hits of all chosen heads, in every process. own: those of this process's."""
        everywhere = {name: hits for part in self.space.world.gather_results(own) for name, hits in part.items()}
        return {name: everywhere[name] for name in ("top1", "top1_last")}

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
    return ConcurrentSweeps(sweeps=sweeps, train_epoch=epochs, label=f"{what} on {train.title}", world=world)
