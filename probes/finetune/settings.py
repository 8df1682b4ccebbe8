"""Which settings does a fine-tuning have? With the peak learning rate and the schedule that they define."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, Literal

from checkpoints.export import Tables
from engine.settings import (
    BelowOne,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    ReadIf,
    UnitInterval,
    Validated,
    check_less,
)
from engine.tasks import ADDED
from engine.training.schedules import LayerSchedule, TableCosine, TimmCosine, WarmupCosine
from imagesets.augmentation import check_policy

Select = Literal["last", "holdout", "val"]
PooledNorm = Literal["fresh", "pretrained"]
LR_FACTORS = {  # lr_rule -> factor of the learning rate, for a batch
    "batch/256": lambda batch: batch / 256,
    "batch/512": lambda batch: batch / 512,
    "sqrt(batch)/8": lambda batch: sqrt(batch) / 8,
    "absolute": lambda batch: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Validated):
    """Settings of one training."""

    lr: PositiveFloat = 1e-3  # peak learning rate of the head, before the factor of lr_rule
    lr_rule: Literal["batch/256", "batch/512", "sqrt(batch)/8", "absolute"] = "batch/256"  # factor of lr; absolute: 1
    batch: PositiveInt = 1024  # images of an update, over all processes
    epochs: PositiveInt = 100  # passes over the training images
    warmup_epochs: NonNegativeFloat = 5.0  # epochs over which the learning rate rises
    schedule: Literal["mae", "beit", "simmim", "deit"] = "mae"  # code whose warm-up and half cosine are used
    floor: NonNegativeFloat = 1e-6  # learning rate at the end
    # learning rate at the start of the warm-up; for the schedules of simmim and deit
    start: Annotated[NonNegativeFloat, ReadIf("schedule", "simmim", "deit"), ReadIf("warmup_epochs")] = 0.0
    layer_decay: Fraction = 0.65  # factor of the learning rate for each block further from the head
    weight_decay: NonNegativeFloat = 0.05  # weight decay of matrices; biases and norms have none
    decay_tokens: bool = False  # weight decay of class token and position table, too
    drop_path: BelowOne = 0.1  # probability of dropping the last block; rises linearly from 0 for the first block
    clip: NonNegativeFloat = 0.0  # largest norm of the gradient; 0: no clipping
    average: BelowOne = 0.0  # decay of averaged weights (EMA), which are then evaluated; 0: none
    pool: Literal["avg", "cls"] = "avg"  # the head reads the mean of the patches after a new norm, or the class token
    head_std: NonNegativeFloat = 2e-5  # standard deviation of the head's initial weights
    head_scale: NonNegativeFloat = 1.0  # factor on these weights
    # Relative position tables: a shared one copied into every block or kept, or fresh ones for a network that has none.
    tables: Tables = "per_block"
    # Train the position table that is added to the patch tokens.
    train_positions: bool = field(default=True, metadata=ADDED)
    # Initial weights of the norm after the mean of the patches, with pool=avg.
    pooled_norm: Annotated[PooledNorm, ReadIf("pool", "avg")] = field(default="fresh", metadata=ADDED)
    projector: bool = False  # the head reads the first layer of the pretrained projector
    policy: str = "rand-m9-mstd0.5-inc1"  # timm's name of a RandAugment policy; empty: none
    crop_scale: Fraction = 0.08  # smallest fraction of the image's area in a random crop
    flip: UnitInterval = 0.5  # probability of a horizontal flip
    erase: UnitInterval = 0.25  # probability of random erasing
    mixup: NonNegativeFloat = 0.8  # alpha of mixup; 0: none. With cutmix, each is used with probability 1/2
    cutmix: NonNegativeFloat = 1.0  # alpha of CutMix; 0: none
    smoothing: BelowOne = 0.1  # label smoothing
    train_interpolation: Literal["bilinear", "bicubic"] = "bicubic"  # for resizing random crops
    mixed_together: PositiveInt = 128  # images that are mixed with each other; in the source, those of one GPU
    repeats: PositiveInt = 1  # how often an epoch repeats an image; it then has fewer different ones
    fraction: Fraction = 1.0  # share of the training images, class-balanced, drawn by the seed
    lists: str = ""  # folder with MSN's lists of images, instead of drawing; published: that of the images
    image_size: PositiveInt | None = None  # pixels; none: the export's own
    crop: Fraction = 0.875  # for evaluation, images are resized to image_size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"  # for resizing in evaluations
    select: Select = "last"  # epoch to report: the last, the best on held-out training images, or the best on val
    # fraction of the training images that is held out
    holdout: Annotated[ProperFraction, ReadIf("select", "holdout")] = 0.05
    judge_every: PositiveInt = 1  # epochs between evaluations
    size: str = ""  # network size of the recipe (S, B, ...); results of other sizes say so
    branch: str = ""  # branch of a checkpoint that the source fine-tunes; results of others say so

    def __post_init__(self) -> None:
        super().__post_init__()
        check_less(self, "warmup_epochs", "epochs")
        check_policy(self.policy)

    @property
    def peak(self) -> float:
        """Peak learning rate of the head."""
        return self.lr * LR_FACTORS[self.lr_rule](self.batch)

    def rates(self) -> LayerSchedule:
        """The schedule that `schedule` names."""
        if self.schedule == "mae":
            return WarmupCosine(warmup=self.warmup_epochs, floor=self.floor)
        if self.schedule == "beit":
            return TableCosine(warmup=self.warmup_epochs, floor=self.floor)
        interval: Literal["update", "epoch"] = "update" if self.schedule == "simmim" else "epoch"
        return TimmCosine(warmup=self.warmup_epochs, floor=self.floor, start=self.start, told=interval)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0
