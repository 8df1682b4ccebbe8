"""MAE against recorded steps of its official training loop (facebookresearch/mae efb2a80), in float64.

The recording is float32: its README measures losses to 1e-6, gradient norms and end weights to 5e-6.
"""

import re
from dataclasses import replace

import pytest
import torch
from recorded import close, fill, progress, recording, under

from checkpoints.positions import sincos_positions
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.mae import METHOD, Settings
from pretrain.parts.masking import mask_at, patchify
from pretrain.parts.sizes import SINCOS, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("mae/mae_step.safetensors")
LOSS, WEIGHTS = 1e-6, 5e-6
FIXED = ("pos_embed", "decoder_pos_embed")


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    for pattern, ours in (
        (r"decoder_embed", "decoder.embed"),
        (r"decoder_blocks", "decoder.blocks"),
        (r"decoder_norm", "decoder.norm"),
        (r"decoder_pred", "pixels"),
        (r"mask_token", "decoder.mask_token"),
    ):
        if re.match(pattern, name):
            return f"autoencoder.{name.replace(pattern, ours, 1)}"
    return f"autoencoder.vit.trunk.{name}"


def recipe(config: dict, **changes) -> Recipe:
    spec = replace(VIT_SMOKE, image_size=config["img"], patch_size=config["patch"], width=config["dim"],
                   depth=config["depth"], heads=config["heads"], mlp_hidden=4 * config["dim"], **SINCOS)  # fmt: skip
    settings = Settings(mask_ratio=config["mask_ratio"], decoder_width=config["ddim"],
                        decoder_depth=config["ddepth"], decoder_heads=config["dheads"], **changes)  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=config["epochs"], batch=config["batch"],
        lr=config["lr"], lr_batch=0, schedule=WarmupCosine(warmup=config["warmup"], floor=config["min_lr"]),
        weight_decay=config["wd"], betas=tuple(config["betas"]),
    )  # fmt: skip


def start(dtype: torch.dtype = torch.float64, parts: int = 1, **changes) -> Updates:
    """MAE in the recorded first state."""
    chosen = recipe(CONFIG, **changes)
    chosen = replace(chosen, batch=chosen.batch * parts)
    method = METHOD(chosen.spec, chosen.settings).to(dtype)
    fill(method, {our_name(name): t for name, t in under(DATA, "model0.").items() if name != "decoder_pos_embed"})
    return Updates(method, chosen)


def views(step: int, dtype: torch.dtype = torch.float64) -> dict:
    return {"image": DATA[f"in{step}.image"].to(dtype), "noise": DATA[f"in{step}.noise"]}


def test_forward_pass():
    network = start().method.autoencoder
    for step in range(CONFIG["steps"]):
        ids = DATA[f"in{step}.noise"].argsort(dim=1)
        hidden = mask_at(ids[:, network.visible :], network.patches)
        assert torch.equal(hidden.double(), DATA[f"out{step}.mask"])
    ids = DATA["in0.noise"].argsort(dim=1)
    latent = network.encode(DATA["in0.image"], ids)
    close(latent, DATA["out0.latent"], LOSS, "latent")
    prediction = network.pixels(network.decoder(latent, ids))
    in_raster = prediction.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(prediction))
    close(in_raster, DATA["out0.pred"], LOSS, "prediction")
    assert torch.equal(ids.argsort(dim=1), DATA["out0.ids_restore"])


def test_patches():
    assert torch.equal(patchify(DATA["in0.image"], CONFIG["patch"]), DATA["patchify.in0"])
    assert torch.equal(patchify(DATA["unpatchify.pred0"], CONFIG["patch"]), DATA["out0.pred"])


@pytest.mark.parametrize(("width", "side"), [(16, 4), (8, 3)])
def test_positions(width, side):
    ours = sincos_positions((side, side), width, "column", prefix=1, dtype=torch.float64)
    close(ours[0], DATA[f"sincos.d{width}g{side}"], 1e-12, "table")
    spec = replace(VIT_SMOKE, image_size=16 * side, patch_size=16, width=width, heads=2, **SINCOS)
    settings = Settings(decoder_width=8, decoder_depth=1, decoder_heads=2)
    network = METHOD(spec, settings).autoencoder
    close(network.vit.trunk.pos_embed[0], DATA[f"sincos.d{width}g{side}"], 1e-6, "encoder's")  # kept in float32
    if width == settings.decoder_width:
        close(network.decoder.positions[0], DATA[f"sincos.d{width}g{side}"], 1e-6, "decoder's")


def test_schedule():
    schedule = recipe(CONFIG).schedule
    for number, rate in enumerate(DATA["sched.lr"]):
        now = TrainProgress(step=number, steps_per_epoch=4, epochs=CONFIG["epochs"])
        assert now.time == DATA["sched.epoch"][number]
        close(schedule.at(CONFIG["lr"], now), rate, 1e-12, f"epoch {now.time}")


def test_full_gradients():
    updates = start()
    updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    recorded = {our_name(name): gradient for name, gradient in under(DATA, "grad0.").items()}
    for name, parameter in updates.method.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, recorded.pop(name), WEIGHTS, f"gradient of {name}")
    assert not recorded


def test_raw_pixels():
    logs = start(norm_pixels=False).run([views(0)], progress(0, CONFIG, CONFIG["steps"]))
    close(logs["loss"], DATA["rawpix.loss0"], LOSS, "loss")
    close(logs["grad_norm"], DATA["rawpix.gradnorm0.total"], WEIGHTS, "gradient norm")


def test_accumulation():
    updates, now = start(parts=2), progress(0, CONFIG, CONFIG["steps"], parts=2)
    close(updates.rates(now)[0], DATA["accum2.lr"], 1e-12, "learning rate")
    logs = updates.run([views(0), views(1)], now)
    close(logs["loss"], (DATA["accum2.loss0"] + DATA["accum2.loss1"]) / 2, LOSS, "loss")
    close(logs["grad_norm"], DATA["accum2.gradnorm.total"], WEIGHTS, "gradient norm")
    end = updates.method.autoencoder.pixels.weight
    close(end, DATA["accum2.end.decoder_pred.weight"], WEIGHTS, "pixel head")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recorded_updates(dtype):
    updates = start(dtype)
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        close(updates.rates(now)[0], DATA[f"lr{step}"], 1e-12, f"learning rate {step}")
        logs = updates.run([views(step, dtype)], now)
        close(logs["loss"], DATA[f"loss{step}"], LOSS, f"loss {step}")
        close(logs["grad_norm"], DATA[f"gradnorm{step}.total"], WEIGHTS, f"gradient norm {step}")
        for official, norm in under(DATA, f"gradnorm{step}.").items():
            if official != "total":
                gradient = updates.method.get_parameter(our_name(official)).grad
                close(gradient.norm(), norm, WEIGHTS, f"gradient of {official}")
    state = updates.method.state_dict()
    for official, end in under(DATA, "model_end.").items():
        if official in FIXED:
            continue
        ours = state[our_name(official)]
        if official.endswith("attn.qkv.bias"):  # the keys' gradient is zero: what Adam makes of it is rounding noise
            width = len(ours) // 3
            ours, end = (torch.cat([bias[:width], bias[2 * width :]]) for bias in (ours, end))
        close(ours, end, WEIGHTS, official)


def test_decayed_parameters():
    groups = start().method.groups()
    ours = {name: group.weight_decay is None for group in groups for name in group.parameters}
    theirs = {our_name(name): True for name in CONFIG["decay"]} | {our_name(n): False for n in CONFIG["no_decay"]}
    assert ours == theirs
