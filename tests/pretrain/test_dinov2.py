"""DINOv2 beyond its recorded steps: masks, stochastic depth, registers, two processes."""

from dataclasses import replace

import pytest
import torch
from elsewhere import together
from small_trainings import forward_pass
from torch import Tensor
from toys import picture, progress

from checkpoints.vit import ViT
from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.dinov2 import METHOD, RECIPES, DinoV2, drop_subsets_
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


def test_blocks_without_stochastic_depth_equal_timms():
    torch.manual_seed(0)
    vit, images = ViT(SPEC), torch.randn(2, 3, 16, 16)
    before = vit(images)[0]
    torch.testing.assert_close(drop_subsets_(vit, [0.0] * SPEC.depth)(images)[0], before, rtol=1e-5, atol=1e-5)


def test_the_student_drops_paths_and_the_teacher_does_not():
    method, crops = dinov2(drop_path=0.5), views()["global"]
    assert torch.equal(method.teacher.class_tokens(crops), method.teacher.class_tokens(crops))
    assert not torch.equal(method.student.class_tokens(crops), method.student.class_tokens(crops))


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
