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
from probes.features.stand_ins import noted, readout_of
from probes.holdout import check_labels, held_out
from probes.linear.augmented import AugmentedBatches
from probes.linear.batches import CachedBatches, EpochPlan, Table
from probes.linear.heads import Entry, Head, Heads, HeadSettings, Optimizer
from probes.linear.sweep import LR_BATCH, Sweep, SweepConfig, ranked, trained_by_rank0
from probes.scores import accuracy, cost
from probes.splits import open_splits

VERSION = 1  # of a training's state on disk; raise it when the same settings would train otherwise


@dataclass(frozen=True, kw_only=True)
class Linear(Task):
    """Settings of one evaluation: a head for every readout, learning rate and weight decay."""

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    lrs: tuple[float, ...] = (0.001,)  # learning rates for 256 images; times batch / 256
    # What heads read: clsN, the class tokens of the last N blocks; avg, the mean of the last patches; clsN+avg, both.
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
            backbone=Backbone(export, space.device, space.precision),
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
        if constant := [kind.name for kind in self.kinds if (gallery[kind] == gallery[kind][0]).all()]:
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


IBOT_LRS = tuple(float(f"{n}e{k}") for k in range(-4, 1) for n in range(1, 10))

LARS = Linear(
    lrs=(0.1,), optimizer="lars", entry="batch_norm", epochs=90, warmup_epochs=10, pace="iteration", batch=4096
)
EXTREMA = replace(LARS, norm=False, interpolation="bilinear")
IBOT = Linear(lrs=IBOT_LRS, readouts=("cls4",))

PAPERS = {
    "linear_lars@mae": Protocol(
        task=replace(LARS, batch=16384, eps=1e-6, drop_last=True, crop_rule="mae", train_interpolation="bicubic"),
        version=1,
        source="facebookresearch/mae main_linprobe.py:44-67, :132-141, :212-262, util/lars.py, FINETUNE.md (batch "
        "512 x 32); 90 epochs are its ViT-B's, L and H train 50",
    ),
    "linear_lars@extrema": Protocol(
        task=EXTREMA,
        version=1,
        source="ExtreMA table 14 (LARS, 0.1, batch 4096, 90 epochs); the released code has no LARS, so MAE's; head, "
        "feature, warm-up and transforms as in the code, see linear_sgd@extrema_code",
    ),
    "linear_sgd@extrema_code": Protocol(
        task=replace(EXTREMA, optimizer="sgd"),
        version=1,
        source="microsoft/ExtreMA main_lincls.py:176-247, :281-296, :522-530 and README: SGD, batch norm of eps 1e-5, "
        "class token before the final norm, bilinear; use the momentum encoder",
    ),
    "linear@dino": Protocol(
        task=replace(IBOT, lrs=(0.001,)),
        version=1,
        source="facebookresearch/dino eval_linear.py:65-129, :237-272, its setting for ViT-S: class tokens of the "
        "last 4 blocks; 0.001 is its default, to be tuned for each checkpoint",
    ),
    "linear@dino_base": Protocol(
        task=replace(IBOT, lrs=(0.001,), readouts=("cls1+avg",)),
        version=1,
        source="facebookresearch/dino eval_linear.py:256-260, its setting for ViT-B: class token and mean patch",
    ),
    "linear_sgd@ibot": Protocol(
        task=IBOT,
        version=1,
        source="bytedance/ibot evaluation/eval_linear_multi.py with run.sh:50-60, its setting for ViT-S: 45 rates at "
        "once, class tokens of the last 4 blocks",
    ),
    "linear_sgd@ibot_base": Protocol(
        task=replace(IBOT, readouts=("cls1+avg",)),
        version=1,
        source="bytedance/ibot evaluation/eval_linear_multi.py with run.sh:50-60, its setting for ViT-B and L: class "
        "token and mean patch",
    ),
    "linear_sgd@moca": Protocol(
        task=replace(IBOT, readouts=("cls1+avg",), drop_last=True),
        version=2,
        source="valeoai/MOCA eval_linear.py:88-120, :217-230, util/data_utils.py:111-138: iBOT's 45 rates; class "
        "token and mean patch, which its README gives for 79.5 (the paper states one rate, 0.04)",
    ),
    "linear_sgd@mst": Protocol(
        task=Linear(lrs=(0.00024,)),
        version=1,
        source="MST (NeurIPS 2021) appendix: 0.00024, batch 1024, 100 epochs, class token of the last block; that the "
        "rate is for 256 images, as in DINO's code, is ours",
    ),
    "linear@msn": Protocol(
        task=Linear(
            lrs=(0.2,), norm=False, optimizer="msn", entry="layer_norm", batch=8192, pace="iteration", drop_last=True
        ),
        version=2,
        source="facebookresearch/msn linear_eval.py:90-110, :251-266, :343-382, src/sgd.py, "
        "src/data_manager.py (drop_last) and configs/eval/lineval_msn_vits16.yaml: rate 6.4 at batch 256 x 32, which "
        "is 0.2 for 256; its validation images are augmented too, ours are not",
    ),
    "linear@dinov2": Protocol(
        task=Linear(
            lrs=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1),
            readouts=("cls1", "cls1+avg", "cls4", "cls4+avg"),
            epochs=10,
            pace="iteration",
            train_interpolation="bicubic",
        ),
        version=1,
        source="facebookresearch/dinov2 eval/linear.py:135-151, :235-256, :503-533: 13 rates, batch 128 x 8; its "
        "10 x 1250 iterations are 10 epochs of ImageNet, and so ours of any set",
    ),
}

CACHED = {
    f"{name}_cached": Protocol(
        task=replace(paper.task, augment=False),
        version=paper.version,
        source=f"ours: {name} on un-augmented features, one an image; not to be compared with published numbers",
    )
    for name, paper in PAPERS.items()
}

PROTOCOLS = PAPERS | CACHED

SUITES = {
    "smoke": ("linear_sgd@ibot_base_cached",),
    "frozen": ("linear_sgd@ibot_base_cached",),
    "full": tuple(PROTOCOLS),
}
