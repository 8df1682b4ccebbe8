"""data2vec (Baevski et al. 2022): predict the features of hidden patches in the top blocks of an EMA teacher.

Figure 1 and section 3 of the paper; facebookresearch/data2vec_vision af9a363, beit/modeling_cyclical.py and
beit/engine_for_cyclical.py. Of the code's options, targets within blocks (layer_results=fc), thinned-out masks and a
factor on the loss are not implemented.
B images, L patches, P prefix tokens, M hidden patches of the whole batch, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, Views, check_encoder, decay_groups
from pretrain.parts.losses import patch_baseline
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import hidden_tokens
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, crop, even_jitter, view
from pretrain.parts.weights import beit_token, beit_vit, cut_truncated_
from pretrain.recipe import RELATIVE, VIT_B, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import TableCosine

JITTER = 0.4  # strength (beit/datasets.py:66-74)
NORM_EPS = 1e-5  # added to the variance in the norms of the targets: torch's default
PENALTY_EPS = 1e-6  # added to the variance in the variance penalty (engine_for_cyclical.py)
NormDims = tuple[int, ...]  # dimensions of (B, L, D) over which a norm computes its statistics
BATCH_NORM, INSTANCE_NORM, LAYER_NORM = (0, 1), (1,), (-1,)


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of ViT-B (beit/README.md)."""

    target_layers: tuple[NonNegativeInt, ...] = (
        6,
        7,
        8,
        9,
        10,
        11,
    )  # teacher blocks whose outputs are averaged; from 0
    # Norms of each block's output, applied in this order, then of the average.
    target_batch_norm: bool = False  # normalise each channel over all patches of the batch
    target_instance_norm: bool = False  # normalise each channel over an image's patches
    target_layer_norm_last: bool = True  # normalise each patch over the channels
    post_target_instance_norm: bool = False  # normalise each channel of the average over an image's patches
    post_target_layer_norm: bool = True  # normalise each patch of the average over the channels
    # beta of the smooth L1 loss, the difference below which it is quadratic
    l1_beta: Annotated[PositiveFloat, ReadIf("l2_loss", False)] = 2.0
    l2_loss: bool = False  # mean squared error instead of the smooth L1 loss
    var_w0: NonNegativeFloat = 0.0  # weight of the penalty on channels that vary too little over the hidden patches
    # standard deviation below which a channel is penalised
    var_margin0: Annotated[NonNegativeFloat, ReadIf("var_w0")] = 0.5
    ema_decay: UnitInterval = 0.9998  # tau, EMA momentum of the teacher after its linear ramp
    ema_decay_init: Annotated[UnitInterval, ReadIf("ema_start_at")] = 0.999  # EMA momentum at the start of the ramp
    ema_start_at: NonNegativeInt = 0  # length of the ramp in updates; 0: no ramp
    num_mask_patches: int = 120  # most patches hidden in an image
    min_mask_patches_per_block: int = 16  # fewest patches of a hidden rectangle, before its sides are rounded
    max_mask_patches_per_block: PositiveInt = 196  # most patches that one rectangle newly hides
    layer_scale_start: PositiveFloat = 1e-4  # initial value of layer scale
    drop_path: BelowOne = 0.25  # drop path rate of the student's last block
    attn_drop: BelowOne = 0.05  # dropout rate of the student's attention weights
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in the crop


class Data2Vec(Method):
    """Views: "image" (B, 3, H, W) and "mask" (B, L), True for hidden patches.

    In half-precision training the teacher runs in half precision too; the official one always runs in float32.
    """

    batch_statistics = True  # the loss is a mean over all hidden patches, of which images have different numbers
    remedy = ", or ema_decay higher"  # section 5 of the paper names both, and the warm-up

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_encoder(spec, relative_position="shared")
        if not settings.target_layers or max(settings.target_layers) >= spec.depth:
            raise ValueError(
                f"target_layers={settings.target_layers}: must be one or more of the blocks 0 to {spec.depth - 1}"
            )
        self.draw_mask = BlockMask(
            spec.grid,
            settings.num_mask_patches,
            settings.min_mask_patches_per_block,
            settings.max_mask_patches_per_block,
        )
        self.student = beit_vit(ViT(spec, settings.drop_path), settings.layer_scale_start)
        for block in self.student.trunk.blocks:
            block.attn.attn_drop.p = settings.attn_drop
        self.mask_token = beit_token(spec.width)
        self.lm_head = cut_truncated_(nn.Linear(spec.width, spec.width))
        self.teacher = frozen_copy(self.student)

    def views(self) -> Views:
        steps = [even_jitter(JITTER), *crop(self.spec.side, self.settings.crop_scale)]
        return ImageViews({"image": view(steps, self.preparation)}, {"mask": self.draw_mask})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, images, mask = self.settings, views["image"], views["mask"].bool()
        targets = self.targets(images, mask)  # y (M, D): the teacher sees whole images
        predictions = self.predict(images, mask)  # f(x) (M, D): the student sees masked images
        loss = F.mse_loss(predictions, targets) if s.l2_loss else F.smooth_l1_loss(predictions, targets, beta=s.l1_beta)
        if not s.var_w0:
            return Step(loss, {})
        deviations = (predictions.var(dim=0) + PENALTY_EPS).sqrt()  # (D,)
        penalty = F.relu(s.var_margin0 - deviations).mean()
        return Step(loss + s.var_w0 * penalty, {"variance": penalty.detach()})

    @torch.no_grad()
    def targets(self, images: Tensor, mask: Tensor) -> Tensor:
        """Images (B, 3, H, W), mask (B, L) -> targets of the hidden patches (M, D): the normalised mean of the
        normalised outputs of the teacher's target layers, computed from whole images."""
        s = self.settings
        layer_norms = {
            BATCH_NORM: s.target_batch_norm,
            INSTANCE_NORM: s.target_instance_norm,
            LAYER_NORM: s.target_layer_norm_last,
        }
        mean_norms = {INSTANCE_NORM: s.post_target_instance_norm, LAYER_NORM: s.post_target_layer_norm}
        norms = [dims for dims, is_used in layer_norms.items() if is_used]
        post_norms = [dims for dims, is_used in mean_norms.items() if is_used]

        outputs = self.teacher(images, layers=s.target_layers, norm=False)  # of each target layer (B, P+L, D)
        layers = [tokens[:, self.spec.prefix :] for tokens in outputs]
        if {*norms, *post_norms} <= {LAYER_NORM}:  # no norm depends on visible patches
            return mean_of_layers([tokens[mask] for tokens in layers], norms, post_norms)
        return mean_of_layers(layers, norms, post_norms)[mask]

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Images (B, 3, H, W), mask (B, L) -> predicted targets of the hidden patches (M, D)."""
        return to_float32(self.lm_head(hidden_tokens(self.student, images, mask, self.mask_token)))

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        targets = self.targets(views["image"], views["mask"].bool())
        kind = "l2" if self.settings.l2_loss else "smooth_l1"
        return {"loss": patch_baseline(targets.unsqueeze(0), kind, self.settings.l1_beta)}

    def groups(self) -> list[Group]:
        return decay_groups(self.named_parameters(), ["student.trunk.cls_token"])  # modeling_cyclical.py, as BEiT

    def momentum(self, progress: TrainProgress) -> float:
        """EMA momentum of the teacher after this update (engine_for_cyclical.py:42, 53-54).

        The ramp's last value is kept until the end of the epoch in which the ramp ends.
        """
        s = self.settings
        first_step_of_epoch = progress.epoch * progress.steps_per_epoch
        if first_step_of_epoch >= s.ema_start_at:
            return s.ema_decay
        step = min(progress.step, s.ema_start_at - 1)
        return s.ema_decay_init + step * (s.ema_decay - s.ema_decay_init) / s.ema_start_at

    def after_update(self, progress: TrainProgress) -> None:
        ema_update(self.teacher, self.student, self.momentum(progress))

    def encoders(self) -> dict[str, Encoder]:
        return {"student": Encoder(vit=self.student), "teacher": Encoder(vit=self.teacher)}


def mean_of_layers(layers: Sequence[Tensor], norms: Sequence[NormDims], post_norms: Sequence[NormDims]) -> Tensor:
    """Mean (..., D) of the patch tokens of several layers, each (..., D). `norms` are applied to each layer,
    `post_norms` to the mean."""
    mean = sum(standardised(tokens, norms) for tokens in layers) / len(layers)
    return standardised(mean, post_norms)


def standardised(tokens: Tensor, norms: Sequence[NormDims]) -> Tensor:
    """Apply norms, one after the other, to tokens (..., D): torch's batch, instance and layer norm without gain and
    bias, in float32 or higher precision."""
    tokens = to_float32(tokens)
    for dims in norms:
        if dims == LAYER_NORM:
            tokens = F.layer_norm(tokens, tokens.shape[-1:])
        else:
            variance, mean = torch.var_mean(tokens, dim=dims, correction=0, keepdim=True)
            tokens = (tokens - mean) / (variance + NORM_EPS).sqrt()
    return tokens


METHOD = Data2Vec

_VIT_B = Recipe(
    source="data2vec_vision af9a363, beit/README.md (16 x 128 images), run_cyclical.py",
    spec=replace(VIT_B, **RELATIVE),
    settings=Settings(),
    epochs=800,
    batch=2048,
    lr=2e-3,
    lr_batch=0,
    schedule=TableCosine(warmup=10, floor=1e-5),
    weight_decay=0.05,
    clip=3.0,
)
_SMALL = dict(ema_decay=0.99, layer_scale_start=0.1, drop_path=0.0, attn_drop=0.0, target_layers=(2, 3))
RECIPES = {
    "vit_b": _VIT_B,
    "vit_l": replace(
        _VIT_B,
        source="data2vec_vision af9a363, beit/README.md (64 x 64 images), the first of its two runs of 800 epochs",
        spec=replace(VIT_L, **RELATIVE),
        settings=Settings(
            target_layers=(18, 19, 20, 21, 22, 23), layer_scale_start=1e-5, drop_path=0.2, attn_drop=0.15
        ),
        batch=4096,
        lr=1e-3,
        schedule=TableCosine(warmup=80, floor=1e-5),
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(
            num_mask_patches=39,
            min_mask_patches_per_block=5,
            max_mask_patches_per_block=64,
            crop_scale=(0.4, 1.0),
            **_SMALL,
        ),
        epochs=12,
        lr=2e-3,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(
            num_mask_patches=10,
            min_mask_patches_per_block=2,
            max_mask_patches_per_block=16,
            crop_scale=(0.6, 1.0),
            **_SMALL,
        ),
    ),
}
