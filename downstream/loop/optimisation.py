"""The optimiser groups of a dense training: rate and weight decay of every layer."""

from typing import Any

from torch import nn

from engine.layer_decay import is_decayed, layer_of

TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model


def optimizer_groups(
    model: nn.Module, depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Parameters that train -> optimiser groups with keys params, names, lr and weight_decay.

    Of L blocks the rate is decay^(L + 1 - layer), necks and heads are layer L + 1. decay_tokens: the mm codebases
    exempt pos_embed and cls_token by their bare names, which never match behind "backbone.", so that they do decay
    them (iBOT, BEiT and CAE segmentation; mmseg: layer_decay_optimizer_constructor.py).
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.removeprefix(TRUNK) if name.startswith(TRUNK) else f"head.{name}"
        layer, decayed = layer_of(own, depth), is_decayed(own, parameter, decay_tokens)
        fresh = {
            "params": [],
            "names": [],
            "lr": rate * decay ** (depth + 1 - layer),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        group = groups.setdefault((layer, decayed), fresh)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
