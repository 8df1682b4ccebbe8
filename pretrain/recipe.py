"""Recipes: everything that determines a pretraining besides images, seed and machine; and the encoders they train.

Recipes are Python values, not files. `--set field=value` changes the recipe's own fields, the method's settings and the
encoder's spec alike, by the bare field name.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Annotated, Any, Literal, TypeVar

from checkpoints.spec import ViTSpec
from engine.settings import (
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    Validated,
    annotations,
    check_fields,
    unread,
    validate,
)
from pretrain.schedules import Constant, CosineTo, Multistep, Schedule, TableCosine, TrainProgress, WarmupCosine, cosine

Rule = Literal["linear", "root"]
# The choices of `--set schedule=NAME`; a recipe may use any other schedule.
_KINDS = (WarmupCosine, TableCosine, Multistep, CosineTo, Constant)
SCHEDULES = {"alternatives": {kind.__name__: kind for kind in _KINDS}}


@dataclass(frozen=True)
class Begins:
    """In the annotation of a method's setting in epochs: they must be fewer than those of the training."""

    otherwise: str  # what would never happen


@dataclass(frozen=True)
class Rises:
    """In the annotation of a method's setting in epochs: a training may end before they are over."""

    what: str  # does then not reach its final value


Mark = TypeVar("Mark", Begins, Rises)


@dataclass(frozen=True, kw_only=True)
class Recipe(Validated):
    """Encoder, method, schedule and optimiser of one training."""

    source: str  # paper or code that the numbers are from, and which of them are ours
    spec: ViTSpec  # the encoder
    settings: Any  # the method's own settings, a `Settings` of its file
    epochs: PositiveInt  # passes over the training images
    batch: PositiveInt  # images in an update, over all processes and micro-batches
    lr: PositiveFloat  # peak learning rate at `lr_batch` images in an update
    lr_batch: NonNegativeInt = 256  # images in an update that lr is for; 0: lr is the peak at any batch
    # how the peak scales with batch / lr_batch: linearly, or with its square root
    lr_rule: Annotated[Rule, ReadIf("lr_batch")] = "linear"
    schedule: Schedule = field(metadata=SCHEDULES)  # schedule of the learning rate
    layer_decay: Fraction = 1.0  # layer-wise learning rate decay: factor from each layer to the one before it
    weight_decay: NonNegativeFloat  # initial weight decay
    # schedule of the weight decay; constant unless the recipe sets it
    weight_decay_schedule: Schedule = field(default_factory=Constant, metadata=SCHEDULES)
    optimizer: Literal["adamw", "lars"] = "adamw"  # optimiser of all parameters
    betas: Annotated[tuple[BelowOne, BelowOne], ReadIf("optimizer", "adamw")] = (0.9, 0.999)  # betas of AdamW
    momentum: Annotated[BelowOne, ReadIf("optimizer", "lars")] = 0.9  # momentum of LARS
    clip: NonNegativeFloat = 0.0  # largest gradient norm; 0: no clipping
    clip_end: NonNegativeFloat = 0.0  # value of clip at the end, reached along half a cosine; 0: clip is constant
    # clip the gradient of each parameter by its own norm (DINO utils.py:132-141)
    clip_each: Annotated[bool, ReadIf("clip")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not dataclasses.is_dataclass(self.settings):
            raise ValueError(f"settings={self.settings!r}: must be an instance of the method's dataclass of settings")
        check_fields(type(self.settings))
        validate(self.settings)  # a plugin's settings may be any dataclass
        if self.spec.class_tokens > 1:
            raise ValueError(
                f"an encoder with {self.spec.class_tokens} class tokens cannot be trained, as methods read the first "
                "alone: choose a network with one"
            )
        if late := [f"{name}={value} with epochs={self.epochs}: {result}" for name, value, result in self._late()]:
            raise ValueError(f"{'; '.join(late)}; give values below epochs")
        if not self.weight_decay and (end := getattr(self.weight_decay_schedule, "end", 0.0)):
            raise ValueError(
                f"weight_decay={self.weight_decay} with weight_decay_schedule.end={end}: it would rise to {end}; for "
                "no weight decay, set weight_decay_schedule.end=0 as well"
            )

    def _late(self) -> Iterator[tuple[str, Any, str]]:
        """Name, value and consequence of each setting in epochs whose time never comes."""
        warmup = getattr(self.schedule, "warmup", 0)
        if warmup >= self.epochs:
            yield "schedule.warmup", warmup, "nothing is left after the warm-up"
        milestones = getattr(self.schedule, "milestones", ())
        if late := [milestone for milestone in milestones if milestone >= self.epochs]:
            yield "schedule.milestones", milestones, f"nothing is left after {late[0]:g}"
        for name, mark in marked(type(self.settings), dataclasses.asdict(self.settings), Begins).items():
            if (epochs := getattr(self.settings, name)) >= self.epochs:
                yield name, epochs, mark.otherwise

    def notes(self) -> Iterator[str]:
        """Lines for the user about settings that do not do what they do in the published recipes."""
        if (floor := getattr(self.schedule, "floor", 0.0)) > self.peak:
            yield (
                f"schedule.floor={floor} is above the peak learning rate, {self.peak:.3g} for batch={self.batch}, so "
                "the rate rises at the end; lower schedule.floor, or raise lr or batch"
            )
        for name, mark in marked(type(self.settings), dataclasses.asdict(self.settings), Rises).items():
            if (epochs := getattr(self.settings, name)) > self.epochs:
                yield (
                    f"{name}={epochs} is longer than the training of {self.epochs} epochs, in which {mark.what} does "
                    f"not reach its final value; for that, lower {name}"
                )

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        scale = self.batch / self.lr_batch if self.lr_batch else 1.0
        return self.lr * (sqrt(scale) if self.lr_rule == "root" else scale)

    def clip_at(self, progress: TrainProgress) -> float:
        """The largest norm of the gradient for the update at `progress`; 0: no clipping."""
        return cosine(self.clip, self.clip_end or self.clip, progress.step / progress.steps)

    def to_json(self) -> dict[str, Any]:
        """All values as JSON; a schedule becomes its fields and the name of its class."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("schedule", "weight_decay_schedule"):
            plain[name] = {"name": type(plain[name]).__name__, **dataclasses.asdict(plain[name])}
        plain |= {"spec": self.spec.to_json(), "settings": dataclasses.asdict(self.settings)}
        return plain

    def defaults(self) -> dict[str, Any]:
        """Plain defaults of the recipe's own fields and of the method's settings, structured as in `to_json`."""
        return {**_plain_defaults(self), "settings": _plain_defaults(self.settings)}


def marked(kind: type, values: Mapping[str, Any], mark: type[Mark]) -> dict[str, Mark]:
    """Name -> mark of the settings in epochs that are in use. kind: class of a method's settings; values: by name."""
    marks = {
        name: entry
        for name, hint in annotations(kind).items()
        for entry in getattr(hint, "__metadata__", ())
        if isinstance(entry, mark)
    }
    never_read = unread(kind, values)
    return {name: entry for name, entry in marks.items() if values[name] and name not in never_read}


def _plain_defaults(settings: Any) -> dict[str, Any]:
    """Name -> default of each field of a dataclass that has a plain default."""
    entries = dataclasses.fields(settings)
    return {entry.name: entry.default for entry in entries if entry.default is not dataclasses.MISSING}


# Encoders of the published recipes.
VIT_S = ViTSpec(
    architecture="vit_small_patch16_224", image_size=224, patch_size=16, width=384, depth=12, heads=6, mlp_hidden=1536
)
VIT_B = replace(VIT_S, architecture="vit_base_patch16_224", width=768, heads=12, mlp_hidden=3072)
VIT_M = replace(VIT_B, width=512, heads=8, mlp_hidden=2048)  # LUT's
VIT_L = replace(VIT_S, architecture="vit_large_patch16_224", width=1024, depth=24, heads=16, mlp_hidden=4096)
VIT_H = replace(
    VIT_L, architecture="vit_huge_patch14_224", patch_size=14, width=1280, depth=32, heads=16, mlp_hidden=5120
)
# 8 x 8 patches of CIFAR-10's images, and of enlarged digits: for two cores.
VIT_32PX = replace(VIT_S, image_size=32, patch_size=4, width=128, depth=4, heads=4, mlp_hidden=512)
# 4 x 4 patches of scikit-learn's digits: for tests and the demo.
VIT_SMOKE = replace(VIT_S, image_size=16, patch_size=4, width=64, depth=4, heads=4, mlp_hidden=256)
SINCOS = dict(position="sincos_column_first", position_resize="bicubic")
SINCOS_ROWS = SINCOS | dict(position="sincos_row_first")  # MoCo-v3's and CAE's
# SimMIM's, BEiT's and data2vec's trunk: positions by a shared relative bias alone, layer scale.
RELATIVE = dict(
    architecture="beit_base_patch16_224",
    layer_scale=True,
    position="none",
    class_position=False,
    relative_position="shared",
    position_resize="relative_spline",
    pool="avg",
)


def on_32px(
    published: Recipe,
    settings: Any,
    *,
    epochs: int,
    batch: int = 128,
    warmup: float = 0.5,
    source: str = "",
    **changes: Any,
) -> Recipe:
    """The recipe "32px" of a method, see `small`."""
    size = published.spec.label.partition("/")[0]
    source = source or f"ours: the {size} recipe on images of 32 px, for two cores"
    return small(published, VIT_32PX, warmup, source=source, settings=settings, epochs=epochs, batch=batch, **changes)


def smoke(published: Recipe, settings: Any, *, source: str = "ours: seconds on digits", **changes: Any) -> Recipe:
    """The recipe "smoke" of a method, see `small`."""
    return small(published, VIT_SMOKE, 0.5, source=source, settings=settings, epochs=2, batch=64, **changes)


def small(published: Recipe, sizes: ViTSpec, warmup: float, **changes: Any) -> Recipe:
    """A published recipe for a smaller encoder, at a learning rate of 1e-3 for any batch size.

    sizes: the spec whose image size, patch size, width, depth, heads and MLP it takes. warmup: in epochs, of the
    published schedule. changes: other fields of the recipe.
    """
    names = ["image_size", "patch_size", "width", "depth", "heads", "mlp_hidden"]
    names += ["architecture"] if published.spec.family == "vit" else []
    schedule: Any = published.schedule
    ours: dict[str, Any] = {
        "spec": replace(published.spec, **{name: getattr(sizes, name) for name in names}),
        "schedule": replace(schedule, warmup=warmup),
        "lr": 1e-3,
        "lr_batch": 0,
        "layer_decay": 1.0,
    }
    return replace(published, **ours | changes)
