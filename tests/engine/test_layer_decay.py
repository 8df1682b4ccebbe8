"""Layer-wise rate decay against the official rules on recorded models."""

import pytest
import torch
from recordings import depth_of, facts
from timm import create_model
from timm.optim import param_groups_weight_decay
from torch import nn

from engine.layer_decay import is_decayed, layer_groups, layer_of

RECORD = facts("layer_decay/layer_decay.json")
MODELS = [name for name, entry in RECORD.items() if "groups" in entry]


def parameter(name: str) -> nn.Parameter:
    """Of the rank that timm's parameter of this name has."""
    if name in ("cls_token", "pos_embed"):
        return nn.Parameter(torch.zeros(1, 1, 2))
    return nn.Parameter(torch.zeros(2) if name.endswith(".bias") or "norm" in name else torch.zeros(2, 2))


@pytest.mark.parametrize("model", MODELS)
def test_groups_are_those_of_the_official_code(model):
    entry = RECORD[model]
    recorded, official = entry["groups"], entry["params"]
    depth = depth_of(official)
    decay = max(group["lr_scale"] for group in recorded if group["lr_scale"] < 1)  # the last block's scale
    weight_decay = max(group["weight_decay"] for group in recorded)
    names = [name for group in recorded for name in group["params"]]
    ours = layer_groups([(name, parameter(name)) for name in names], depth, decay, weight_decay)
    assert [sorted(group["names"]) for group in ours] == [sorted(group["params"]) for group in recorded]
    for group in ours:
        for name in group["names"]:
            assert layer_of(name, depth) == official[name]["layer_id"], name
            assert group["lr_scale"] == pytest.approx(official[name]["lr_scale"], rel=1e-12)
            assert group["weight_decay"] == official[name]["weight_decay"]


def test_relative_tables_are_decayed_and_registers_are_not():
    table = nn.Parameter(torch.zeros(9, 2))
    assert is_decayed("blocks.0.attn.relative_position_bias_table", table)
    assert layer_of("blocks.0.attn.relative_position_bias_table", 12) == 1
    assert layer_of("rel_pos_bias.relative_position_bias_table", 12) == 13
    assert layer_of("reg_token", 12) == 0 and not is_decayed("reg_token", nn.Parameter(torch.zeros(1, 4, 2)))


def test_tokens_are_decayed_where_no_list_spares_them():
    """timm's groups of a network that names no exceptions, as iBOT's does not, and of one that does."""
    network = create_model("vit_tiny_patch16_224", depth=2)
    for tokens, spared in ((True, ()), (False, network.no_weight_decay())):
        groups = param_groups_weight_decay(network, 0.05, no_weight_decay_list=spared)
        theirs = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        for group in layer_groups(network.named_parameters(), 2, 1.0, 0.05, decay_tokens=tokens):
            assert {theirs[id(parameter)] for parameter in group["params"]} == {group["weight_decay"]}
