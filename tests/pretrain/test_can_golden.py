"""CAN against recorded steps of its first author's PyTorch version (shlokk/mae-contrastive 12d2ba5), in float64.

Agreement with it is no parity with the paper, whose code was not released (tests/golden/can/README.md).
"""

import re
from dataclasses import replace

import torch
from recorded import EXACT, check_decay, close, close_norm, close_norms, close_states, fill, progress, recording
from recordings import absent, under

from pretrain.loop.updates import Updates
from pretrain.methods.can import METHOD, VIEWS, Settings, sinusoids
from pretrain.parts.masking import mask_at
from pretrain.parts.sizes import SINCOS, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("can/can_step.safetensors")
LOSS, NORM, END = 1e-9, 1e-7, 1e-7  # the README's limits
WAVES = 1e-7  # its frequencies are float32
HIDDEN = len(DATA["model0.blocks.0.mlp.fc1.weight"])
FIXED = ("pos_embed", "decoder_pos_embed")


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    for pattern, ours in (
        (r"decoder_embed", "autoencoder.decoder.embed"),
        (r"decoder_blocks", "autoencoder.decoder.blocks"),
        (r"decoder_norm", "autoencoder.decoder.norm"),
        (r"decoder_pred", "autoencoder.pixels"),
        (r"mask_token", "autoencoder.decoder.mask_token"),
        (r"projection_head", "projector"),
        (r"noise_pe_mlp", "noise_mlp"),
    ):
        if re.match(pattern, name):
            return name.replace(pattern, ours, 1)
    return f"autoencoder.vit.trunk.{name}"


def recipe() -> Recipe:
    spec = replace(VIT_SMOKE, image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"],
                   depth=CONFIG["depth"], heads=CONFIG["heads"], mlp_hidden=HIDDEN, **SINCOS)  # fmt: skip
    settings = Settings(
        mask_ratio=CONFIG["mask_ratio"], noise_std=CONFIG["std"], noise_dims=CONFIG["pe_dims"],
        norm_pixels=CONFIG["norm_pix_loss"], noisy_target=True, pooled="all", projector_layers=2, projector_hidden=0,
        projector_width=len(DATA["model0.projection_head.2.weight"]), projector_norm="none",
        temperature=CONFIG["temperature"], contrast_weight=CONFIG["weight_simclr"],
        pixel_weight=CONFIG["weight_mae"] * (1 - CONFIG["weight_noise"]),
        noise_weight=CONFIG["weight_mae"] * CONFIG["weight_noise"],
        decoder_width=CONFIG["ddim"], decoder_depth=CONFIG["ddepth"], decoder_heads=CONFIG["dheads"],
    )  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=CONFIG["epochs"], batch=CONFIG["batch"],
        lr=CONFIG["lr"], lr_batch=0, weight_decay=CONFIG["wd"], betas=tuple(CONFIG["betas"]),
        schedule=WarmupCosine(warmup=CONFIG["warmup"], floor=CONFIG["min_lr"]),
    )  # fmt: skip


def start() -> Updates:
    """CAN in the recorded first state."""
    chosen = recipe()
    method = METHOD(chosen.spec, chosen.settings).double()
    fill(method, {our_name(name): t for name, t in under(DATA, "model0.").items() if name != "decoder_pos_embed"})
    return Updates(method, chosen)


def by_image(both: torch.Tensor) -> torch.Tensor:
    """(2B, ...) all first views, then all second ones -> (B, 2, ...)."""
    return both.unflatten(0, (VIEWS, -1)).transpose(0, 1)


def views(step: int) -> dict[str, torch.Tensor]:
    images = torch.cat([DATA[f"in{step}.view{number}"] for number in (1, 2)])
    drawn = {ours: DATA[f"in{step}.{theirs}"] for ours, theirs in
             (("noise", "mask_noise"), ("level", "level"), ("gauss", "gauss"))}  # fmt: skip
    return {name: by_image(both) for name, both in {"image": images, **drawn}.items()}


def test_forward_pass():
    method = start().method
    for step in range(CONFIG["steps"]):
        ids = DATA[f"in{step}.mask_noise"].argsort(dim=1)
        hidden = mask_at(ids[:, method.autoencoder.visible :], method.autoencoder.patches)
        assert torch.equal(hidden.double(), DATA[f"out{step}.mask"].double())
    ids, level = DATA["in0.mask_noise"].argsort(dim=1), CONFIG["std"] * DATA["in0.level"]
    assert torch.equal(ids.argsort(dim=1), DATA["out0.ids_restore"])
    images = torch.cat([DATA["in0.view1"], DATA["in0.view2"]]) + level.view(-1, 1, 1, 1) * DATA["in0.gauss"]
    latent = method.autoencoder.encode(images, ids)
    close(latent, DATA["out0.latent_before_noise_embedding"], EXACT, "latent")
    close(sinusoids(level, CONFIG["pe_dims"]), DATA["out0.noise_embedding_sinusoid"], WAVES, "sinusoids")
    decoded = method.decode(latent, level, ids)
    in_raster = decoded.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(decoded))
    close(in_raster, DATA["out0.pred"], WAVES, "prediction")


def test_full_gradients():
    updates = start()
    updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    official = under(DATA, "grad0.") or absent("gradients")
    recorded = {our_name(name): gradient for name, gradient in official.items()}
    for name, parameter in updates.method.named_parameters():
        if parameter.requires_grad:
            close_norm(parameter.grad, recorded[name].norm(), NORM, name, rounding=EXACT)
            if recorded[name].norm() > EXACT:
                close(parameter.grad, recorded[name], NORM, f"gradient of {name}")
            del recorded[name]
    assert not recorded


def test_recorded_updates():
    updates = start()
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        close(updates.rates(now)[0], DATA[f"lr{step}"], EXACT, f"learning rate {step}")
        logs = updates.run([views(step)], now)
        for ours, theirs in (("loss", "loss"), ("pixels", "loss_recon"), ("noise", "loss_noise"),
                             ("contrast", "loss_contrastive")):  # fmt: skip
            close(logs[ours], DATA[f"{theirs}{step}"], LOSS, f"{theirs} {step}")
        close_norms(updates, DATA, NORM, step, our_name, rounding=EXACT)
    ends = under(DATA, "model_end.")
    trained = {our_name(name) for name in ends} | {our_name(FIXED[0])}
    assert trained == updates.method.state_dict().keys()
    close_states(updates.method.state_dict(), ends, END, our_name)


def test_decayed_parameters():
    check_decay(start(), CONFIG["decay"], CONFIG["no_decay"], our_name)
