"""LARS and layer-wise learning-rate decay as the sources compute them, which torch and timm do not offer exactly.

LARS (You et al. 2017) follows MoCo-v3 and MAE, for a single parameter or for the stacked parameters of many heads.

d = g + wd p, scaled by trust |p| / |d| where both norms are above zero; mu <- momentum mu + d; p <- p - lr mu. The
learning rate is not part of the buffer mu. The caller uses plain momentum for biases and other vectors (MAE
util/lars.py:18-47 skips ndim <= 1; DINO utils.py:553-591 skips only ndim == 1).

timm's Lars uses |g| + wd |p| in place of |g + wd p|, an error of 9e-4 at a weight decay of 0.01, and does not support
stacked heads.

Layer-wise learning-rate decay is the same in MAE, BEiT, ExtreMA, iBOT, MOCA, LUT and SimMIM. With L blocks, the
embeddings are layer 0, block i is layer i + 1, and everything after the blocks (norms, head, a shared relative position
table) is layer L + 1; a layer's rate is the scheduled one times decay^(L + 1 - layer). MAE lr_decay.py:15-75, ExtreMA
finetune/optim_factory.py:31-95, SimMIM optimizer.py:69-170. timm's param_groups_layer_decay agrees only for mean
pooling: before a class-token head it gives the final norm the last block's rate.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

TRUST = 0.001  # trust coefficient of LARS (MAE util/lars.py:18, DINO utils.py:559)


def adapted(
    gradient: Tensor, parameter: Tensor, weight_decay: float | Tensor = 0.0, *, heads: int | None, trust: float = TRUST
) -> Tensor:
    """The direction of LARS with weight decay, scaled by the trust ratio; in the parameter's shape.

    heads: the dimension along which several parameters are stacked; None for a single one. weight_decay: a number, or
    a tensor that broadcasts against the parameter.
    """
    direction = gradient + weight_decay * parameter
    dims = [dim for dim in range(parameter.ndim) if dim != heads]  # of one parameter
    parameter_norm = torch.linalg.vector_norm(parameter, dim=dims, keepdim=True)
    direction_norm = torch.linalg.vector_norm(direction, dim=dims, keepdim=True)
    has_ratio = (parameter_norm > 0) & (direction_norm > 0)
    scale = torch.where(has_ratio, trust * parameter_norm / direction_norm, torch.ones_like(parameter_norm))
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
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        direction = parameter.grad
        if parameter.ndim > 1:
            direction = adapted(direction, parameter, group["weight_decay"], heads=None, trust=group["trust"])
        state = self.state[parameter]
        if "mu" not in state:
            state["mu"] = torch.zeros_like(parameter)
        state["mu"].mul_(group["momentum"]).add_(direction)
        parameter.add_(state["mu"], alpha=-group["lr"])


EMBEDDINGS = ("cls_token", "reg_token", "mask_token", "pos_embed")  # and patch_embed.*; registers like the class token
UNDECAYED = ("cls_token", "reg_token", "pos_embed")


def layer_of(name: str, depth: int) -> int:
    """Layer, 0 to depth + 1, of a parameter by its timm name."""
    if name in EMBEDDINGS or name.startswith("patch_embed."):
        return 0
    block = re.match(r"blocks\.(\d+)\.", name)
    return int(block[1]) + 1 if block else depth + 1


def is_decayed(name: str, parameter: Parameter, decay_tokens: bool = False) -> bool:
    """Whether weight decay applies: to matrices and relative position tables, and to tokens with `decay_tokens`."""
    return parameter.ndim > 1 and not name.endswith(".bias") and (decay_tokens or name not in UNDECAYED)


def layer_groups(
    parameters: Iterable[tuple[str, Parameter]],
    depth: int,
    decay: float,
    weight_decay: float,
    decay_tokens: bool = False,
) -> list[dict[str, Any]]:
    """Optimiser groups with keys params, names, weight_decay and lr_scale, in the order in which parameters need them.

    torch's optimisers ignore `lr_scale`: the caller multiplies the rate by it. Weight decay is not scaled.
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        layer, has_decay = layer_of(name, depth), is_decayed(name, parameter, decay_tokens)
        if (layer, has_decay) not in groups:
            groups[layer, has_decay] = {
                "params": [],
                "names": [],
                "weight_decay": weight_decay if has_decay else 0.0,
                "lr_scale": decay ** (depth + 1 - layer),
            }
        group = groups[layer, has_decay]
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
