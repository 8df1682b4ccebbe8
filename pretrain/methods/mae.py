"""MAE (He et al. 2022): encode a quarter of the patches, rebuild the pixels of the others.

Figure 1 of the paper; facebookresearch/mae efb2a80, models_mae.py. B batch, L patches, k visible ones, p patch side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from pretrain.decoders import TokenDecoder
from pretrain.masking import kept, order_of, take
from pretrain.method import Clock, Encoder, Method, Step, Views
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine
from pretrain.sizes import SINCOS, VIT_32PX, VIT_B, VIT_L, VIT_SMOKE
from pretrain.views import crop, noise, view
from pretrain.weights import xavier_, xavier_vit

PIXEL_EPS = 1e-6  # models_mae.py:207


@dataclass(frozen=True, kw_only=True)
class Settings:
    """mask_ratio: share of patches that are hidden. norm_pixels: targets normalised patch by patch (table 1d).

    crop_scale: area of the random crop. decoder_*: table 1a, 1b.
    """

    mask_ratio: float = 0.75
    norm_pixels: bool = True
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    crop_scale: tuple[float, float] = (0.2, 1.0)


class PixelReconstruction(NamedTuple):
    """loss: scalar. latent: encoded class token and visible patches (B, 1+k, D). prediction (B, L, 3pp) in the order of
    `ids` (B, L), of which the first k were visible."""

    loss: Tensor
    latent: Tensor
    prediction: Tensor
    ids: Tensor


class MaskedAutoencoder(nn.Module):
    """Encoder, decoder and pixel loss; LUT builds on it too."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.patches = spec.grid[0] * spec.grid[1]
        self.visible = kept(self.patches, settings.mask_ratio)
        if not 0 < self.visible < self.patches:
            raise ValueError(
                f"mask_ratio={settings.mask_ratio} leaves {self.visible} of {self.patches} patches visible"
            )
        self.vit = xavier_vit(ViT(spec))
        self.decoder = TokenDecoder(
            spec.width, settings.decoder_width, settings.decoder_depth, settings.decoder_heads, spec.grid
        )
        self.pixels = xavier_(nn.Linear(settings.decoder_width, spec.patch_size**2 * 3))

    def encode(self, images: Tensor, ids: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids of the visible patches (B, k) -> class token and patches (B, 1+k, D)."""
        patches = self.vit.place(self.vit.project(images), self.vit.spec.grid)
        return self.vit.encode(patches, keep=ids)[0]

    def reconstruct(self, images: Tensor, ids: Tensor) -> PixelReconstruction:
        """ids (B, L): all patches, the visible ones first."""
        latent = self.encode(images, ids[:, : self.visible])
        prediction = self.pixels(self.decoder(latent, ids))
        target = take(patchify(images, self.vit.spec.patch_size), ids[:, self.visible :])
        if self.settings.norm_pixels:
            target = normalised(target)
        loss = (prediction[:, self.visible :] - target).square().mean()
        return PixelReconstruction(loss, latent, prediction, ids)


class Mae(Method):
    """Views: "image" (B, 3, H, W) and "noise" (B, L)."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.autoencoder = MaskedAutoencoder(spec, settings)

    def views(self) -> Views:
        steps = crop(self.spec.image_size, self.settings.crop_scale)
        return MaeViews(view(steps, self.preparation), self.autoencoder.patches)

    def forward(self, views: Mapping[str, Tensor], clock: Clock) -> Step:
        found = self.autoencoder.reconstruct(views["image"], order_of(views["noise"]))
        return Step(found.loss, {})

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.autoencoder.vit)}


@dataclass(frozen=True)
class MaeViews:
    """One crop, and noise for its patches."""

    crop: Views
    patches: int

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        return {"image": self.crop(image), "noise": noise(self.patches)}


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, h*p, w*p) -> (B, L, p*p*3): row in the patch, column in it, channel (models_mae.py:95-107)."""
    batch, channels, height, width = images.shape
    cells = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch**2 * channels)


def normalised(patches: Tensor) -> Tensor:
    """Each patch (..., 3pp) less its mean, over its standard deviation, with n-1 (models_mae.py:204-207)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + PIXEL_EPS).sqrt()


METHOD = Mae

_VIT_B = Recipe(
    source="He et al. 2022, table 8; mae PRETRAIN.md, main_pretrain.py (released weights: 1600 epochs)",
    spec=replace(VIT_B, **SINCOS),
    settings=Settings(),
    epochs=800,
    batch=4096,
    lr=1.5e-4,
    schedule=WarmupCosine(warmup=40),
    weight_decay=0.05,
    betas=(0.9, 0.95),
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_1600": replace(_VIT_B, epochs=1600),
    "vit_l": replace(_VIT_B, spec=replace(VIT_L, **SINCOS)),
    "32px": replace(
        _VIT_B,
        source="ours: the ViT-B recipe on 8 x 8 patches, for two cores",
        spec=replace(VIT_32PX, **SINCOS),
        settings=Settings(decoder_width=96, decoder_depth=2, decoder_heads=3, crop_scale=(0.4, 1.0)),
        epochs=20,
        batch=256,
        lr=1e-3,
        schedule=WarmupCosine(warmup=2),
    ),
    "smoke": replace(
        _VIT_B,
        source="ours: seconds on digits",
        spec=replace(VIT_SMOKE, **SINCOS),
        settings=Settings(decoder_width=32, decoder_depth=1, decoder_heads=2, crop_scale=(0.6, 1.0)),
        epochs=2,
        batch=64,
        lr=1e-3,
        schedule=WarmupCosine(warmup=1),
    ),
}
