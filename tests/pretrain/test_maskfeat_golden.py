"""MaskFeat against recorded steps and HOG features of its official code (facebookresearch/SlowFast 287ec00).

Networks in float64; HOG features in float32, as in the official code.
"""

import random
from dataclasses import replace

import pytest
import torch
from recorded import (
    EXACT,
    check_decay,
    close,
    close_gradients,
    close_norms,
    close_states,
    fill,
    progress,
    recording,
)
from recordings import ELSEWHERE, facts, matches, tensors, under

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.maskfeat import METHOD, TRUNK, Settings
from pretrain.parts.hog import hog
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("maskfeat/maskfeat_step.safetensors")
HOG, OPTIONS = tensors("maskfeat/maskfeat_hog.safetensors"), facts("maskfeat/maskfeat_hog.safetensors")
# The README's limits.
TARGET, LOSS, NORM, END = 1e-6, 1e-7, 1e-6, 1e-6
HIDDEN = len(DATA["model0.blocks.0.mlp.fc1.weight"])
OURS = {
    "mask_token": "mask_token",
    "pred_head.transforms.0.0.weight": "vit.trunk.norm.weight",
    "pred_head.transforms.0.0.bias": "vit.trunk.norm.bias",
    "pred_head.projections.0.weight": "projection.weight",
    "pred_head.projections.0.bias": "projection.bias",
}


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    return OURS.get(name, f"vit.trunk.{name}")


def state(prefix: str) -> dict[str, torch.Tensor]:
    return {our_name(name): tensor for name, tensor in under(DATA, prefix).items()}


def recipe() -> Recipe:
    spec = replace(VIT_SMOKE, image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"],
                   depth=CONFIG["depth"], heads=CONFIG["heads"], mlp_hidden=HIDDEN, **TRUNK)  # fmt: skip
    schedule = WarmupCosine(
        warmup=CONFIG["warmup"], start=CONFIG["warm_lr"] / CONFIG["lr"], floor=CONFIG["min_lr"]
    )  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=Settings(mask_ratio=CONFIG["mask_ratio"]), epochs=CONFIG["epochs"],
        batch=CONFIG["batch"], lr=CONFIG["lr"], lr_batch=0, schedule=schedule, weight_decay=CONFIG["wd"],
        betas=tuple(CONFIG["betas"]), clip=CONFIG["clip"] or 0.0,
    )  # fmt: skip


def start() -> Updates:
    """MaskFeat in the recorded first state."""
    chosen = recipe()
    method = METHOD(chosen.spec, chosen.settings).double()
    fill(method, state("model0."))
    return Updates(method, chosen)


def views(step: int) -> dict[str, torch.Tensor]:
    return {"image": DATA[f"in{step}.image"], "mask": DATA[f"in{step}.mask"].flatten(1)}


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
def test_hog(image, recorded, options):
    """In every cell of the 8-bit picture, those among them in which rounding decides, and flat ones. Another recording
    may be of a processor that rounds otherwise: of that all but these cells, as its README says."""
    images = HOG[image].float()
    images = images if images.ndim == 4 else images.unsqueeze(0)
    theirs = HOG[recorded].reshape(len(images), *HOG[recorded].shape[-4:])
    ours = hog(images, **{"bins": OPTIONS["bins"], "cell": OPTIONS["pool"], **options})
    if recorded == "u8.hog" and ELSEWHERE:
        clear = HOG["u8.ambiguous_cell"].unsqueeze(1).expand_as(ours) == 0
        assert clear.any()
        ours, theirs = ours[clear], theirs[clear]
    assert_near(ours, theirs)


def test_hog_of_ramps():
    """One direction in a whole cell: all of its histogram in one bin."""
    cell = OPTIONS["pool"]
    place = torch.arange(4.0 * cell)
    for (column, row), recorded in zip(HOG["ramps.column_row_slope"], HOG["ramps.hog_inner_cell"], strict=True):
        plane = column * place.unsqueeze(0) + row * place.unsqueeze(1)
        assert_near(hog(plane.expand(1, 3, -1, -1), OPTIONS["bins"], cell)[0, 0, :, 1, 1], recorded)


def test_targets():
    method = start().method
    assert_near(method.targets(DATA["in0.image"]), DATA["hog0.all_targets"])
    for step in range(CONFIG["steps"]):
        mask = DATA[f"in{step}.mask"].flatten(1).bool()
        assert_near(method.targets(DATA[f"in{step}.image"])[mask], DATA[f"out{step}.target"])


def test_forward_pass():
    method, image, mask = start().method, DATA["in0.image"], DATA["in0.mask"].flatten(1).bool()
    patches = torch.where(mask.unsqueeze(-1), method.mask_token, method.vit.project(image))
    placed = method.vit.place(patches, method.spec.grid)
    close(placed, DATA["act0.embed"][:, 1:], EXACT, "embedding")
    blocks = method.vit.encode(placed, layers=range(CONFIG["depth"]), norm=False)
    for number, tokens in enumerate(blocks):
        close(tokens, DATA[f"act0.block{number}"], EXACT, f"block {number}")
    close(method.predict(image, mask), DATA["out0.pred"], EXACT, "prediction")


def test_full_gradients():
    updates = start()
    updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    close_gradients(updates.method, state("grad0."), NORM)


def test_recorded_updates():
    updates = start()
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        close(updates.rates(now)[0], DATA[f"lr{step}"], EXACT, f"learning rate {step}")
        logs = updates.run([views(step)], now)
        close(logs["loss"], DATA[f"loss{step}"], LOSS, f"loss {step}")
        close_norms(updates, DATA, NORM, step, our_name)
    ends = state("model_end.")
    assert ends.keys() == updates.method.state_dict().keys()
    close_states(updates.method.state_dict(), ends, END)


def test_schedule():
    """Recorded at fractional epochs, in equal steps."""
    epochs, rates = DATA["sched.epoch"], DATA["sched.lr"]
    per_epoch = round(1 / float(epochs[1] - epochs[0]))
    for number, (epoch, rate) in enumerate(zip(epochs, rates, strict=True)):
        now = TrainProgress(step=number, steps_per_epoch=per_epoch, epochs=CONFIG["epochs"])
        close(now.time, epoch, EXACT, f"step {number}")
        close(recipe().schedule.at(CONFIG["lr"], now), rate, EXACT, f"epoch {epoch}")


def test_decayed_parameters():
    check_decay(start(), CONFIG["decay"], CONFIG["no_decay"], our_name)


@pytest.mark.parametrize("masks", [found[0] for found in matches(r"maskgen\.\d+_[\d.]+", DATA)])
def test_masks_are_the_recorded_ones(masks):
    """maskgen.14_0.4: on a 14 x 14 grid, 0.4 of it hidden; several in a row from Python's generator."""
    side, ratio = masks.removeprefix("maskgen.").split("_")
    spec = replace(recipe().spec, image_size=int(side) * CONFIG["patch"])
    draw = METHOD(spec, Settings(mask_ratio=float(ratio))).draw_mask
    random.seed(CONFIG["mask_seed"])
    for mask in DATA[masks]:
        assert torch.equal(draw().reshape(mask.shape), mask.bool())
