"""I-JEPA beyond its recorded steps: when context blocks may overlap targets, and the blocks of a batch."""

from dataclasses import replace

import torch
from toys import progress

from pretrain.methods.ijepa import METHOD, RECIPES, TRIES, IJepa, free_blocks

SMOKE = RECIPES["smoke"]


def ijepa(**changes) -> IJepa:
    torch.manual_seed(0)
    return METHOD(replace(SMOKE.spec, image_size=32), replace(SMOKE.settings, **changes)).double()


def noise(method: IJepa, images: int = 5) -> torch.Tensor:
    s = method.settings
    count = s.target_blocks + s.context_blocks * TRIES * (s.target_blocks + 1)
    return torch.rand(images, count, 2, generator=torch.Generator().manual_seed(0))


def test_after_too_many_tries_a_context_block_may_overlap_the_last_target():
    targets = torch.zeros(1, 2, 64, dtype=torch.bool)
    targets[0, 0, :32], targets[0, 1, 32:] = True, True
    tries = torch.zeros(1, 1, 3 * TRIES, 64, dtype=torch.bool)
    tries[..., 30:40] = True  # of which the first target has 2, the second 8
    free, first = free_blocks(tries, targets, min_keep=5)
    assert first.item() == TRIES and free[0, 0].nonzero().flatten().tolist() == list(range(32, 40))
    tries[..., 7, :] = False
    targets[:, 1] = False
    free, first = free_blocks(tries, targets, min_keep=5)
    assert first.item() == 0 and free.sum() == 8


def test_contexts_of_a_batch_have_equal_sizes_and_no_target_patch():
    method = ijepa(context_blocks=2, min_keep=2)
    contexts, targets = method.block_ids(noise(method))
    assert contexts.shape[:2] == (2, 5) and targets.shape[:2] == (4, 5)
    for image in range(5):
        context_sets = [set(ids[image].tolist()) for ids in contexts]
        target_set = set(targets[:, image].flatten().tolist())
        assert all(not part & target_set and len(part) == contexts.shape[2] for part in context_sets)


def test_block_sizes_are_drawn_once_per_update():
    method, drawn = ijepa(), []
    for step, part in ((3, 0), (3, 1), (4, 0)):
        method.before_forward(replace(progress(), step=step, micro_batch=part, micro_batches=2))
        drawn.append(method.uniform)
    assert drawn[0] == drawn[1] != drawn[2]
