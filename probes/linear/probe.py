"""How does a probe get from an export and an image set to the accuracies of a sweep of heads?

`SweepTask` holds the settings. A `Probe` is such a task on one export and image set: it extracts the features of images
that select a head or are reported, trains the `Sweep`, and makes its outcome. `train_together` runs several probes side
by side.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.settings import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    ReadIf,
    TwoOrMore,
    check_less,
)
from engine.sweeps import edge_warnings
from engine.tasks import (
    ADDED,
    Emit,
    Features,
    Head,
    Outcome,
    Predicts,
    SelectOn,
    Shared,
    Task,
    Workspace,
    all_features,
    settings_of,
)
from engine.training.schedules import Schedule, TrainProgress
from imagesets.random_crops import CropRule
from imagesets.sets import ImageSet, training_folder
from imagesets.stored import shards_digest, with_shuffle_window
from probes.features.extract import (
    DecodedBatch,
    Extractor,
    FeatureSet,
    emit_logits,
    extract,
    facts_of_pass,
    forward_batch,
    transform_of,
)
from probes.features.fallbacks import record_fallback
from probes.features.kinds import FeatureKind
from probes.linear.batches import EpochPlan, Table
from probes.linear.stream import FeatureStream
from probes.linear.sweep import ConcurrentSweeps, Sweep, TrainEpoch, divide_heads
from probes.linear.train_transform import Augmentation
from probes.scores import (
    Hits,
    accuracy,
    concatenate_hits,
    cost,
    equal_features_warning,
    hits_of,
    nll_metric,
    prediction_arrays,
    with_class_means,
)
from probes.splits import check_labels, held_out, not_held_out_warning, open_splits

# Of a training's state on disk; raise it when the same settings would give a different training. 2: augmented images
# are in the order of all images, without those held out.
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class SweepTask(Task):
    """Base of probes that train a sweep of heads: one for every readout, learning rate and weight decay.

    The images that select a head are not trained on. Tasks that read one stream of augmented images train together.
    """

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    lrs: OneOrMoreDifferent[PositiveFloat] = (0.001,)  # learning rates for a batch of 256 images, scaled by batch / 256
    weight_decays: OneOrMoreDifferent[NonNegativeFloat] = (0.0,)  # weight decays of the heads
    norm: bool = True  # apply the network's final norm to features
    # whose random resized crop: torchvision's or MAE's
    crop_rule: Annotated[CropRule, ReadIf("augment")] = "torchvision"
    # for resizing random crops
    train_interpolation: Annotated[Literal["bilinear", "bicubic"], ReadIf("augment")] = "bilinear"
    batch: TwoOrMore = 1024  # images of a step; all training images if they are fewer
    epochs: PositiveInt = 100  # passes over the training images
    warmup_epochs: NonNegativeInt = 0  # epochs over which the learning rate rises from 0
    drop_last: bool = False  # leave out the images of an epoch that do not fill a batch
    # number of shards of `wds:` or `parquet:` that are read at a time and shuffled; 0: all images are shuffled
    shuffle_window: Annotated[NonNegativeInt, ReadIf("augment")] = field(default=0, metadata=ADDED)
    select: SelectOn = "holdout"  # images that select head and epoch: held-out training images, or validation images
    # fraction of the training images that is held out
    holdout: Annotated[ProperFraction, ReadIf("select", "holdout")] = 0.1
    crop: Fraction = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # for resizing images

    def __post_init__(self) -> None:
        super().__post_init__()
        check_less(self, "warmup_epochs", "epochs")

    def epoch_plan(self, images: int) -> tuple[EpochPlan, int]:
        """The plan of an epoch, and the number of held-out images, for a training set of `images`; for forecasts."""
        held_out_images = round(self.holdout * images) if self.select == "holdout" else 0
        plan = EpochPlan(images=images - held_out_images, requested_batch=self.batch, drop_last=self.drop_last, seed=0)
        return plan, held_out_images

    @property
    def decays_and_lrs(self) -> list[tuple[float, float]]:
        """(weight decay, learning rate for 256 images) of each head of a readout."""
        return list(product(self.weight_decays, self.lrs))

    @property
    def augmentation(self) -> Augmentation:
        """Augmentation of the training images, if heads train on random crops."""
        return Augmentation(rule=self.crop_rule, interpolation=self.train_interpolation)

    @property
    def augment(self) -> bool:
        """Whether heads train on random crops."""
        return True

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        """Readout -> the feature kinds that a head reads side by side."""
        raise NotImplementedError

    @property
    def kinds(self) -> tuple[FeatureKind, ...]:
        """The feature kinds that are read of images without augmentation."""
        return tuple(dict.fromkeys(kind for kinds in self.kinds_by_readout.values() for kind in kinds))

    def widths(self, width: int) -> dict[str, int]:
        """Readout -> number of features that a head reads. width: D of the network."""
        return {readout: width * len(kinds) for readout, kinds in self.kinds_by_readout.items()}

    @property
    def schedule(self) -> Schedule:
        """Schedule of the learning rates."""
        raise NotImplementedError

    def heads(self, width: int, classes: int, batch: int, space: Workspace, own: range | None = None) -> Any:
        """Heads or AttentiveHeads of the whole grid.

        width: D of the network. batch: images of a step. own: heads that this process trains; all if None.
        """
        raise NotImplementedError

    def with_supported_readouts(self, spec: FrozenSpec) -> tuple[Self, dict[str, str]]:
        """These settings with readouts that the network supports, and requested readout -> the one used for it."""
        raise NotImplementedError

    @property
    def predicts(self) -> Predicts:
        return "classes"

    def with_one_head(self, readout: str) -> Self:
        """The settings of a sweep of one head, which reads `readout`."""
        raise NotImplementedError

    def head_inputs(self, vectors: Tensor) -> Tensor:
        """The vectors (B, V, D) of a readout's kinds as a head reads them."""
        return vectors.flatten(1)

    def apply_head(
        self, head: Head, export: FrozenExport, images: ImageSet, space: Workspace, emit: Emit, first: int = 0
    ) -> None:
        readout, width = head.facts["readout"], export.spec.width
        task = self.with_one_head(readout)
        kinds, heads = task.kinds_by_readout[readout], task.heads(width, len(head.classes), 1, space)
        for name, tensor in heads.weights.items():
            tensor.copy_(head.tensors[name])
        backbone = Backbone(export, space.device, space.precision, space.compiled)
        extractor = Extractor(backbone=backbone, kinds=tuple(dict.fromkeys(kinds)), image_set=images)

        def logits_of(batch: DecodedBatch, span: range) -> Tensor:
            rows = extractor(batch, span)
            vectors = np.concatenate([rows[kind].reshape(len(span), -1, width) for kind in kinds], axis=1)
            return heads.logits({readout: self.head_inputs(torch.from_numpy(vectors).to(space.device))})[:, 0]

        emit_logits(logits_of, images, transform_of(export, space, self), space, emit, first)

    def probe(self, export: FrozenExport, space: Workspace) -> "Probe":
        """The task on one export and image set."""
        return Probe.of(self, export, space)

    def with_further_evaluations(self, outcome: Outcome, probe: "Probe", sweep: Sweep) -> Outcome:
        """Hook for subclasses: the outcome with further evaluations, after the training."""
        return outcome

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        return Shared(together=train_together, stream=self.augmentation.name)

    def selecting(self, select: SelectOn) -> Self:
        return replace(self, select=select)

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        ((_, outcome),) = train_together([self], export, space)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


FEW_STEPS = 100  # of an optimiser, with which a head is far from its optimum (ours)


def train_together(
    tasks: Sequence[SweepTask], export: FrozenExport, space: Workspace
) -> Iterator[tuple[int, Outcome | Exception]]:
    """Train the heads of all tasks on one stream of augmented images; or those of a single task, on any features.

    Yields the index of each task with its outcome or error, as soon as its training ends.
    """
    if len(tasks) > 1:  # extract in one pass what these tasks, and others of the run, read without augmentation
        space = replace(space, wanted=all_features([space.wanted, *_plain_features(tasks, export, space)]))
    probes: dict[Path, list[tuple[int, Probe]]] = {}  # folder of a training -> the tasks that need it
    for number, task in enumerate(tasks):
        try:
            probe = task.probe(export, space)
        except Exception as error:  # of this task alone
            yield number, error
        else:
            probes.setdefault(probe.folder, []).append((number, probe))
    # Each training once, together with those that shuffle images in the same way.
    trainings = sorted((same[0][1] for same in probes.values()), key=lambda probe: probe.task.shuffle_window)
    for _, side_by_side in groupby(trainings, lambda probe: probe.task.shuffle_window):
        for sweep in concurrent_sweeps(list(side_by_side)).run():
            for count, (number, probe) in enumerate(probes[sweep.folder]):
                if sweep.error:
                    yield number, sweep.error
                else:
                    outcome = probe.outcome(sweep, bears_cost=count == 0)
                    yield number, tasks[number].with_further_evaluations(outcome, probe, sweep)


def _plain_features(tasks: Sequence[SweepTask], export: FrozenExport, space: Workspace) -> Iterator[Features]:
    """The features of images without augmentation that each task reads."""
    for task in tasks:
        with suppress(ValueError):  # a task that cannot evaluate the network fails on its own
            kinds = task.with_supported_readouts(export.spec)[0].kinds
            yield {transform_of(export, space, task).name: kinds}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A task on one export and image set."""

    task: SweepTask  # with readouts that the network supports
    used_readouts: Mapping[str, str]  # requested readout -> the one used for it
    export: FrozenExport
    space: Workspace
    train: ImageSet
    val: ImageSet
    held_out_indices: np.ndarray  # (n,) training images that select head and epoch; empty if validation images do
    # Features without augmentation. Of the training images; if heads train on random crops, of the held-out images
    # alone, or, if there are none, of the validation images.
    train_features: FeatureSet
    val_features: FeatureSet

    @classmethod
    def of(cls, task: SweepTask, export: FrozenExport, space: Workspace) -> Self:
        """Extract the features that are not on disk. ValueError if no class can be held out, or if a class of the
        validation images has no training image."""
        supported, used_readouts = task.with_supported_readouts(export.spec)
        train, val = open_splits(space)
        if task.shuffle_window:
            train = with_shuffle_window(train, task.shuffle_window)
        held_out_indices = np.empty(0, np.int64)
        if task.select == "holdout":
            held_out_indices = held_out(train, task.holdout, space.seed)
        transform = transform_of(export, space, supported)
        val_features = extract(export, val, supported.kinds, space, transform)
        images = train
        if task.augment:
            images = train.subset(held_out_indices, f"held-out-{task.holdout:g}-seed{space.seed}")
        train_features = extract(export, images, supported.kinds, space, transform) if len(images) else val_features
        check_labels(train.labels if task.augment else train_features.labels, val_features.labels, train)
        return cls(
            task=supported,
            used_readouts=used_readouts,
            export=export,
            space=space,
            train=train,
            val=val,
            held_out_indices=held_out_indices,
            train_features=train_features,
            val_features=val_features,
        )

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the bits of the training depend on."""
        return {
            "version": VERSION,
            "export": self.export.digest,
            "settings": settings_of(self.task),
            "train": self.train.fingerprint,
            "plain": self.train_features.facts,
            "val": self.val_features.facts,
            "skip_bad": self.space.skip_bad,
            "seed": self.space.seed,
            "device": torch.device(self.space.device).type,
            **({"shards": shards_digest(self.train)} if self.task.shuffle_window else {}),
            **({"crops": "fast"} if self.space.decode == "fast" and self.task.augment else {}),
        }

    @cached_property
    def folder(self) -> Path:
        """Folder of the training's states. All processes must read this property together."""
        return self.space.world.on_rank0(
            lambda: training_folder(self.space.cache / "linear", self.key, [self.train, self.val])
        )

    @cached_property
    def train_indices(self) -> np.ndarray:
        """(n,) images of the training set to train on; without augmentation, rows of `train_features`."""
        if self.task.augment:
            return np.setdiff1d(np.arange(len(self.train)), self.held_out_indices)
        return np.flatnonzero(~np.isin(self.train_features.indices, self.held_out_indices))

    @property
    def plan(self) -> EpochPlan:
        return EpochPlan(
            images=len(self.train_indices),
            requested_batch=self.task.batch,
            drop_last=self.task.drop_last,
            seed=self.space.seed,
        )

    @property
    def head_costs(self) -> list[int]:
        """Cost of a step of each head, relative to each other."""
        widths = self.task.widths(self.export.spec.width).values()
        return [width * len(self.train.classes) for width in widths for _ in self.task.decays_and_lrs]

    def table(self, features: FeatureSet, readouts: Collection[str]) -> Table:
        """The features that heads on these readouts read."""
        kinds_by_readout = {name: kinds for name, kinds in self.task.kinds_by_readout.items() if name in readouts}
        arrays = {kind: features.arrays[kind] for kinds in kinds_by_readout.values() for kind in kinds}
        return Table(arrays=arrays, labels=features.labels, readouts=kinds_by_readout, device=self.space.device)

    @cached_property
    def selection_features(self) -> tuple[FeatureSet, np.ndarray]:
        """The features that select head and epoch, and their rows (n,) in the set."""
        if self.task.select == "val":
            return self.val_features, np.arange(len(self.val_features))
        if self.task.augment:
            return self.train_features, np.arange(len(self.train_features))
        return self.train_features, np.flatnonzero(np.isin(self.train_features.indices, self.held_out_indices))

    def sweep(self, own: range) -> Sweep:
        """The training. own: heads that this process trains."""
        task, readouts = self.task, self.task.kinds_by_readout
        heads = task.heads(self.export.spec.width, len(self.train.classes), self.plan.batch, self.space, own)
        return Sweep(
            heads=heads,
            plan=self.plan,
            train_indices=self.train_indices,
            kinds=tuple(dict.fromkeys(kind for kinds in readouts.values() for kind in kinds)),
            readouts={name: kinds for name, kinds in readouts.items() if name in heads.readouts},
            step_heads=self.step_heads,
            count_hits=self.count_hits,
            epochs=task.epochs,
            folder=self.folder,
            augmentation=task.augmentation,
        )

    def step_heads(self, heads: Any, features: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> None:
        """A training step of this process's heads on features (B, D) of every readout and labels (B,)."""
        heads.step(features, labels, self.task.schedule.at(1.0, progress))

    def count_hits(self, heads: Any) -> Tensor:
        """For each head of this process, how many selection images it classifies correctly (h,) int64."""
        if not heads.own:
            return torch.empty(0, dtype=torch.int64)
        features, rows = self.selection_features
        return sum(heads.hits(*block) for block in self.table(features, heads.readouts).blocks(rows))

    def stream(self) -> FeatureStream:
        """The stream of augmented training images."""
        space = self.space
        return FeatureStream(
            image_set=self.train,
            backbone=Backbone(self.export, space.device, space.precision, space.compiled),
            space=space,
            chunk=self.chunk,
            shuffle_window=self.task.shuffle_window,
        )

    @property
    def chunk(self) -> int:
        """Images of a forward pass."""
        return self.space.batch_size or forward_batch(self.space.device)

    def train_facts(self, sweep: Sweep) -> Mapping[str, Any]:
        """Facts about the training images; with augmentation, in the form of `FeatureSet.facts`."""
        if not self.task.augment:
            return self.train_features.facts
        # With a policy the name does not end in "exact": those images are always decoded exactly.
        transform = re.sub("exact$", self.space.decode, self.task.augmentation.name)
        facts = facts_of_pass(self.train, sweep.skipped, transform, self.space, self.chunk)
        if self.task.select == "holdout":
            facts["skipped"] |= self.train_features.facts["skipped"]
        return facts

    def warnings(self) -> list[str]:
        """Reasons to doubt the numbers, one line each."""
        warnings, train, plan = [], self.train, self.plan
        if plan.batch < plan.requested_batch:
            warnings.append(
                f"batches of {plan.batch} images, which are all training images, instead of {plan.requested_batch}; "
                "learning rates are scaled to this batch"
            )
        if self.task.select == "holdout" and (warning := not_held_out_warning(train.labels, train.classes)):
            warnings.append(warning)
        absent = np.setdiff1d(np.arange(len(train.classes)), self.val_features.labels)
        if len(absent):
            first = train.classes[absent[0]]
            warnings.append(f"{len(absent)} of {len(train.classes)} classes have no validation image, {first} first")
        warnings += equal_features_warning(self.train_features, self.task.kinds)
        if (steps := plan.steps_per_epoch * self.task.epochs) < FEW_STEPS:
            warnings.append(
                f"{steps} optimiser steps are too few for a head trained from scratch: logreg@dinov2 fits one to its "
                "optimum"
            )
        return warnings

    def hits(self, sweep: Sweep) -> dict[str, Hits]:
        """Metric -> hits of its head on the validation images; in every process."""
        table = self.table(self.val_features, sweep.heads.readouts)

        def hits_of_head(head: Any) -> Hits:
            blocks = table.blocks(np.arange(len(table.labels)))
            return concatenate_hits([hits_of(head.logits(features)[:, 0], labels) for features, labels in blocks])

        return self.gather_hits(
            lambda: {metric: hits_of_head(head) for metric, head in sweep.own_reported_heads().items()}
        )

    def gather_hits(self, own_hits: Callable[[], dict[str, Hits]]) -> dict[str, Hits]:
        """Metric -> hits, of all processes, in every process. own_hits: computes those of this process's heads."""
        hits: dict[str, Hits] = {}
        for hits_of_rank in self.space.world.gather_results(own_hits):
            hits |= hits_of_rank
        return {metric: hits[metric] for metric in ("top1", "top1_last")}

    def cost(self, sweep: Sweep, bears_cost: bool) -> dict[str, float]:
        """What the run computed: "augmented_forwards" add up over results, "stream_forwards" were shared by several."""
        spent = cost(self.train_features, self.val_features)
        if self.task.augment:
            forwards = sweep.augmented_forwards if bears_cost else 0
            spent |= {"augmented_forwards": forwards, "stream_forwards": sweep.stream_forwards}
        return spent

    def outcome(self, sweep: Sweep, bears_cost: bool = True) -> Outcome:
        """Accuracies of a finished training on the validation images, with facts.

        bears_cost: whether the result includes the cost of the training; only one of several results of the same
        training does.
        """
        features, by_val = self.val_features, self.task.select == "val"
        hits, metrics = self.hits(sweep), {}
        for name, head_hits in hits.items():
            for metric, correct in ((name, head_hits.top1), (name.replace("top1", "top5"), head_hits.top5)):
                metrics[metric] = accuracy(correct, features.indices, len(self.val), chosen_on_val=by_val)
        record = sweep.record(len(self.selection_features[1]))
        chosen = {name: record["chosen"][name] for name in ("readout", "lr", "weight_decay")}
        edges = edge_warnings(record["grid"], chosen, "best", record["selection_images"])
        facts = {
            "train": self.train_facts(sweep),
            "val": features.facts,
            "selection": self.task.select,
            **record,
            "warnings": self.warnings() + sweep.warnings() + edges,
        }
        best, spent = hits["top1"], self.cost(sweep, bears_cost)
        metrics["nll"] = nll_metric(best.nll, features.indices, len(self.val), by_val)
        arrays = prediction_arrays(best.predicted, best.confidence, features.indices, len(self.val))
        metrics = with_class_means(metrics, self.val)
        head = self.kept_head(sweep) if self.space.keep_heads else None
        outcome = Outcome(metrics=metrics, arrays=arrays, facts=facts, cost=spent, head=head)
        return record_fallback(outcome, self.used_readouts, self.export.spec)

    def kept_head(self, sweep: Sweep) -> Head | None:
        """In rank 0, the head of the main metric; one process has trained it."""
        own = {} if sweep.best_copy is None else sweep.best_copy.weights
        by_rank = self.space.world.gather_on_rank0({name: tensor.cpu() for name, tensor in own.items()})
        readout, depth = sweep.heads.heads[sweep.best_index].readout, self.export.spec.depth
        layers = sorted({kind.layer % depth for kind in self.task.kinds_by_readout[readout]})
        facts = {"readout": readout, "layers": layers}
        return next((Head(tensors=own, classes=self.train.classes, facts=facts) for own in by_rank if own), None)


def concurrent_sweeps(probes: Sequence[Probe]) -> ConcurrentSweeps:
    """The trainings of probes: any number on one stream of augmented images, or a single one on cached features."""
    first = probes[0]
    world, train = first.space.world, first.train
    shares = divide_heads([probe.head_costs for probe in probes], world)
    sweeps = [probe.sweep(own) for probe, own in zip(probes, shares, strict=True)]
    train_epoch: TrainEpoch
    if first.task.augment:
        train_epoch = first.stream().run
    else:
        train_epoch = partial(train_on_cache, first, first.table(first.train_features, sweeps[0].heads.readouts))
    heads = "linear heads" if len(probes) == 1 else f"{len(probes)} linear probes"
    return ConcurrentSweeps(sweeps=sweeps, train_epoch=train_epoch, label=f"{heads} on {train.title}", world=world)


def train_on_cache(
    probe: Probe, table: Table, epoch: int, sweeps: Sequence[Sweep], between_batches: Callable[[], None]
) -> None:
    """Train the single sweep of a probe on the remaining batches of an epoch, whose features are in a table."""
    (sweep,) = sweeps
    for number, features, labels in table.batches(probe.train_indices, probe.plan, epoch, sweep.iteration):
        between_batches()
        sweep.step(number, features, labels)
