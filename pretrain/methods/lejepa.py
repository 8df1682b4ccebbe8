"""LeJEPA (Balestriero and LeCun 2025): views of an image agree, and their projections are a standard Gaussian.

No teacher, no stop-gradient, no schedule but that of the learning rate. SIGReg compares the projections with the
Gaussian along random directions, by the statistic of Epps and Pulley (1983). Written from the paper. The defaults are
those of its scripts (README.md of rbalestr-lab/lejepa eddffdd); the recipe `imagenette` follows MINIMAL.md there, and
`imagenette_vit_s16` the first author's library (galilai-group/stable-pretraining d15ec96, methods/lejepa.py), whose
loss differs in three settings.
B images of this process, G global and N local crops, V = G + N views, D width, K projected width, S directions,
T points.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.distributed import current_world
from engine.precision import to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    TwoOrMore,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress
from pretrain.methods.dino import check_crops
from pretrain.parts.colours import BlurKernel, Colours
from pretrain.parts.heads import class_tokens, mlp, projector_tensors
from pretrain.parts.views import ImageViews, crop, multi_crop, view
from pretrain.recipe import VIT_B, VIT_L, VIT_S, Recipe, on_32px, smoke
from pretrain.schedules import WarmupCosine

Jitter = tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """`sigreg_weight` is the only weight in the loss. Its best value depends on the batch size, as the statistic grows
    with the number of images."""

    sigreg_weight: UnitInterval = 0.05  # lambda, weight of SIGReg
    convex: bool = True  # weight of the prediction loss: 1 - lambda (the paper); false: 1 (stable-pretraining)
    sigreg_over: Literal["view", "all"] = "view"  # one statistic for each view, or one for all views together
    # views whose mean projection all views predict
    centre: Annotated[Literal["global", "all"], ReadIf("local_crops")] = "global"
    directions: PositiveInt = 1024  # S, number of random directions, drawn anew for every update
    points: TwoOrMore = 17  # T, points of the quadrature on [0, t_max]
    t_max: PositiveFloat = 3.0  # upper end of the quadrature
    clip_value: NonNegativeFloat = 0.0  # statistics below this value count as 0
    embedding: PositiveInt = 512  # width of the linear layer between encoder and projector
    projector_hidden: tuple[PositiveInt, ...] = (2048, 2048)  # widths of the projector's hidden layers
    projector_width: PositiveInt = 512  # K, output width of the projector
    global_crops: PositiveInt = 2  # G, number of global crops of an image
    global_scale: AreaRange = (0.3, 1.0)  # least and largest share of the image's area in a global crop
    local_crops: NonNegativeInt = 6  # number of local crops of an image; 0: none
    # least and largest share of the image's area in a local crop
    local_scale: Annotated[AreaRange, ReadIf("local_crops")] = (0.05, 0.3)
    local_size: Annotated[PositiveInt, ReadIf("local_crops")] = 96  # side of a local crop in pixels
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"  # filter of the crops; bilinear in both codes
    jitter: Jitter = (0.4, 0.4, 0.2, 0.1)  # strength of the jitter of brightness, contrast, saturation and hue
    blur: UnitInterval = 0.5  # probability of Gaussian blur in a view
    # side of the kernel of torchvision's blur, in pixels; 0: Pillow's blur
    blur_kernel: Annotated[BlurKernel, ReadIf("blur")] = 0
    solarise: UnitInterval = 0.2  # probability of solarisation in a view
    drop_path: BelowOne = 0.1  # drop path rate of the encoder's last block

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_crops + self.local_crops < 2:
            raise ValueError(f"global_crops={self.global_crops}, local_crops={self.local_crops}: give 2 views or more")


class LeJepa(Method):
    """Views: "global" (B, G, 3, S, S) and, if there are local crops, "local" (B, N, 3, s, s)."""

    batch_statistics = True  # batch norms, and SIGReg
    min_batch, min_batch_setting = 2, "its batch norms: the method"
    remedy = ", or sigreg_weight higher if the features collapse"

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_crops(spec, settings.blur_kernel, local_size=settings.local_size if settings.local_crops else spec.side)
        self.vit = ViT(spec, settings.drop_path)
        widths = [settings.embedding, *settings.projector_hidden, settings.projector_width]
        embed = nn.Linear(spec.width, settings.embedding)
        self.projector = nn.Sequential(embed, mlp(widths, norm="bn", activation="relu"))
        self.directions = random_directions(settings.projector_width, settings.directions, seed=0)

    def views(self) -> ImageViews:
        s = self.settings
        colours = Colours(jitter=s.jitter, blur=s.blur, blur_kernel=s.blur_kernel, solarise=s.solarise)
        large = view([*crop(self.spec.side, s.global_scale, s.interpolation), colours], self.preparation)
        small = view([*crop(s.local_size, s.local_scale, s.interpolation), colours], self.preparation)
        return multi_crop((large,) * s.global_crops, (small,) * s.local_crops)

    def before_forward(self, progress: TrainProgress) -> None:
        """Draw new directions for every update, the same in all processes and micro-batches."""
        if progress.is_first_micro_batch:
            size = (self.settings.projector_width, self.settings.directions)
            self.directions = random_directions(*size, seed=progress.step)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, projections = self.settings, self.project(views)  # (V, B, K), the global crops first

        # Prediction: every view predicts the centre of the image's views.
        centre_views = projections[: s.global_crops] if s.centre == "global" else projections
        centre = centre_views.mean(dim=0)  # (B, K)
        prediction = (centre - projections).square().mean()

        # SIGReg: along every direction, the projections are standard Gaussian.
        samples = projections if s.sigreg_over == "view" else projections.flatten(0, 1)
        sigreg = self.epps_pulley(samples).mean()

        prediction_weight = 1 - s.sigreg_weight if s.convex else 1
        loss = prediction_weight * prediction + s.sigreg_weight * sigreg
        return Step(loss, {"prediction": prediction.detach(), "sigreg": sigreg.detach()})

    def project(self, views: Mapping[str, Tensor]) -> Tensor:
        """Crops of all sizes -> projections (V, B, K); the projector's batch norms see all crops together."""
        crops = [views[name] for name in ("global", "local") if name in views]
        tokens = torch.cat([class_tokens(self.vit, group) for group in crops], dim=1).transpose(0, 1)  # (V, B, D)
        projections = to_float32(self.projector(tokens.flatten(0, 1)))
        return projections.unflatten(0, tokens.shape[:2])

    def epps_pulley(self, projections: Tensor) -> Tensor:
        """Projections (..., B, K) -> Epps-Pulley statistics along all directions (..., S)."""
        with torch.autocast(projections.device.type, enabled=False):
            samples = projections @ self.directions.to(projections)  # (..., B, S)
            return epps_pulley(samples, self.settings.t_max, self.settings.points, self.settings.clip_value)

    def groups(self) -> list[Group]:
        """A single group: biases and norms are decayed too, in both codes."""
        return [Group(parameters=dict(self.named_parameters()))]

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss of an encoder whose projections are all zero, the constant with the lowest statistic."""
        s, crops = self.settings, sum(group.shape[1] for group in views.values())
        samples = len(views["global"]) * (crops if s.sigreg_over == "all" else 1)
        zeros = torch.zeros(samples, 1, device=views["global"].device)
        return {"loss": s.sigreg_weight * epps_pulley(zeros, s.t_max, s.points, s.clip_value).squeeze()}

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.vit, extra=projector_tensors(self.projector))}


def random_directions(width: int, count: int, seed: int) -> Tensor:
    """Random unit vectors, the columns of (K, S); drawn on the CPU, so that they are the same on any device."""
    directions = torch.randn(width, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return directions / directions.norm(dim=0)


def epps_pulley(samples: Tensor, t_max: float, points: int, clip_value: float = 0.0) -> Tensor:
    """Epps-Pulley statistics (..., S) of samples (..., B, S) along S directions, over the samples of all processes.

    For N samples x_n it is N times the integral over t from -t_max to t_max of
    exp(-t^2/2) |mean_n exp(i t x_n) - exp(-t^2/2)|^2, by the trapezoidal rule. The integrand is even, so only t >= 0 is
    computed and counts twice. Statistics below `clip_value` become 0.
    """
    t = torch.linspace(0, t_max, points, dtype=samples.dtype, device=samples.device)
    gaussian = (-t.square() / 2).exp()  # characteristic function of the standard Gaussian, and weight in the integral
    weights = torch.full_like(t, 2 * t_max / (points - 1))
    weights[[0, -1]] /= 2
    angles, world = samples.unsqueeze(-1) * t, current_world()  # (..., B, S, T)
    # Real and imaginary part of the samples' characteristic function, mean_n exp(i t x_n): (2, ..., S, T).
    means = torch.stack([angles.cos().mean(dim=-3), angles.sin().mean(dim=-3)])
    if world.size > 1:
        means = all_reduce(means / world.size)
    errors = (means[0] - gaussian).square() + means[1].square()
    statistics = samples.shape[-2] * world.size * (errors @ (weights * gaussian))
    return torch.where(statistics < clip_value, 0.0, statistics)


METHOD = LeJepa

_TABLES = dict(position_resize="bicubic_antialias")  # timm's dynamic_img_size
_CROPS = dict(interpolation="bilinear", blur_kernel=23)  # stable-pretraining's
_VIT_L = Recipe(
    source="LeJEPA README.md and scripts (ViT-L/14, ImageNet-1k), without the scripts' 238 px, patch_mask_ratio and "
    "teacher_student; ours: warm-up of 10 epochs, filter of crops and blur, as stable-pretraining's",
    spec=replace(VIT_L, architecture="vit_large_patch14_224", patch_size=14, **_TABLES),
    settings=Settings(**_CROPS, local_size=98),
    epochs=100,
    batch=512,
    lr=5e-4,
    lr_batch=0,
    schedule=WarmupCosine(warmup=10, floor=5e-7, start=0.01),
    weight_decay=0.05,
)
_SMALLER = f"{_VIT_L.source}; ours: patches of 16, local crops of 96 px"
# On small images blur and solarisation leave little to see: ours.
_SMALL = dict(
    directions=256,
    embedding=64,
    projector_hidden=(128, 128),
    projector_width=16,
    global_scale=(0.2, 1.0),
    local_crops=0,
    local_size=16,
    blur=0.0,
    solarise=0.0,
    drop_path=0.0,
)
RECIPES = {
    "vit_s": replace(_VIT_L, source=_SMALLER, spec=replace(VIT_S, **_TABLES), settings=Settings(**_CROPS)),
    "vit_b": replace(_VIT_L, source=_SMALLER, spec=replace(VIT_B, **_TABLES), settings=Settings(**_CROPS)),
    "vit_l": _VIT_L,
    "imagenette": replace(
        _VIT_L,
        source="LeJEPA MINIMAL.md (ViT-S/8 at 128 px); ours: the embedding starts as torch's layers, there as timm's",
        spec=replace(VIT_S, architecture="vit_small_patch8_224", image_size=128, patch_size=8, **_TABLES),
        settings=Settings(
            **_CROPS | dict(blur_kernel=7),
            sigreg_weight=0.02,
            directions=256,
            projector_width=16,
            global_crops=4,
            global_scale=(0.08, 1.0),
            local_crops=0,
            jitter=(0.8, 0.8, 0.8, 0.2),
        ),
        epochs=800,
        batch=256,
        lr=2e-3,
        schedule=WarmupCosine(warmup=1, floor=1e-3, start=0.01),
    ),
    "imagenette_vit_s16": replace(
        _VIT_L,
        source="stable-pretraining benchmarks/imagenet10/lejepa-vit-small.py",
        spec=replace(VIT_S, **_TABLES),
        settings=Settings(**_CROPS, sigreg_weight=0.02, convex=False, sigreg_over="all"),
        epochs=600,
        batch=128,
        lr=4e-4,
        schedule=WarmupCosine(warmup=10, floor=4e-7, start=0.01),
    ),
    "32px": on_32px(
        _VIT_L,
        Settings(**_SMALL, global_crops=4),
        source="ours: the ViT-L recipe on CIFAR-10, four crops, for two cores",
        epochs=6,
        lr=2e-3,
        schedule=WarmupCosine(warmup=0.3, floor=1e-6, start=0.01),
    ),
    "smoke": smoke(
        _VIT_L,
        Settings(**_SMALL | dict(global_crops=4, directions=64, embedding=32, projector_hidden=(32, 32), local_size=8)),
        lr=4e-3,
        schedule=WarmupCosine(warmup=0.5, start=0.01),
    ),
}
