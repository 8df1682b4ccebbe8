"""Layer-wise learning-rate decay, the same in MAE, BEiT, ExtreMA, iBOT, MOCA, LUT and SimMIM.

Of L blocks, the embeddings are layer 0, block i is layer i + 1, everything behind the blocks (norms, head, a shared
relative position table) is layer L + 1; a layer's rate is decay^(L + 1 - layer) of the scheduled one. MAE lr_decay.py:
15-75, ExtreMA finetune/optim_factory.py:31-95, SimMIM optimizer.py:69-170. timm's param_groups_layer_decay agrees
for mean pooling alone: in front of a class-token head it gives the final norm the last block's rate.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

EMBEDDINGS = ("cls_token", "reg_token", "mask_token", "pos_embed")  # and patch_embed.*; registers as the class token
UNDECAYED = ("cls_token", "reg_token", "pos_embed")


def layer_of(name: str, depth: int) -> int:
    """Layer, 0..depth+1, of a parameter under its timm name."""
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
    """Named parameters -> optimiser groups with keys params, names, weight_decay and lr_scale, in order of appearance.

    torch's optimisers ignore `lr_scale`: the caller multiplies the rate by it. Weight decay is not scaled.
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        layer, decayed = layer_of(name, depth), is_decayed(name, parameter, decay_tokens)
        fresh = {
            "params": [],
            "names": [],
            "weight_decay": weight_decay if decayed else 0.0,
            "lr_scale": decay ** (depth + 1 - layer),
        }
        group = groups.setdefault((layer, decayed), fresh)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
