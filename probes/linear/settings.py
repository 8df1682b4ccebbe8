"""Settings of sweeps of heads, those of linear probes, and what follows from them alone."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Self

from checkpoints.frozen import FrozenSpec
from engine.settings import (
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    TwoOrMore,
    Validated,
    check_less,
)
from engine.tasks import SelectOn, Workspace
from engine.training.schedules import Pace, PacedCosine, Schedule
from imagesets.random_crops import CropRule
from probes.features.fallbacks import supported_readout
from probes.features.kinds import FeatureKind, kinds_of
from probes.linear.augmented import Augmentation
from probes.linear.batches import EpochPlan
from probes.linear.heads import LR_BATCH, Entry, Head, Heads, HeadSettings, Optimizer


@dataclass(frozen=True, kw_only=True)
class SweepSettings(Validated):
    """What sweeps of linear and of attentive heads have in common: a head for every readout, learning rate and weight
    decay, trained on all but the images that select one of them."""

    lrs: OneOrMoreDifferent[PositiveFloat] = (0.001,)  # learning rates for 256 images; times batch / 256
    weight_decays: OneOrMoreDifferent[NonNegativeFloat] = (0.0,)  # of the heads
    norm: bool = True  # read behind the network's final norm
    crop_rule: CropRule = "torchvision"  # whose random crop it is
    train_interpolation: Literal["bilinear", "bicubic"] = "bilinear"  # of resizing the random crops
    batch: TwoOrMore = 1024  # images in a step; all training images where they are fewer
    epochs: PositiveInt = 100  # passes over the training images
    warmup_epochs: NonNegativeInt = 0  # over which the rate rises from 0
    drop_last: bool = False  # leave out the images of an epoch that do not fill a batch
    select: SelectOn = "holdout"  # images that select head and epoch: held-out ones, or validation's
    holdout: ProperFraction = 0.1  # share of the training images that is held out for this
    crop: Fraction = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # of that resizing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_less(self, "warmup_epochs", "epochs")

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


@dataclass(frozen=True, kw_only=True)
class LinearSettings(SweepSettings):
    """Settings of a sweep of linear heads."""

    # What heads read: clsN, the class tokens of the last N blocks; avg, the mean of the last patches; clsN+avg, both;
    # avg@N, the mean of the patches of the Nth block, and cls+avg@N, its class token and mean.
    readouts: OneOrMoreDifferent[str] = ("cls1",)
    optimizer: Optimizer = "sgd"  # sgd with momentum, LARS, MSN's own SGD, or AdamW
    momentum: BelowOne = 0.9  # of the optimizer
    entry: Entry = "plain"  # norm in front of a head: none, batch norm without parameters, or MSN's trained layer norm
    eps: PositiveFloat = 1e-5  # of that norm
    augment: bool = True  # train on random crops and mirror images; false: on one cached feature of each image
    pace: Pace = "epoch"  # how often the rate moves on along its half cosine

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.entry == "layer_norm") != (self.optimizer == "msn"):
            raise ValueError(f"entry={self.entry}, optimizer={self.optimizer}: layer_norm and msn go together alone")
        for readout in self.readouts:
            kinds_of(readout, self.norm)

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        return {readout: kinds_of(readout, self.norm) for readout in self.readouts}

    @property
    def schedule(self) -> Schedule:
        return PacedCosine(warmup=self.warmup_epochs, pace=self.pace)

    def heads(self, width: int, classes: int, batch: int, space: Workspace, own: range | None = None) -> Heads:
        """All heads of the grid, readout by readout, then weight decay by weight decay; own: those of this process."""
        grid = [
            Head(readout=readout, lr=lr * batch / LR_BATCH, weight_decay=weight_decay)
            for readout in self.readouts
            for weight_decay, lr in self.rates
        ]
        recipe = HeadSettings(optimizer=self.optimizer, momentum=self.momentum, entry=self.entry, eps=self.eps)
        return Heads(
            grid, self.widths(width), classes, recipe, batch=batch, seed=space.seed, device=space.device, own=own
        )

    def with_supported_readouts(self, spec: FrozenSpec) -> tuple[Self, dict[str, str]]:
        read = {readout: supported_readout(readout, spec) for readout in self.readouts}
        return replace(self, readouts=tuple(dict.fromkeys(read.values()))), read
