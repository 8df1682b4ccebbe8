"""CAPI (Darcet et al. 2025): predict the clusters of hidden patches, which are learnt from the averaged encoder.

Figure 2; facebookresearch/capi 98b4fa1, train_capi.py, model.py. The official code trains the clusters with an AdamW of
their own; here they are a parameter group with its own rates, and both losses share one backward pass, as they have no
weights in common.
B images, L patches, V visible and m predicted ones, R registers, D width, d channels of a head, K clusters.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log
from typing import Annotated

import torch
from timm.layers import apply_rot_embed_cat
from timm.models.eva import EvaBlock
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.importers.capi import ENCODER
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import l2_normalize, to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, check_encoder
from pretrain.methods.dinov2 import drop_subsets_
from pretrain.parts.heads import Prototypes
from pretrain.parts.mask_shapes import HiddenShape, VisibleAndPredicted
from pretrain.parts.masking import take
from pretrain.parts.teachers import ema_update, frozen_copy, max_over_processes, sinkhorn
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import TOKEN_STD, capi_vit
from pretrain.recipe import VIT_L, Begins, Recipe, on_32px, smoke
from pretrain.schedules import TruncatedCosine

# Fields of the encoder's spec that may have any value; all others must be those of the published encoders.
FREE_FIELDS = ("architecture", "image_size", "patch_size", "width", "depth", "heads", "mlp_hidden", "mlp", "pool")
FREE_FIELDS += ("norm_eps", "rotary_base", "registers", "register_place", "register_box", "position_resize")
MAX_LOG_ASSIGNMENT = 50.0  # largest score of a cluster over the images once shifted; exp of it is far from overflow
EPS = 1e-8  # added to denominators in Sinkhorn-Knopp and in the normalisation of the prototypes

MomentumWarmup = Annotated[
    NonNegativeFloat, Begins("the teacher, which is exported, would keep much of its initial weights")
]


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of default_pretrain_config.yaml."""

    clusters: PositiveInt = 16384  # K, number of clusters
    cluster_bias: bool = True  # whether the cluster logits have a bias
    cluster_lr: NonNegativeFloat = 0.5  # factor on the learning rate of the clustering layer
    cluster_weight_decay: NonNegativeFloat = 0.01  # weight decay of the clustering layer, bias included
    cluster_temperature: PositiveFloat = 0.12  # temperature of the clustering layer's predictions
    target_temperature: PositiveFloat = 0.06  # temperature of the targets, before Sinkhorn-Knopp
    student_temperature: PositiveFloat = 0.12  # temperature of the student's predictions
    sinkhorn_iterations: NonNegativeInt = 3  # iterations of Sinkhorn-Knopp, over the images of all processes
    # Sinkhorn-Knopp for each position separately, so that clusters do not encode positions; false: over all patches
    sinkhorn_by_position: bool = True
    mask_shape: HiddenShape = "inverse_block"  # hidden patches: all but a block, a block, or random ones
    # shift the block at random, wrapping around the image's edges
    mask_roll: Annotated[bool, ReadIf("mask_shape", "inverse_block", "block")] = True
    mask_ratio: ProperFraction = 0.65  # share of the patches that is hidden
    predicted_share: Fraction = 0.05  # share of the hidden patches that is predicted
    predictor_depth: PositiveInt = 12  # blocks of the predictor, which is as wide as the encoder
    drop_path: BelowOne = 0.2  # drop path rate of all blocks of encoder and predictor
    patch_lr: NonNegativeFloat = 0.2  # factor on the learning rate of the patch embedding
    rotary_lr: NonNegativeFloat = 0.0  # factor on the learning rate of the rotary frequencies; 0: they are fixed
    norm_weight_decay: NonNegativeFloat = 0.01  # weight decay of the norms' gains
    teacher_momentum: UnitInterval = 0.999  # EMA momentum of the teacher after the momentum's warm-up
    # EMA momentum at the start of the warm-up; 1: the teacher is fixed
    teacher_momentum_start: Annotated[UnitInterval, ReadIf("momentum_warmup")] = 1.0
    teacher_momentum_end: UnitInterval = 1.0  # EMA momentum at the end of the half cosine that follows the warm-up
    momentum_warmup: MomentumWarmup = 0.0  # epochs of the linear warm-up of the momentum
    momentum_cut: Fraction = 0.8  # share of the momentum's half cosine that the training covers
    crop_scale: AreaRange = (0.6, 1.0)  # least and largest share of the image's area in a crop


class Capi(Method):
    """Views: "image" (B, 3, H, W) and "ids" (B, V+m) of the visible patches, then of the predicted ones."""

    batch_statistics = True  # Sinkhorn-Knopp balances the clusters over the images of a forward pass
    min_batch, min_batch_setting = 2, "sinkhorn_by_position"

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        capi_spec = ViTSpec(**ENCODER | {name: getattr(spec, name) for name in FREE_FIELDS})
        check_encoder(spec, **{field.name: getattr(capi_spec, field.name) for field in fields(capi_spec)})
        self.mask = visible_and_predicted(spec.grid, settings)
        self.vit = drop_subsets_(capi_vit(ViT(spec)), [settings.drop_path] * spec.depth)
        self.predictor = Predictor(spec, settings.predictor_depth, settings.drop_path)
        self.head = Prototypes(spec.width, settings.clusters, fixed=False, eps=EPS)
        nn.init.trunc_normal_(self.head.weight_v, std=TOKEN_STD)
        self.clusters = nn.Linear(spec.width, settings.clusters, bias=settings.cluster_bias)
        nn.init.normal_(self.clusters.weight)
        if settings.cluster_bias:
            nn.init.zeros_(self.clusters.bias)
        for rope in (self.vit.trunk.rope, self.predictor.rope):
            rope.requires_grad_(settings.rotary_lr > 0)
        self.teacher = frozen_copy(self.vit)

    def views(self) -> ImageViews:
        image = view(crop(self.spec.side, self.settings.crop_scale), self.preparation)
        return ImageViews({"image": image}, {"ids": self.mask})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = views["image"]
        visible, predicted = views["ids"].tensor_split([self.mask.visible], dim=1)  # ids (B, V) and (B, m)

        # Teacher: assignments of all patches to the clusters, which the clustering layer learns from too.
        assignments, clustering_loss = self.assign(images)  # (B, L, K)

        # Student: the predictor fills in hidden patches from the visible ones.
        tokens = self.predict(images, visible, predicted)  # (B, m, D)
        logits = self.head(l2_normalize(tokens))  # (B, m, K)
        targets = take(assignments, predicted)  # (B, m, K)
        prediction_loss = soft_cross_entropy(logits / self.settings.student_temperature, targets)

        logs = {"prediction": prediction_loss.detach(), "clustering": clustering_loss.detach()}
        return Step(prediction_loss + clustering_loss, logs)

    def assign(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) -> target assignments of their patches (B, L, K), without gradient, and the loss of the
        clustering layer, which predicts the same assignments."""
        s = self.settings
        with torch.no_grad():
            patch_tokens = to_float32(self.teacher(images)[0][:, self.spec.registers :])  # (B, L, D)
            patch_tokens = patch_tokens.transpose(0, 1)
        logits = to_float32(self.clusters(F.normalize(patch_tokens, dim=-1, eps=1e-7)))  # (L, B, K)
        # Sinkhorn-Knopp balances over the last but one dimension: the images at each position, or all patches.
        scores = logits.detach() if s.sinkhorn_by_position else logits.detach().flatten(0, 1)
        targets = balanced_assignments(scores / s.target_temperature, s.sinkhorn_iterations).view_as(logits)
        clustering_loss = soft_cross_entropy(logits / s.cluster_temperature, targets)
        return targets.transpose(0, 1), clustering_loss

    def predict(self, images: Tensor, visible: Tensor | None, predicted: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids of the visible patches (B, V) or None for all, and ids of the predicted ones (B, m)
        -> the predictor's tokens after its final norm (B, m, D)."""
        context = self.vit.encode(self.vit.project(images), keep=visible)[0]  # (B, R+V, D)
        rope, grid = self.vit.trunk.rope, self.spec.grid
        predicted_positions = rope.positions(grid)[self.spec.registers :][predicted]
        context_positions = rope.positions(grid, visible).expand(len(images), -1, -1)
        return self.predictor(predicted_positions, context, context_positions)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss of uniform predictions: on average over images, the targets use all clusters equally."""
        return {"prediction": log(self.settings.clusters)}

    def groups(self) -> list[Group]:
        """Groups by learning rate and weight decay."""
        s = self.settings
        groups: dict[tuple[float, float | None], dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            lr_scale, weight_decay = 1.0, None
            if name.startswith("clusters."):
                lr_scale, weight_decay = s.cluster_lr, s.cluster_weight_decay
            elif ".patch_embed." in name:
                lr_scale, weight_decay = s.patch_lr, 0.0 if name.endswith(".bias") else None
            elif ".rope." in name:
                lr_scale = s.rotary_lr
            elif "norm" in name:
                weight_decay = s.norm_weight_decay
            groups[lr_scale, weight_decay][name] = parameter
        return [
            Group(parameters=parameters, lr_scale=lr_scale, weight_decay=weight_decay)
            for (lr_scale, weight_decay), parameters in groups.items()
        ]

    def after_update(self, progress: TrainProgress) -> None:
        """Move the teacher towards the encoder, with a momentum that follows a warm-up and a truncated cosine."""
        s = self.settings
        schedule = TruncatedCosine(warmup=s.momentum_warmup, floor=s.teacher_momentum_end, cut=s.momentum_cut)
        momentum = schedule.at(s.teacher_momentum, progress, s.teacher_momentum_start)
        ema_update(self.teacher, self.vit, momentum)

    def encoders(self) -> dict[str, Encoder]:
        return {"teacher": Encoder(vit=self.teacher), "student": Encoder(vit=self.vit)}


class Predictor(nn.Module):
    """Blocks in which mask tokens attend to the encoder's tokens, not to each other."""

    def __init__(self, spec: ViTSpec, depth: int, drop_path: float) -> None:
        super().__init__()
        vit = drop_subsets_(capi_vit(ViT(replace(spec, depth=depth))), [drop_path] * depth)
        self.blocks, self.rope, self.norm = vit.trunk.blocks, vit.trunk.rope, vit.trunk.norm
        for block in self.blocks:
            block.__class__ = CrossAttentionBlock
        self.mask_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        nn.init.normal_(self.mask_token, std=TOKEN_STD)

    def forward(self, positions: Tensor, context: Tensor, context_positions: Tensor) -> Tensor:
        """Predict the tokens at `positions` (B, m, 2), after the final norm (B, m, D).

        context, context_positions: the encoder's tokens (B, R+V, D) and their positions (B, R+V, 2).
        """
        tokens = self.mask_token.expand(len(positions), positions.shape[1], -1)
        tables = zip(self.rope.tables(positions), self.rope.tables(context_positions), strict=True)
        for block, (table, context_table) in zip(self.blocks, tables, strict=True):
            tokens = block(tokens, table, context, context_table)
        return self.norm(tokens)


class CrossAttentionBlock(EvaBlock):
    """timm's block with cross-attention from tokens (B, m, D) to the context (B, N, D).

    table, context_table: their rotary positions (B, 1, m, 2d) and (B, 1, N, 2d).
    """

    def forward(self, tokens: Tensor, table: Tensor, context: Tensor, context_table: Tensor) -> Tensor:
        tokens = self.drop_path1.add(tokens, self.cross_attention, table, context, context_table)
        return self.drop_path2.add(tokens, lambda subset: self.mlp(self.norm2(subset)))

    def cross_attention(self, tokens: Tensor, table: Tensor, context: Tensor, context_table: Tensor) -> Tensor:
        """The block's attention branch (B, m, D), norm included."""
        attention, tokens = self.attn, self.norm1(tokens)
        heads = (attention.num_heads, attention.head_dim)
        projected = (attention.q_proj(tokens), attention.k_proj(context), attention.v_proj(context))
        queries, keys, values = (vectors.unflatten(-1, heads).transpose(1, 2) for vectors in projected)
        queries = apply_rot_embed_cat(queries, table, half=attention.rotate_half)
        keys = apply_rot_embed_cat(keys, context_table, half=attention.rotate_half)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return attention.proj(attended.transpose(1, 2).flatten(2))


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits (..., K), target probabilities (..., K) -> their mean cross-entropy."""
    return F.cross_entropy(to_float32(logits).flatten(0, -2), targets.flatten(0, -2))


def balanced_assignments(scores: Tensor, iterations: int) -> Tensor:
    """Scores (..., B, K) -> assignments (..., B, K) by Sinkhorn-Knopp over the images of all processes.

    Each cluster's scores are shifted by a constant, which its first normalisation over the images cancels.
    """
    shift = max_over_processes(scores.amax(dim=-2, keepdim=True)) - MAX_LOG_ASSIGNMENT
    return sinkhorn((scores - shift).exp_(), iterations, EPS)


def visible_and_predicted(grid: tuple[int, int], settings: Settings) -> VisibleAndPredicted:
    """The sampler of an image's visible and predicted patches. Raises ValueError if none would be predicted."""
    s, patches = settings, grid[0] * grid[1]
    hidden = int(patches * s.mask_ratio)
    predicted = int(hidden * s.predicted_share)
    if not predicted:
        raise ValueError(
            f"predicted_share={s.predicted_share} of {hidden} hidden patches is less than one (mask_ratio="
            f"{s.mask_ratio} of {patches} patches): raise "
            f"{f'predicted_share to {1 / hidden:.2g}' if hidden else 'mask_ratio'}"
        )
    return VisibleAndPredicted(shape=s.mask_shape, grid=grid, hidden=hidden, predicted=predicted, roll=s.mask_roll)


METHOD = Capi

# default_pretrain_config.yaml: 512 images on each of 8 GPUs of 4 nodes.
UPDATES, WARMUP, BATCH = 500_000, 50_000, 16_384


def _vit_l(name: str, images: int) -> Recipe:
    """The published recipe on the image set `name`. images: its number of training images."""
    steps_per_epoch = images // BATCH
    warmup = WARMUP / steps_per_epoch  # epochs
    return Recipe(
        source=f"capi default_pretrain_config.yaml, {name}: 500,000 updates, as epochs of {images:,} images",
        spec=replace(VIT_L, patch_size=14, registers=16, **ENCODER),
        settings=Settings(momentum_warmup=warmup),
        epochs=round(UPDATES / steps_per_epoch),
        batch=BATCH,
        lr=1e-3,
        lr_batch=0,
        schedule=TruncatedCosine(warmup=warmup),
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )


_IN1K = _vit_l("ImageNet-1k", 1_281_167)
_SMALL = replace(_IN1K, spec=replace(_IN1K.spec, registers=4), settings=Settings(drop_path=0.0, teacher_momentum=0.99))
RECIPES = {
    "vit_l14": _IN1K,
    "vit_l14_in22k": _vit_l("ImageNet-22k", 14_197_122),
    "vit_l14_p205": _vit_l("Places205", 2_448_873),
    "32px": on_32px(
        _SMALL,
        replace(_SMALL.settings, clusters=512, predicted_share=0.25, predictor_depth=2, momentum_warmup=0.3),
        source="ours: the ViT-L recipe on CIFAR-10, for two cores",
        epochs=6,
        warmup=0.3,
    ),
    "smoke": smoke(
        _SMALL,
        replace(
            _SMALL.settings, clusters=32, cluster_lr=4.0, predicted_share=0.5, predictor_depth=1, momentum_warmup=0.5
        ),
    ),
}
