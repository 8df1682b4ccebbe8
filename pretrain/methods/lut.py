"""LUT (Kim et al. 2024): masked image modelling, and visible patches predict the teacher's features of the whole image.

A broader-context loss in addition to MAE's; naver-ai/lut 4420a27, models/models_lut.py, engines/engine_lut.py. The
variant on SimMIM follows table A of the supplementary; it has no official code. The student sees different patches of
two views, the teacher sees both views whole.
B images, D width, U units of a mask (patches, or SimMIM's blocks), v visible ones.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from engine.settings import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, Views, decay_groups
from pretrain.methods import mae, simmim
from pretrain.parts.colours import Changes, Colours
from pretrain.parts.heads import Activation, Norm, mlp
from pretrain.parts.losses import byol_loss, direction_baseline
from pretrain.parts.masking import order_of
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, crop, fixed_crop, view
from pretrain.parts.weights import xavier_
from pretrain.recipe import SINCOS, VIT_L, VIT_M, VIT_S, on_32px, smoke
from pretrain.schedules import WarmupCosine, cosine

BASE_SETTINGS = {  # base -> settings that apply to it only
    "mae": ("norm_pixels", "decoder_width", "decoder_depth", "decoder_heads"),
    "simmim": ("mask_patch", "layer_scale_start", "drop_path", "seen"),
}
NORM_EPS = {"bn": 1e-5, "ln": 1e-6}  # models_lut.py:112-142


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """MAE or SimMIM with the broader-context loss. Settings of the unused base must keep their defaults."""

    base: Literal["mae", "simmim"] = "mae"  # the method of masked image modelling
    mask_ratio: UnitInterval = 0.75  # share of patches, or of SimMIM's blocks, that are hidden
    w_mim: NonNegativeFloat = 1.0  # weight of the base's loss (table B); 0: the context loss alone (table C)
    w_bc: NonNegativeFloat = 0.25  # alpha of Eq. 3, weight of the broader-context loss (table B)
    projector_depth: NonNegativeInt = 2  # linear layers of the projector; 0: no projector
    predictor_depth: NonNegativeInt = 2  # linear layers of the predictor; 0: no predictor
    head_hidden: PositiveInt = 4096  # hidden width of projector and predictor
    head_norm: Norm = "bn"  # norm of projector and predictor
    head_activation: Activation = "relu"  # activation of projector and predictor
    teacher_momentum: UnitInterval = 0.996  # EMA momentum of the teacher at the start; 1 at the end
    # simple: resize the short side to image_size, shift by up to crop_padding (the code); random: crop crop_scale of
    # the area (the paper's figure)
    crop: Literal["simple", "random"] = "simple"
    # pixels of mirrored border into which the simple crop may shift
    crop_padding: Annotated[NonNegativeInt, ReadIf("crop", "simple")] = 4
    # least and largest share of the image's area in the random crop
    crop_scale: Annotated[tuple[float, float], ReadIf("crop", "random")] = (0.2, 1.0)
    norm_pixels: bool = True  # normalise the target pixels patch by patch (MAE)
    decoder_width: PositiveInt = 512  # token width of the decoder (MAE)
    decoder_depth: PositiveInt = 8  # blocks of the decoder (MAE)
    decoder_heads: PositiveInt = 16  # attention heads of the decoder (MAE)
    mask_patch: PositiveInt = 32  # side of a block in pixels (SimMIM)
    layer_scale_start: PositiveFloat = 0.1  # initial value of layer scale (SimMIM)
    drop_path: BelowOne = 0.1  # drop path rate of the last block (SimMIM)
    # the student's context: the mean of the visible patches, or of all patches (SimMIM; all: ours)
    seen: simmim.Seen = "visible"

    def __post_init__(self) -> None:
        super().__post_init__()
        (unused_base,) = BASE_SETTINGS.keys() - {self.base}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in BASE_SETTINGS[unused_base] and value != field.default:
                raise ValueError(
                    f"{field.name}={value} is for base={unused_base!r}, not {self.base!r}: leave it at {field.default}"
                )
        if self.w_mim == self.w_bc == 0:
            raise ValueError("w_mim=0 with w_bc=0: nothing is left to learn")

    def base_settings(self) -> mae.Settings | simmim.Settings:
        """The settings of the base, which have the same names here."""
        kind = {"mae": mae.Settings, "simmim": simmim.Settings}[self.base]
        names = {"mask_ratio", "crop_scale", *BASE_SETTINGS[self.base]} & kind.__dataclass_fields__.keys()
        return kind(**{name: getattr(self, name) for name in names})


class Lut(Method):
    """Views: "view1", "view2" (B, 3, H, W), and "noise" (B, U) for the masks of both."""

    sync_batch_norm = True

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics = settings.head_norm == "bn"
        if settings.head_norm == "bn":
            self.min_batch, self.min_batch_setting = 2, "head_norm=bn"
        if settings.base == "mae":
            self.base = mae.MaskedAutoencoder(spec, settings.base_settings())
        else:
            self.base = simmim.MaskedPredictor(spec, settings.base_settings(), settings.seen)
        noise = self.base.mask_noise()
        units = noise.grid[0] * noise.grid[1]
        if 2 * self.base.visible > units:
            raise ValueError(
                f"mask_ratio={settings.mask_ratio} leaves {self.base.visible} of {units} patches or blocks visible, too"
                " many for two views that show different ones; use 0.5 or more"
            )
        if settings.crop_padding >= spec.side:
            raise ValueError(f"crop_padding={settings.crop_padding} must be less than image_size={spec.side}")
        self.projector = head(spec.width, settings.projector_depth, settings)
        self.predictor = head(spec.width, settings.predictor_depth, settings)
        self.teacher = frozen_copy(nn.ModuleDict({"vit": self.base.vit, "projector": self.projector})).eval()

    def train(self, mode: bool = True) -> "Lut":
        """Keep the teacher in eval mode: its batch norms use running statistics (model_ema_sched.py:133-199)."""
        super().train(mode)
        self.teacher.eval()
        return self

    def views(self) -> Views:
        size, settings = self.spec.side, self.settings
        if settings.crop == "simple":
            geometry = fixed_crop(size, size, settings.crop_padding)
        else:
            geometry = crop(size, settings.crop_scale)
        views_by_name = {
            "view1": view(geometry, self.preparation),
            "view2": view([*geometry, View2Colours(grey=0.0)], self.preparation),
        }
        return ImageViews(views_by_name, {"noise": self.base.mask_noise()})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = torch.cat([views["view1"], views["view2"]])  # (2B, 3, H, W)
        order1 = order_of(views["noise"])  # (B, U), the visible units of view 1 first
        order2 = order1.roll(-self.base.visible, dims=1)  # view 2 sees the next v units
        orders = torch.cat([order1, order2])
        latent = self.base.encode(images, orders)

        # Masked image modelling, on view 1 alone.
        view1 = slice(len(order1))
        mim_loss = self.base.loss(latent[view1], images[view1], order1)

        # Broader context: the visible patches of each view predict the teacher's features of the other, whole view.
        contexts = self.base.context(latent, orders).chunk(2)  # (B, D) of each view
        # Batch norms see one view after the other, as in the code.
        prediction1, prediction2 = (self.predictor(self.projector(context)) for context in contexts)
        target1, target2 = self.teacher_targets(images).chunk(2)
        context_loss = 0.5 * (byol_loss(prediction2, target1) + byol_loss(prediction1, target2))

        loss = self.settings.w_mim * mim_loss + self.settings.w_bc * context_loss  # Eq. 3
        return Step(loss, {"mim": mim_loss.detach(), "context": context_loss.detach()})

    @torch.no_grad()
    def teacher_targets(self, images: Tensor) -> Tensor:
        """Whole images (B, 3, H, W) -> the teacher's projections (B, D)."""
        patch_tokens = self.teacher["vit"](images)[0][:, self.spec.prefix :]
        return self.teacher["projector"](patch_tokens.mean(dim=1))

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses of predicting the same patch everywhere, and the mean direction of the teacher's projections."""
        baselines = {}
        if self.settings.w_mim:
            baselines["mim"] = self.base.baseline_loss(views["view1"])
        if self.settings.w_bc:
            losses = [direction_baseline(self.teacher_targets(views[name])) for name in ("view1", "view2")]
            baselines["context"] = torch.stack(losses).mean()
        return baselines

    def groups(self) -> list[Group]:
        return decay_groups(self.named_parameters(), [f"base.{name}" for name in self.base.undecayed])

    def after_update(self, progress: TrainProgress) -> None:
        """Update the teacher, statistics of batch norms included; the momentum's schedule counts forward passes
        (engine_lut.py:86-89)."""
        passes = progress.step * progress.micro_batches + progress.micro_batch
        momentum = cosine(self.settings.teacher_momentum, 1.0, passes / (progress.steps * progress.micro_batches))
        student = nn.ModuleDict({"vit": self.base.vit, "projector": self.projector})
        ema_update(self.teacher, student, momentum, buffers=True)

    def encoders(self) -> dict[str, Encoder]:
        return {"student": Encoder(vit=self.base.vit), "teacher": Encoder(vit=self.teacher["vit"])}


def head(width: int, depth: int, settings: Settings) -> nn.Sequential:
    """An MLP (B, D) -> (B, D) of `depth` linear layers without bias; no norm after the last (models_lut.py:112-142)."""
    widths = [width] + [settings.head_hidden] * (depth - 1) + [width] * (depth > 0)
    norm, activation = settings.head_norm, settings.head_activation
    return xavier_(mlp(widths, norm=norm, activation=activation, bias=False, norm_eps=NORM_EPS.get(norm, 0.0)))


@dataclass(frozen=True, kw_only=True)
class View2Colours(Colours):
    """Jitter, then always one of greyscale, solarisation and blur (main_lut.py:303-337)."""

    def draw(self) -> Changes:
        changes = super().draw()
        match random.choices(("grey", "solarise", "blur"))[0]:  # as torchvision's RandomChoice
            case "grey":
                return changes._replace(grey=True)
            case "solarise":
                torch.rand(1)  # the source draws for a probability of 1 here, and so for blur
                return changes._replace(solarise=True)
            case _:
                random.random()
                return changes._replace(radius=random.uniform(*self.blur_radius))


METHOD = Lut

_VIT_B = replace(
    mae.RECIPES["vit_b_1600"],
    source="naver-ai/lut 4420a27, docs/PRETRAIN.md, main_lut.py; w_bc: supplementary, table B (no default in the code)",
    settings=Settings(),
)
_SIMMIM = replace(
    simmim.RECIPES["vit_b_100"],
    source="LUT supplementary B.1, table A (100 epochs, w_bc 0.25); the rest is ours: SimMIM's code, its cosine for "
    "100 epochs of Swin, LUT's views and heads, masks of 32 px that show the views different blocks",
    settings=Settings(base="simmim", mask_ratio=0.6),
)
_SMALL = dict(head_hidden=512, teacher_momentum=0.99)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_400": replace(_VIT_B, epochs=400, source=f"{_VIT_B.source}; 400 epochs: table B"),
    "vit_b_100": replace(_VIT_B, epochs=100, source=f"{_VIT_B.source}; 100 epochs: table C"),
    # The code's rule, blr sqrt(batch) / 4 (main_lut.py:232-236): the same at a batch of 4096, higher below.
    "vit_b_root": replace(_VIT_B, lr_rule="root", lr_batch=16),
    "vit_s": replace(_VIT_B, spec=replace(VIT_S, **SINCOS)),
    "vit_m": replace(_VIT_B, spec=replace(VIT_M, **SINCOS)),
    "vit_l": replace(_VIT_B, spec=replace(VIT_L, **SINCOS)),
    "simmim_vit_b": _SIMMIM,
    "32px": on_32px(
        _VIT_B,
        Settings(decoder_width=96, decoder_depth=2, decoder_heads=3, **_SMALL),
        epochs=2,
    ),
    "smoke": smoke(_VIT_B, Settings(decoder_width=32, decoder_depth=2, decoder_heads=2, crop_padding=2, **_SMALL)),
    "smoke_simmim": smoke(
        _SIMMIM,
        Settings(base="simmim", mask_ratio=0.6, mask_patch=4, drop_path=0.0, crop_padding=2, **_SMALL),
        schedule=WarmupCosine(warmup=0.5),
    ),
}
