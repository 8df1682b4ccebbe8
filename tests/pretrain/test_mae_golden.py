"""MAE against recorded steps of its official training loop (facebookresearch/mae efb2a80), in float64.

The recording is float32: its README measures losses to 1e-6, gradient norms and end weights to 5e-6.
"""

import re
from dataclasses import replace

import pytest
import torch
from recorded import clock, close, fill, recording, under

from pretrain.masking import mask_at
from pretrain.methods.mae import METHOD, Settings
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine
from pretrain.sizes import SINCOS, VIT_SMOKE
from pretrain.updates import Updates

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


@pytest.fixture
def updates() -> Updates:
    chosen = recipe(CONFIG)
    method = METHOD(chosen.spec, chosen.settings).double()
    tensors = {our_name(name): t for name, t in under(DATA, "model0.").items() if name != "decoder_pos_embed"}
    fill(method, tensors)
    return Updates(method, chosen)


def views(step: int) -> dict:
    return {"image": DATA[f"in{step}.image"], "noise": DATA[f"in{step}.noise"]}


def test_forward_pass(updates):
    network, ids = updates.method.autoencoder, DATA["in0.noise"].argsort(dim=1)
    latent = network.encode(DATA["in0.image"], ids)
    close(latent, DATA["out0.latent"], LOSS, "latent")
    prediction = network.pixels(network.decoder(latent, ids))
    in_raster = prediction.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(prediction))
    close(in_raster, DATA["out0.pred"], LOSS, "prediction")
    hidden = mask_at(ids[:, network.visible :], network.patches)
    assert torch.equal(hidden.double(), DATA["out0.mask"])


def test_recorded_updates(updates):
    for step in range(CONFIG["steps"]):
        now = clock(step, CONFIG, CONFIG["steps"])
        logs = updates.run([views(step)], now)
        close(logs["loss"], DATA[f"loss{step}"], LOSS, f"loss {step}")
        close(logs["grad_norm"], DATA[f"gradnorm{step}.total"], WEIGHTS, f"gradient norm {step}")
        for name, parameter in updates.method.named_parameters():
            if parameter.requires_grad:
                official = next(n for n in under(DATA, f"gradnorm{step}.") if n != "total" and our_name(n) == name)
                close(parameter.grad.norm(), DATA[f"gradnorm{step}.{official}"], WEIGHTS, f"gradient of {name}")
    state = updates.method.state_dict()
    for official, end in under(DATA, "model_end.").items():
        if official in FIXED:
            continue
        ours = state[our_name(official)]
        if official.endswith("attn.qkv.bias"):  # the keys' gradient is zero: what Adam makes of it is rounding noise
            width = len(ours) // 3
            ours, end = (torch.cat([bias[:width], bias[2 * width :]]) for bias in (ours, end))
        close(ours, end, WEIGHTS, official)
