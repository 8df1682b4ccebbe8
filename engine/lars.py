"""LARS (You et al. 2017) as MoCo-v3 and MAE compute it, for one parameter or for the same one of many heads at once.

d = g + wd p, scaled by trust |p| / |d| where both norms are above zero; mu <- momentum mu + d; p <- p - lr mu. The
rate stays outside the buffer mu. Biases and other vectors are left to plain momentum by whoever calls (MAE
util/lars.py:18-47 skips ndim <= 1; DINO utils.py:553-591 skips ndim == 1 alone).

timm's Lars takes |g| + wd |p| for |g + wd p|, 9e-4 off at a weight decay of 0.01, and cannot tell stacked heads apart.
"""

import torch
from torch import Tensor

TRUST = 0.001  # MAE util/lars.py:18, DINO utils.py:559


def adapted(
    gradient: Tensor, parameter: Tensor, weight_decay: float | Tensor = 0.0, *, heads: int, trust: float = TRUST
) -> Tensor:
    """The scaled direction, in the parameter's shape. heads: the dimension whose entries are parameters of their own.

    weight_decay: a number, or a tensor that broadcasts against the parameter.
    """
    direction = gradient + weight_decay * parameter
    own = [at for at in range(parameter.ndim) if at != heads]
    size = torch.linalg.vector_norm(parameter, dim=own, keepdim=True)
    length = torch.linalg.vector_norm(direction, dim=own, keepdim=True)
    scale = torch.where((size > 0) & (length > 0), trust * size / length, torch.ones_like(size))
    return direction * scale
