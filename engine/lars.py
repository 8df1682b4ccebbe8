"""LARS (You et al. 2017) as MoCo-v3 and MAE compute it, for one parameter or for the same one of many heads at once.

d = g + wd p, scaled by trust |p| / |d| where both norms are above zero; mu <- momentum mu + d; p <- p - lr mu. The
rate stays outside the buffer mu. The caller gives biases and other vectors plain momentum (MAE util/lars.py:18-47
skips ndim <= 1; DINO utils.py:553-591 skips ndim == 1 alone).

timm's Lars takes |g| + wd |p| for |g + wd p|, 9e-4 off at a weight decay of 0.01, and cannot tell stacked heads apart.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

TRUST = 0.001  # MAE util/lars.py:18, DINO utils.py:559


def adapted(
    gradient: Tensor, parameter: Tensor, weight_decay: float | Tensor = 0.0, *, heads: int | None, trust: float = TRUST
) -> Tensor:
    """The scaled direction d, in the parameter's shape.

    heads: the dimension along which several parameters are stacked; None for a single one. weight_decay: a number, or
    a tensor that broadcasts against the parameter.
    """
    direction = gradient + weight_decay * parameter
    own = [at for at in range(parameter.ndim) if at != heads]
    size = torch.linalg.vector_norm(parameter, dim=own, keepdim=True)
    length = torch.linalg.vector_norm(direction, dim=own, keepdim=True)
    scale = torch.where((size > 0) & (length > 0), trust * size / length, torch.ones_like(size))
    return direction * scale


class Lars(torch.optim.Optimizer):
    """LARS over whole parameters; vectors and scalars get plain momentum without weight decay (MAE util/lars.py:18-47).

    Groups take lr, momentum, weight_decay and trust. The state of a parameter is its momentum buffer `mu`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = TRUST,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict) -> None:
        direction = parameter.grad
        if parameter.ndim > 1:
            direction = adapted(direction, parameter, group["weight_decay"], heads=None, trust=group["trust"])
        state = self.state[parameter]
        if "mu" not in state:
            state["mu"] = torch.zeros_like(parameter)
        state["mu"].mul_(group["momentum"]).add_(direction)
        parameter.add_(state["mu"], alpha=-group["lr"])
