"""NEPA beyond its recorded steps: causal attention, layer scale, positions, averaged weights."""

from dataclasses import replace

import torch
from small_trainings import forward_pass
from toys import progress

from checkpoints.vit import rotary_tables
from pretrain.methods.nepa import METHOD, RECIPES, Nepa, rotary_table

SMOKE = RECIPES["smoke"]


def nepa(**changes) -> Nepa:
    """With a layer scale large enough for attention to matter."""
    torch.manual_seed(0)
    return METHOD(SMOKE.spec, replace(SMOKE.settings, **{"layer_scale_init": 1.0} | changes)).double()


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_token_attends_to_itself_and_those_before_it():
    method = nepa()
    patches = method.vit.project(images()).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(method.predict(patches)[:, 5].square().sum(), patches)
    used = gradient.abs().sum(dim=(0, 2)) > 0
    assert used.tolist() == [True] * 5 + [False] * 11
    exported = method.vit.encode(patches)[0]  # as in the exported encoder, without a causal mask
    assert torch.autograd.grad(exported[:, 5].square().sum(), patches)[0].abs().sum(dim=(0, 2)).all()


def test_a_layer_scale_of_zero_is_trained():
    """layerscale_value=0 of its configs; None is an encoder without a layer scale."""
    method = nepa(layer_scale_init=0.0)
    patches = method.vit.project(images())
    inputs = torch.cat([method.vit.trunk.cls_token.expand(3, -1, -1), patches], dim=1)
    torch.testing.assert_close(method.predict(patches), method.vit.trunk.norm(inputs))
    forward_pass(method, {"image": images()}, progress()).loss.backward()
    assert all(block.gamma_1.grad.any() and block.gamma_2.grad.any() for block in method.vit.trunk.blocks)
    plain = METHOD(replace(SMOKE.spec, layer_scale=False), SMOKE.settings)
    assert not [name for name, _ in plain.named_parameters() if "gamma" in name]


def test_positions_equal_those_of_the_exported_encoder_times_the_factor():
    method = nepa()
    (table, *_) = rotary_tables(method.vit.trunk.rope, SMOKE.spec.depth, (4, 4), None)
    periods = method.vit.trunk.rope.periods
    torch.testing.assert_close(rotary_table(periods, (4, 4), 1.0), table.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary_table(periods, (4, 4), 2.0), rotary_table(periods / 2, (4, 4), 1.0))


def test_factors_are_between_the_inverse_and_the_setting():
    method, factors = nepa(rescale=3.0), []
    for step in range(200):
        method.before_forward(replace(progress(), step=step))
        factors.append(method.factor)
    logs = torch.tensor(factors).log()
    assert 1 / 3 <= min(factors) < 0.4 and 2.7 < max(factors) <= 3 and abs(logs.mean()) < 0.15


def test_the_average_starts_as_a_copy_after_the_first_update():
    method = nepa(average_momentum=0.9)
    weight = method.vit.trunk.blocks[0].mlp.fc1.weight
    with torch.no_grad():
        weight.add_(1.0)
    method.after_update(progress())
    average = method.teacher.trunk.blocks[0].mlp.fc1.weight
    assert torch.equal(average, weight)
    first = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    method.after_update(replace(progress(), step=1))
    torch.testing.assert_close(average, first + 0.1)
