"""CAE's pretext part (Chen et al. 2022, figure 2; modeling_cae_helper.py): a regressor says the latents of the hidden
patches from those of the visible ones, a decoder says their tokens from these.

B images, V visible and M hidden patches, d width.
"""

from functools import partial

import torch
from timm.layers import DropPath, Mlp
from timm.models.beit import Block
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.parts.weights import beit_token, cut_truncated_, rescale_, xavier_

NORM_EPS = 1e-6
MLP_RATIO = 4


class CrossAttention(nn.Module):
    """Queries, keys and values of tokens apart; the keys have no bias, which a softmax does not see."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(B, M, d), (B, N, d), (B, N, d) -> (B, M, d)"""
        q, k, v = (
            tokens.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for tokens in (self.q(queries) + self.q_bias, self.k(keys), self.v(values) + self.v_bias)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RegressorBlock(nn.Module):
    """Hidden patches ask the visible ones and themselves. Places go into queries and keys alone, and the second norm
    stands on the trunk. layer_scale: start of both scales; 0: they stay 1."""

    def __init__(self, width: int, heads: int, layer_scale: float, drop_path: float) -> None:
        super().__init__()
        self.norm_q, self.norm_k, self.norm_v, self.norm2 = (nn.LayerNorm(width, eps=NORM_EPS) for _ in range(4))
        self.attn = CrossAttention(width, heads)
        self.mlp = Mlp(width, MLP_RATIO * width)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        for name in ("gamma_1", "gamma_2"):
            scale = torch.full((width,), layer_scale or 1.0)
            self.register_parameter(name, nn.Parameter(scale, requires_grad=layer_scale > 0))

    def forward(self, hidden: Tensor, visible: Tensor, hidden_places: Tensor, places: Tensor) -> Tensor:
        """Tokens (B, M, d) and (B, V, d), places (B, M, d) and, of visible and hidden patches, (B, V+M, d)."""
        tokens = torch.cat([visible, hidden], dim=1)
        asked = self.attn(self.norm_q(hidden + hidden_places), self.norm_k(tokens + places), self.norm_v(tokens))
        hidden = self.norm2(hidden + self.drop_path(self.gamma_1 * asked))
        return hidden + self.drop_path(self.gamma_2 * self.mlp(hidden))


class LatentRegressor(nn.Module):
    """Visible latents -> hidden ones, from as many copies of one mask token."""

    def __init__(self, width: int, depth: int, heads: int, layer_scale: float, drop_path: float) -> None:
        super().__init__()
        self.mask_token = beit_token(width)
        self.blocks = nn.ModuleList(
            RegressorBlock(width, heads, layer_scale, rate) for rate in drop_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, visible: Tensor, visible_places: Tensor, hidden_places: Tensor) -> Tensor:
        """(B, V, d), (B, V, d), (B, M, d) -> (B, M, d)"""
        places = torch.cat([visible_places, hidden_places], dim=1)
        hidden = self.mask_token.to(visible).expand_as(hidden_places)
        for block in self.blocks:
            hidden = block(hidden, visible, hidden_places, places)
        return self.norm(hidden)


class HiddenDecoder(nn.Module):
    """Latents of the hidden patches -> logits of `codes` tokens, by blocks among these patches alone."""

    def __init__(self, width: int, depth: int, heads: int, layer_scale: float, drop_path: float, codes: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=NORM_EPS)
        self.blocks = nn.ModuleList(
            Block(width, heads, qkv_bias=True, mlp_ratio=MLP_RATIO, init_values=layer_scale, drop_path=rate,
                  norm_layer=norm)
            for rate in drop_rates(drop_path, depth)
        )  # fmt: skip
        self.norm = norm(width)
        self.head = nn.Linear(width, codes)

    def forward(self, hidden: Tensor, hidden_places: Tensor) -> Tensor:
        """(B, M, d), (B, M, d) -> (B, M, K)"""
        hidden = hidden + hidden_places
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def drop_rates(last: float, depth: int) -> list[float]:
    """From 0 to `last` in equal steps."""
    return torch.linspace(0, last, depth, device="cpu").tolist()


def cae_(part: LatentRegressor | HiddenDecoder, rescaled: bool) -> None:
    """Initial weights (modeling_cae.py:53-83): Xavier's; with `rescaled`, the option fix_init_weight, BEiT's."""
    if rescaled:
        rescale_(cut_truncated_(part).blocks)
    else:
        xavier_(part)
