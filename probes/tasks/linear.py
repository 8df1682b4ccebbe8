"""Linear classifiers on frozen features: by SGD as in DINO, iBOT, MOCA, DINOv2 and MSN, by LARS as in MAE and ExtreMA.

All heads of a sweep (learning rate x readout x weight decay) train together on the same batches. With `augment` the
frozen backbone runs once on every augmented batch, as in the papers; without it the heads train on one cached feature
of each image, which is a protocol of its own (`..._cached`).

Head and epoch are selected on held-out training images (`select` holdout) or, as in the papers, on the validation
images that are reported (`select` val).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import ViTSpec
from engine import checks
from engine.files import digest
from engine.tasks import Outcome, Protocol, SelectOn, Task, Workspace
from engine.training.schedules import Pace, PacedCosine
from imagesets.random_crops import CropRule
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.features.extract import BATCH, FeatureKind, FeatureSet, extract, transform_of
from probes.features.readouts import kinds_of
from probes.features.rows import are_equal
from probes.features.stand_ins import noted, readout_of
from probes.holdout import check_labels, held_out
from probes.linear.augmented import AugmentedBatches
from probes.linear.batches import CachedBatches, EpochPlan, Table
from probes.linear.heads import Entry, Head, Heads, HeadSettings, Optimizer
from probes.linear.recipes import PUBLISHED, VARIANTS
from probes.linear.sweep import LR_BATCH, Sweep, SweepConfig, ranked, trained_by_rank0
from probes.published import as_reported, protocols_of
from probes.scores import accuracy, cost
from probes.splits import open_splits

VERSION = 1  # of a training's state on disk; raise it when the same settings would train otherwise


@dataclass(frozen=True, kw_only=True)
class Linear(Task):
    """Settings of one evaluation: a head for every readout, learning rate and weight decay."""

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    lrs: tuple[float, ...] = (0.001,)  # learning rates for 256 images; times batch / 256
    # What heads read: clsN, the class tokens of the last N blocks; avg, the mean of the last patches; clsN+avg, both;
    # avg@N, the mean of the patches of the Nth block.
    readouts: tuple[str, ...] = ("cls1",)
    weight_decays: tuple[float, ...] = (0.0,)  # of the heads
    norm: bool = True  # read behind the network's final norm
    optimizer: Optimizer = "sgd"  # sgd with momentum, LARS, or MSN's own SGD
    momentum: float = 0.9  # of the optimizer
    entry: Entry = "plain"  # norm in front of a head: none, batch norm without parameters, or MSN's trained layer norm
    eps: float = 1e-5  # of that norm
    augment: bool = True  # train on random crops and mirror images; false: on one cached feature of each image
    crop_rule: CropRule = "torchvision"  # whose random crop it is
    train_interpolation: Literal["bilinear", "bicubic"] = "bilinear"  # of resizing the random crops
    batch: int = 1024  # images in a step; all training images where they are fewer
    epochs: int = 100  # passes over the training images
    warmup_epochs: int = 0  # over which the rate rises from 0
    pace: Pace = "epoch"  # how often the rate moves on along its half cosine
    drop_last: bool = False  # leave out the images of an epoch that do not fill a batch
    select: SelectOn = "holdout"  # images that select head and epoch: held-out ones, or validation's
    holdout: float = 0.1  # share of the training images that is held out for this
    crop: float = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # of that resizing

    def __post_init__(self) -> None:
        checks.annotations(self)
        checks.distinct(self, "lrs", "readouts", "weight_decays")
        checks.positive(self, "lrs", "eps")
        checks.amounts(self, "weight_decays")
        checks.below_one(self, "momentum")
        checks.counts(self, "batch", least=2)
        checks.counts(self, "epochs")
        checks.counts(self, "warmup_epochs", least=0)
        checks.below(self, "warmup_epochs", "epochs")
        checks.proper_shares(self, "holdout")
        checks.factors(self, "crop")
        if (self.entry == "layer_norm") != (self.optimizer == "msn"):
            raise ValueError(f"entry={self.entry}, optimizer={self.optimizer}: layer_norm and msn go together alone")
        for readout in self.readouts:
            kinds_of(readout, self.norm)

    @property
    def kinds(self) -> tuple[FeatureKind, ...]:
        """Everything that a head reads, each once."""
        return tuple(dict.fromkeys(kind for readout in self.readouts for kind in kinds_of(readout, self.norm)))

    def features(self, export: ViTExport, space: Workspace) -> dict[str, tuple[FeatureKind, ...]]:
        return {} if self.augment else {self.transform(export, space).name: self.suited(export.spec)[0].kinds}

    def selecting(self, select: SelectOn) -> "Linear":
        return replace(self, select=select)

    def suited(self, spec: ViTSpec) -> tuple["Linear", dict[str, str]]:
        """This task with readouts that the network has (probes/features/stand_ins.py), and the one for each readout."""
        read = {readout: readout_of(readout, spec) for readout in self.readouts}
        return replace(self, readouts=tuple(dict.fromkeys(read.values()))), read

    def sizes(self, spec: ViTSpec, images: Mapping[str, int]) -> dict[str, Any]:
        readouts = self.suited(spec)[0].readouts
        held = round(self.holdout * images["train"]) if self.select == "holdout" else 0
        plan = EpochPlan(rows=images["train"] - held, asked=self.batch, drop_last=self.drop_last, seed=0)
        trained = self.epochs * min(plan.rows, plan.count * plan.size) + held if self.augment else images["train"]
        heads = len(self.lrs) * len(readouts) * len(self.weight_decays)
        steps, passes = self.epochs * plan.count, trained + images["val"]
        found = {"image size": spec.image_size, "heads": heads, "epochs": self.epochs, "steps": steps}
        return found | {"batch": plan.size, "forward passes": passes}

    def transform(self, export: ViTExport, space: Workspace) -> EvalTransform:
        """How images are prepared for evaluation, and for training without augmentation."""
        return transform_of(export, space, self.crop, self.interpolation)

    def run(self, export: ViTExport, space: Workspace) -> Outcome:
        task, read = self.suited(export.spec)
        return noted(task.evaluate(export, space), read, export.spec)

    def evaluate(self, export: ViTExport, space: Workspace) -> Outcome:
        """`run` on features that the network has."""
        train, val = open_splits(space)
        held = held_out(train, self.holdout, space.seed) if self.select == "holdout" else np.empty(0, np.int64)
        transform = self.transform(export, space)
        queries = extract(export, val, self.kinds, space, transform)
        # With augmentation, plain features are needed for the held-out images alone.
        images = train.subset(held, f"held-out-{self.holdout:g}-seed{space.seed}") if self.augment else train
        gallery = extract(export, images, self.kinds, space, transform) if len(images) else queries
        check_labels(train.labels if self.augment else gallery.labels, queries.labels, train)
        found = trained_by_rank0(space.world, lambda: self.fit(export, train, held, gallery, queries, space))
        return self.outcome(found, gallery, queries, len(val))

    def fit(
        self, export: ViTExport, train: ImageSet, held: np.ndarray, gallery: FeatureSet, queries: FeatureSet,
        space: Workspace,
    ) -> "Found":  # fmt: skip
        """Train all heads, select, and evaluate the selected ones on the validation images."""
        asked = self.table(queries, space)
        if self.select == "val":
            table, evaluated = asked, np.arange(len(queries))
        else:
            table, evaluated = self.table(gallery, space), np.arange(len(gallery))
            evaluated = evaluated if self.augment else np.flatnonzero(np.isin(gallery.indices, held))
        batches = self.augmented(export, train, held, space) if self.augment else self.cached(gallery, held, space)
        key = self.key(export, train, gallery, queries, space)
        sweep = Sweep(
            heads=self.heads(export.spec.width, len(train.classes), batches.plan.size, space),
            batches=batches,
            count_hits=lambda heads: sum(heads.hits(*block) for block in table.blocks(evaluated)),
            config=SweepConfig(
                epochs=self.epochs,
                schedule=PacedCosine(warmup=self.warmup_epochs, pace=self.pace),
                folder=space.cache / "linear" / digest(key)[:32],
            ),
        )
        sweep.run(f"linear heads on {train.url} {train.split}")
        last = sweep.heads.alone(sweep.last_place)
        facts = {
            "train": self.trained_on(train, batches, gallery, space) if self.augment else gallery.facts,
            "val": queries.facts,
            "selection": self.select,
            **sweep.record(len(evaluated)),
            "warnings": self.warnings(gallery, queries, train, batches.plan),
        }
        return Found(
            chosen={"top1": ranked(sweep.best, asked), "top1_last": ranked(last, asked)},
            facts=facts,
            forwards=batches.forwards,
        )

    def cached(self, gallery: FeatureSet, held: np.ndarray, space: Workspace) -> CachedBatches:
        """Batches of features on disk, without the images held out."""
        rows = np.flatnonzero(~np.isin(gallery.indices, held))
        return CachedBatches(table=self.table(gallery, space), rows=rows, plan=self.plan(len(rows), space))

    def augmented(self, export: ViTExport, train: ImageSet, held: np.ndarray, space: Workspace) -> AugmentedBatches:
        """Batches of augmented images, without those held out."""
        rows = np.setdiff1d(np.arange(len(train)), held)
        return AugmentedBatches(
            image_set=train,
            rows=rows,
            backbone=Backbone(export, space.device, space.precision, space.compiled),
            readouts=self.kinds_by_readout,
            plan=self.plan(len(rows), space),
            interpolation=self.train_interpolation,
            rule=self.crop_rule,
            chunk=space.batch_size or BATCH[torch.device(space.device).type],
            skip_bad=space.skip_bad,
            workers=space.workers,
        )

    def plan(self, rows: int, space: Workspace) -> EpochPlan:
        return EpochPlan(rows=rows, asked=self.batch, drop_last=self.drop_last, seed=space.seed)

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        return {readout: kinds_of(readout, self.norm) for readout in self.readouts}

    def table(self, features: FeatureSet, space: Workspace) -> Table:
        return Table(
            arrays=features.arrays, labels=features.labels, readouts=self.kinds_by_readout, device=space.device
        )

    def heads(self, width: int, classes: int, batch: int, space: Workspace) -> Heads:
        """All heads of the grid, readout by readout, then weight decay by weight decay."""
        grid = [
            Head(readout=readout, lr=lr * batch / LR_BATCH, weight_decay=weight_decay)
            for readout in self.readouts
            for weight_decay in self.weight_decays
            for lr in self.lrs
        ]
        widths = {readout: width * len(kinds) for readout, kinds in self.kinds_by_readout.items()}
        recipe = HeadSettings(optimizer=self.optimizer, momentum=self.momentum, entry=self.entry, eps=self.eps)
        return Heads(grid, widths, classes, recipe, batch=batch, seed=space.seed, device=space.device)

    def key(
        self, export: ViTExport, train: ImageSet, gallery: FeatureSet, queries: FeatureSet, space: Workspace
    ) -> dict[str, Any]:
        """Everything that the bits of a training depend on."""
        return {
            "version": VERSION,
            "export": export.digest,
            "settings": asdict(self),
            "train": train.fingerprint,
            "plain": gallery.facts,
            "val": queries.facts,
            "skip_bad": space.skip_bad,
            "seed": space.seed,
            "device": torch.device(space.device).type,
        }

    def trained_on(
        self, train: ImageSet, batches: AugmentedBatches, held: FeatureSet, space: Workspace
    ) -> dict[str, Any]:
        """The same facts as `FeatureSet.facts`, for augmented images. held: features of the held-out images."""
        skipped = {train.path(index): batches.skipped[index] for index in sorted(batches.skipped)}
        skipped |= held.facts["skipped"] if self.select == "holdout" else {}
        return {
            "url": train.url,
            "split": train.split,
            "fingerprint": train.fingerprint,
            "images": len(train),
            "skipped": skipped,
            "transform": f"{self.crop_rule}-crop-{self.train_interpolation}-flip_exact",
            "precision": space.precision,
            "batch_size": batches.chunk,
        }

    def warnings(self, gallery: FeatureSet, queries: FeatureSet, train: ImageSet, plan: EpochPlan) -> list[str]:
        """Why to doubt the numbers, a line each."""
        found = []
        if plan.size < plan.asked:
            found.append(
                f"batches of {plan.size}, all there is to train on, and not of {plan.asked}; rates are scaled by it"
            )
        absent = np.setdiff1d(np.arange(len(train.classes)), queries.labels)
        if len(absent):
            first = train.classes[absent[0]]
            found.append(f"{len(absent)} of {len(train.classes)} classes have no validation image, {first} first")
        if constant := [kind.name for kind in self.kinds if are_equal(gallery[kind])]:
            found.append(f"the features {', '.join(constant)} are the same for all images: nothing can be learnt")
        return found

    def outcome(self, found: "Found", gallery: FeatureSet, queries: FeatureSet, images: int) -> Outcome:
        """Accuracies on `images` validation images, and what they rest on."""
        metrics, by_val = {}, self.select == "val"
        for name, hits in found.chosen.items():
            for metric, right in ((name, hits[0]), (name.replace("top1", "top5"), hits[1])):
                metrics[metric] = accuracy(right, queries.indices, images, chosen_on_val=by_val)
        spent = cost(gallery, queries) | ({"augmented_forwards": found.forwards} if self.augment else {})
        return Outcome(metrics=metrics, facts=found.facts, cost=spent)


class Found(NamedTuple):
    """A finished training. chosen: name of an accuracy -> the chosen head's hits among the first guess and the first
    five (V,) bool. facts: JSON values. forwards: augmented images that this very run put through the backbone."""

    chosen: dict[str, tuple[np.ndarray, np.ndarray]]
    facts: dict[str, Any]
    forwards: int


PAPERS = protocols_of(Linear, PUBLISHED)
OTHERS = protocols_of(Linear, VARIANTS)
CACHED = {
    f"{name}_cached": Protocol(
        task=replace(paper.task, augment=False),
        version=paper.version,
        source=f"ours: {name} on un-augmented features, one an image; not to be compared with published numbers",
    )
    for name, paper in PAPERS.items()
}

PROTOCOLS = PAPERS | CACHED | OTHERS
PROTOCOLS |= as_reported({name: each for name, each in (PAPERS | OTHERS).items() if each.task.select != "val"})
# Table 12's one rate is the paper's, iBOT's sweep the code's.
PROTOCOLS |= as_reported({"linear_sgd@moca": PAPERS["linear_sgd@moca"]}, lrs=(0.04,))

SUITES = {
    "smoke": ("linear_sgd@ibot_base_cached",),
    "frozen": ("linear_sgd@ibot_base_cached",),
    "full": ("linear_sgd@ibot_base",),  # a sweep: one rate rarely suits a checkpoint of another source
    "everything": tuple(PAPERS | CACHED),
    "paper:extrema": ("linear_lars@extrema_paper",),
    "paper:lut": ("linear_lars@lut_paper",),
    "paper:moca": ("linear_sgd@moca_paper",),
    "paper:mst": ("linear@dino_paper", "linear_sgd@mst_paper"),
}
