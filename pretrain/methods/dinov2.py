"""DINOv2 (Oquab et al. 2024): DINO and iBOT on the same crops, KoLeo on class tokens; DINOv3's Gram anchoring.

Section 4; facebookresearch/dinov2 b8931f7, train/ssl_meta_arch.py. Gram anchoring (Simeoni et al. 2025, section 4) is
written from the paper. Of the options a head with batch norms for patches, training without local crops' weights of
their own, and the distillation of the smaller models are not here.
B images, G = 2 global and N local crops, L patches, m masked ones of all crops, K prototypes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import Compose

from checkpoints.spec import ViTSpec
from engine.precision import to_float32
from engine.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pretrain.method import Step, TrainProgress
from pretrain.parts.losses import Negatives, dino_loss, gram_loss, masked_patch_loss
from pretrain.parts.masked_distillation import MaskedDistillation, MaskedSettings, patch_head
from pretrain.parts.self_distillation import (
    SMALL,
    SMOKE,
    DistillationSettings,
    SelfDistillation,
    check_crop_size,
    small_recipes,
)
from pretrain.parts.teachers import Centre, Temperature, frozen_copy, mean_output, sinkhorn_targets
from pretrain.parts.views import ImageViews, Tensors, Transform, crop, view
from pretrain.recipe import VIT_B, VIT_L, Recipe
from pretrain.schedules import CosineTo, TableCosine, ramp


@dataclass(frozen=True, kw_only=True)
class Settings(MaskedSettings, DistillationSettings):
    """The defaults are those of configs/ssl_default_config.yaml, which is vitl16_short."""

    fixed_prototypes: bool = False  # their lengths are trained
    teacher_temperature: PositiveFloat = 0.07
    teacher_warmup: NonNegativeInt = 30  # epochs; the temperature rises with every update
    sinkhorn: bool = False  # targets by Sinkhorn-Knopp over all processes, in place of the centre and a softmax
    patch_prototypes: PositiveInt = 131072  # K of a separate head for masked patches
    gram_weight: NonNegativeFloat = 0.0  # of Gram anchoring, after its rise; 0: none (DINOv3 2.0)
    gram_start: NonNegativeInt = 1  # epochs before it begins, and the Gram teacher becomes a copy of the teacher
    gram_rise: NonNegativeFloat = 0.0  # epochs in which its weight rises
    gram_refresh: PositiveInt = 1  # epochs from one copy to the next
    gram_copies: NonNegativeInt = 3  # how often the Gram teacher is replaced; 0: it is the moving teacher itself
    gram_size: NonNegativeInt = 0  # side in pixels of the Gram teacher's crops; 0: it sees the global crops
    gram_negatives: Negatives = "keep"  # negative similarities: keep, drop, or drop_teacher's only


class DinoV2(MaskedDistillation, SelfDistillation):
    """Views: "global" (B, G, 3, S, S), "local" (B, N, 3, s, s) and "mask" (B, G, L) bool."""

    sync_batch_norm = False  # nor is KoLeo of the images of other processes

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics |= settings.sinkhorn
        self.zero_lr_epochs = settings.freeze_prototypes
        patch_prototypes = settings.patch_prototypes if settings.separate_head else settings.prototypes
        centred = settings.center and not settings.sinkhorn
        self.centre.enabled = centred
        self.patch_centre = Centre(patch_prototypes, settings.center_momentum, centred)
        if settings.gram_weight:
            if settings.gram_size:
                check_crop_size(spec, "gram_size", settings.gram_size)
            self.gram_teacher = frozen_copy(self.teacher.vit) if settings.gram_copies else None
        self.gram_weight = 0.0

    def views(self) -> "ImageViews | GramCrops":
        s, masked = self.settings, super().views()
        if not (s.gram_weight and s.gram_size):
            return masked
        colours = [view(steps, self.preparation) for steps in self.global_colours()]
        geometry = Compose(crop(max(s.gram_size, self.spec.side), s.global_scale))
        return GramCrops(masked, geometry, tuple(colours), Tensors(self.preparation), s.gram_size, self.spec.side)

    def before_forward(self, progress: TrainProgress) -> None:
        s = self.settings
        updates = s.teacher_warmup * progress.steps_per_epoch
        temperatures = Temperature(start=s.teacher_temperature_start, end=s.teacher_temperature, warmup=updates)
        self.teacher_temperature = temperatures.at(progress.step)
        start, rise = s.gram_start * progress.steps_per_epoch, int(s.gram_rise * progress.steps_per_epoch)
        self.gram_weight = ramp(progress.step, start=0, peak=0, end=s.gram_weight, warmup=start, cosine_steps=rise)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, masks, student = self.settings, views["mask"], self.student
        cls_targets, patch_targets, observed = self.teacher_targets(views["global"], masks)
        classes, local, patches = self.student_tokens(views)
        local_logits = None if local is None else student.head(local)
        cls_loss = dino_loss(student.head(classes), local_logits, cls_targets, s.student_temperature)
        patch_logits = patch_head(student)(patches[masks])
        patch_loss = masked_patch_loss(patch_logits, patch_targets, masks, s.student_temperature)
        koleo = self.koleo(classes)
        loss = s.cls_weight * cls_loss + s.patch_weight * patch_loss + s.koleo_weight * koleo
        logs = {"cls": cls_loss.detach(), "patch": patch_loss.detach(), "koleo": koleo.detach()}
        if s.gram_weight:
            gram = gram_loss(patches.flatten(0, 1), self.gram_targets(views), s.gram_negatives)
            loss, logs["gram"] = loss + self.gram_weight * gram, gram.detach()
        return Step(loss, logs, observed)

    @torch.no_grad()
    def gram_targets(self, views: Mapping[str, Tensor]) -> Tensor:
        """The Gram teacher's patch tokens (B G, L, D), resized to the student's grid."""
        crops = views.get("gram", views["global"]).flatten(0, 1)
        vit = self.teacher.vit if self.gram_teacher is None else self.gram_teacher
        grid = (crops.shape[-2] // self.spec.patch_size, crops.shape[-1] // self.spec.patch_size)
        return resized_tokens(vit(crops)[0][:, self.spec.prefix :], grid, self.spec.grid)

    @torch.no_grad()
    def teacher_targets(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Whole crops (B, G, 3, S, S), masks (B, G, L) -> targets of the class tokens (B, G, K) and of the masked
        patches (m, K), and what the centres follow."""
        classes, patches = self.teacher_tokens(crops, masks)
        logits, patch_logits = self.teacher.head(classes), patch_head(self.teacher)(patches)
        if self.settings.sinkhorn:
            targets = [sinkhorn_targets(outputs, self.teacher_temperature) for outputs in (logits, patch_logits)]
            return targets[0], targets[1], {}
        # A pass that masks nothing leaves the patches' centre where it is.
        patch_mean = mean_output(patch_logits) if len(patch_logits) else self.patch_centre.center
        observed = {"centre": mean_output(logits), "patch_centre": patch_mean}
        patch_targets = self.patch_centre.soften(patch_logits, self.teacher_temperature)
        return self.targets(logits), patch_targets, observed

    def before_update(self, progress: TrainProgress) -> None:
        """Prototypes stand still by a rate of 0: their gradients count, in the optimiser and in the clipping."""

    def after_update(self, progress: TrainProgress) -> None:
        super().after_update(progress)
        s = self.settings
        if s.gram_weight and s.gram_copies:
            copies, since = divmod(
                progress.step + 1 - s.gram_start * progress.steps_per_epoch, progress.steps_per_epoch
            )
            if since == 0 and 0 <= copies < s.gram_copies * s.gram_refresh and copies % s.gram_refresh == 0:
                self.gram_teacher.load_state_dict(self.teacher.vit.state_dict())

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """As DINO's; the patches' loss counts crops without a mask as 0."""
        s = self.settings
        of_patches = s.patch_prototypes if s.separate_head else s.prototypes
        masked = views["mask"].any(dim=-1).float().mean().item()
        return {"cls": log(s.prototypes)} | ({"patch": masked * log(of_patches)} if masked else {})


def resized_tokens(
    tokens: Tensor, source: tuple[int, int], target: tuple[int, int], mode: str = "bicubic", antialias: bool = False
) -> Tensor:
    """Patch tokens (B, L, D) of the `source` grid -> (B, L', D) of the `target` grid."""
    if source == target:
        return tokens
    maps = to_float32(tokens).mT.unflatten(-1, source)
    return F.interpolate(maps, target, mode=mode, align_corners=False, antialias=antialias).flatten(2).mT


@dataclass(frozen=True)
class GramCrops:
    """Masked crops, of which the global ones come from larger ones: "gram" (G, 3, S', S'), without changed colours."""

    masked: ImageViews
    geometry: Transform  # at the larger size
    colours: tuple[Callable[[Image.Image], Tensor], ...]  # of each global crop
    plain: Tensors
    gram_size: int
    size: int

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        parts = [self.geometry(image) for _ in self.colours]
        crops = [colours(resized(part, self.size)) for colours, part in zip(self.colours, parts, strict=True)]
        gram = [self.plain(resized(part, self.gram_size)) for part in parts]
        local = {name: make for name, make in self.masked.made.items() if name != "global"}
        return {"global": torch.stack(crops), **replace(self.masked, made=local)(image), "gram": torch.stack(gram)}


def resized(image: Image.Image, side: int) -> Image.Image:
    return image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)


METHOD = DinoV2

_TABLE = dict(layer_scale=True, position_resize="bicubic_offset")
_VIT_L = Recipe(
    source="dinov2 configs/train/vitl16_short.yaml over ssl_default_config.yaml (ImageNet-1k, 32 x 64 images)",
    spec=replace(VIT_L, **_TABLE),
    settings=Settings(),
    epochs=100,
    batch=2048,
    lr=4e-3,
    lr_batch=1024,
    lr_rule="root",
    schedule=TableCosine(warmup=10, floor=1e-6),
    layer_decay=0.9,
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4),
    clip=3.0,
)
_LARGE = Settings(
    sinkhorn=True,
    separate_head=True,
    prototypes=131072,
    bottleneck=384,
    teacher_momentum=0.994,
    drop_path=0.4,
    local_size=98,
)
_VIT_L_22K = replace(
    _VIT_L,
    source="dinov2 configs/train/vitl14.yaml (ImageNet-22k or LVD-142M); its epochs have 1250 updates, ours all images",
    spec=replace(
        VIT_L,
        architecture="vit_giant_patch14_dinov2",
        patch_size=14,
        mlp_hidden=2 * 2736,
        **_TABLE,
    ),
    settings=_LARGE,
    epochs=500,
    batch=3072,
    lr=2e-4,
    schedule=TableCosine(warmup=80, floor=1e-6),
    layer_decay=1.0,
    weight_decay_schedule=CosineTo(end=0.2),
)
_OURS = dict(freeze_prototypes=0, teacher_warmup=0)
RECIPES = {
    "vit_l": _VIT_L,
    "vit_b": replace(
        _VIT_L,
        source=f"{_VIT_L.source}; with a ViT-B/16, as SimDINO's authors trained it",
        spec=replace(VIT_B, **_TABLE),
    ),
    "vit_l14": _VIT_L_22K,
    "vit_g14": replace(
        _VIT_L_22K,
        source="dinov2 configs/train/vitg14.yaml (ImageNet-22k or LVD-142M, 12 images a GPU); else as vit_l14",
        spec=replace(_VIT_L_22K.spec, width=1536, depth=40, heads=24, mlp_hidden=2 * 4096),
    ),
    **small_recipes(_VIT_L, Settings(**SMALL | _OURS), Settings(**SMOKE | _OURS), of="ViT-L"),
}
