"""The optimiser groups of a dense training: rate and weight decay of every layer."""

from typing import Any, Protocol

import torch
from torch import nn

from engine.optimisers import layer_groups

TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model


def optimizer_groups(
    model: nn.Module, depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Parameters that train -> optimiser groups with keys params, names, lr and weight_decay.

    Of L blocks the rate is decay^(L + 1 - layer), necks and heads are layer L + 1. decay_tokens: the mm codebases
    exempt pos_embed and cls_token by their bare names, which never match behind "backbone.", so that they do decay
    them (iBOT, BEiT and CAE segmentation; mmseg: layer_decay_optimizer_constructor.py).
    """
    own = {
        name.removeprefix(TRUNK) if name.startswith(TRUNK) else f"head.{name}": name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    parameters = [(ours, model.get_parameter(name)) for ours, name in own.items()]
    return [
        {
            "params": group["params"],
            "names": [own[ours] for ours in group["names"]],
            "lr": rate * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in layer_groups(parameters, depth, decay, weight_decay, decay_tokens)
    ]


class LayerSettings(Protocol):
    """Settings of a task whose layers have rates of their own."""

    @property
    def lr(self) -> float: ...
    @property
    def layer_decay(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def decay_tokens(self) -> bool: ...


def adamw_by_layer(model: nn.Module, depth: int, task: LayerSettings) -> torch.optim.AdamW:
    """AdamW over what trains of a model around a network of `depth` blocks."""
    groups = optimizer_groups(model, depth, task.layer_decay, task.lr, task.weight_decay, task.decay_tokens)
    return torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups])
