"""Decoders: of visible and mask tokens (MAE, LUT, MOCA, I-JEPA), and from all patches' tokens to an image (MST).

Tokens come in any order, each with the id of its patch. As attention does not depend on the order, tokens are not put
back into raster order.
Letters: B images, P prefix tokens, k visible and m decoded patches, D encoder width, d decoder width, p patch side.
"""

from functools import partial

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from checkpoints.positions import sincos_positions
from checkpoints.spec import ViTSpec
from pretrain.parts.masking import take
from pretrain.parts.weights import TOKEN_STD, xavier_


class TokenDecoder(nn.Module):
    """A linear layer from width D to width d, `depth` pre-norm blocks with LayerNorm eps 1e-6, and a final norm (MAE
    models_mae.py:46-60). The initial weights are MAE's.

    Args:
        spec: of the encoder, whose grid, prefix tokens and MLP ratio the decoder shares, as in all four codes.
        width: d.
        depth: number of blocks.
        heads: attention heads.
        name: prefix of the methods' settings that hold these sizes, for error messages.

    Raises:
        ValueError: `width` is not a multiple of 4 and of `heads`.
    """

    def __init__(self, spec: ViTSpec, width: int, depth: int, heads: int, name: str = "decoder") -> None:
        super().__init__()
        self.prefix = spec.prefix
        if width % 4:
            raise ValueError(f"{name}_width={width}: sine-cosine positions need a multiple of 4")
        if width % heads:
            raise ValueError(f"{name}_heads={heads} does not divide {name}_width={width}")
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(spec.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp_ratio=spec.mlp_ratio, qkv_bias=True, norm_layer=norm) for _ in range(depth)
        )
        self.norm = norm(width)
        self.register_buffer("positions", sincos_positions(spec.grid, width, "column", spec.prefix), persistent=False)
        xavier_(self)
        nn.init.normal_(self.mask_token, std=TOKEN_STD)

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Prefix tokens and visible patches (B, P+k, D), ids (B, m) -> decoded patches (B, m, d), in that order.

        The first k ids are those of the visible patches; the other m-k become mask tokens.
        """
        tokens = self.embed(tokens)
        masked = ids.shape[1] + self.prefix - tokens.shape[1]  # m - k
        mask_tokens = self.mask_token.expand(len(ids), masked, -1).to(tokens)
        prefix_positions, patch_positions = self.positions.expand(len(ids), -1, -1).tensor_split([self.prefix], dim=1)
        positions = torch.cat([prefix_positions, take(patch_positions, ids)], dim=1)
        tokens = torch.cat([tokens, mask_tokens], dim=1) + positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)[:, self.prefix :]


CONV_CHANNELS = 256  # of the first stage of the convolutional decoder; each further stage has half as many
MIN_CONV_CHANNELS = 32  # of a stage


def convolutional(width: int, patch: int, first: int = CONV_CHANNELS, norm: bool = True) -> nn.Sequential:
    """Decoder (B, D, h, w) -> (B, 3, h*p, w*p) of transposed convolutions, each of which doubles the side.

    width: D. patch: p, a power of 2; otherwise raises ValueError. first: channels of the first stage. norm: a batch
    norm in each stage. Initial weights are torch's.
    """
    stages = patch.bit_length() - 1
    if 2**stages != patch:
        raise ValueError(
            f"decoder=conv doubles the side in each stage, and patch_size={patch} is no power of 2: use decoder=linear"
        )
    layers: list[nn.Module] = []
    for stage in range(stages):
        channels = max(first >> stage, min(first, MIN_CONV_CHANNELS))
        layers.append(nn.ConvTranspose2d(width, channels, kernel_size=4, stride=2, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.Conv2d(width, 3, kernel_size=3, padding=1))


def linear(width: int, patch: int) -> nn.Sequential:
    """Decoder (B, D, h, w) -> (B, 3, h*p, w*p) that maps each token to the pixels of its patch."""
    return nn.Sequential(nn.Conv2d(width, 3 * patch**2, kernel_size=1), nn.PixelShuffle(patch))
