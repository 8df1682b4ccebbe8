"""Decoders: of visible and mask tokens (MAE, LUT, MOCA, I-JEPA), and of all patches' tokens to an image (MST).

Tokens come in any order, each with the id of its patch: attention does not see the order, so nothing is put back into
the raster. Letters: B images, k visible patches, m decoded patches, D encoder width, d decoder width.
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
    """Width D -> width d, `depth` pre-norm blocks with LayerNorm eps 1e-6, a last norm (MAE models_mae.py:46-60).

    spec: of the encoder, whose grid, prefix tokens and MLP ratio the decoder shares, as in all four codes. The initial
    weights are MAE's. Raises ValueError for sizes that do not fit each other, by their names among the methods'
    settings, which begin with `name`.
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
        """Prefix tokens and visible patches (B, P+k, D), ids (B, m) -> (B, m, d), in the order of `ids`.

        The first k ids are those of the visible patches; the other m-k become mask tokens.
        """
        tokens = self.embed(tokens)
        hidden = self.mask_token.expand(len(ids), ids.shape[1] + self.prefix - tokens.shape[1], -1)
        places = take(self.positions[:, self.prefix :].expand(len(ids), -1, -1), ids)
        places = torch.cat([self.positions[:, : self.prefix].expand(len(ids), -1, -1), places], dim=1)
        tokens = torch.cat([tokens, hidden.to(tokens)], dim=1) + places
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)[:, self.prefix :]


WIDTH, LAST = 256, 32  # channels of the first stage; each of the others has half as many, down to the last


def convolutional(width: int, patch: int, first: int = WIDTH, norm: bool = True) -> nn.Sequential:
    """(B, D, h, w) -> (B, 3, h*p, w*p): transposed convolutions that double the side, p = 2^stages.

    first: channels of the first stage. norm: a batch norm in each stage. Initial weights are torch's.
    """
    stages = patch.bit_length() - 1
    if 2**stages != patch:
        raise ValueError(
            f"decoder=conv doubles the side at each stage, which never gives patch_size={patch}: use linear"
        )
    layers: list[nn.Module] = []
    for stage in range(stages):
        channels = max(first >> stage, min(first, LAST))
        layers.append(nn.ConvTranspose2d(width, channels, kernel_size=4, stride=2, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.Conv2d(width, 3, kernel_size=3, padding=1))


def linear(width: int, patch: int) -> nn.Sequential:
    """(B, D, h, w) -> (B, 3, h*p, w*p): each token becomes its patch's pixels."""
    return nn.Sequential(nn.Conv2d(width, 3 * patch**2, kernel_size=1), nn.PixelShuffle(patch))
