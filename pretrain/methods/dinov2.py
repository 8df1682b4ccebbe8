"""DINOv2 (Oquab et al. 2024): DINO and iBOT on the same crops, KoLeo on class tokens; DINOv3's Gram anchoring.

Section 4; facebookresearch/dinov2 b8931f7, train/ssl_meta_arch.py. Gram anchoring (Simeoni et al. 2025, section 4) is
written from the paper. Of the options a head with batch norms for patches, training without local crops' weights of
their own, and the distillation of the smaller models are not here.
B images, G = 2 global and N local crops, L patches, m masked ones of all crops, K prototypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from engine import checks
from pretrain.method import Step, TrainProgress
from pretrain.parts.heads import PrototypeHead
from pretrain.parts.losses import dino_loss, masked_patch_loss
from pretrain.parts.masked_distillation import MaskedDistillation, MaskedSettings
from pretrain.parts.self_distillation import SMALL, SMOKE, DistillationSettings, SelfDistillation, small_recipes
from pretrain.parts.teachers import Centre, Temperature, frozen_copy, mean_output, sinkhorn_targets
from pretrain.recipe import VIT_B, VIT_L, Recipe
from pretrain.schedules import CosineTo, TableCosine


@dataclass(frozen=True, kw_only=True)
class Settings(MaskedSettings, DistillationSettings):
    """The defaults are those of configs/ssl_default_config.yaml, which is vitl16_short."""

    fixed_prototypes: bool = False  # their lengths are trained
    teacher_temperature: float = 0.07
    teacher_warmup: int = 30  # epochs; the temperature rises with every update
    sinkhorn: bool = False  # targets by Sinkhorn-Knopp over all processes, in place of the centre and a softmax
    separate_head: bool = False  # masked patches have a head of their own
    patch_prototypes: int = 131072  # K of that head
    patch_head_layers: int = 3  # of its MLP
    patch_head_hidden: int = 2048  # hidden width of its MLP
    patch_bottleneck: int = 256  # width before its prototypes

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.counts(self, "patch_prototypes", "patch_head_layers", "patch_head_hidden", "patch_bottleneck")


class DinoV2(MaskedDistillation, SelfDistillation):
    """Views: "global" (B, G, 3, S, S), "local" (B, N, 3, s, s) and "mask" (B, G, L) bool."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics |= settings.sinkhorn
        self.frozen_epochs = settings.freeze_prototypes
        patch_prototypes = settings.prototypes
        if settings.separate_head:
            patch_prototypes = settings.patch_prototypes
            self.student.patch_head = PrototypeHead(
                spec.width,
                patch_prototypes,
                hidden=settings.patch_head_hidden,
                bottleneck=settings.patch_bottleneck,
                layers=settings.patch_head_layers,
                norm=settings.head_norm,
                fixed=settings.fixed_prototypes,
            )
            self.teacher.patch_head = frozen_copy(self.student.patch_head)
        centred = settings.center and not settings.sinkhorn
        self.centre.enabled = centred
        self.patch_centre = Centre(patch_prototypes, settings.center_momentum, centred)

    def before_forward(self, progress: TrainProgress) -> None:
        s = self.settings
        updates = s.teacher_warmup * progress.steps_per_epoch
        temperatures = Temperature(start=s.teacher_temperature_start, end=s.teacher_temperature, warmup=updates)
        self.teacher_temperature = temperatures.at(progress.step)

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
        return Step(loss, logs, observed)

    @torch.no_grad()
    def teacher_targets(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Whole crops (B, G, 3, S, S), masks (B, G, L) -> targets of the class tokens (B, G, K) and of the masked
        patches (m, K), and what the centres follow."""
        classes, patches = self.teacher_tokens(crops)
        logits, patch_logits = self.teacher.head(classes), patch_head(self.teacher)(patches[masks])
        if self.settings.sinkhorn:
            targets = [sinkhorn_targets(each, self.teacher_temperature) for each in (logits, patch_logits)]
            return targets[0], targets[1], {}
        observed = {"center": mean_output(logits)}
        if len(patch_logits):
            observed["patch_center"] = mean_output(patch_logits)
        patch_targets = self.patch_centre.soften(patch_logits, self.teacher_temperature)
        return self.targets(logits), patch_targets, observed

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        super().observe(observed, progress)
        if "patch_center" in observed:
            self.patch_centre.add(observed["patch_center"], progress.micro_batch, progress.micro_batches)

    def before_update(self, progress: TrainProgress) -> None:
        """Prototypes stand still by a rate of 0: their gradients count, in the optimiser and in the clipping."""

    def after_update(self, progress: TrainProgress) -> None:
        super().after_update(progress)
        self.patch_centre.update()

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """As DINO's; the patches' loss counts crops without a mask as 0."""
        s = self.settings
        of_patches = s.patch_prototypes if s.separate_head else s.prototypes
        masked = views["mask"].any(dim=-1).float().mean().item()
        return {"cls": log(s.prototypes)} | ({"patch": masked * log(of_patches)} if masked else {})


def patch_head(branch: nn.Module) -> PrototypeHead:
    return getattr(branch, "patch_head", branch.head)


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
    layer_decay=1.0,
    local_size=98,
)
_VIT_L_22K = replace(
    _VIT_L,
    source="dinov2 configs/train/vitl14.yaml (ImageNet-22k or LVD-142M); an epoch was 1250 updates, here it is all images",
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
    weight_decay_schedule=CosineTo(end=0.2),
)
_OURS = dict(freeze_prototypes=0, teacher_warmup=0, layer_decay=1.0)
RECIPES = {
    "vit_l": _VIT_L,
    "vit_b": replace(
        _VIT_L, source=f"{_VIT_L.source}; with a ViT-B/16, as SimDINO's authors trained it", spec=replace(VIT_B, **_TABLE)
    ),
    "vit_l14": _VIT_L_22K,
    "vit_g14": replace(
        _VIT_L_22K,
        source="dinov2 configs/train/vitg14.yaml (ImageNet-22k or LVD-142M, 12 images a GPU); else as vit_l14",
        spec=replace(_VIT_L_22K.spec, width=1536, depth=40, heads=24, mlp_hidden=2 * 4096),
    ),
    **small_recipes(_VIT_L, Settings(**SMALL | _OURS), Settings(**SMOKE | _OURS), **_TABLE),
}
