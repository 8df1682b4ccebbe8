"""SimMIM (Xie et al. 2022): mask tokens replace patches, the encoder sees all, and one linear layer predicts pixels.

Figure 1 of the paper; microsoft/SimMIM d3e29bc, models/simmim.py. Masks are made of blocks of patches. Of its
ablations, heads of Swin blocks and classes of colours or tokens as targets are not implemented.
B images, L patches, p patch side, U blocks, v visible ones, s patches in a block, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import AreaRange, BelowOne, PositiveFloat, PositiveInt, UnitInterval, Validated
from pretrain.method import Encoder, Group, Method, Step, Views, decay_groups
from pretrain.parts.heads import mlp
from pretrain.parts.losses import patch_baseline
from pretrain.parts.mask_shapes import MaskNoise
from pretrain.parts.masking import mask_at, order_of, patchify, take, with_mask_tokens
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import beit_token, beit_vit
from pretrain.recipe import RELATIVE, VIT_B, Recipe, on_32px, smoke
from pretrain.schedules import Multistep, WarmupCosine

Masks = Literal["random", "block", "square"]
Seen = Literal["visible", "all"]
LOSSES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
COUNT_EPS = 1e-5  # added to the number of masked pixels (simmim.py:120)


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """Includes the ablations of tables 1, 2 and 4; the defaults are the paper's."""

    mask_ratio: UnitInterval = 0.6  # share of the image's blocks that are hidden
    mask_patch: PositiveInt = 32  # side of a block in pixels
    # shape of the mask: random blocks, BEiT's rectangles of blocks, or one square of about mask_ratio (table 1)
    sampling: Masks = "random"
    head_depth: PositiveInt = 1  # linear layers of the pixel head, with GELU between them (table 2)
    loss: Literal["l1", "l2", "smooth_l1"] = "l1"  # loss of the pixels (table 4)
    # pixels that count in the loss: those of hidden patches (prediction), or all (reconstruction)
    loss_area: Literal["masked", "all"] = "masked"
    layer_scale_start: PositiveFloat = 0.1  # initial value of layer scale
    drop_path: BelowOne = 0.1  # drop path rate of the last block
    crop_scale: AreaRange = (0.67, 1.0)  # least and largest share of the image's area in the random crop


class MaskedPredictor(nn.Module):
    """Encoder, mask token, pixel head and loss; LUT uses it too.

    order: (B, U), ids of all blocks, the v visible ones first. The buffer `blocks` (U, s) holds the patch ids of each
    block.
    """

    undecayed = ("vit.trunk.cls_token", "vit.trunk.pos_embed")  # vision_transformer.py:285; the mask token is decayed

    def __init__(self, spec: ViTSpec, settings: Settings, seen: Seen = "visible") -> None:
        super().__init__()
        if spec.relative_position == "none":
            raise ValueError("SimMIM's encoder is BEiT's: it needs relative_position='shared'")
        self.settings, self.grid, self.seen = settings, spec.grid, seen
        self.patches, self.patch = spec.grid[0] * spec.grid[1], spec.patch_size
        self.register_buffer("blocks", blocks_of(spec, settings.mask_patch), persistent=False)
        blocks = len(self.blocks)
        hidden = ceil(blocks * settings.mask_ratio)  # data_simmim.py:36
        hidden = round(hidden**0.5) ** 2 if settings.sampling == "square" else hidden
        self.visible = blocks - hidden
        if not 0 < self.visible < blocks:
            raise ValueError(
                f"mask_ratio={settings.mask_ratio} with mask_patch={settings.mask_patch} leaves {self.visible} of "
                f"{blocks} blocks visible"
            )
        self.vit = beit_vit(ViT(spec, settings.drop_path), settings.layer_scale_start)
        self.mask_token = beit_token(spec.width)
        self.pixels = mlp([spec.width] * settings.head_depth + [spec.patch_size**2 * 3])

    def encode(self, images: Tensor, order: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) with the mask token in hidden patches -> class token and patches after the final
        norm (B, 1+L, D)."""
        mask = mask_at(self.hidden_ids(order), self.patches)
        patches = with_mask_tokens(self.vit.project(images), mask, self.mask_token)
        return self.vit.encode(self.vit.add_positions(patches, self.grid))[0]

    def context(self, latent: Tensor, order: Tensor) -> Tensor:
        """Encoded tokens (B, 1+L, D) -> the mean (B, D) of the visible patches, or of all with seen="all"."""
        patch_tokens = latent[:, 1:]
        if self.seen == "visible":
            patch_tokens = take(patch_tokens, self.patch_ids(order[:, : self.visible]))
        return patch_tokens.mean(dim=1)

    def loss(self, latent: Tensor, images: Tensor, order: Tensor) -> Tensor:
        """Mean error of the pixels that count (`loss_area`). latent: (B, 1+L, D). images: (B, 3, H, W)."""
        patch_tokens, targets = latent[:, 1:], patchify(images, self.patch)
        if self.settings.loss_area == "masked":
            hidden_ids = self.hidden_ids(order)
            patch_tokens, targets = take(patch_tokens, hidden_ids), take(targets, hidden_ids)
        predictions = to_float32(self.pixels(patch_tokens))
        total = LOSSES[self.settings.loss](predictions, targets, reduction="sum")
        return total / (targets.numel() + 3 * COUNT_EPS)

    def baseline_loss(self, images: Tensor) -> Tensor:
        """Loss of predicting the same patch everywhere, for images (B, 3, H, W)."""
        return patch_baseline(patchify(images, self.patch), self.settings.loss)

    def mask_noise(self) -> MaskNoise:
        """The sampler of the noise that orders the blocks: those with the largest numbers are hidden."""
        side = isqrt(len(self.blocks))
        return MaskNoise(self.settings.sampling, (side, side), len(self.blocks) - self.visible)

    def patch_ids(self, block_ids: Tensor) -> Tensor:
        """Ids of blocks (B, u) -> ids of their patches (B, u*s)."""
        return self.blocks[block_ids].flatten(1)

    def hidden_ids(self, order: Tensor) -> Tensor:
        """Ids of blocks, the visible ones first (B, U) -> ids of the patches in hidden blocks (B, (U-v)*s)."""
        return self.patch_ids(order[:, self.visible :])


class SimMim(Method):
    """Views: "image" (B, 3, H, W) and "noise" (B, U)."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.predictor = MaskedPredictor(spec, settings)

    def views(self) -> Views:
        steps = crop(self.spec.side, self.settings.crop_scale, "bilinear")
        return ImageViews({"image": view(steps, self.preparation)}, {"noise": self.predictor.mask_noise()})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images, order = views["image"], order_of(views["noise"])  # (B, 3, H, W), (B, U)
        latent = self.predictor.encode(images, order)  # (B, 1+L, D)
        return Step(self.predictor.loss(latent, images, order), {})

    def groups(self) -> list[Group]:
        return decay_groups(self.named_parameters(), [f"predictor.{name}" for name in self.predictor.undecayed])

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.predictor.baseline_loss(views["image"])}

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.predictor.vit)}


def blocks_of(spec: ViTSpec, mask_patch: int) -> Tensor:
    """Patch ids (U, s) of the blocks of mask_patch x mask_patch pixels, in raster order.

    Raises ValueError if blocks do not divide the image, or patches do not divide a block.
    """
    if mask_patch % spec.patch_size or spec.side % mask_patch:
        raise ValueError(
            f"mask_patch={mask_patch}: must be a multiple of patch_size={spec.patch_size} that divides "
            f"image_size={spec.side}"
        )
    rows, side = spec.grid[0], mask_patch // spec.patch_size
    ids = torch.arange(rows**2).reshape(rows // side, side, rows // side, side)
    return ids.transpose(1, 2).reshape(-1, side**2)


METHOD = SimMim

_VIT_B = Recipe(
    source="microsoft/SimMIM d3e29bc, configs/vit_base__800ep/simmim_pretrain__vit_base__img224__800ep.yaml, config.py",
    spec=replace(VIT_B, **RELATIVE),
    settings=Settings(),
    epochs=800,
    batch=2048,
    lr=1e-4,
    lr_batch=512,
    schedule=Multistep(warmup=10, start=5e-7 / 1e-4, milestones=(700,)),
    weight_decay=0.05,
    clip=5.0,
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_100": replace(
        _VIT_B,
        source="LUT supplementary, table A (100 epochs); its rates are not stated: those of microsoft/SimMIM "
        "configs/swin_base__100ep/simmim_pretrain__swin_base__img192_window6__100ep.yaml, as in LUT's simmim_vit_b",
        epochs=100,
        lr=2e-4,
        schedule=WarmupCosine(warmup=10, floor=4e-5),  # 1e-5 at 512 images
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(mask_patch=8, drop_path=0.0),
        source="ours: the ViT-B recipe on images of 32 px and masks of 2 x 2 patches, for two cores",
        epochs=12,
        lr=2e-3,
        schedule=WarmupCosine(warmup=0.5),
    ),
    "smoke": smoke(_VIT_B, Settings(mask_patch=4, drop_path=0.0), schedule=WarmupCosine(warmup=0.5)),
}
