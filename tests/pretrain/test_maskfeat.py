"""MaskFeat beyond its recorded steps: precision of the targets, initial weights."""

from dataclasses import replace

import pytest
import torch
from toys import SMALL, views_of

from pretrain.method import Method
from pretrain.methods.maskfeat import METHOD, RECIPES, TRUNK

SPEC = replace(SMALL, **TRUNK)
SETTINGS = RECIPES["smoke"].settings


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_targets_do_not_depend_on_autocast():
    method = method_of().float()
    images = views_of(method, dtype=torch.float32)["image"]
    exact = method.targets(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.targets(images), exact)


def test_initial_weights_follow_the_official_code():
    torch.manual_seed(0)
    method = METHOD(replace(SPEC, width=64, mlp_hidden=256), SETTINGS)
    trunk = method.vit.trunk
    for tensor in (
        trunk.patch_embed.proj.weight,
        trunk.pos_embed,
        trunk.blocks[0].mlp.fc1.weight,
        method.mask_token,
        method.projection.weight,
    ):
        assert tensor.std().item() == pytest.approx(0.02, rel=0.25)
    for name, parameter in trunk.blocks.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0.02).all(), name
    assert trunk.patch_embed.proj.bias.abs().max() > 0.02  # torch's default
    for bias in (trunk.norm.bias, method.projection.bias):
        assert (bias == 0).all()
