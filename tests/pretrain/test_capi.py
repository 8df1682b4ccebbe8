"""CAPI beyond its recorded steps: positions of registers, masks, two processes."""

import random
from dataclasses import replace

import pytest
import torch
from elsewhere import together
from small_trainings import same
from torch import Tensor
from toys import progress

from checkpoints.vit import ViT
from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.methods.capi import METHOD, RECIPES, Capi
from pretrain.parts.mask_shapes import one_block

SMOKE = RECIPES["smoke"]


def capi(**changes) -> Capi:
    torch.manual_seed(0)
    return METHOD(SMOKE.spec, replace(SMOKE.settings, **changes)).double()


def views(method: Capi, images: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    pictures = torch.randn(images, 3, 16, 16, dtype=torch.float64)
    return {"image": pictures, "ids": torch.stack([method.mask() for _ in range(images)])}


def test_registers_lie_on_the_border_of_the_visible_patches():
    rope = ViT(SMOKE.spec).trunk.rope
    corners = [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert rope.positions((4, 4))[:4].tolist() == corners
    keep = torch.tensor([[5, 10], [4, 7]])  # rows 1 and 2, columns 1 and 2; row 1, columns 0 and 3
    third = torch.tensor(1 / 3)
    boxes = rope.positions((4, 4), keep)[:, :4]
    torch.testing.assert_close(boxes[0], third + third * torch.tensor(corners))
    torch.testing.assert_close(boxes[1], torch.tensor([[1.0, 0], [1, 0], [1, 1], [1, 1]]) * torch.tensor([third, 1]))
    image = ViT(replace(SMOKE.spec, register_box="image")).trunk.rope.positions((4, 4), keep)
    assert image[:, :4].tolist() == [corners] * 2 and torch.equal(image[:, 4:], rope.positions((4, 4), keep)[:, 4:])
    corner = ViT(replace(SMOKE.spec, register_place="corner")).trunk.rope.positions((4, 4), keep)
    assert (corner[0, :4] == third).all()


@pytest.mark.parametrize("count", [1, 6, 15])
def test_a_block_is_connected_across_the_edges(count):
    for roll in (False, True):
        for _ in range(50):
            block = one_block((4, 4), count, roll)
            assert block.sum() == count
            rows, columns = (block.any(dim=axis).nonzero().flatten() for axis in (1, 0))
            if not roll:
                assert rows[-1] - rows[0] < len(rows) and columns[-1] - columns[0] < len(columns)


def state_after_updates(world: World) -> dict[str, Tensor]:
    """State after three updates with the process's share of a batch, with Sinkhorn-Knopp over all positions."""
    changes = {"sinkhorn_by_position": False}
    recipe = replace(SMOKE, settings=replace(SMOKE.settings, **changes))
    updates = Updates(capi(**changes), recipe, world=world)
    share = slice(2 * world.rank, 2 * world.rank + 2) if world.size > 1 else slice(None)
    batch = {name: tensor[share] for name, tensor in views(updates.method).items()}
    for step in range(3):
        updates.run([batch], replace(progress(), step=step + 1, epochs=4))
    return {name: tensor.detach() for name, tensor in updates.method.state_dict().items()}


def test_two_processes_train_as_one():
    first, second = together(state_after_updates)
    assert same(first, second)
    for name, tensor in state_after_updates(World()).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
