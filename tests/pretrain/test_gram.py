"""DINOv3's Gram anchoring, an option of DINOv2: loss, tokens and weights equal recordings of the official code; when
the Gram teacher is replaced."""

from dataclasses import replace
from math import isqrt

import pytest
import torch
from recorded import EXACT, assert_close, doubled
from recordings import facts, tensors, under
from toys import picture

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.dinov2 import METHOD, RECIPES, resized_tokens
from pretrain.parts.losses import gram_loss
from pretrain.schedules import ramp

DATA, CONFIG = doubled(tensors("dinov3_gram/golden.safetensors")), facts("dinov3_gram/config.json")
NEGATIVES = {(False, False): "keep", (True, False): "drop", (False, True): "drop_teacher"}
SMOKE = RECIPES["smoke"]


@pytest.mark.parametrize("case", range(len(CONFIG["cases"])))
def test_loss_and_tokens_equal_the_recorded_ones(case):
    _, ours, theirs, _, unit, per_image, drop, drop_teacher, compared, mode, antialias = CONFIG["cases"][case]
    data = under(DATA, f"case{case}/")
    student = data["student"].clone().requires_grad_()
    grids = [(isqrt(count), isqrt(count)) for count in (theirs, ours)]
    pair = [student, resized_tokens(data["teacher"], *grids, mode=mode, antialias=antialias)]
    if compared != "all":
        selected = data["mask"] if compared == "masked" else ~data["mask"]
        pair = [tokens[selected] for tokens in pair]
    assert_close(pair[1], data["teacher_used"], EXACT, "teacher's tokens")
    if not per_image:
        pair = [tokens.reshape(-1, tokens.shape[-1]) for tokens in pair]
    loss = gram_loss(*pair, NEGATIVES[drop, drop_teacher], unit)
    loss.backward()
    assert_close(loss, data["loss"], 1e-9, "loss")
    assert_close(student.grad, data["grad"], 1e-9, "gradient")


@pytest.mark.parametrize("case", range(len(CONFIG["sched"])))
def test_the_weight_follows_the_recorded_schedule(case):
    options = CONFIG["sched"][case]
    steps = options.get("cosine_iterations", options["total_iterations"] - options["warmup_iterations"])
    for step, weight in enumerate(DATA[f"sched/case{case}"]):
        sizes = dict(warmup=options["warmup_iterations"], cosine_steps=steps)
        assert_close(ramp(step, **{name: options[name] for name in ("start", "peak", "end")}, **sizes), weight, EXACT)


def anchored(**changes):
    torch.manual_seed(0)
    return METHOD(SMOKE.spec, replace(SMOKE.settings, gram_weight=2.0, **changes)).double()


def photo():
    return picture(0, 50, 40)


def test_the_gram_teacher_is_replaced_at_the_set_epochs():
    """Before epoch 1 and again two epochs later; the weight is nonzero from epoch 1 on."""
    method = anchored(gram_start=1, gram_refresh=2, gram_copies=2)
    recipe = replace(SMOKE, settings=method.settings, epochs=8, lr=1e-3, lr_batch=0)
    updates, views = Updates(method, recipe), method.views()
    torch.manual_seed(0)
    batch = {name: torch.stack([view, view.flip(0)]) for name, view in views(photo()).items()}
    batch = {name: view.double() if view.is_floating_point() else view for name, view in batch.items()}
    replaced, weights = [], []
    for step in range(16):
        progress = TrainProgress(step=step, steps_per_epoch=2, epochs=8)
        before = method.gram_teacher.trunk.cls_token.clone()
        updates.run([batch], progress)
        weights.append(method.gram_weight)
        if not torch.equal(before, method.gram_teacher.trunk.cls_token):
            replaced.append(step)
            assert torch.equal(method.gram_teacher.trunk.cls_token, method.teacher.vit.trunk.cls_token)
    assert replaced == [1, 5] and weights == [0.0, 0.0] + [2.0] * 14


def test_crops_of_the_gram_teacher_are_the_students_without_colours():
    method = anchored(gram_size=32, blur=(0.0, 0.0, 0.0))
    views = method.views()
    views = replace(views, colours=(views.to_tensor, views.to_tensor))
    crops = views(photo())
    assert crops["gram"].shape == (2, 3, 32, 32) and crops["global"].shape == (2, 3, 16, 16)
    resized = torch.nn.functional.interpolate(crops["gram"], (16, 16), mode="bicubic", antialias=True)
    assert (resized - crops["global"]).abs().mean() < 0.02  # rounding to 8 bits
    targets = method.gram_targets({name: view.unsqueeze(0).double() for name, view in crops.items()})
    assert targets.shape == (2, 16, 64)
