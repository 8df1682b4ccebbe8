"""CAN (Mishra et al. 2022): noisy, masked views agree; a decoder predicts hidden pixels and the noise of visible ones.

Reimplemented: the published numbers come from JAX code that was never released. The arithmetic is that of the first
author's later PyTorch version, shlokk/mae-contrastive 12d2ba5, models_mae.py and loss_contrastive.py, and is tested
against recorded steps of it; no parity is claimed with the paper. Comments at the settings note where the defaults
differ from that code.
B images, 2B views (all first ones, then all second ones), L patches, k visible ones, p patch side, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Literal

import torch
from torch import Tensor

from checkpoints.spec import ViTSpec
from engine.distributed import current_world
from engine.settings import (
    AreaRange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Method, Step, Views
from pretrain.methods import mae
from pretrain.parts.colours import Colours
from pretrain.parts.heads import Norm, mlp
from pretrain.parts.losses import nt_xent
from pretrain.parts.masking import order_of, patchify, take
from pretrain.parts.views import ImageViews, Several, crop, view
from pretrain.parts.weights import xavier_
from pretrain.recipe import on_32px, smoke

VIEWS = 2
MAX_WAVELENGTH = 10_000.0  # of the embedding of noise levels, divided by 2 pi
COLOURS = Colours(jitter=(0.4, 0.4, 0.4, 0.1), blur=0.5)  # main_pretrain.py, for both views


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are the paper's where its abstract gives them; otherwise those of the author's code, as it was meant
    to run, or of SimCLR and MAE."""

    mask_ratio: UnitInterval = 0.5  # share of patches that are hidden (abstract; the code's option defaults to 0.75)
    # largest standard deviation of the noise, in normalised pixels (the code has this option, but ignores it)
    noise_std: NonNegativeFloat = 0.05
    noise_dims: int = 128  # number of sinusoids that encode a noise level
    norm_pixels: bool = True  # normalise the target pixels patch by patch, like MAE (the code: off)
    noisy_target: Annotated[bool, ReadIf("noise_std")] = False  # predict hidden pixels with their noise (the code: on)
    # tokens averaged for the contrastive loss: patches, or patches and class token (the code: all)
    pooled: Literal["patches", "all"] = "patches"
    projector_layers: PositiveInt = 3  # linear layers of the projector (the code: 2)
    projector_hidden: NonNegativeInt = 4096  # hidden width of the projector; 0: the encoder's width (the code)
    projector_width: PositiveInt = 128  # output width of the projector
    projector_norm: Norm = "bn"  # norm after each linear layer of the projector but the last (the code: none)
    temperature: PositiveFloat = 0.1  # temperature of the contrastive loss
    contrast_weight: NonNegativeFloat = 0.03  # weight of the contrastive loss
    pixel_weight: NonNegativeFloat = 0.67  # weight of the hidden pixels' loss (the code: 0.97 * 0.7)
    noise_weight: NonNegativeFloat = 0.3  # weight of the noise loss (the code: 0.97 * 0.3)
    decoder_width: PositiveInt = 512  # token width of the decoder
    decoder_depth: PositiveInt = 8  # blocks of the decoder
    decoder_heads: PositiveInt = 16  # attention heads of the decoder
    crop_scale: AreaRange = (0.2, 1.0)  # least and largest share of the image's area in a crop

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_dims < 4 or self.noise_dims % 2:
            raise ValueError(f"noise_dims={self.noise_dims}: must be an even number, 4 or more")

    def autoencoder(self) -> mae.Settings:
        """Settings of CAN's masked autoencoder, which is MAE's."""
        return mae.Settings(
            mask_ratio=self.mask_ratio,
            norm_pixels=self.norm_pixels,
            decoder_width=self.decoder_width,
            decoder_depth=self.decoder_depth,
            decoder_heads=self.decoder_heads,
        )


class Can(Method):
    """Views: "image" (B, 2, 3, H, W), "noise" (B, 2, L) for masks, "level" (B, 2) in [0, 1) for the noise levels, and
    "gauss" (B, 2, 3, H, W), standard normal numbers."""

    batch_statistics = True  # its negatives; processes share them
    sync_batch_norm = True  # ours, as in SimCLR
    min_batch, min_batch_setting = 2, "its negatives: the method"  # the views of one image alone always agree
    remedy = ", or contrast_weight higher"  # ours

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.autoencoder = mae.MaskedAutoencoder(spec, settings.autoencoder())
        hidden = [settings.projector_hidden or spec.width] * (settings.projector_layers - 1)
        dims = [spec.width, *hidden, settings.projector_width]
        self.projector = xavier_(mlp(dims, norm=settings.projector_norm, activation="relu"))
        self.noise_mlp = xavier_(mlp([settings.noise_dims, spec.width, spec.width], activation="relu"))

    def views(self) -> Views:
        steps = [*crop(self.spec.side, self.settings.crop_scale, "bilinear"), COLOURS]
        images, size = Several([view(steps, self.preparation)] * VIEWS), self.spec.side
        draws = {
            "noise": partial(torch.rand, VIEWS, self.autoencoder.patches),
            "level": partial(torch.rand, VIEWS),
            "gauss": partial(torch.randn, VIEWS, 3, size, size),
        }
        return ImageViews({"image": images}, draws)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s = self.settings
        both = {name: tensor.transpose(0, 1).flatten(0, 1) for name, tensor in views.items()}  # (2B, ...)
        images, ids = both["image"], order_of(both["noise"])
        level = s.noise_std * both["level"]  # (2B,)
        noise = level.view(-1, 1, 1, 1) * both["gauss"]
        noisy_images = images + noise

        latent = self.autoencoder.encode(noisy_images, ids)  # (2B, 1+k, D)
        decoded = self.decode(latent, level, ids)  # (2B, L, 3pp)
        targets = noisy_images if s.noisy_target else images
        pixel_loss, noise_loss = self.errors(decoded, targets, noise, ids)
        contrastive_loss = self.contrast(latent)

        loss = s.contrast_weight * contrastive_loss + s.pixel_weight * pixel_loss + s.noise_weight * noise_loss
        logs = {
            "contrast": contrastive_loss.detach(),
            "pixels": pixel_loss.detach(),
            "noise": noise_loss.detach(),
        }
        return Step(loss, logs)

    def contrast(self, latent: Tensor) -> Tensor:
        """Contrastive loss of the projected mean tokens of `latent` (2B, 1+k, D)."""
        tokens = latent if self.settings.pooled == "all" else latent[:, 1:]
        projections = self.projector(tokens.mean(dim=1))
        return nt_xent(projections, self.settings.temperature)

    def decode(self, latent: Tensor, level: Tensor, ids: Tensor) -> Tensor:
        """Decode tokens (2B, 1+k, D), to which the embedding of the noise levels (2B,) is added.

        Returns (2B, L, 3pp), in the order of `ids` (2B, L): the noise of visible patches, the pixels of hidden ones.
        """
        level_embedding = self.noise_mlp(sinusoids(level, self.settings.noise_dims))  # (2B, D)
        tokens = latent + level_embedding.unsqueeze(1)
        return self.autoencoder.pixels(self.autoencoder.decoder(tokens, ids))

    def errors(self, decoded: Tensor, images: Tensor, noise: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Mean squared errors of the hidden patches' pixels, and of the visible patches' noise.

        decoded: (2B, L, 3pp). images, noise: (2B, 3, H, W). ids: (2B, L).
        """
        visible, patch = self.autoencoder.visible, self.spec.patch_size
        hidden_pixels = self.autoencoder.target(take(patchify(images, patch), ids[:, visible:]))
        visible_noise = take(patchify(noise, patch), ids[:, :visible])
        pixel_loss = (decoded[:, visible:] - hidden_pixels).square().mean()
        noise_loss = (decoded[:, :visible] - visible_noise).square().mean()
        return pixel_loss, noise_loss

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        """Losses of equally likely keys and of the same patch everywhere. No baseline of the noise loss: only late in
        training does a decoder predict noise better than zero does."""
        candidates = VIEWS * len(views["image"]) * current_world().size - 1
        return {"contrast": log(candidates), "pixels": self.autoencoder.baseline_loss(views["image"].flatten(0, 1))}

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.autoencoder.vit)}


def sinusoids(level: Tensor, dims: int) -> Tensor:
    """Noise levels (n,) -> (n, dims): sines, then cosines, of angular frequencies from 1 to 1 / MAX_WAVELENGTH
    (models_mae.py)."""
    half = dims // 2
    steps = torch.arange(half, dtype=level.dtype, device=level.device)
    angles = level.unsqueeze(1) * torch.exp(-log(MAX_WAVELENGTH) / (half - 1) * steps)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


METHOD = Can

_VIT_B = replace(
    mae.RECIPES["vit_b"],
    source="ours after MAE's recipe; batch and rate are those of shlokk/mae-contrastive's README (64 x 4, accumulated "
    "four times); of the published ViT-B's training, only the 800 epochs are known",
    settings=Settings(),
    batch=1024,
    lr=2.5e-4,
)
_SMALL = dict(projector_hidden=256, projector_width=64, noise_dims=32)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_author": replace(
        _VIT_B,
        source="shlokk/mae-contrastive 12d2ba5, README.md and main_pretrain.py, with the options that it needs to run "
        "(noise_loss) and to be CAN (half of the patches hidden); its noise is twice what its option says",
        settings=Settings(
            noise_std=0.1,
            norm_pixels=False,
            noisy_target=True,
            pooled="all",
            projector_layers=2,
            projector_hidden=0,
            projector_norm="none",
            pixel_weight=0.679,
            noise_weight=0.291,
        ),
        epochs=50,
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(decoder_width=96, decoder_depth=2, decoder_heads=3, **_SMALL),
        epochs=3,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(
            decoder_width=32,
            decoder_depth=1,
            decoder_heads=2,
            crop_scale=(0.6, 1.0),
            **_SMALL | dict(projector_hidden=64, projector_width=32),
        ),
    ),
}
