"""MoCo-v3 beyond its recorded steps: initial weights, groups, views, the moving average, exports."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from small_trainings import batches, plan, progress, small_recipe, updates

from imagesets.random_crops import RandomResizedCrop
from pretrain.methods.mocov3 import METHOD, RECIPES
from pretrain.parts.colours import Colours
from pretrain.schedules import cosine

SMOKE = RECIPES["smoke"]


def small(**changes) -> METHOD:
    return METHOD(SMOKE.spec, replace(SMOKE.settings, **changes))


def test_initial_weights_follow_the_official_code():
    """vits.py:27-69: bounds of uniform distributions; heads keep torch's default."""
    method, width, pixels = small(), SMOKE.spec.width, 3 * SMOKE.spec.patch_size**2
    trunk, bounds = method.base.vit.trunk, {}
    for block in trunk.blocks:
        bounds |= {block.attn.qkv.weight: sqrt(6 / (2 * width)), block.attn.proj.weight: sqrt(6 / (2 * width))}
        bounds |= {layer.weight: sqrt(6 / (width + SMOKE.spec.mlp_hidden)) for layer in (block.mlp.fc1, block.mlp.fc2)}
        assert not any(layer.bias.any() for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2))
    bounds[trunk.patch_embed.proj.weight] = sqrt(6 / (pixels + width))
    bounds[method.predictor[0].weight] = 1 / sqrt(SMOKE.settings.projector_width)
    for weight, bound in bounds.items():
        assert 0.98 * bound < weight.abs().max() <= bound
    assert trunk.cls_token.abs().max() < 1e-5 and not trunk.patch_embed.proj.bias.any()
    pairs = zip(method.base.parameters(), method.momentum.parameters(), strict=True)
    assert all(torch.equal(base, momentum) for base, momentum in pairs)


@pytest.mark.parametrize("frozen", [True, False])
def test_one_group_decays_all_trained_parameters(frozen):
    method = small(freeze_patches=frozen)
    (group,) = method.groups()
    assert group.weight_decay is None and group.lr is None
    names = {"base.vit.trunk.cls_token", "base.vit.trunk.norm.bias", "predictor.1.bias"}
    assert names <= group.parameters.keys() and "base.vit.trunk.pos_embed" not in group.parameters
    assert ("base.vit.trunk.patch_embed.proj.weight" in group.parameters) is not frozen


def test_views_have_the_official_crops_and_colours():
    """main_moco.py:262-285, CONFIG.md."""
    makers = METHOD(RECIPES["vit_s"].spec, RECIPES["vit_s"].settings).views().makers
    for view, blur, solarise in ((makers["first"], 1.0, 0.0), (makers["second"], 0.1, 0.2)):
        kinds = {type(step): step for step in view.steps}
        crop, colours = kinds[RandomResizedCrop], kinds[Colours]
        assert (crop.scale, crop.interpolation, crop.rule) == ((0.08, 1.0), "bilinear", "torchvision")
        assert (colours.blur, colours.blur_radius, colours.solarise) == (blur, (0.1, 2.0), solarise)


def test_the_momentum_may_be_constant():
    """main_moco.py without --moco-m-cos."""
    method = small(teacher_momentum=0.75, teacher_momentum_end=0.75)
    with torch.no_grad():
        before = method.momentum.projector[0].weight.clone()
        method.base.projector[0].weight.add_(1.0)
    method.follow(progress(plan(2), 1))
    torch.testing.assert_close(method.momentum.projector[0].weight, before + 0.25)


def test_the_average_moves_once_per_update_before_the_forward_pass():
    training = updates("mocov3", small_recipe("mocov3"))
    method, parts = training.method, plan(2)
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    training.run(batches(method, parts), progress(parts))
    name = "vit.trunk.blocks.0.mlp.fc1.weight"
    assert torch.equal(method.momentum.get_parameter(name), before[f"momentum.{name}"])  # equal to the base until then
    base, average = (network.get_parameter(name).detach().clone() for network in (method.base, method.momentum))
    training.run(batches(method, parts, 1), progress(parts, 1))
    alpha = cosine(method.settings.teacher_momentum, 1.0, 1 / progress(parts).steps)
    torch.testing.assert_close(method.momentum.get_parameter(name), alpha * average + (1 - alpha) * base)


def test_exports_keep_the_projector_of_their_network():
    encoders = small().encoders()
    assert list(encoders) == ["base", "momentum"]
    for encoder in encoders.values():
        names = {f"projector.{layer}.weight" for layer in (0, 1, 3, 4, 6)} | {"projector.1.running_mean"}
        assert names <= encoder.extra.keys() and "projector.7.weight" not in encoder.extra
