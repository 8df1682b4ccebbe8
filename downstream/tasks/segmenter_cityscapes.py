"""Cityscapes semantic segmentation by Segmenter: a linear layer on the frozen network, or a mask transformer.

MOCA's protocol: 100, 372 or all 2975 training images. For 100 and 372, there are three splits by French et al.; the
learning rate is searched on the first and used for the others, and mIoU on the 500 validation images is averaged over
the splits.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet
from downstream.dense_task import Lengths, Source
from downstream.layouts.cityscapes import SEEDS, few_image_split
from downstream.loop.training import Plan, optimizer_groups
from downstream.segmentation import Segmentation, segmentation_outcome
from engine.errors import option
from engine.settings import (
    BelowOne,
    Different,
    FactorRange,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    check_up_to,
)
from engine.sweeps import edge_warnings
from engine.tasks import Outcome, Protocol, Workspace, settings_of, smoke_protocol
from engine.training.schedules import Polynomial

if TYPE_CHECKING:
    from torch import nn

    from downstream.loop.running import TrainedModel

STD = 0.02  # standard deviation of Segmenter's initial weights


@dataclass(frozen=True, kw_only=True)
class Segmenter(Segmentation):
    """Settings of one evaluation: one training per learning rate on the first split, and one on each other split."""

    COST: ClassVar[float] = 800.0  # 216 epochs, each crop twelve times the pixels of 224 x 224; times the rates tried
    LAYOUT: ClassVar[str] = "cityscapes"
    KEY: ClassVar[str] = "segmenter_cityscapes"
    VIT_REASON: ClassVar[str] = "the mask transformer is trained with the blocks of a ViT"
    RESIZE_VAL: ClassVar[bool] = False
    SOURCE: ClassVar[Source] = Source(
        name="Cityscapes",
        classes=19,
        images=2975,
        settings=("images", "epochs", "batch", "scale", "ratios", "crop", "stride"),
    )

    decoder: Literal["linear", "mask"] = "linear"  # on the frozen network, or a transformer that is trained with it
    images: NonNegativeInt = 100  # training images of each split; 0: all, in one training
    splits: Annotated[Different[int], ReadIf("images")] = SEEDS[:3]  # seeds of the splits
    # Learning rates to try; of several, that of the best mIoU on the validation images, after the first split.
    lr: OneOrMoreDifferent[PositiveFloat] = (0.001, 0.003, 0.01, 0.03, 0.1)
    floor: NonNegativeFloat = 1e-5  # what the rate falls to, by (1 - step / steps)^0.9
    epochs: PositiveInt = 100  # passes over the training images
    batch: PositiveInt = 8  # images in a step
    layers: Annotated[PositiveInt, ReadIf("decoder", "mask")] = 1  # blocks of the mask transformer
    # side of training crops and evaluation windows in pixels, up to the next multiple of the patch
    crop: PositiveInt = 768
    stride: PositiveInt = 512  # pixels from one evaluation window to the next
    # longer and shorter side that training images are fitted into, in pixels
    scale: tuple[PositiveInt, PositiveInt] = (2048, 1024)
    ratios: FactorRange = (0.5, 2.0)  # range of the random factor on that
    # chance of the last block to be skipped; it rises linearly from 0 at the first
    drop_path: Annotated[BelowOne, ReadIf("decoder", "mask")] = 0.1
    judge_every: PositiveInt = 4  # epochs between evaluations
    report: Literal["best", "last"] = "best"  # evaluation to report: the best on the validation images, or the last
    # compute activations again in the backward pass, which takes less memory
    recompute: Annotated[bool, ReadIf("decoder", "mask")] = False
    size: str = ""  # of the network that the recipe is for (S, B, ...); a result of another one says so
    branch: str = ""  # of a checkpoint that the source evaluates; a result of another one says so

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images and not self.splits:
            raise ValueError(f"splits=() with images={self.images}: must be 1 or more different values")
        check_up_to(self, "floor", "lr")

    @property
    def frozen(self) -> bool:
        return self.decoder == "linear"

    @property
    def val_size(self) -> tuple[int, int]:
        """As training images, which are scaled to the size of Cityscapes' images, 2048 x 1024."""
        return self.scale

    def lengths(self, images: int) -> Lengths:
        self.check_count(images)
        count = self.images or images
        trainings = len(self.lr) + max(len(self.splits) - 1, 0) * bool(self.images)
        evaluations = trainings * -(-self.epochs // self.judge_every)
        return Lengths(trainings, self.epochs * -(-count // self.batch), self.epochs * count, evaluations)

    def check_count(self, images: int, where: str = "") -> None:
        """ValueError if a split needs more than these training images. where: beginning of the message."""
        if self.images > images:
            raise ValueError(
                f"{where}there are {images} training images, not {self.images}; "
                f"{option('settings', {f'{self.KEY}.images': images})}"
            )

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val, missing_classes = self.load_scenes(space)
        splits = self.training_sets(train)
        tried = {lr: self.run_training(self.plan_at(lr, export, splits[0], val, space.seed), space) for lr in self.lr}
        best = max(tried, key=lambda lr: tried[lr].metrics["mIoU"])
        others = [self.run_training(self.plan_at(best, export, split, val, space.seed), space) for split in splits[1:]]
        facts = self.facts(tried, best)
        edges = edge_warnings(facts["per_learning_rate"], {"lr": best}, "mIoU")
        facts["warnings"] = [*self.recipe_warnings(export, train, tried[best].batch), *edges]
        chosen_on_val = bool(facts["chosen_on"])
        return segmentation_outcome([tried[best], *others], splits, val, missing_classes, facts, chosen_on_val)

    def training_sets(self, train: SceneSet) -> list[SceneSet]:
        """The training scenes of each split, or all scenes."""
        if not self.images:
            return [train]
        count = len(train)
        self.check_count(count, f"{train.url}: ")
        return [train.subset(few_image_split(count, self.images, s), f"{self.images}-seed{s}") for s in self.splits]

    def facts(self, tried: dict[float, "TrainedModel"], best: float) -> dict[str, Any]:
        """The learning rates that were tried, the best of them, and what was chosen on validation images."""
        return {
            "learning_rate": best,
            "per_learning_rate": [{"lr": lr, "mIoU": trained.metrics["mIoU"]} for lr, trained in tried.items()],
            "chosen_on": [
                *(["learning rate: validation images, first split"] if len(tried) > 1 else []),
                *(["evaluation: validation images"] if self.report == "best" else []),
            ],
        }

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        return self.plan_at(self.lr[0], export, self.training_sets(train)[0], val, seed)

    def plan_at(self, lr: float, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The plan of one training at one learning rate."""
        steps = -(-len(train) // self.batch)  # of an epoch; Segmenter's loader keeps the last, smaller batch
        settings = {name: value for name, value in settings_of(self).items() if name not in ("lr", "splits", "images")}
        return Plan(
            task=self.KEY,
            export=export,
            settings=settings | {"rate": lr},
            train=train,
            val=val,
            batch=self.batch,
            max_micro_batch=self.MAX_MICRO_BATCH,
            schedule=Polynomial(power=0.9, floor=self.floor),
            epochs=self.epochs,
            steps_per_epoch=steps,
            judge_every=min(self.judge_every, self.epochs) * steps,
            best="mIoU" if self.report == "best" else "",
            build_data=lambda: self.build_data(train, val, export.spec),
            build_model=lambda synchronised: self.model(export, len(train.classes), synchronised, seed),
            build_optimizer=lambda model: self.optimiser(model, export, lr),
            label=f"{self.decoder} decoder, lr {lr:g}, on {train.url}",
        )

    def model(self, export: FrozenExport, classes: int, synchronised: bool, seed: int) -> "nn.Module":
        """Segmenter on the patches of the last block after the final norm. It has no batch norm."""
        from downstream.models.backbone import DenseBackbone, dense_network
        from downstream.models.segmentors import linear_head, mask_head, segmentor

        crop, width = self.side(export.spec), export.spec.width
        network = dense_network(export, crop, 0.0 if self.frozen else self.drop_path)
        backbone = DenseBackbone(network, (-1,), norm=True, frozen=self.frozen, recompute=self.recompute)
        heads = (
            linear_head(width, classes, maps=1, over_valid=True, std=STD)
            if self.frozen
            else mask_head(width, classes, self.layers)
        )
        return segmentor(backbone, heads, export, crop, self.stride, seed)

    def optimiser(self, model: "nn.Module", export: FrozenExport, lr: float) -> torch.optim.Optimizer:
        """SGD with Nesterov momentum, which timm calls "sgd", without weight decay."""
        groups = optimizer_groups(model, export.spec.depth, 1.0, lr, 0.0, decay_tokens=False)
        parameters = [parameter for group in groups for parameter in group["params"]]
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


FULL: dict[str, Any] = {"images": 0, "splits": (), "epochs": 216, "size": "B"}
LINEAR = Segmenter(size="B")
MASK = Segmenter(decoder="mask", lr=(0.001, 0.003, 0.01, 0.03), epochs=216, size="B")
SMOKE = Segmenter(
    images=24,
    splits=SEEDS[:2],
    lr=(0.1, 1.0),
    epochs=10,
    crop=48,
    stride=48,
    scale=(96, 64),
    ratios=(1.0, 1.5),
    judge_every=10,
    report="last",
)

SOURCE = (
    "MOCA appendix C.3 over rstrudel/segmenter segm/config.yml and segm/train.py; the best of the evaluations on val, "
    "every fourth epoch; ours: the grid of rates (MOCA tunes and does not say on which), batches that run over an "
    "epoch's end, the position table resized by the export's rule (Segmenter's is bilinear)"
)
SPLITS = ", which three of French et al.'s five splits (the first)"


def _protocol(task: Segmenter, source: str) -> Protocol:
    return Protocol(task=task, version=1, source=source)


def _few_shot(task: Segmenter, images: int) -> Protocol:
    return _protocol(replace(task, images=images), f"{SOURCE}{SPLITS}")


def _on_all(task: Segmenter) -> Protocol:
    return _protocol(replace(task, **FULL), SOURCE)


PROTOCOLS = {
    "segmenter_linear@smoke": smoke_protocol(SMOKE, "seconds on tiny-cityscapes:"),
    "segmenter_mask@smoke": _protocol(
        replace(SMOKE, decoder="mask", splits=SEEDS[:1], lr=(0.05,), epochs=30, judge_every=30, drop_path=0.0),
        "ours: seconds on tiny-cityscapes:, with the mask transformer",
    ),
    "segmenter_linear100@moca": _few_shot(LINEAR, 100),
    "segmenter_linear372@moca": _few_shot(LINEAR, 372),
    "segmenter_linear@moca": _on_all(LINEAR),
    "segmenter_mask100@moca": _few_shot(MASK, 100),
    "segmenter_mask372@moca": _few_shot(MASK, 372),
    "segmenter_mask@moca": _on_all(MASK),
}

SUITES = {
    "smoke": ("segmenter_linear@smoke", "segmenter_mask@smoke"),
    "full": ("segmenter_linear100@moca", "segmenter_mask100@moca"),
    "everything": ("segmenter_linear100@moca", "segmenter_linear372@moca", "segmenter_mask100@moca"),
    "paper:moca": tuple(name for name in PROTOCOLS if name.endswith("@moca")),
}
