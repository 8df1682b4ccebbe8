"""CAE (Chen et al. 2022): a regressor predicts the latents of hidden patches, a decoder their visual tokens.

Figure 2 and section 3 of the paper; lxtGH/CAE d725971, models/modeling_cae.py, models/modeling_cae_helper.py,
furnace/engine_for_pretraining.py:

    visible patches --encoder--> Z_v --regressor--> Z_m --decoder--> Y_m, compared with the tokenizer's tokens
    hidden patches --target encoder--> target latents, compared with Z_m

B images, L patches, k visible and M hidden ones in every image, D width, d width of regressor and decoder, K codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from timm.layers import DropPath, Mlp
from timm.models.beit import Block
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.positions import sincos_positions
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    TwoOrMore,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Step, TrainProgress, check_encoder
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import take
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.tokenizers import TokenPrediction
from pretrain.parts.weights import beit_token, cae_vit, cut_truncated_, rescale_, xavier_
from pretrain.recipe import SINCOS_ROWS, VIT_B, VIT_L, VIT_S, Recipe, on_32px, smoke
from pretrain.schedules import TableCosine


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of CAE-B (scripts/cae_base_800e.sh, tools/run_pretraining.py), but the tokenizer's."""

    tokenizer: str = ""  # file of DALL-E's encoder; "": k-means of patches, fitted to the training images
    codes: Annotated[TwoOrMore, ReadIf("tokenizer", "")] = 8192  # number of codes of k-means
    num_mask_patches: int = 98  # patches hidden in every image
    min_mask_patches_per_block: int = 16  # fewest patches of a hidden rectangle, before its sides are rounded
    decoder_width: PositiveInt = 768  # token width of regressor and decoder
    decoder_heads: PositiveInt = 12  # attention heads of regressor and decoder
    regressor_depth: PositiveInt = 4  # blocks of the regressor
    decoder_depth: PositiveInt = 4  # blocks of the decoder
    align_weight: NonNegativeFloat = 2.0  # lambda, weight of the alignment loss of the latents
    # target encoder: the encoder before the last update (lxtGH/CAE), or the current one (Atten4Vis/CAE a7fd162)
    target: Literal["previous", "current"] = "previous"
    target_momentum: UnitInterval = 0.0  # EMA momentum of the target encoder; 0: a copy of the encoder
    layer_scale_start: PositiveFloat = 0.1  # initial value of the encoder's layer scale
    # initial value of the layer scale of regressor and decoder; 0: no layer scale
    decoder_layer_scale_start: NonNegativeFloat = 0.1
    rescaled: bool = False  # BEiT's initial weights (fix_init_weight)
    drop_path: BelowOne = 0.1  # drop path rate of the last block of encoder, regressor and decoder
    colour_jitter: NonNegativeFloat = 0.0  # strength of the jitter of brightness, contrast and saturation
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in the crop

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_width % 4 or self.decoder_width % self.decoder_heads:
            raise ValueError(
                f"decoder_width={self.decoder_width} with decoder_heads={self.decoder_heads}: the width must be a "
                "multiple of 4, for sine-cosine positions, and of the number of heads"
            )


class ContextAutoencoder(TokenPrediction):
    """Encoder, target encoder, latent regressor and decoder. The same number of patches is hidden in every image.

    Views: those of `TokenPrediction`.
    """

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        check_encoder(spec, position="sincos_row_first", class_token=True, registers=0)
        s, width = settings, settings.decoder_width
        draw_mask = BlockMask(spec.grid, s.num_mask_patches, s.min_mask_patches_per_block, exact=True)
        super().__init__(spec, settings, draw_mask)
        self.vit = cae_vit(ViT(spec, s.drop_path), s.layer_scale_start, s.rescaled)
        self.teacher = frozen_copy(self.vit, drop_path=True)
        self.embed = embedding(spec.width, width, s.rescaled)
        block_settings = (s.decoder_heads, s.decoder_layer_scale_start, s.drop_path)
        self.regressor = LatentRegressor(width, s.regressor_depth, *block_settings)
        self.decoder = HiddenDecoder(width, s.decoder_depth, *block_settings, self.tokenizer.codes)
        for network in (self.regressor, self.decoder):
            if s.rescaled:
                rescale_(cut_truncated_(network).blocks)
            else:
                xavier_(network)
        self.register_buffer("positions", sincos_positions(spec.grid, width, "row"), persistent=False)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = views["image"]
        visible, hidden = self.split(views["mask"])  # ids (B, k) and (B, M)

        # Targets of the hidden patches: visual tokens and latents.
        tokens = self.tokenizer(views["picture"]).gather(1, hidden)  # (B, M)
        target_latents = self.target(images, hidden)  # (B, M, d)

        # Predictions: latents from those of the visible patches, and tokens from the predicted latents.
        latents = self.regress(images, visible, hidden)  # Z_m (B, M, d)
        logits = to_float32(self.decoder(latents, self.positions_of(hidden)))  # Y_m (B, M, K)

        decoding_loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        alignment_loss = F.mse_loss(to_float32(latents), to_float32(target_latents))
        weighted_alignment = self.settings.align_weight * alignment_loss  # lambda
        is_correct = (logits.detach().argmax(dim=2) == tokens).to(logits.dtype)
        logs = {
            "loss_main": decoding_loss.detach(),
            "loss_align": weighted_alignment.detach(),
            "token_accuracy": is_correct.mean(),
        }
        return Step(decoding_loss + weighted_alignment, logs)

    def split(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mask (B, L), 1 for hidden patches -> ids of the visible (B, k) and of the hidden patches (B, M), both in
        raster order."""
        visible_first = mask.to(torch.uint8).argsort(dim=1, stable=True)
        visible = visible_first.shape[1] - self.settings.num_mask_patches
        return visible_first.tensor_split([visible], dim=1)

    def positions_of(self, ids: Tensor) -> Tensor:
        """Ids (B, l) -> position embeddings (B, l, d)."""
        return take(self.positions.expand(len(ids), -1, -1), ids)

    def encode(self, vit: ViT, images: Tensor, ids: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids (B, l) -> latents (B, l, d) of these patches; the encoder sees no others."""
        patches = vit.add_positions(vit.project(images), self.spec.grid)
        patch_tokens = vit.encode(patches, keep=ids)[0][:, 1:]  # without the class token
        return self.embed(patch_tokens)

    @torch.no_grad()
    def target(self, images: Tensor, hidden: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids of the hidden patches (B, M) -> their latents (B, M, d) by the target encoder."""
        return self.encode(self.teacher, images, hidden)

    def regress(self, images: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids of visible (B, k) and hidden patches (B, M) -> predicted latents Z_m of the hidden
        patches (B, M, d)."""
        visible_latents = self.encode(self.vit, images, visible)  # Z_v (B, k, d)
        return self.regressor(visible_latents, self.positions_of(visible), self.positions_of(hidden))

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss_main": self.baseline_loss_of_tokens(views)}

    def before_update(self, progress: TrainProgress) -> None:
        """With target="previous", move the target encoder towards the encoder before this update."""
        if self.settings.target == "previous":
            ema_update(self.teacher, self.vit, self.settings.target_momentum)

    def after_update(self, progress: TrainProgress) -> None:
        """With target="current", move the target encoder towards the encoder after this update."""
        if self.settings.target == "current":
            ema_update(self.teacher, self.vit, self.settings.target_momentum)

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.vit)}


def embedding(width_in: int, width: int, rescaled: bool) -> nn.Module:
    """A linear layer and a norm, tokens (..., width_in) -> (..., width); the identity if the widths are equal.

    With `rescaled`, it keeps torch's initial weights, as in the source (modeling_cae.py:53-61).
    """
    if width_in == width:
        return nn.Identity()
    layer = nn.Sequential(nn.Linear(width_in, width), nn.LayerNorm(width, eps=NORM_EPS))
    return layer if rescaled else xavier_(layer)


NORM_EPS = 1e-6
MLP_RATIO = 4  # hidden width of the MLPs of regressor and decoder, divided by their token width


class CrossAttention(nn.Module):
    """Multi-head cross-attention. Keys have no bias, as it would not change the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Tokens for queries (B, M, d), keys (B, N, d) and values (B, N, d) -> (B, M, d)."""
        projected = (self.q(queries) + self.q_bias, self.k(keys), self.v(values) + self.v_bias)
        q, k, v = (tokens.unflatten(2, (self.heads, -1)).transpose(1, 2) for tokens in projected)
        attended = F.scaled_dot_product_attention(q, k, v)  # (B, heads, M, d / heads)
        return self.proj(attended.transpose(1, 2).flatten(2))


class RegressorBlock(nn.Module):
    """Cross-attention from the hidden patches to all patches, then an MLP.

    Positions are added to queries and keys only. As in the source, the second norm is applied to the residual stream
    itself. layer_scale: initial value of both layer scales; 0: both are 1 and not trained.
    """

    def __init__(self, width: int, heads: int, layer_scale: float, drop_path: float) -> None:
        super().__init__()
        self.norm_q, self.norm_k, self.norm_v, self.norm2 = (nn.LayerNorm(width, eps=NORM_EPS) for _ in range(4))
        self.attn = CrossAttention(width, heads)
        self.mlp = Mlp(width, MLP_RATIO * width)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        for name in ("gamma_1", "gamma_2"):
            scale = torch.full((width,), layer_scale or 1.0)
            self.register_parameter(name, nn.Parameter(scale, requires_grad=layer_scale > 0))

    def forward(self, hidden: Tensor, visible: Tensor, hidden_positions: Tensor, positions: Tensor) -> Tensor:
        """Update the tokens of the hidden patches (B, M, d).

        hidden, visible: tokens (B, M, d) and (B, k, d). hidden_positions: (B, M, d). positions: of all patches, the
        visible ones first (B, k+M, d).
        """
        tokens = torch.cat([visible, hidden], dim=1)
        queries = self.norm_q(hidden + hidden_positions)
        keys, values = self.norm_k(tokens + positions), self.norm_v(tokens)
        attended = self.attn(queries, keys, values)
        hidden = self.norm2(hidden + self.drop_path(self.gamma_1 * attended))
        return hidden + self.drop_path(self.gamma_2 * self.mlp(hidden))


class LatentRegressor(nn.Module):
    """Predicts the latents of hidden patches from those of visible ones, starting from a mask token per patch."""

    def __init__(self, width: int, depth: int, heads: int, layer_scale: float, drop_path: float) -> None:
        super().__init__()
        self.mask_token = beit_token(width)
        self.blocks = nn.ModuleList(
            RegressorBlock(width, heads, layer_scale, rate) for rate in drop_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, visible: Tensor, visible_positions: Tensor, hidden_positions: Tensor) -> Tensor:
        """Latents Z_v of visible patches and their positions, both (B, k, d), positions of hidden patches (B, M, d) ->
        latents Z_m of hidden patches (B, M, d)."""
        positions = torch.cat([visible_positions, hidden_positions], dim=1)
        hidden = self.mask_token.to(visible).expand_as(hidden_positions)
        for block in self.blocks:
            hidden = block(hidden, visible, hidden_positions, positions)
        return self.norm(hidden)


class HiddenDecoder(nn.Module):
    """Predicts the visual tokens of hidden patches from their latents; hidden patches attend to each other alone."""

    def __init__(self, width: int, depth: int, heads: int, layer_scale: float, drop_path: float, codes: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=NORM_EPS)
        self.blocks = nn.ModuleList(
            Block(
                width,
                heads,
                qkv_bias=True,
                mlp_ratio=MLP_RATIO,
                init_values=layer_scale,
                drop_path=rate,
                norm_layer=norm,
            )
            for rate in drop_rates(drop_path, depth)
        )
        self.norm = norm(width)
        self.head = nn.Linear(width, codes)

    def forward(self, hidden: Tensor, hidden_positions: Tensor) -> Tensor:
        """Latents Z_m of hidden patches and their positions, both (B, M, d) -> logits Y_m of their tokens (B, M, K)."""
        hidden = hidden + hidden_positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def drop_rates(last: float, depth: int) -> list[float]:
    """The drop-path rate of each block: from 0 to `last` in equal steps."""
    return torch.linspace(0, last, depth, device="cpu").tolist()


METHOD = ContextAutoencoder

SCALED = SINCOS_ROWS | dict(layer_scale=True)
_VIT_B = Recipe(
    source="lxtGH/CAE d725971, scripts/cae_base_800e.sh (32 x 64 images); its tokenizer is DALL-E's, --set "
    "tokenizer=encoder.pkl",
    spec=replace(VIT_B, **SCALED),
    settings=Settings(),
    epochs=800,
    batch=2048,
    lr=1.5e-3,
    lr_batch=0,
    schedule=TableCosine(warmup=20, floor=1e-5),
    weight_decay=0.05,
    clip=3.0,
)
_SMALL = dict(drop_path=0.0, regressor_depth=2, decoder_depth=2)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_300": replace(_VIT_B, epochs=300, schedule=TableCosine(warmup=10, floor=1e-5)),
    "vit_b_1600": replace(_VIT_B, epochs=1600, schedule=TableCosine(warmup=40, floor=1e-5)),
    "vit_s": replace(
        _VIT_B,
        source="lxtGH/CAE d725971, models/modeling_cae.py (12 heads), tools/run_pretraining.py; its README gives no "
        "command for it; ours: 300 epochs, as for the base model",
        spec=replace(VIT_S, heads=12, **SCALED),
        epochs=300,
        schedule=TableCosine(warmup=10, floor=1e-5),
    ),
    "vit_l": replace(
        _VIT_B,
        source="lxtGH/CAE d725971, scripts/cae_large_1600e.sh with its last three lines, which a line break cuts off",
        spec=replace(VIT_L, **SCALED),
        settings=Settings(
            decoder_width=1024, decoder_heads=16, layer_scale_start=1e-5, decoder_layer_scale_start=1e-5, rescaled=True
        ),
        epochs=1600,
        schedule=TableCosine(warmup=40, floor=1e-5),
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(
            codes=512,
            num_mask_patches=32,
            min_mask_patches_per_block=5,
            decoder_width=128,
            decoder_heads=4,
            crop_scale=(0.4, 1.0),
            **_SMALL,
        ),
        epochs=8,
        lr=2e-3,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(
            codes=64,
            num_mask_patches=8,
            min_mask_patches_per_block=2,
            decoder_width=32,
            decoder_heads=2,
            crop_scale=(0.6, 1.0),
            **_SMALL,
        ),
    ),
}
