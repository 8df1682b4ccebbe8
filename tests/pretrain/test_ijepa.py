"""I-JEPA beside its recordings: where blocks are, when context blocks may overlap targets, what is seen, mistakes."""

from dataclasses import replace

import pytest
import torch
from toys import progress

from pretrain.methods.ijepa import METHOD, RECIPES, TRIES, IJepa, block_size, blocks_at, free_blocks, ids_of

SMOKE = RECIPES["smoke"]
GRID = (8, 8)


def ijepa(**changes) -> IJepa:
    torch.manual_seed(0)
    return METHOD(replace(SMOKE.spec, image_size=32), replace(SMOKE.settings, **changes)).double()


def noise(method: IJepa, images: int = 5) -> torch.Tensor:
    s = method.settings
    count = s.target_blocks + s.context_blocks * TRIES * (s.target_blocks + 1)
    return torch.rand(images, count, 2, generator=torch.Generator().manual_seed(0))


def test_blocks_are_rectangles_of_the_size_asked_for():
    assert block_size(GRID, (0.2, 0.5), (0.5, 2.0), 0.0) == (2, 5)
    assert block_size(GRID, (0.2, 0.5), (0.5, 2.0), 1.0) == (7, 4)  # of 8 rows 7 at most
    blocks = blocks_at(torch.rand(50, 3, 2), (3, 2), GRID).view(-1, *GRID)
    assert (blocks.any(dim=2).sum(dim=1) == 3).all() and (blocks.any(dim=1).sum(dim=1) == 2).all()
    assert not blocks[:, -1].any() and not blocks[:, :, -1].any() and blocks[:, 0].any() and blocks[:, -2].any()


def test_a_context_block_is_moved_until_it_keeps_enough_and_then_overlaps_the_last_target():
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


def test_contexts_of_a_batch_have_as_many_patches_and_none_of_a_target():
    method = ijepa(context_blocks=2, min_keep=2)
    contexts, targets = method.block_ids(noise(method))
    assert contexts.shape[:2] == (2, 5) and targets.shape[:2] == (4, 5)
    for image in range(5):
        shown = [set(ids[image].tolist()) for ids in contexts]
        asked = set(targets[:, image].flatten().tolist())
        assert all(not part & asked and len(part) == contexts.shape[2] for part in shown)


def test_blocks_that_show_most_lose_their_last_patches():
    blocks = torch.zeros(2, 1, 6, dtype=torch.bool)
    blocks[0, 0, [1, 2, 5]], blocks[1, 0, [0, 3]] = True, True
    assert ids_of(blocks).tolist() == [[[1, 2], [0, 3]]]


def test_the_context_encoder_sees_its_patches_alone():
    method = ijepa(min_keep=2)
    contexts, targets = method.block_ids(noise(method))
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(method.predict(images, contexts, targets).square().sum(), images)
    touched = gradient.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum(dim=(1, 4, 5)).flatten(1) > 0
    assert torch.equal(touched, torch.zeros_like(touched).scatter_(1, contexts[0], True))


def test_each_target_block_is_predicted_alone():
    """What is asked for beside it does not change a prediction."""
    method = ijepa(min_keep=2)
    contexts, targets = method.block_ids(noise(method))
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    together = method.predict(images, contexts, targets).unflatten(0, (4, 5))
    torch.testing.assert_close(method.predict(images, contexts, targets[2:3]), together[2])


def test_sizes_are_those_of_the_update_in_all_its_parts():
    method, drawn = ijepa(), []
    for step, part in ((3, 0), (3, 1), (4, 0)):
        method.before_forward(replace(progress(), step=step, micro_batch=part, micro_batches=2))
        drawn.append(method.uniform)
    assert drawn[0] == drawn[1] != drawn[2]


MISTAKES = [
    ({"min_keep": 30}, "min_keep=30: a target block may have"),
    ({"predictor_width": 30}, "predictor_width=30"),
    ({"target_blocks": 0}, "target_blocks=0"),
    ({"target_scale": (0.3, 0.2)}, "target_scale"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_are_one_line(changes, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        ijepa(**changes)
