"""iBOT (Zhou et al. 2022): DINO on masked crops, whose masked patches also predict the teacher's outputs for them.

Figure 3 and algorithm 1; bytedance/ibot da316d8, main_ibot.py, models/head.py. Of its options, Swin, ReLUs in the head,
batch norms over groups of processes, different numbers of prototypes for patches and class tokens, more than two global
crops, and training without masked patches are not implemented.
B images, G = 2 global and N local crops, L patches, m masked ones of all crops, D width, d bottleneck, K prototypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from engine.settings import (
    AreaRange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
)
from pretrain.method import Step, TrainProgress
from pretrain.methods.dino import (
    GLOBAL_CROPS,
    POSITIONS,
    SMALL,
    SMOKE,
    DistillationSettings,
    SelfDistillation,
    TeacherWarmup,
    small_recipes,
)
from pretrain.methods.dino import RECIPES as DINO
from pretrain.parts.heads import PrototypeHead, Prototypes
from pretrain.parts.losses import dino_loss, masked_patch_loss
from pretrain.parts.mask_shapes import MaskShape, VaryingMask
from pretrain.parts.masking import masked_tokens
from pretrain.parts.teachers import Centre, Temperature, frozen_copy, mean_output
from pretrain.parts.views import ImageViews
from pretrain.recipe import VIT_B, VIT_L, Begins


@dataclass(frozen=True, kw_only=True)
class Settings(DistillationSettings):
    """The defaults are main_ibot.py's (28-170), and where these differ, those of README.md's command for the ViT-S."""

    prototypes: PositiveInt = 8192
    shared_head: bool = True  # class tokens and patches share the student's prototypes (table 9)
    # class tokens and patches share the teacher's prototypes, an average of the student's for class tokens
    shared_head_teacher: bool = True
    teacher_temperature: PositiveFloat = 0.07
    teacher_warmup: TeacherWarmup = 30  # epochs of the warm-up of both temperatures
    patch_temperature: PositiveFloat = 0.07  # temperature of the teacher's outputs for patches, after its warm-up
    # temperature of these outputs at the start of its warm-up
    patch_temperature_start: Annotated[PositiveFloat, ReadIf("teacher_warmup")] = 0.04
    mask_shape: MaskShape = "block"  # masks of BEiT's rectangles, or of random patches (pred_shape)
    # mask ratios, one of which each crop draws; with the default, half of the crops stay unmasked (pred_ratio)
    mask_ratios: tuple[UnitInterval, ...] = (0.0, 0.3)
    # spread of each mask ratio, which is uniform between ratio - spread and ratio + spread (pred_ratio_var)
    mask_spreads: tuple[UnitInterval, ...] = (0.0, 0.2)
    # epochs before crops are masked (pred_start_epoch)
    mask_start: Annotated[NonNegativeInt, Begins("no patch would ever be hidden")] = 0
    cls_weight: NonNegativeFloat = 1.0  # lambda 1, weight of the class tokens' loss
    patch_weight: NonNegativeFloat = 1.0  # lambda 2, weight of the masked patches' loss
    global_scale: AreaRange = (0.25, 1.0)
    local_scale: Annotated[AreaRange, ReadIf("local_crops")] = (0.05, 0.25)
    local_crops: NonNegativeInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mask_ratios or len(self.mask_ratios) != len(self.mask_spreads):
            raise ValueError(
                f"mask_ratios={self.mask_ratios}, mask_spreads={self.mask_spreads}: give both the same number of values"
            )
        for ratio, spread in zip(self.mask_ratios, self.mask_spreads, strict=True):
            if not spread <= ratio <= 1 - spread:
                raise ValueError(
                    f"mask_spreads={self.mask_spreads}: {ratio} +- {spread} is not within 0 to 1; lower the spread"
                )
        if self.cls_weight == self.patch_weight == 0:
            raise ValueError("cls_weight=0 with patch_weight=0: nothing is left to learn")


class Ibot(SelfDistillation):
    """Views: DINO's, and "mask" (B, G, L) bool, True for patches hidden from the student."""

    one_norm = True  # models/head.py:69-87

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        if not settings.shared_head:
            prototypes = Prototypes(settings.bottleneck, settings.prototypes, settings.fixed_prototypes)
            self.student.head.last_layer2 = prototypes
        if not settings.shared_head_teacher:  # the teacher's start as a copy of the student's
            self.teacher.head.last_layer2 = frozen_copy(patch_prototypes(self.student.head))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, spec.width))  # models/vision_transformer.py:170-172
        self.patch_centre = Centre(settings.prototypes, settings.center_momentum, settings.center)
        self.patch_temperatures = Temperature(
            start=settings.patch_temperature_start,
            end=settings.patch_temperature,
            warmup=settings.teacher_warmup,
            delay=settings.mask_start,
        )
        self.patch_temperature, self.is_masking = self.patch_temperatures.at(0), settings.mask_start == 0

    def views(self) -> ImageViews:
        s = self.settings
        mask = VaryingMask(shape=s.mask_shape, ratios=s.mask_ratios, spreads=s.mask_spreads)
        return replace(super().views(), samplers={"mask": partial(mask.several, GLOBAL_CROPS, self.spec.grid)})

    def before_forward(self, progress: TrainProgress) -> None:
        super().before_forward(progress)
        self.patch_temperature = self.patch_temperatures.at(progress.epoch)
        self.is_masking = progress.epoch >= self.settings.mask_start

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, crops, masks = self.settings, views["global"], views["mask"] & self.is_masking
        # Targets: the teacher sees the global crops whole. Predictions: the student sees them masked, and local crops.
        cls_targets, patch_targets, observed = self.teacher_targets(crops, masks)  # (B, G, K), (m, K)
        cls_logits, patch_logits = self.student_logits(crops, masks)  # (B, G, K), (m, K)
        local_logits = None  # or (B, N, K)
        if "local" in views:
            local_logits = self.student.head(self.student.class_tokens(views["local"]))

        cls_loss = dino_loss(cls_logits, local_logits, cls_targets, s.student_temperature)  # Eq. 2
        patch_loss = masked_patch_loss(patch_logits, patch_targets, masks, s.student_temperature)  # Eq. 3
        loss = s.cls_weight * cls_loss + s.patch_weight * patch_loss
        return Step(loss, {"cls": cls_loss.detach(), "patch": patch_loss.detach()}, observed)

    def student_logits(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Crops (B, G, 3, S, S), masks (B, G, L) -> logits of the class tokens (B, G, K) and of the masked patches
        (m, K). Visible patches pass through the head only if it has batch norms, whose statistics include them."""
        head, prefix, tokens = self.student.head, self.spec.prefix, self.encode_masked(crops, masks)
        if self.settings.head_norm == "bn":
            vectors = head.embed(tokens)  # (B, G, P+L, d)
            cls_logits = head.last_layer(vectors[:, :, 0])
            return cls_logits, patch_prototypes(head)(vectors[:, :, prefix:][masks])
        cls_logits = head(tokens[:, :, 0])
        patch_vectors = head.embed(tokens[:, :, prefix:][masks])  # (m, d)
        return cls_logits, patch_prototypes(head)(patch_vectors)

    @torch.no_grad()
    def teacher_targets(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Global crops (B, G, 3, S, S), which the teacher sees whole, and masks (B, G, L) -> target probabilities of
        the class tokens (B, G, K) and of the masked patches (m, K), and name -> the mean logits (K,) towards which the
        centre of that name moves."""
        head, patch_layer = self.teacher.head, patch_prototypes(self.teacher.head)
        tokens = self.teacher.vit(crops.flatten(0, 1))[0]  # (B*G, P+L, D)
        vectors = head.embed(tokens).unflatten(0, crops.shape[:2])  # (B, G, P+L, d)
        patch_vectors = vectors[:, :, self.spec.prefix :]
        cls_logits = head.last_layer(vectors[:, :, 0])
        # Prototypes are linear: the mean of all patches' logits is the logits of their mean vector. So logits are
        # computed for masked patches only.
        with torch.autocast(crops.device.type, enabled=False):
            observed = {"centre": mean_output(cls_logits), "patch_centre": patch_layer(mean_output(patch_vectors))}
        patch_targets = self.patch_centre.soften(patch_layer(patch_vectors[masks]), self.patch_temperature)
        return self.targets(cls_logits), patch_targets, observed

    def encode_masked(self, crops: Tensor, masks: Tensor) -> Tensor:
        """Global crops (B, G, 3, S, S), masks (B, G, L) -> the student's tokens after the final norm (B, G, P+L, D).

        Masked patches are replaced by the mask token before positions are added (models/vision_transformer.py:205-222).
        """
        tokens = masked_tokens(self.student.vit, crops.flatten(0, 1), masks.flatten(0, 1), self.mask_token)
        return tokens.unflatten(0, crops.shape[:2])

    def averaged_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """The encoders, and the head's layers that teacher and student both have (main_ibot.py:380-390)."""
        student_layers = dict(self.student.head.named_children())
        teacher_layers = dict(self.teacher.head.named_children())
        head_pairs = [(layer, student_layers[name]) for name, layer in teacher_layers.items() if name in student_layers]
        return [(self.teacher.vit, self.student.vit), *head_pairs]

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Losses of uniform predictions; crops without a mask count as 0 in the patch loss."""
        ratios = self.settings.mask_ratios
        masked_share = sum(ratio > 0 for ratio in ratios) / len(ratios)
        weights = {"cls": 1.0, "patch": masked_share if self.is_masking else 0.0}
        return {name: weight * log(self.settings.prototypes) for name, weight in weights.items() if weight}


def patch_prototypes(head: PrototypeHead) -> Prototypes:
    """The prototypes of patches: the head's separate ones, if any, or those of class tokens."""
    return getattr(head, "last_layer2", head.last_layer)


METHOD = Ibot

_VIT_S = replace(
    DINO["vit_s"],
    source="Zhou et al. 2022, section 3.2; ibot README.md (ViT-S, 16 x 64 images), main_ibot.py:28-170",
    settings=Settings(fixed_prototypes=False),
    epochs=800,
    batch=1024,
)
_LARGER = (
    "Zhou et al. 2022, section 3.2 (epochs, batch, rate, masks), appendix B (crops); fixed_prototypes: main_ibot.py's "
    "help; else as ViT-S, as the argument files that the README links are not available"
)
_VIT_B = replace(
    _VIT_S,
    source=_LARGER,
    spec=replace(VIT_B, **POSITIONS),
    settings=Settings(global_scale=(0.32, 1.0), local_scale=(0.05, 0.32)),
    epochs=400,
)
_VIT_L = replace(_VIT_B, spec=replace(VIT_L, **POSITIONS), epochs=250)
RECIPES = {
    "vit_s": _VIT_S,
    "vit_s_two_crops": replace(
        _VIT_S,
        source="Zhou et al. 2022, table 10, left; main_ibot.py's defaults for two crops, which are all masked",
        settings=Settings(
            fixed_prototypes=False, local_crops=0, global_scale=(0.14, 1.0), mask_ratios=(0.3,), mask_spreads=(0.0,)
        ),
    ),
    "vit_b": _VIT_B,
    "vit_b_22k": replace(_VIT_B, source=f"{_LARGER}; ImageNet-22k", epochs=80),
    "vit_l": _VIT_L,
    "vit_l_22k": replace(_VIT_L, source=f"{_LARGER}; ImageNet-22k", epochs=50),
    **small_recipes(_VIT_S, Settings(**SMALL), Settings(**SMOKE)),
}
