"""MaskFeat against recorded steps and HOG features of its official code (facebookresearch/SlowFast 287ec00).

Networks in float64; HOG features in float32, as in the official code.
"""

import random
from dataclasses import replace

import pytest
import torch
from recorded import EXACT, RecordedTraining, recording
from recordings import ELSEWHERE, facts, matches, tensors

from pretrain.methods.maskfeat import METHOD, TRUNK, Settings, hog
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("maskfeat/maskfeat_step.safetensors")
HOG, OPTIONS = tensors("maskfeat/maskfeat_hog.safetensors"), facts("maskfeat/maskfeat_hog.safetensors")
TARGET = 1e-6  # the README's limit
OURS = {
    "mask_token": "mask_token",
    "pred_head.transforms.0.0.weight": "vit.trunk.norm.weight",
    "pred_head.transforms.0.0.bias": "vit.trunk.norm.bias",
    "pred_head.projections.0.weight": "projection.weight",
    "pred_head.projections.0.bias": "projection.bias",
}


class TestMaskfeat(RecordedTraining):
    data, config = DATA, CONFIG
    method, design = METHOD, TRUNK
    LOSS, NORM, END = 1e-7, 1e-6, 1e-6  # the README's limits

    def our_name(self, official):
        return OURS.get(official, f"vit.trunk.{official}")

    def settings(self):
        return Settings(mask_ratio=self.config["mask_ratio"])

    def schedule(self):
        peak = self.config["lr"]
        start, floor = self.config["warm_lr"] / peak, self.config["min_lr"]
        return WarmupCosine(warmup=self.config["warmup"], start=start, floor=floor)

    def views(self, forward):
        return {"image": self.data[f"in{forward}.image"], "mask": self.data[f"in{forward}.mask"].flatten(1)}

    def outputs(self, method, step):
        if step:
            return
        image, mask = self.data["in0.image"], self.data["in0.mask"].flatten(1).bool()
        patches = torch.where(mask.unsqueeze(-1), method.mask_token, method.vit.project(image))
        embedded = method.vit.add_positions(patches, method.spec.grid)
        yield "act0.embed", embedded, EXACT, self.data["act0.embed"][:, 1:]
        blocks = method.vit.encode(embedded, layers=range(self.config["depth"]), norm=False)
        for number, tokens in enumerate(blocks):
            yield f"act0.block{number}", tokens, EXACT
        yield "out0.pred", method.predict(image, mask), EXACT

    def test_targets_equal_the_recorded_ones(self):
        method = self.begin().method
        assert_near(method.targets(self.data["in0.image"]), self.data["hog0.all_targets"])
        for step in range(self.steps):
            mask = self.data[f"in{step}.mask"].flatten(1).bool()
            assert_near(method.targets(self.data[f"in{step}.image"])[mask], self.data[f"out{step}.target"])

    @pytest.mark.parametrize("masks", [match[0] for match in matches(r"maskgen\.\d+_[\d.]+", DATA)])
    def test_masks_equal_the_recorded_ones(self, masks):
        """maskgen.14_0.4: consecutive masks from Python's generator on a 14 x 14 grid, of which 0.4 is hidden."""
        side, ratio = masks.removeprefix("maskgen.").split("_")
        spec = replace(self.recipe().spec, image_size=int(side) * self.config["patch"])
        draw = METHOD(spec, Settings(mask_ratio=float(ratio))).draw_mask
        random.seed(self.config["mask_seed"])
        for mask in self.data[masks]:
            assert torch.equal(draw().reshape(mask.shape), mask.bool())


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= TARGET


@pytest.mark.parametrize(
    ("image", "recorded", "options"),
    [
        ("smooth.image", "smooth.hog", {}),
        ("smooth.image", "smooth.pool.hog", {"cell": OPTIONS["other_pool"]}),
        ("smooth.image", "smooth.bins.hog", {"bins": OPTIONS["other_bins"]}),
        ("smooth.image", "smooth.gauss.hog", {"window": OPTIONS["gaussian_window"]}),
        ("u8.image", "u8.hog", {}),
        ("u8.pixels", "u8.hog_of_raw_pixels", {}),
    ],
)
def test_hog_features_equal_the_recorded_ones(image, recorded, options):
    """All cells are compared, including flat ones and those in which rounding decides.

    The latter are left out of recordings elsewhere, as the README says: another processor may round differently.
    """
    images = HOG[image].float()
    images = images if images.ndim == 4 else images.unsqueeze(0)
    theirs = HOG[recorded].reshape(len(images), *HOG[recorded].shape[-4:])
    ours = hog(images, **{"bins": OPTIONS["bins"], "cell": OPTIONS["pool"], **options})
    if recorded == "u8.hog" and ELSEWHERE:
        clear = HOG["u8.ambiguous_cell"].unsqueeze(1).expand_as(ours) == 0
        assert clear.any()
        ours, theirs = ours[clear], theirs[clear]
    assert_near(ours, theirs)


def test_hog_features_of_ramps_equal_the_recorded_ones():
    """One direction in the complete cell: its histogram is in one bin."""
    cell = OPTIONS["pool"]
    place = torch.arange(4.0 * cell)
    for (column, row), recorded in zip(HOG["ramps.column_row_slope"], HOG["ramps.hog_inner_cell"], strict=True):
        plane = column * place.unsqueeze(0) + row * place.unsqueeze(1)
        assert_near(hog(plane.expand(1, 3, -1, -1), OPTIONS["bins"], cell)[0, 0, :, 1, 1], recorded)
