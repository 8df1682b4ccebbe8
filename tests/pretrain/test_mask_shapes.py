"""Shapes of masks: BEiT's blocks against recorded ones bit for bit, the others by what they have to look like."""

import random

import pytest
import torch
from recordings import facts, matches, tensors
from torch.utils.data import default_collate

from engine.extensions import load_extension
from imagesets.sets import open_set
from pretrain.loop.trainer import build
from pretrain.parts.mask_shapes import BlockMask, MaskNoise, blocks
from pretrain.parts.masking import mask_at

FILES = ("beit/beit_step.safetensors", "data2vec/data2vec_step.safetensors")
# Side of the grid, hidden patches, least and most in a block.
MASKS = [
    (file, found) for file in FILES for found in matches(r"maskgen\.\w+?_(\d+)_(\d+)_(\d+)_(\d+|none)", tensors(file))
]


@pytest.mark.parametrize(("file", "recorded"), MASKS)
def test_blocks_are_the_recorded_ones(file, recorded):
    """Masks in a row from Python's generator (unilm beit/masking_generator.py)."""
    side, hidden, least = (int(recorded[number]) for number in (1, 2, 3))
    draw = BlockMask((side, side), hidden, least, None if recorded[4] == "none" else int(recorded[4]))
    random.seed(facts(file)["mask_seed"])
    for mask in tensors(file)[recorded[0]]:
        ours = draw()
        assert torch.equal(ours.reshape(side, side), mask.bool())
        assert int(ours.sum()) <= hidden


@pytest.mark.parametrize("name", ["beit", "data2vec", "maskfeat"])
def test_a_batch_of_empty_masks_is_refused(name):
    """One image without a mask is not, and counts for nothing."""
    module = load_extension("methods", name)
    method = build(module, module.RECIPES["smoke"], 0)
    views = default_collate([method.views()(open_set("digits:", "train").image(at)) for at in range(2)])
    one = {**views, "mask": views["mask"].clone().index_fill_(0, torch.tensor([1]), False)}
    alone = {key: value[:1] for key, value in one.items()}
    assert one["mask"].any() and method(one).loss.item() == pytest.approx(method(alone).loss.item(), rel=1e-5)
    with pytest.raises(ValueError, match="none of the 2 images of this forward pass has a hidden patch"):
        method({**views, "mask": torch.zeros_like(views["mask"])})


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
