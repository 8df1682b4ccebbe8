"""Networks on top of an encoder that are discarded after pretraining: projectors, predictors and DINO's projection
head; and the class token, which is the input of most of them.

State-dict names are the sources': an MLP numbers its layers like nn.Sequential (linear 0, norm 1, activation 2,
linear 3, ...), DINO's head has mlp.N.*, last_layer.weight_g and last_layer.weight_v.
Letters: B images, D width, d bottleneck, K prototypes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.vit import ViT
from engine.precision import l2_normalize
from pretrain.parts.weights import truncated_

Norm = Literal["bn", "ln", "none"]
Activation = Literal["relu", "gelu"]
NORMS = {"bn": nn.BatchNorm1d, "ln": nn.LayerNorm}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


def class_token(vit: ViT, images: Tensor, keep: Tensor | None = None) -> Tensor:
    """Images (B, 3, H, W), ids of the visible patches (B, l) or None for all -> the class token after the final norm
    (B, D), which is computed for that token alone."""
    grid = (images.shape[-2] // vit.spec.patch_size, images.shape[-1] // vit.spec.patch_size)
    tokens = vit.encode(vit.add_positions(vit.project(images), grid), keep, norm=False, grid=grid)[0]
    return vit.normalise(tokens[:, :1])[:, 0]


def class_tokens(vit: ViT, crops: Tensor) -> Tensor:
    """V crops of one size (B, V, 3, S, S) -> class tokens after the final norm (B, V, D), in one pass."""
    return class_token(vit, crops.flatten(0, 1)).unflatten(0, crops.shape[:2])


def mlp(
    dims: Sequence[int],
    *,
    norm: Norm = "none",
    activation: Activation = "gelu",
    bias: bool = True,
    last_bias: bool | None = None,
    last_norm: bool = False,
    norm_eps: float = 1e-5,
    one_norm: bool = False,
) -> nn.Sequential:
    """An MLP (B, dims[0]) -> (B, dims[-1]), with torch's initial weights.

    Args:
        dims: widths of the input, the hidden layers and the output.
        norm: after each linear layer but the last.
        activation: after each linear layer but the last, behind the norm.
        bias: of the linear layers.
        last_bias: of the last linear layer; None: as `bias`.
        last_norm: add a batch norm without parameters at the end (SimCLR, MoCo-v3 builder.py:56-59).
        norm_eps: epsilon of the norms.
        one_norm: share a single norm among all hidden layers, which must have the same width.
    """
    layers: list[nn.Module] = []
    last = len(dims) - 2
    norms = [NORMS[norm](width, eps=norm_eps) for width in dims[1:-1]] if norm != "none" else []
    for number, (width_in, width_out) in enumerate(pairwise(dims)):
        if number > 0:
            layers += [norms[0 if one_norm else number - 1]] if norms else []
            layers.append(ACTIVATIONS[activation]())
        has_bias = bias if number < last or last_bias is None else last_bias
        layers.append(nn.Linear(width_in, width_out, bias=has_bias))
    layers += [nn.BatchNorm1d(dims[-1], norm_eps, affine=False)] if last_norm else []
    return nn.Sequential(*layers)


def projector_tensors(projector: nn.Module, prefix: str = "projector.") -> dict[str, Tensor]:
    """The tensors of a projector for an export, named `projector.*`: all except the update counts of batch norms."""
    tensors = projector.state_dict(prefix=prefix)
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


class Prototypes(nn.Module):
    """Weight-normalised linear layer (..., d) -> (..., K) without bias, with the rows g v / (|v| + eps).

    fixed: g is not trained and stays 1, so that rows have unit length.
    """

    def __init__(self, width: int, count: int, fixed: bool = True, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_g = nn.Parameter(torch.ones(count, 1), requires_grad=not fixed)
        self.weight_v = nn.Parameter(nn.Linear(width, count, bias=False).weight.detach())

    def forward(self, vectors: Tensor) -> Tensor:
        if self.eps:
            lengths = self.weight_v.norm(dim=1, keepdim=True) + self.eps
            return F.linear(vectors, self.weight_v * (self.weight_g / lengths))
        # The kernel of torch's weight_norm, but not its module, which renames the two tensors.
        return F.linear(vectors, torch._weight_norm(self.weight_v, self.weight_g, 0))


class PrototypeHead(nn.Module):
    """DINO's head, tokens (..., D) -> logits (..., K): an MLP, normalisation to unit length (`embed`), and prototypes
    (`last_layer`).

    Args:
        widths: D, those of the MLP's hidden layers, d.
        count: K; 0: no last layer, so that the outputs are unit vectors (..., d).
        norm: after each linear layer of the MLP but the last; with "bn", all tokens form one batch.
        fixed: see `Prototypes` (norm_last_layer in the source).
        one_norm: see `mlp`.
    """

    def __init__(
        self, widths: Sequence[int], count: int, *, norm: Norm, fixed: bool = True, one_norm: bool = False
    ) -> None:
        super().__init__()
        self.mlp = truncated_(mlp(widths, norm=norm, one_norm=one_norm))
        self.last_layer = Prototypes(widths[-1], count, fixed) if count else nn.Identity()

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (..., D) -> unit vectors (..., d)."""
        return l2_normalize(self.mlp(tokens.flatten(0, -2))).unflatten(0, tokens.shape[:-1])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last_layer(self.embed(tokens))
