"""SimDINO and SimDINOv2 beyond their recorded steps: covariances of chunks, scheduled weights, a separate head."""

from dataclasses import replace

import pytest
import torch
from elsewhere import together
from refusals import refusal
from small_trainings import small_recipe, trainer
from torch import Tensor
from torch.nn import functional as F

from engine.distributed import World
from pretrain.method import TrainProgress
from pretrain.methods import simdinov2
from pretrain.methods.simdino import CodingRateSettings, simdino_loss

GPUS, IMAGES, WIDTH = 4, 4, 12  # GPUs of the source, images of each, width of the vectors
EXPANSION = CodingRateSettings(covariance_images=IMAGES, compression_weight=0.0)


def unit_vectors(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of two global crops of all images: (GPUS * IMAGES, 2, WIDTH)."""
    vectors = torch.randn(GPUS * IMAGES, 2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(vectors, dim=-1).to(dtype)


def expansion_of_gpus(vectors: Tensor, eps: float) -> Tensor:
    """The source's expansion term (simdino/main_dino.py:536-561, reduce_cov=0), a mean over its GPUs."""
    images, rates = len(vectors), []
    for gpu in vectors.split(IMAGES):
        for crop in gpu.unbind(1):
            matrix = torch.eye(WIDTH, dtype=crop.dtype) + WIDTH / (images * eps) * crop.T @ crop
            rates.append(matrix.logdet() / 2 * (WIDTH + images) / (WIDTH * images))
    return torch.stack(rates).mean()


def expansion_and_gradient(world: World, size: int, micro_batches: int = 1) -> tuple[Tensor, Tensor]:
    """Expansion and gradient of the vectors of this process, which DDP divides by the number of processes, in chunks of
    `size` images; means over the micro-batches."""
    share = GPUS * IMAGES // world.size
    vectors, targets = (unit_vectors(seed).split(share)[world.rank].clone() for seed in (0, 1))
    vectors.requires_grad_()
    settings, expansions = replace(EXPANSION, covariance_images=size), []
    for part, part_targets in zip(vectors.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss, logs = simdino_loss(part, None, part_targets, settings, micro_batches)
        (loss / micro_batches).backward()
        expansions.append(logs["expansion"])
    return torch.stack(expansions).mean(), vectors.grad / world.size


def test_chunks_expand_as_the_gpus_of_the_source():
    """Each has a covariance of its own, divided by the images of all; with one for all, the term is larger."""
    vectors, targets = unit_vectors(0, torch.float64), unit_vectors(1, torch.float64)
    _, logs = simdino_loss(vectors, None, targets, EXPANSION)
    expected = expansion_of_gpus((vectors + targets) / 2, EXPANSION.eps)
    torch.testing.assert_close(logs["expansion"], expected, rtol=1e-12, atol=0)
    _, gathered = simdino_loss(vectors, None, targets, replace(EXPANSION, covariance_images=0))
    assert gathered["expansion"] > 1.5 * logs["expansion"]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_chunks_have_the_same_bits_in_two_processes(size):
    """Also a chunk of both processes' images."""
    (first, first_gradient), (second, second_gradient) = together(expansion_and_gradient, size)
    expansion, gradient = expansion_and_gradient(World(), size)
    assert torch.equal((first + second) / 2, expansion)
    assert torch.equal(torch.cat([first_gradient, second_gradient]), gradient)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_chunks_have_the_same_bits_in_micro_batches(micro_batches):
    whole, parts = expansion_and_gradient(World(), IMAGES), expansion_and_gradient(World(), IMAGES, micro_batches)
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])


@pytest.mark.parametrize(("name", "setting"), [("simdino", "covariance_images"), ("dinov2", "koleo_images")])
def test_forward_passes_without_whole_chunks_are_refused_before_the_training(name, setting, tmp_path):
    settings = replace(small_recipe(name).settings, **{setting: 4})
    message = refusal(trainer, name, tmp_path / "out", micro_batch=2, recipe=dict(settings=settings))
    assert f"{setting}=4" in message and "2 images" in message and "batch_size" in message
    assert not (tmp_path / "out").exists()
    assert trainer(name, tmp_path / "out", micro_batch=4, recipe=dict(settings=settings)).train() == "finished"


def test_vectors_that_are_no_whole_chunks_are_refused():
    """In a training loop of one's own."""
    message = refusal(simdino_loss, unit_vectors(0)[:6], None, unit_vectors(1)[:6], EXPANSION)
    assert "covariance_images=4" in message and "6 images" in message


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
