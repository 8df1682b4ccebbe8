"""MaskFeat beside its recordings: what it sees and is asked for, HOG features by hand, initial weights, mistakes."""

import math
from dataclasses import replace

import pytest
import torch
from small_trainings import forward_pass
from toys import SMALL, progress, views_of

from pretrain.method import Method
from pretrain.methods.maskfeat import METHOD, RECIPES, TRUNK, by_patch, hog
from pretrain.parts.masking import patchify

SPEC = replace(SMALL, **TRUNK)
SETTINGS = RECIPES["smoke"].settings


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_only_visible_pixels_are_seen_and_only_hidden_patches_are_asked_for():
    method = method_of()
    views = views_of(method)
    mask, images = views["mask"].bool(), views["image"].requires_grad_()
    assert 0 < mask.sum() <= 6 * len(mask)  # round(16 * 0.4)
    prediction = method.predict(images, mask)
    (seen,) = torch.autograd.grad(prediction.square().sum(), images)
    assert torch.equal(patchify(seen, 4).abs().sum(-1) == 0, mask)
    error = prediction - method.targets(images)[mask]
    torch.testing.assert_close(forward_pass(method, views, progress()).loss, error.square().mean())


def test_histograms_by_hand():
    """Pixel by pixel, away from the edges of bins: the middle cells of noise."""
    torch.manual_seed(0)
    image = torch.rand(1, 3, 16, 16)
    found, bins, cell = hog(image, bins=6, cell=4), 6, 4
    for colour in range(3):
        plane = image[0, colour].double()
        votes = torch.zeros(bins, dtype=torch.float64)
        for row in range(4, 8):
            for column in range(8, 12):
                near = plane[row - 1 : row + 2, column - 1 : column + 2]
                weights = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
                across = float(weights @ (near[:, 0] - near[:, 2]))
                down = float((near[0] - near[2]) @ weights)
                angle = math.atan2(across, down) % math.pi  # unsigned, from the vertical
                votes[int(angle / math.pi * bins)] += math.hypot(across, down)
        torch.testing.assert_close(found[0, colour, :, 1, 2].double(), votes / votes.norm(), atol=1e-6, rtol=0)
    assert found.shape == (1, 3, bins, 16 // cell, 16 // cell)


def test_histograms_of_each_patch():
    histograms = torch.arange(2 * 3 * 5 * 4 * 6.0).reshape(2, 3, 5, 4, 6)  # 2 x 3 patches of 2 x 2 cells
    patches = by_patch(histograms, cells=2)
    assert patches.shape == (2, 6, 3 * 5 * 4)
    expected = histograms[1, :, :, 2:4, 2:4]  # second row, second column of patches
    assert torch.equal(patches[1, 4], expected.flatten())


def test_colours_and_contrast_leave_histograms_as_they_are():
    image = torch.rand(2, 3, 16, 16)
    scaled = image * torch.tensor([0.5, 2.0, 4.0]).view(3, 1, 1)
    torch.testing.assert_close(hog(scaled, cell=4), hog(image, cell=4), atol=1e-6, rtol=0)


def test_targets_do_not_depend_on_autocast():
    method = method_of().float()
    images = views_of(method, dtype=torch.float32)["image"]
    exact = method.targets(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.targets(images), exact)


def test_initial_weights():
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
    assert trunk.patch_embed.proj.bias.abs().max() > 0.02  # torch's own
    for bias in (trunk.norm.bias, method.projection.bias):
        assert (bias == 0).all()


def test_the_published_rates():
    """lr, warm-up's start and end of the cosine are for 256 images (BASE_LR_SCALE_NUM_SHARDS)."""
    recipe = RECIPES["vit_b"]
    shards = recipe.batch / 256
    assert recipe.peak == pytest.approx(2e-4 * shards) and recipe.schedule.floor == pytest.approx(1e-6 * shards)
    assert recipe.schedule.start * recipe.peak == pytest.approx(1e-6 * shards)
