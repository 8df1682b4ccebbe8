"""LARS and layer-wise rate decay against the recorded official ones."""

import pytest
import torch
from recordings import depth_of, facts, tensors
from timm import create_model
from timm.optim import param_groups_weight_decay
from torch import nn

from engine.optimisers import TRUST, Lars, adapted, is_decayed, layer_groups, layer_of

# Ours in float64: what is left is the rounding of the recording, which is the same on every processor.
DATA = {name: tensor.double() for name, tensor in tensors("lars/data.safetensors").items()}
META = facts("lars/meta.json")
CASES = [name for name, case in META["cases"].items() if case["class"].endswith("LARS")]


def is_scaled(case: str, shape: list[int]) -> bool:
    return len(shape) != 1 if case.startswith("dino") else len(shape) > 1


def test_lars_steps_equal_the_recorded_ones():
    for case in CASES:
        for name in META["shapes"]:
            options, lrs = META["cases"][case]["kwargs"], META["cases"][case]["lrs"]
            value = DATA[f"{case}/init/{name}"].clone()
            buffer = torch.zeros_like(value)
            for step, lr in enumerate(lrs):
                direction = DATA[f"{case}/grad{step}/{name}"]
                if is_scaled(case, META["shapes"][name]):
                    trust = options.get("trust_coefficient", TRUST)
                    direction = adapted(direction[None], value[None], options["weight_decay"], heads=0, trust=trust)[0]
                buffer.mul_(options.get("momentum", 0.9)).add_(direction)
                value.sub_(lr * buffer)
                torch.testing.assert_close(buffer, DATA[f"{case}/buf{step}/{name}"], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(value, DATA[f"{case}/param{step}/{name}"], rtol=1e-6, atol=1e-7)


def test_stacked_heads_are_scaled_independently():
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 6, 5, 4, generator=generator, dtype=torch.float64)
    values[:, 2] = 0  # norm 0: not scaled
    gradients[:, 3] = 0
    decays = torch.tensor([0.0, 1e-3, 0.0, 0.0, 0.5], dtype=torch.float64)
    together = adapted(gradients, values, decays.view(1, 5, 1), heads=1)
    for head in range(5):
        alone = adapted(gradients[:, head][None], values[:, head][None], float(decays[head]), heads=0)[0]
        torch.testing.assert_close(together[:, head], alone, rtol=1e-14, atol=0)
    assert torch.equal(together[:, 2], gradients[:, 2]) and not together[:, 3].any()


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("dino")])
def test_the_lars_optimizer_makes_the_recorded_steps(case):
    options = dict(META["cases"][case]["kwargs"])
    options["trust"] = options.pop("trust_coefficient", TRUST)
    parameters = {name: torch.nn.Parameter(DATA[f"{case}/init/{name}"].clone()) for name in META["shapes"]}
    optimizer = Lars(list(parameters.values()), **{name: options[name] for name in options if name != "lr"}, lr=0.0)
    for step, lr in enumerate(META["cases"][case]["lrs"]):
        optimizer.param_groups[0]["lr"] = lr
        for name, parameter in parameters.items():
            parameter.grad = DATA[f"{case}/grad{step}/{name}"].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.data, DATA[f"{case}/param{step}/{name}"], rtol=1e-6, atol=1e-7)


RECORD = facts("layer_decay/layer_decay.json")
MODELS = [name for name, entry in RECORD.items() if "groups" in entry]


def make_parameter(name: str) -> nn.Parameter:
    """A parameter of the rank that timm's of this name has."""
    if name in ("cls_token", "pos_embed"):
        return nn.Parameter(torch.zeros(1, 1, 2))
    return nn.Parameter(torch.zeros(2) if name.endswith(".bias") or "norm" in name else torch.zeros(2, 2))


def test_layer_decay_groups_equal_the_official_ones():
    for model in MODELS:
        entry = RECORD[model]
        recorded, official = entry["groups"], entry["params"]
        depth = depth_of(official)
        decay = max(group["lr_scale"] for group in recorded if group["lr_scale"] < 1)  # the last block's scale
        weight_decay = max(group["weight_decay"] for group in recorded)
        names = [name for group in recorded for name in group["params"]]
        ours = layer_groups([(name, make_parameter(name)) for name in names], depth, decay, weight_decay)
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


def test_tokens_are_decayed_unless_the_network_exempts_them():
    """As in timm's groups of a network that exempts nothing (iBOT's), and of one that exempts its tokens."""
    network = create_model("vit_tiny_patch16_224", depth=2)
    for tokens, exempt in ((True, ()), (False, network.no_weight_decay())):
        groups = param_groups_weight_decay(network, 0.05, no_weight_decay_list=exempt)
        expected = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        for group in layer_groups(network.named_parameters(), 2, 1.0, 0.05, decay_tokens=tokens):
            assert {expected[id(parameter)] for parameter in group["params"]} == {group["weight_decay"]}
