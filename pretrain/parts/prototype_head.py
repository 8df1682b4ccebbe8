"""DINO's projection head: an MLP to a bottleneck, unit vectors, their products with weight-normed prototypes.

facebookresearch/dino 7c446df, vision_transformer.py:257-291; iBOT's is built of the same two parts. State-dict names
are the source's: mlp.N.*, last_layer.weight_g, last_layer.weight_v. D width, d bottleneck, K prototypes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.parts.heads import Norm, mlp
from pretrain.parts.losses import l2_normalize
from pretrain.parts.weights import truncated_


class Prototypes(nn.Module):
    """(..., d) -> (..., K), products with K rows g v / |v|. fixed: g stays 1, so that the rows have unit length."""

    def __init__(self, width: int, count: int, fixed: bool = True) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(count, 1), requires_grad=not fixed)
        self.weight_v = nn.Parameter(nn.Linear(width, count, bias=False).weight.detach())

    def forward(self, vectors: Tensor) -> Tensor:
        # The kernel of torch's weight_norm, without its module, which renames the two tensors.
        return F.linear(vectors, torch._weight_norm(self.weight_v, self.weight_g, 0))


class PrototypeHead(nn.Module):
    """(B, D) -> (B, K) logits: `embed`, then `last_layer`, which other tokens may share.

    layers: linear ones of the MLP. norm: after each of them but the last; with "bn" B counts as one batch.
    fixed: see Prototypes (the source's norm_last_layer).
    """

    def __init__(
        self, width: int, count: int, *, hidden: int, bottleneck: int, layers: int, norm: Norm, fixed: bool
    ) -> None:
        super().__init__()
        dims = [width, *[hidden] * (layers - 1), bottleneck]
        self.mlp = truncated_(mlp(dims, norm=norm))
        self.last_layer = Prototypes(bottleneck, count, fixed)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, D) -> unit vectors (B, d)."""
        return l2_normalize(self.mlp(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last_layer(self.embed(tokens))
