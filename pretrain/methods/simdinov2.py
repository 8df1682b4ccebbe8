"""SimDINOv2 (Wu et al. 2025): DINOv2 without prototypes, centres and temperatures; a coding rate prevents the collapse.

Section 3.2; github.com/RobinWu218/SimDINO 8149fc4, simdinov2/train/ssl_meta_arch_sim.py. The schedule of the patch
loss's weight is not implemented: the source computes it but keeps using its first value.
B images, G = 2 global and N local crops, L patches, m masked ones of all crops, d bottleneck.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from checkpoints.spec import ViTSpec
from engine.settings import AreaRange, BelowOne, NonNegativeFloat, NonNegativeInt, ReadIf, UnitInterval
from pretrain.method import Step, TrainProgress
from pretrain.methods.dino import SMALL_CROPS, SMOKE_CROPS, small_recipes
from pretrain.methods.dinov2 import RECIPES as DINOV2
from pretrain.methods.dinov2 import MaskedDistillation, MaskedSettings, patch_head
from pretrain.methods.simdino import CodingRateSettings, simdino_loss
from pretrain.parts.losses import masked_mean
from pretrain.recipe import VIT_B, VIT_L, Rises
from pretrain.schedules import WarmupCosine, cosine


@dataclass(frozen=True, kw_only=True)
class Settings(CodingRateSettings, MaskedSettings):
    """The defaults are those of configs/simdino_config.yaml."""

    eps_end: NonNegativeFloat = 0.0  # final value of eps, reached along half a cosine; 0: eps is constant
    # final value of compression_weight, reached along half a cosine; 0: it is constant
    compression_weight_end: NonNegativeFloat = 0.0
    # epochs until eps and compression_weight reach their final values; 0: all epochs
    end_epoch: Annotated[NonNegativeInt, Rises("eps and compression_weight")] = 0
    koleo_weight: NonNegativeFloat = 0.0
    layer_scale_init: NonNegativeFloat = 0.1
    teacher_momentum: UnitInterval = 0.9
    global_scale: AreaRange = (0.4, 1.0)
    local_scale: Annotated[AreaRange, ReadIf("local_crops")] = (0.05, 0.4)
    drop_path: BelowOne = 0.2


class SimDinoV2(MaskedDistillation):
    """Views: "global" (B, G, 3, S, S), "local" (B, N, 3, s, s) and "mask" (B, G, L) bool, True for hidden patches."""

    remedy = ", or eps lower"

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics, self.passes = True, 1
        self.chunks = {**self.chunks, "covariance_images": settings.covariance_images}
        self.coding_rate: CodingRateSettings = settings

    def before_forward(self, progress: TrainProgress) -> None:
        """Set eps and the weight of the agreement by their schedules."""
        s, self.passes = self.settings, progress.micro_batches
        steps = (s.end_epoch or progress.epochs) * progress.steps_per_epoch  # of both schedules
        done = min(1.0, progress.step / steps)
        self.coding_rate = replace(
            s,
            eps=cosine(s.eps, s.eps_end or s.eps, done),
            compression_weight=cosine(s.compression_weight, s.compression_weight_end or s.compression_weight, done),
        )

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, masks, head = self.settings, views["mask"], self.student.head
        # Targets: the teacher sees the global crops whole. Predictions: the student sees them masked, and local crops.
        teacher_cls_tokens, teacher_patch_tokens = self.teacher_tokens(views["global"], masks)
        cls_targets = self.teacher.head(teacher_cls_tokens)  # (B, G, d)
        patch_targets = patch_head(self.teacher)(teacher_patch_tokens)  # (m, d)
        cls_tokens, local_cls_tokens, patch_tokens = self.student_tokens(views)

        # SimDINO on class tokens.
        local_vectors = None if local_cls_tokens is None else head(local_cls_tokens)  # (B, N, d)
        cls_loss, logs = simdino_loss(head(cls_tokens), local_vectors, cls_targets, self.coding_rate, self.passes)

        # Masked patches maximise the inner product with the teacher's vectors of the same patches.
        patch_vectors = patch_head(self.student)(patch_tokens[masks])  # (m, d)
        patch_loss = masked_mean(-(patch_vectors * patch_targets).sum(dim=-1), masks)

        koleo = self.koleo(cls_tokens)
        loss = s.cls_weight * cls_loss + s.patch_weight * patch_loss + s.koleo_weight * koleo
        return Step(loss, logs | {"patch": patch_loss.detach()})


METHOD = SimDinoV2

_REGISTERS = dict(layer_scale=True, registers=4, position_resize="bicubic_antialias")
_VIT_L = replace(
    DINOV2["vit_l"],
    source="SimDINO simdinov2/configs/simdino_config.yaml over ssl_default_config.yaml (8 x 128 images, each 128 with "
    "a covariance of their own); blur with its probabilities as named, unlike dinov2's code",
    spec=replace(VIT_L, **_REGISTERS),
    settings=Settings(covariance_images=128, blur_kernel=9),
    epochs=100,
    batch=1024,
    schedule=WarmupCosine(warmup=10, floor=1e-6, start=2.5e-4),  # from 1e-6
)
RECIPES = {
    "vit_l": _VIT_L,
    "vit_b": replace(
        _VIT_L,
        source=f"{_VIT_L.source}; with student.arch=vit_base, as its README says",
        spec=replace(VIT_B, **_REGISTERS),
    ),
    **small_recipes(_VIT_L, Settings(**SMALL_CROPS), Settings(**SMOKE_CROPS), of="ViT-L"),
}
