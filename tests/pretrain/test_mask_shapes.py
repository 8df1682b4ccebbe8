"""Shapes of masks: BEiT's blocks equal the recorded ones bit for bit; properties of the other shapes."""

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
# Names of masks: side of the grid, hidden patches, least and most in a block.
MASKS = [
    (file, match) for file in FILES for match in matches(r"maskgen\.\w+?_(\d+)_(\d+)_(\d+)_(\d+|none)", tensors(file))
]


@pytest.mark.parametrize(("file", "recorded"), MASKS)
def test_blocks_equal_the_recorded_ones(file, recorded):
    """Consecutive masks from Python's generator (unilm beit/masking_generator.py)."""
    side, hidden, least = (int(recorded[number]) for number in (1, 2, 3))
    draw = BlockMask((side, side), hidden, least, None if recorded[4] == "none" else int(recorded[4]))
    random.seed(facts(file)["mask_seed"])
    for mask in tensors(file)[recorded[0]]:
        ours = draw()
        assert torch.equal(ours.reshape(side, side), mask.bool())
        assert int(ours.sum()) <= hidden


@pytest.mark.parametrize("name", ["beit", "data2vec", "maskfeat"])
def test_a_batch_of_empty_masks_is_refused(name):
    """One image without a mask is accepted and does not change the loss."""
    module = load_extension("methods", name)
    method = build(module, module.RECIPES["smoke"], 0)
    views = default_collate([method.views()(open_set("digits:", "train").image(index)) for index in range(2)])
    with_one_mask = {**views, "mask": views["mask"].clone().index_fill_(0, torch.tensor([1]), False)}
    masked_image = {key: value[:1] for key, value in with_one_mask.items()}
    assert with_one_mask["mask"].any() and method(with_one_mask).loss.item() == pytest.approx(
        method(masked_image).loss.item(), rel=1e-5
    )
    with pytest.raises(ValueError, match="none of the 2 images of this forward pass has a hidden patch"):
        method({**views, "mask": torch.zeros_like(views["mask"])})


def hidden_by(noise: MaskNoise) -> torch.Tensor:
    """(h, w) bool: the hidden patches of one draw, which are the last in its order."""
    ids = noise().argsort()[-noise.hidden :]
    return mask_at(ids.unsqueeze(0), noise.grid[0] * noise.grid[1]).reshape(noise.grid)


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0), torch.manual_seed(0)


@pytest.mark.parametrize("sampling", ["random", "block", "grid", "square"])
def test_every_shape_hides_the_set_number_and_differs_between_images(sampling):
    masks = [hidden_by(MaskNoise(sampling, (8, 8), {"grid": 48, "square": 36}.get(sampling, 40))) for _ in range(20)]
    assert len({int(mask.sum()) for mask in masks}) == 1
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 3


def test_a_block_mask_covers_its_rectangles_and_is_completed():
    random.seed(3)
    block = blocks((14, 14), 75, 16)
    random.seed(3)
    mask = hidden_by(MaskNoise("block", (14, 14), 75))
    assert (mask | ~block).all() and int(mask.sum()) == 75


def test_a_grid_mask_shows_one_patch_of_each_four():
    mask = hidden_by(MaskNoise("grid", (6, 8), 36))
    cells = (~mask).unfold(0, 2, 2).unfold(1, 2, 2).flatten(2)  # (3, 4, 4)
    assert (cells.sum(-1) == 1).all() and len(cells.flatten(0, 1).unique(dim=0)) == 1


def test_a_square_mask_is_a_square():
    for _ in range(5):
        mask = hidden_by(MaskNoise("square", (7, 7), 25))
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert len(rows) == len(columns) == 5 and mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
