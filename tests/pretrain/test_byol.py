"""BYOL against its formulas: no official code runs on a ViT, so there is no recording."""

import math
from dataclasses import replace

import pytest
import torch
from recorded import assert_close
from small_trainings import batches, plan, progress, small_recipe, updates
from torch import Tensor

from pretrain.loop.updates import Updates

EXACT = 1e-10


@pytest.fixture
def training() -> Updates:
    """In float64, with target weights that differ from the online network's."""
    torch.set_default_dtype(torch.float64)
    byol = updates("byol", small_recipe("byol"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in byol.method.momentum.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for name, parameter in byol.method.named_parameters():
            if name.endswith((".1.weight", ".1.bias", ".0.bias")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    yield byol
    torch.set_default_dtype(torch.float32)


def two_layers(values: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """max(0, BN(x W0' + b0)) W1' with the batch's own mean and biased variance, eps 1e-5 (utils/networks.py:25-50)."""
    hidden = values @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"]
    centred = hidden - hidden.sum(dim=0) / len(hidden)
    variance = (centred * centred).sum(dim=0) / len(hidden)
    normed = centred / (variance + 1e-5).sqrt() * weights[f"{name}.1.weight"] + weights[f"{name}.1.bias"]
    return normed.clamp(min=0) @ weights[f"{name}.3.weight"].T


def byol_loss_by_formula(training: Updates, views: dict[str, Tensor]) -> Tensor:
    """Mean over images of |p1/|p1| - z2/|z2||^2 + |p2/|p2| - z1/|z1||^2, with z constant."""
    method, weights, p, z = training.method, dict(training.method.named_parameters()), [], []
    for images in (views["first"], views["second"]):
        projection = two_layers(class_tokens(method.base, images), weights, "base.projector")
        p.append(two_layers(projection, weights, "predictor"))
        z.append(two_layers(class_tokens(method.momentum, images), weights, "momentum.projector").detach())
    p, z = ([vectors / (vectors * vectors).sum(dim=1, keepdim=True).sqrt() for vectors in side] for side in (p, z))
    return sum(((p[view] - z[1 - view]) ** 2).sum() for view in (0, 1)) / len(p[0])


def class_tokens(network: torch.nn.Module, images: Tensor) -> Tensor:
    """(B, D) after the final norm."""
    return network.vit(images)[0][:, 0]


def test_an_update_follows_the_formulas(training):
    """Loss, every gradient, and the target network after the optimiser's step."""
    (views,) = batches(training.method, plan())
    trained = {name: p for name, p in training.method.named_parameters() if p.requires_grad}
    expected = byol_loss_by_formula(training, views)
    gradients = dict(zip(trained, torch.autograd.grad(expected, list(trained.values())), strict=True))
    before = {name: p.detach().clone() for name, p in training.method.momentum.named_parameters()}
    now = progress(plan(), step=2)
    assert_close(training.run([views], now)["loss"], expected, EXACT, "loss")
    for name, parameter in trained.items():
        if gradients[name].norm() > 1e-12:  # smaller ones are biases in front of a batch norm
            assert_close(parameter.grad, gradients[name], EXACT, f"gradient of {name}")
    tau = 1 - (1 - training.method.settings.teacher_momentum) * (math.cos(math.pi * now.step / now.steps) + 1) / 2
    online = dict(training.method.base.named_parameters())
    for name, parameter in training.method.momentum.named_parameters():
        assert_close(parameter, tau * before[name] + (1 - tau) * online[name], EXACT, f"target's {name}")


def test_with_momentum_0_the_target_equals_the_online_network(training):
    """tau = 0 at the first update; only parameters move, not the statistics of batch norms."""
    training.method.settings = replace(training.method.settings, teacher_momentum=0.0)
    training.run(batches(training.method, plan()), progress(plan()))
    pairs = zip(training.method.base.named_parameters(), training.method.momentum.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        torch.testing.assert_close(theirs.detach(), ours.detach(), msg=name)
    norms = training.method.base.projector[1], training.method.momentum.projector[1]
    assert not torch.allclose(norms[0].running_mean, norms[1].running_mean)


def test_heads_have_the_papers_layers_and_spare_biases_from_decay(training):
    method = training.method
    for head in (method.base.projector, method.predictor):
        assert head[0].bias is not None and head[3].bias is None and len(head) == 4
    decays = {name: group.weight_decay for group in method.groups() for name in group.parameters}
    assert decays["base.projector.0.bias"] == decays["predictor.1.weight"] == 0.0
    assert decays["base.projector.0.weight"] is None


def test_the_baseline_loss_is_that_of_the_best_constant(training):
    """Up to the correction for fitting the constant to the batch; no statistics move."""
    (views,) = batches(training.method, plan())
    before = {name: buffer.clone() for name, buffer in training.method.named_buffers()}
    baseline = training.method.baseline_loss(views)["loss"]
    training.method.momentum.eval()
    fitted = 0.0
    for targets in training.method.targets(views):
        units = torch.nn.functional.normalize(targets)
        constant = torch.nn.functional.normalize(units.mean(dim=0), dim=0)
        fitted += (units - constant).square().sum(dim=1).mean()
    assert fitted <= baseline <= 4.0 and baseline == pytest.approx(fitted.item(), rel=0.3)
    assert all(torch.equal(buffer, before[name]) for name, buffer in training.method.named_buffers())
