"""SimDINO and SimDINOv2 beside their recordings: the coding rate by its formula, processes, mistakes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from elsewhere import together
from torch import Tensor

from engine.distributed import World
from pretrain.method import TrainProgress
from pretrain.methods import simdino, simdinov2
from pretrain.methods.simdino import agreement, coding_rate

VECTORS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_coding_rate_by_its_formula():
    """By the singular values: half the sum of log(1 + d s^2 / (n eps)), times (d + n) / (d n)."""
    singular = np.linalg.svd(VECTORS.numpy(), compute_uv=False)
    rate = 0.5 * np.log1p(5 * singular**2 / (8 * 0.05)).sum() * (5 + 8) / (5 * 8)
    assert coding_rate(VECTORS, 0.05).item() == pytest.approx(rate, rel=1e-12)


def test_coding_rate_is_largest_for_vectors_that_are_spread():
    unit = torch.nn.functional.normalize(VECTORS, dim=1)
    collapsed = unit[:1].expand_as(unit)
    assert coding_rate(unit, 0.05) > coding_rate(0.5 * unit + 0.5 * collapsed, 0.05) > coding_rate(collapsed, 0.05)


def test_agreement_is_a_mean_over_pairs_of_different_views():
    generator = torch.Generator().manual_seed(1)
    views, others, targets = (torch.randn(3, count, 4, generator=generator) for count in (2, 3, 2))
    everything = torch.cat([views, others], dim=1)
    pairs = [(targets[:, i] * everything[:, j]).sum(-1).mean() for i in range(2) for j in range(5) if i != j]
    torch.testing.assert_close(agreement(views, others, targets), torch.stack(pairs).mean())


def rate_of_a_share(world: World) -> tuple[Tensor, Tensor]:
    vectors = VECTORS.clone().requires_grad_()
    share = vectors[4 * world.rank : 4 * world.rank + 4] if world.size > 1 else vectors
    rate = coding_rate(share, 0.05)
    return rate.detach(), torch.autograd.grad(rate / world.size, vectors)[0]


def test_two_processes_have_the_coding_rate_of_all_images():
    (first, one), (second, two) = together(rate_of_a_share)
    rate, gradient = rate_of_a_share(World())
    torch.testing.assert_close(torch.stack([first, second]), torch.stack([rate, rate]), rtol=1e-12, atol=0)
    torch.testing.assert_close(one + two, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("module", [simdino, simdinov2])
def test_there_are_no_prototypes(module):
    recipe = module.RECIPES["smoke"]
    method = module.METHOD(recipe.spec, recipe.settings)
    assert not [name for name, _ in method.named_parameters() if "last_layer" in name]
    vectors = method.student.head(torch.randn(3, recipe.spec.width))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))


def test_weights_that_change():
    """SimDINOv2's: half a cosine to their ends over `end_epoch` epochs, which they keep."""
    recipe = simdinov2.RECIPES["smoke"]
    settings = replace(recipe.settings, eps=0.05, eps_end=0.45, compression_weight_end=3.0, end_epoch=2)
    method = simdinov2.METHOD(recipe.spec, settings)
    for step, expected in {0: (0.05, 1.0), 10: (0.25, 2.0), 20: (0.45, 3.0), 39: (0.45, 3.0)}.items():
        method.before_forward(TrainProgress(step=step, steps_per_epoch=10, epochs=4))
        assert (method.coding_rate.eps, method.coding_rate.compression_weight) == pytest.approx(expected, rel=1e-12)


def test_a_separate_head_serves_masked_patches_alone():
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


@pytest.mark.parametrize(
    ("changes", "message"), [({"eps": 0.0}, "eps=0.0"), ({"expansion_of": "teacher"}, "expansion_of='teacher'")]
)
def test_mistakes_are_one_line(changes, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        replace(simdino.RECIPES["smoke"].settings, **changes)
