"""Projectors and predictors: small networks behind an encoder's instance representation, dropped after pretraining.

State-dict names count the layers as the sources' nn.Sequential do: linear 0, norm 1, activation 2, linear 3, ...
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

Norm = Literal["bn", "ln", "none"]
Activation = Literal["relu", "gelu"]
NORMS = {"bn": nn.BatchNorm1d, "ln": nn.LayerNorm}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


def mlp(
    dims: Sequence[int],
    *,
    norm: Norm = "none",
    activation: Activation = "gelu",
    bias: bool = True,
    norm_eps: float = 1e-5,
) -> nn.Sequential:
    """Linear layers (B, dims[0]) -> ... -> (B, dims[-1]); after each but the last, the norm and the activation.

    bias: of the linear layers. Initial weights are torch's.
    """
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(dims):
        if layers:
            layers += [NORMS[norm](width_in, eps=norm_eps)] if norm != "none" else []
            layers.append(ACTIVATIONS[activation]())
        layers.append(nn.Linear(width_in, width_out, bias=bias))
    return nn.Sequential(*layers)
