"""SimDINOv2 beyond its recorded steps: scheduled weights and a separate head."""

from dataclasses import replace

import pytest
import torch

from pretrain.method import TrainProgress
from pretrain.methods import simdinov2


def test_eps_and_compression_weight_follow_half_a_cosine():
    """They reach their ends after `end_epoch` epochs and keep them."""
    recipe = simdinov2.RECIPES["smoke"]
    settings = replace(recipe.settings, eps=0.05, eps_end=0.45, compression_weight_end=3.0, end_epoch=2)
    method = simdinov2.METHOD(recipe.spec, settings)
    for step, expected in {0: (0.05, 1.0), 10: (0.25, 2.0), 20: (0.45, 3.0), 39: (0.45, 3.0)}.items():
        method.before_forward(TrainProgress(step=step, steps_per_epoch=10, epochs=4))
        assert (method.coding_rate.eps, method.coding_rate.compression_weight) == pytest.approx(expected, rel=1e-12)


def test_a_separate_head_is_used_for_masked_patches_alone():
    recipe = simdinov2.RECIPES["smoke"]
    method = simdinov2.METHOD(recipe.spec, replace(recipe.settings, separate_head=True, patch_bottleneck=24))
    method.before_forward(TrainProgress(step=0, steps_per_epoch=1, epochs=1))
    generator = torch.Generator().manual_seed(0)
    side, patches = recipe.spec.side, recipe.spec.grid[0] * recipe.spec.grid[1]
    crops = torch.randn(3, 2, 3, side, side, generator=generator)
    masks = torch.zeros(3, 2, patches, dtype=torch.bool)
    masks[:, 0, :5] = True
    step = method({"global": crops, "mask": masks})
    patch_head = list(method.student.patch_head.parameters())
    gradients = torch.autograd.grad(step.loss, [*patch_head, *method.student.head.parameters()])
    assert all(gradient.norm() > 0 for gradient in gradients)
    unmasked = method({"global": crops, "mask": torch.zeros_like(masks)}).loss
    assert not any(gradient.any() for gradient in torch.autograd.grad(unmasked, patch_head, materialize_grads=True))
