"""DINOv2 beyond its recorded steps: crops, masks, registers, position tables, two processes."""

import random
from dataclasses import replace
from math import isnan

import pytest
import torch
from elsewhere import together
from small_trainings import forward_pass
from torch import Tensor
from toys import picture, progress

from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.dinov2 import METHOD, RECIPES, DinoV2
from pretrain.parts.losses import koleo_loss
from pretrain.parts.teachers import sinkhorn_targets

SMOKE = RECIPES["smoke"]
SPEC, SETTINGS = SMOKE.spec, SMOKE.settings
PHOTO = picture(0, 50, 40)


def dinov2(spec=SPEC, **changes) -> DinoV2:
    torch.manual_seed(0)
    return METHOD(spec, replace(SETTINGS, **changes)).double()


def views(count: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    crops = torch.randn(count, 2, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"global": crops, "mask": torch.rand(count, 2, 16, generator=generator) < 0.3}


def test_as_many_crops_are_masked_as_set():
    for crops in range(3):
        method = dinov2(masked_crops=crops, mask_ratio=(0.4, 0.5))
        masks = [method.views()(PHOTO)["mask"] for _ in range(8)]
        assert {int(mask.any(dim=1).sum()) for mask in masks} == {crops}
        assert max(mask.sum(dim=1).max() for mask in masks) <= 8  # half of the patches


def test_registers_have_no_positions():
    """Their rows of the position table stay zero under Adam with weight decay."""
    method = dinov2(replace(SPEC, registers=2))
    updates = Updates(method, replace(SMOKE, spec=method.spec, lr=1e-2))
    for step in range(3):
        updates.run([views()], replace(progress(), step=step))
    table = method.student.vit.trunk.pos_embed
    assert not table[:, 1:3].any() and table[:, :1].any() and table[:, 3:].any()


def test_a_position_table_of_patches_alone_is_trained():
    """As in timm's DINOv2 with registers: no rows for class token and registers."""
    method = dinov2(replace(SPEC, registers=2, class_position=False))
    before = method.student.vit.trunk.pos_embed.detach().clone()
    updates = Updates(method, replace(SMOKE, spec=method.spec, lr=1e-2))
    for step in range(2):  # the warm-up begins at 0
        updates.run([views()], replace(progress(), step=step))
    moved = (method.student.vit.trunk.pos_embed != before).any(dim=-1)
    assert before.abs().sum(dim=-1).all() and moved.all()


@pytest.mark.parametrize("key", ["vit_l", "vit_b", "vit_l14", "vit_g14"])
def test_crops_are_blurred_as_often_as_by_the_released_code(key):
    """data/transforms.py:12-21 blurs with 1 - p: the first global crop never, the second mostly; torchvision's blur."""
    recipe = RECIPES[key]
    method = METHOD(SPEC, replace(recipe.settings, local_size=8, prototypes=8, head_hidden=8, patch_prototypes=8))
    large, small = (maker.makers for maker in method.views().makers.values())
    torch.manual_seed(0), random.seed(0)
    for maker, share in zip([*large, small[0]], [0.0, 0.9, 0.5], strict=True):
        changes = [maker.steps[-1].draw() for _ in range(2000)]
        blurred = [change for change in changes if not isnan(change.radius)]
        assert len(blurred) / 2000 == pytest.approx(share, abs=0.04)
        assert {change.kernel for change in blurred} <= {9} and all(0.1 <= c.radius <= 2.0 for c in blurred)


def koleo_of_a_share(world: World, size: int) -> tuple[Tensor, Tensor]:
    """KoLeo of this process's class tokens, and their gradient, which DDP divides by the number of processes."""
    tokens = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = tokens.chunk(world.size)[world.rank].clone().requires_grad_()
    loss = dinov2(koleo_weight=0.1, koleo_images=size).koleo(share)
    loss.backward()
    return loss.detach(), share.grad / world.size


@pytest.mark.parametrize("size", [4, 8])
def test_koleo_looks_among_chunks_of_images(size):
    """As on each GPU of the source; the same in two processes."""
    loss, gradient = koleo_of_a_share(World(), size)
    tokens = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = sum(koleo_loss(chunk[:, crop]) for chunk in tokens.split(size) for crop in range(2)) / (8 // size)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (first, first_gradient), (second, second_gradient) = together(koleo_of_a_share, size)
    torch.testing.assert_close((first + second) / 2, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([first_gradient, second_gradient]), gradient, rtol=1e-12, atol=1e-15)


def targets_of_a_share(world: World) -> Tensor:
    logits = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = slice(4 * world.rank, 4 * world.rank + 4) if world.size > 1 else slice(None)
    return sinkhorn_targets(logits[share], 0.05)


def test_two_processes_have_the_sinkhorn_targets_of_one():
    torch.testing.assert_close(torch.cat(together(targets_of_a_share)), targets_of_a_share(World()), rtol=1e-12, atol=0)


def test_without_masked_patches_the_patch_loss_is_zero():
    method, batch = dinov2(), views()
    batch["mask"] = torch.zeros_like(batch["mask"])
    step = forward_pass(method, batch, progress())
    assert step.logs["patch"] == 0 and step.loss.isfinite()


@pytest.mark.parametrize("unmasked", [0, 1])
def test_a_micro_batch_without_masked_patches_does_not_move_their_centre(unmasked):
    """As the first of two micro-batches it raised an error; as the second it moved the centre towards zero."""
    parts = [views(), views()]
    parts[unmasked]["mask"] = torch.zeros_like(parts[unmasked]["mask"])
    method = dinov2(center_momentum=0.0)
    method.patch_centre.center.fill_(2.0)
    outputs = method.teacher_targets(parts[1 - unmasked]["global"], parts[1 - unmasked]["mask"])[2]["patch_centre"]
    for number, part in enumerate(parts):
        now = TrainProgress(step=0, steps_per_epoch=2, epochs=1, micro_batch=number, micro_batches=2)
        method.observe(method(part).observed, now)
    method.after_update(now)
    torch.testing.assert_close(method.patch_centre.center, (outputs + 2.0) / 2)
