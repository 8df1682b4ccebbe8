"""LUT against recorded steps of its official training loop (naver-ai/lut 4420a27), in float64.

The code's teacher also averages decoder and predictor, which it never runs; ours does not have them.
"""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import in_processes
from PIL import Image
from recorded import EXACT, close, close_norm, close_states, fill, progress, recording
from recordings import absent, under
from small_trainings import forward_pass
from torch import Tensor

from engine.distributed import World
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.lut import METHOD, RECIPES, Settings
from pretrain.parts.batch_norm import synchronised
from pretrain.parts.masking import mask_at
from pretrain.parts.sizes import SINCOS, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("lut/lut_step.safetensors")
ACCUM, ACCUM_CONFIG = recording("lut/lut_accum.safetensors")
VARIANTS, VARIANTS_CONFIG = recording("lut/lut_variants.safetensors")
AUG, AUG_CONFIG = recording("lut/lut_aug.safetensors")
# What its README allows, of losses and outputs, of gradient norms, of weights after steps of Adam. The recording is
# float32, whose rounding batch norms over a few images enlarge: at other sizes it comes to 1e-5, 2e-5 and 4e-6.
LOSS, NORM, END = 1e-5, 1e-4, 5e-5
BETAS = (0.9, 0.95)  # its README's, where the configuration has none
HIDDEN = len(DATA["student0.blocks.0.mlp.fc1.weight"])
TEACHER = re.compile(r"(?!decoder_|mask_token|predictor)")


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    for pattern, ours in (
        (r"decoder_embed", "base.decoder.embed"),
        (r"decoder_blocks", "base.decoder.blocks"),
        (r"decoder_norm", "base.decoder.norm"),
        (r"decoder_pred", "base.pixels"),
        (r"mask_token", "base.decoder.mask_token"),
        (r"head", "projector"),
        (r"predictor", "predictor"),
    ):
        if re.match(pattern, name):
            return name.replace(pattern, ours, 1)
    return f"base.vit.trunk.{name}"


def teacher_name(name: str) -> str:
    """Official name in the averaged copy -> ours."""
    return "teacher." + our_name(name).removeprefix("base.")


def state(student: dict[str, Tensor], teacher: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both networks' tensors by our names."""
    found = {our_name(name): t for name, t in student.items() if name != "decoder_pos_embed"}
    return found | {teacher_name(name): t for name, t in teacher.items() if TEACHER.match(name)}


def recipe(config: dict) -> Recipe:
    spec = replace(VIT_SMOKE, image_size=config["img"], patch_size=config["patch"], width=config["dim"],
                   depth=config["depth"], heads=config["heads"], mlp_hidden=HIDDEN, **SINCOS)  # fmt: skip
    settings = Settings(
        mask_ratio=config["mask_ratio"], norm_pixels=config["norm_pix"], decoder_width=config["ddim"],
        decoder_depth=config["ddepth"], decoder_heads=config["dheads"], projector_depth=config["depth_head"],
        predictor_depth=config["depth_pred"], head_hidden=config["head_mlp"], head_norm=config["norm"].lower(),
        head_activation=config["act"].lower(), w_mim=config["w_mae"], w_bc=config["w_bc"],
        teacher_momentum=config["ema"],
    )  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=config["epochs"],
        batch=config["batch"] * config.get("accum_iter", 1), lr=config["lr"], lr_batch=0,
        schedule=WarmupCosine(warmup=config["warmup"], floor=config.get("min_lr", 0.0)), weight_decay=config["wd"],
        betas=tuple(config.get("betas", BETAS)),
    )  # fmt: skip


def start(config: dict = CONFIG, dtype: torch.dtype = torch.float64, world: World | None = None) -> Updates:
    """LUT in the recorded first state."""
    chosen = recipe(config)
    method = METHOD(chosen.spec, chosen.settings).to(dtype)
    fill(method, state(under(DATA, "student0."), under(DATA, "ema0.")))
    if world is not None:
        method = synchronised(method)
    return Updates(method, chosen, world=world)


def views(step: int, data: dict = DATA, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: data[f"in{step}.{name}"].to(dtype) for name in ("view1", "view2", "noise")}


def check_weights(updates: Updates, data: dict, student: str, teacher: str) -> None:
    """Every recorded tensor of both networks against ours."""
    ours, recorded = updates.method.state_dict(), state(under(data, student), under(data, teacher))
    counts = {name: recorded.pop(name) for name in list(recorded) if name.endswith("num_batches_tracked")}
    assert all(torch.equal(ours[name], end) for name, end in counts.items() if not name.startswith("teacher."))
    assert recorded
    close_states(ours, recorded, END)


def check_gradients(updates: Updates, norms: dict[str, Tensor], what: str) -> None:
    for name, norm in norms.items():
        if name != "total":
            close_norm(updates.method.get_parameter(our_name(name)).grad, norm, NORM, f"{name}, {what}")


def test_forward_pass():
    method = start().method
    ids = DATA["in0.noise"].argsort(dim=1)
    visible, patches = method.base.visible, method.base.patches
    for number, order in enumerate((ids, ids.roll(-visible, dims=1)), start=1):
        latent = method.base.encode(DATA[f"in0.view{number}"], order)
        close(latent, DATA[f"out0.latent{number}"], LOSS, f"latent {number}")
        hidden = mask_at(order[:, visible:], patches)
        assert torch.equal(hidden.double(), DATA[f"out0.mask{number}"])
    both = torch.cat([DATA["in0.view1"], DATA["in0.view2"]])
    close(method.teacher_targets(both), DATA["out0.teacher_out"], LOSS, "teacher")
    prediction = method.base.pixels(method.base.decoder(method.base.encode(DATA["in0.view1"], ids), ids))
    in_raster = prediction.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(prediction))
    close(in_raster, DATA["out0.pred"], LOSS, "prediction")


def test_student_outputs():
    """The recorded predictor outputs, view 1 before view 2, as the forward pass makes them."""
    method, seen = start().method, []
    method.predictor.register_forward_hook(lambda module, given, found: seen.append(found))
    forward_pass(method, views(0), progress(0, CONFIG, CONFIG["steps"]))
    close(torch.cat(seen), DATA["out0.student_out"], LOSS, "student")


def test_full_gradients():
    updates = start()
    updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    official = under(DATA, "grad0.") or absent("gradients")
    recorded = {our_name(name): gradient for name, gradient in official.items()}
    for name, parameter in updates.method.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, recorded.pop(name), NORM, f"gradient of {name}")
    assert not recorded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recorded_updates(dtype):
    updates = start(dtype=dtype)
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        close(updates.rates(now)[0], DATA[f"lr{step}"], EXACT, f"learning rate {step}")
        logs = updates.run([views(step, dtype=dtype)], now)
        for ours, theirs in (("loss", "total"), ("mim", "mae"), ("context", "bc")):
            close(logs[ours], DATA[f"loss{step}.{theirs}"], LOSS, f"{ours} {step}")
        close(logs["grad_norm"], DATA[f"gradnorm{step}.total"], NORM, f"gradient norm {step}")
        check_gradients(updates, under(DATA, f"gradnorm{step}."), f"step {step}")
        if step == 0:
            check_weights(updates, DATA, "student_after0.", "ema_after0.")
    check_weights(updates, DATA, "student_end.", "ema_end.")


def test_accumulation():
    """Two forward passes an update: their losses, the gradient's norm, the teacher's later momentum, the end."""
    updates, parts = start(ACCUM_CONFIG), ACCUM_CONFIG["accum_iter"]
    steps = ACCUM_CONFIG["steps"] // parts
    for step in range(steps):
        now = progress(step, ACCUM_CONFIG, steps, parts)
        numbers = range(step * parts, (step + 1) * parts)
        given = [views(number, ACCUM if f"in{number}.noise" in ACCUM else DATA) for number in numbers]
        close(updates.rates(now)[0], ACCUM[f"lr{step}"], EXACT, f"learning rate {step}")
        logs = updates.run(given, now)
        close(logs["loss"], sum(ACCUM[f"loss{number}.scaled_total"] for number in numbers), LOSS, f"loss {step}")
        close(logs["context"], sum(ACCUM[f"loss{n}.bc"] for n in numbers) / parts, LOSS, f"context {step}")
        close(logs["grad_norm"], ACCUM[f"gradnorm{step}.total"], NORM, f"gradient norm {step}")
    check_ends(updates, under(ACCUM, "student_end."), our_name)
    check_ends(updates, {n: t for n, t in under(ACCUM, "ema_end.").items() if TEACHER.match(n.removeprefix("norm."))},
               teacher_name)  # fmt: skip


def check_ends(updates: Updates, recorded: dict[str, Tensor], named: Callable[[str], str]) -> None:
    """Some entries themselves, and the norms (under `norm.`) of all."""
    ours = updates.method.state_dict()
    for name, end in recorded.items():
        entry = name.removeprefix("norm.") if end.ndim == 0 else name
        if entry == "decoder_pos_embed" or entry.endswith(("attn.qkv.bias", "num_batches_tracked")):
            continue
        mine = ours[named(entry)]
        close(mine.norm() if entry != name else mine, end, END, name)


@pytest.mark.parametrize("recorded", ["lut_step", "lut_accum"])
def test_teacher_momentum(recorded):
    """The teacher's distance that is left after a move is the recorded decay, at the recorded forward pass."""
    data, config = (DATA, CONFIG) if recorded == "lut_step" else (ACCUM, ACCUM_CONFIG)
    parts = config.get("accum_iter", 1)
    steps = config["steps"] // parts
    for step in range(steps):
        now = progress(step, config, steps, parts)
        now = replace(now, micro_batch=parts - 1)
        assert now.step * parts + now.micro_batch == data[f"ema_it{step}"]
        method = start(config).method
        with torch.no_grad():
            method.base.vit.trunk.cls_token.fill_(0.0)
            method.teacher["vit"].trunk.cls_token.fill_(1.0)
        method.after_update(now)
        close(method.teacher["vit"].trunk.cls_token.mean(), data[f"ema_decay{step}"], EXACT, f"momentum {step}")


@pytest.mark.parametrize("name", VARIANTS_CONFIG["variants"])
def test_head_variants(name):
    changed, recorded = CONFIG | VARIANTS_CONFIG["variants"][name], under(VARIANTS, f"{name}.")
    chosen = recipe(changed)
    method = METHOD(chosen.spec, chosen.settings).double()
    heads = re.compile(r"head|predictor")
    student = {n: t for n, t in under(DATA, "student0.").items() if not heads.match(n)} | under(recorded, "student0.")
    teacher = {n: t for n, t in under(DATA, "ema0.").items() if not heads.match(n)} | under(recorded, "ema0.")
    fill(method, state(student, teacher))
    updates = Updates(method, chosen)
    logs = updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    losses = under(recorded, "loss.")
    for ours, theirs in (("loss", "total"), ("mim", "mae"), ("context", "bc")):
        if theirs in losses:
            close(logs[ours], losses.pop(theirs), LOSS, ours)
    assert set(losses) <= {"bc_teacher1_student2", "bc_teacher2_student1"}
    check_gradients(updates, under(recorded, "gradnorm."), name)
    both = torch.cat([DATA["in0.view1"], DATA["in0.view2"]])
    close(method.teacher_targets(both), recorded["teacher_out"], LOSS, "teacher")


def test_decayed_parameters():
    groups = start().method.groups()
    ours = {name for group in groups if group.weight_decay is not None for name in group.parameters}
    assert ours == {our_name(name) for name in CONFIG["no_decay"]}


@pytest.mark.parametrize("seed", AUG_CONFIG["seeds"])
def test_views_are_the_recorded_ones_bit_for_bit(seed):
    """Of Python's and torch's generators, in torchvision's and Pillow's versions of the recording."""
    size = AUG_CONFIG["input_size"]
    patch = next(side for side in range(size // 2, 0, -1) if size % side == 0)
    padding = AUG_CONFIG.get("crop_padding", Settings.crop_padding)  # that of main_lut.py
    spec = replace(RECIPES["smoke"].spec, image_size=size, patch_size=patch)
    make = METHOD(spec, replace(RECIPES["smoke"].settings, crop_padding=padding)).views()
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    found = make(Image.fromarray(AUG["in.image_uint8_hwc"].numpy()))
    for name in ("view1", "view2"):
        assert torch.equal(found[name].double(), AUG[f"seed{seed}.{name}"]), name
    assert found["noise"].shape == ((size // patch) ** 2,)


PROCESSES = next(count for count in range(2, CONFIG["batch"] + 1) if CONFIG["batch"] % count == 0)  # of the batch


def share_of_the_recorded_updates(world: World, folder: Path) -> None:
    updates = start(world=world)
    for step in range(CONFIG["steps"]):
        share = {name: tensor.chunk(world.size)[world.rank] for name, tensor in views(step).items()}
        logs = updates.run([share], progress(step, CONFIG, CONFIG["steps"]))
        close(logs["loss"], DATA[f"loss{step}.total"], LOSS, f"loss {step}")
        close(logs["grad_norm"], DATA[f"gradnorm{step}.total"], NORM, f"gradient norm {step}")
    check_weights(updates, DATA, "student_end.", "ema_end.")
    (folder / str(world.rank)).write_text("equal")


@pytest.mark.slow
def test_processes_on_a_share_of_the_batch_each(tmp_path):
    """Batch norms share their statistics, so the recorded updates come out of parts of the batch too."""
    in_processes(PROCESSES, share_of_the_recorded_updates, tmp_path)
    assert len(list(tmp_path.iterdir())) == PROCESSES


def test_momentum_is_one_only_after_the_end():
    method = start().method
    last = TrainProgress(step=11, steps_per_epoch=3, epochs=4)
    before = method.teacher["vit"].trunk.cls_token.clone()
    method.after_update(last)
    assert not torch.equal(before, method.teacher["vit"].trunk.cls_token)
