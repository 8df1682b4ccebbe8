"""NEPA (Xu et al. 2025): a causal transformer predicts the embedding of each patch from those before it.

Figure 1; SihanXU/nepa 15ea494, models/vit_nepa. The encoder's attention is causal in pretraining; in exports it is
bidirectional, as in the authors' fine-tuning. B images, L patches, D width, d channels of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log, pi
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints.spec import HALF, Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import AreaRange, NonNegativeFloat, OneOrMore, UnitInterval, Validated
from pretrain.method import Encoder, Method, Step, TrainProgress, check_encoder
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import nepa_vit
from pretrain.recipe import VIT_B, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import WarmupCosine


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of configs/pretrain and scripts/pretrain for the ViT-B."""

    # trained parameters of the norms of queries and keys, if the encoder has them: none, the gain, or gain and bias
    query_norm_trained: Literal["none", "gain", "all"] = "none"
    layer_scale_init: NonNegativeFloat = 1e-5  # initial value of layer scale, if the encoder has it
    rescale: OneOrMore = 2.0  # positions are multiplied by a factor from 1 / rescale to rescale, drawn for every update
    average_momentum: UnitInterval = 0.9999  # EMA momentum of the averaged weights, which are exported
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in a crop


class CausalViT(ViT):
    """A ViT. While `causal_factor` is set, its attention is causal and its positions are multiplied by that factor."""

    causal_factor: float | None = None

    def block_kwargs(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> list[dict]:
        if self.causal_factor is None:
            return super().block_kwargs(length, keep, grid)
        table = rotary_table(self.trunk.rope.periods, self.spec.grid, self.causal_factor)
        return [{"rope": table, "is_causal": True}] * self.spec.depth


class Nepa(Method):
    """Views: "image" (B, 3, H, W)."""

    preparation = Preparation(mean=HALF, std=HALF)
    remedy = "; if the log's spread falls to 0, all patches have the same embedding"

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_encoder(spec, class_token=True, registers=0, position="none", rotary="centred")
        self.vit = nepa_vit(CausalViT(spec), settings.layer_scale_init)
        if spec.query_norm:
            for block in self.vit.trunk.blocks:
                for norm in (block.attn.q_norm, block.attn.k_norm):
                    norm.weight.requires_grad_(settings.query_norm_trained != "none")
                    norm.bias.requires_grad_(settings.query_norm_trained == "all")
        self.teacher = frozen_copy(self.vit)  # averaged for the export; not part of the loss
        self.factor = 1.0

    def views(self) -> ImageViews:
        steps = crop(self.spec.side, self.settings.crop_scale, "bilinear")
        return ImageViews({"image": view(steps, self.preparation)})

    def before_forward(self, progress: TrainProgress) -> None:
        """Draw the factor on all positions, the same in all processes and micro-batches of the update."""
        uniform = torch.rand((), generator=torch.Generator().manual_seed(progress.step), dtype=torch.float32).item()
        self.factor = exp(log(self.settings.rescale) * (2 * uniform - 1))

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        patches = self.vit.project(views["image"])  # (B, L, D)
        targets = to_float32(patches.detach())
        outputs = self.predict(patches)  # (B, 1+L, D)
        predictions = to_float32(outputs[:, :-1])  # the class token predicts the first patch
        loss = -F.cosine_similarity(predictions, targets, dim=-1, eps=1e-12).mean()
        spread = F.normalize(targets, dim=-1).flatten(0, 1).std(dim=0).norm()
        return Step(loss, {"spread": spread})

    def predict(self, patches: Tensor) -> Tensor:
        """Embedded patches (B, L, D) -> outputs of class token and patches after the final norm (B, 1+L, D); each
        depends on its own token and those before it."""
        self.vit.causal_factor = self.factor
        try:
            return self.vit.encode(patches)[0]
        finally:
            self.vit.causal_factor = None

    def after_update(self, progress: TrainProgress) -> None:
        """Update the averaged weights, which start as a copy of those after the first update."""
        ema_update(self.teacher, self.vit, self.settings.average_momentum if progress.step else 0.0)

    def facts(self) -> dict[str, str]:
        return {"attention": "causal in pretraining; here, as in its authors' fine-tuning, patches see each other"}

    def encoders(self) -> dict[str, Encoder]:
        return {"teacher": Encoder(vit=self.teacher), "student": Encoder(vit=self.vit)}


def rotary_table(periods: Tensor, grid: tuple[int, int], factor: float) -> Tensor:
    """Sines and cosines of rotary embeddings (L, 2d): those of checkpoints/vit.py for centred positions, multiplied by
    `factor`. periods: (d/4,)."""
    axes = [(torch.arange(side, device=periods.device).to(periods) + 0.5) / side * 2 - 1 for side in grid]
    centres = torch.cartesian_prod(*axes) * factor  # (L, 2), row and column
    angles = (2 * pi * centres.unsqueeze(-1) / periods).flatten(1).repeat(1, 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


METHOD = Nepa

_ROTARY = dict(
    architecture="vit_base_patch16_dinov3",
    layer_scale=True,
    norm_eps=1e-12,
    position="none",
    class_position=False,
    rotary="centred",
    rotary_base=100.0,
    rotary_pairs="halves",
    split_qkv=True,
    query_norm=True,
    pool="avg",  # as in its authors' fine-tuning; in pretraining the class token sees itself alone
)
_VIT_B = Recipe(
    source="nepa scripts/pretrain, configs/pretrain (ViT-B/14, ImageNet-1k); clip: the default of its trainer",
    spec=replace(VIT_B, patch_size=14, **_ROTARY),
    settings=Settings(),
    epochs=1600,
    batch=4096,
    lr=3e-4,
    schedule=WarmupCosine(warmup=40),
    weight_decay=0.05,
    betas=(0.9, 0.95),
    clip=1.0,
)
_SMALL = Settings(average_momentum=0.99, crop_scale=(0.4, 1.0))
RECIPES = {
    "vit_b": _VIT_B,
    "vit_l": replace(
        _VIT_B,
        source=_VIT_B.source.replace("ViT-B/14", "ViT-L/14"),
        spec=replace(VIT_L, patch_size=14, **_ROTARY),
        settings=Settings(query_norm_trained="gain"),
    ),
    "32px": on_32px(
        _VIT_B,
        _SMALL,
        source="ours: the ViT-B recipe on CIFAR-10, for two cores",
        epochs=6,
        warmup=0.3,
    ),
    "smoke": smoke(_VIT_B, _SMALL),
}
