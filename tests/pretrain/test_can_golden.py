"""CAN against recorded steps of its first author's PyTorch version (shlokk/mae-contrastive 12d2ba5), in float64.

Agreement with it is no parity with the paper, whose code was not released (tests/golden/can/README.md).
"""

import re

import torch
from recorded import EXACT, RecordedTraining, recording

from pretrain.methods.can import METHOD, VIEWS, Settings, sinusoids
from pretrain.parts.masking import mask_at
from pretrain.recipe import SINCOS
from pretrain.schedules import WarmupCosine

WAVES = 1e-7  # its frequencies are float32
NAMES = (
    (r"decoder_(embed|blocks|norm)", r"autoencoder.decoder.\1"),
    (r"decoder_pred", "autoencoder.pixels"),
    (r"mask_token", "autoencoder.decoder.mask_token"),
    (r"projection_head", "projector"),
    (r"noise_pe_mlp", "noise_mlp"),
)


class TestCan(RecordedTraining):
    data, config = recording("can/can_step.safetensors")
    method, design = METHOD, SINCOS
    LOSS, NORM, END, ROUNDING = 1e-9, 1e-7, 1e-7, EXACT  # the README's limits
    losses = {"loss": "loss{}", "pixels": "loss_recon{}", "noise": "loss_noise{}", "contrast": "loss_contrastive{}"}
    unrecorded = r".*pos_embed"
    test_schedule = None

    def our_name(self, official):
        for pattern, ours in NAMES:
            if re.match(pattern, official):
                return re.sub(pattern, ours, official)
        return None if official == "decoder_pos_embed" else f"autoencoder.vit.trunk.{official}"

    def settings(self):
        config = self.config
        return Settings(
            mask_ratio=config["mask_ratio"],
            noise_std=config["std"],
            noise_dims=config["pe_dims"],
            norm_pixels=config["norm_pix_loss"],
            noisy_target=True,
            pooled="all",
            projector_layers=2,
            projector_hidden=0,
            projector_width=len(self.data["model0.projection_head.2.weight"]),
            projector_norm="none",
            temperature=config["temperature"],
            contrast_weight=config["weight_simclr"],
            pixel_weight=config["weight_mae"] * (1 - config["weight_noise"]),
            noise_weight=config["weight_mae"] * config["weight_noise"],
            decoder_width=config["ddim"],
            decoder_depth=config["ddepth"],
            decoder_heads=config["dheads"],
        )

    def schedule(self):
        return WarmupCosine(warmup=self.config["warmup"], floor=self.config["min_lr"])

    def views(self, forward):
        """(2B, ...) all first views, then all second ones -> (B, 2, ...)."""
        data = {name: self.data[f"in{forward}.{name}"] for name in ("mask_noise", "level", "gauss")}
        views = {"image": torch.cat([self.data[f"in{forward}.view{number}"] for number in (1, 2)])}
        views |= {"noise": data["mask_noise"], "level": data["level"], "gauss": data["gauss"]}
        return {name: both.unflatten(0, (VIEWS, -1)).transpose(0, 1) for name, both in views.items()}

    def outputs(self, method, step):
        ids = self.data[f"in{step}.mask_noise"].argsort(dim=1)
        yield f"out{step}.mask", mask_at(ids[:, method.autoencoder.visible :], method.autoencoder.patches)
        if step:
            return
        yield "out0.ids_restore", ids.argsort(dim=1)
        level = self.config["std"] * self.data["in0.level"]
        images = torch.cat([self.data["in0.view1"], self.data["in0.view2"]])
        latent = method.autoencoder.encode(images + level.view(-1, 1, 1, 1) * self.data["in0.gauss"], ids)
        yield "out0.latent_before_noise_embedding", latent, EXACT
        yield "out0.noise_embedding_sinusoid", sinusoids(level, self.config["pe_dims"]), WAVES
        decoded = method.decode(latent, level, ids)
        yield "out0.pred", decoded.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(decoded)), WAVES
