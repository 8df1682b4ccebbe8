"""Shapes of masks: BEiT's blocks against recorded ones bit for bit, the others by what they have to look like."""

import random

import pytest
import torch
from recorded import recording

from pretrain.parts.mask_shapes import MaskNoise, blocks
from pretrain.parts.masking import mask_at

DATA, CONFIG = recording("beit/beit_step.safetensors")


@pytest.mark.parametrize(
    ("recorded", "hidden", "least"),
    [("maskgen.beit_14_75_16_none", 75, 16), ("maskgen.d2v_14_120_16_196", 120, 16)],
)
def test_blocks_are_the_recorded_ones(recorded, hidden, least):
    """Four masks in a row from Python's generator (unilm beit/masking_generator.py); 196 is as good as no limit."""
    random.seed(CONFIG["mask_seed"])
    for mask in DATA[recorded]:
        ours = blocks((14, 14), hidden, least)
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
