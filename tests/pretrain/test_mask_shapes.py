"""Shapes of masks: BEiT's blocks against recorded ones bit for bit, the others by what they have to look like."""

import random

import pytest
import torch
from recordings import facts, matches, tensors

from pretrain.parts.mask_shapes import MaskNoise, blocks
from pretrain.parts.masking import mask_at

DATA, CONFIG = tensors("beit/beit_step.safetensors"), facts("beit/beit_step.safetensors")
# Side of the grid, hidden patches, min_batch and most in a block; as many as there are is as good as no limit.
MASKS = [found for found in matches(r"maskgen\.\w+?_(\d+)_(\d+)_(\d+)_(\d+|none)", DATA)
         if found[4] in ("none", str(int(found[1]) ** 2))]  # fmt: skip


@pytest.mark.parametrize("recorded", MASKS, ids=lambda found: found[0])
def test_blocks_are_the_recorded_ones(recorded):
    """Masks in a row from Python's generator (unilm beit/masking_generator.py)."""
    side, hidden, least = (int(recorded[number]) for number in (1, 2, 3))
    random.seed(CONFIG["mask_seed"])
    for mask in DATA[recorded[0]]:
        ours = blocks((side, side), hidden, least)
        assert torch.equal(ours, mask.bool())
        assert int(ours.sum()) <= hidden


def hidden_by(noise: MaskNoise) -> torch.Tensor:
    """(h, w) bool of the last patches in the order of one draw."""
    ids = noise().argsort()[-noise.hidden :]
    return mask_at(ids.unsqueeze(0), noise.grid[0] * noise.grid[1]).reshape(noise.grid)


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0), torch.manual_seed(0)


@pytest.mark.parametrize("sampling", ["random", "block", "grid", "square"])
def test_every_shape_hides_as_many_as_asked_and_differs_between_images(sampling):
    masks = [hidden_by(MaskNoise(sampling, (8, 8), {"grid": 48, "square": 36}.get(sampling, 40))) for _ in range(20)]
    assert len({int(mask.sum()) for mask in masks}) == 1
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 3


def test_a_block_mask_covers_its_rectangles_and_is_filled_up():
    random.seed(3)
    block = blocks((14, 14), 75, 16)
    random.seed(3)
    mask = hidden_by(MaskNoise("block", (14, 14), 75))
    assert (mask | ~block).all() and int(mask.sum()) == 75


def test_a_grid_shows_one_of_each_four():
    mask = hidden_by(MaskNoise("grid", (6, 8), 36))
    cells = (~mask).unfold(0, 2, 2).unfold(1, 2, 2).flatten(2)  # (3, 4, 4)
    assert (cells.sum(-1) == 1).all() and len(cells.flatten(0, 1).unique(dim=0)) == 1


def test_a_square_is_one():
    for _ in range(5):
        mask = hidden_by(MaskNoise("square", (7, 7), 25))
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert len(rows) == len(columns) == 5 and mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
