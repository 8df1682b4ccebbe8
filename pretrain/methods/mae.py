"""MAE (He et al. 2022): encode a quarter of the patches, predict the pixels of the others.

Figure 1 of the paper; facebookresearch/mae efb2a80, models_mae.py. Of its ablations, two targets of table 1d are not
implemented: PCA coefficients and dVAE tokens.
B images, L patches, k visible ones, p patch side, D width, d width of the decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.settings import AreaRange, PositiveInt, ReadIf, UnitInterval, Validated
from pretrain.method import Encoder, Method, Step, Views, check_encoder
from pretrain.parts.colours import Colours
from pretrain.parts.decoders import TokenDecoder
from pretrain.parts.losses import patch_baseline
from pretrain.parts.mask_shapes import MaskNoise
from pretrain.parts.masking import (
    mask_at,
    normalised,
    order_of,
    patchify,
    take,
    visible_count,
    with_mask_tokens,
)
from pretrain.parts.views import ImageViews, crop, fixed_crop, view
from pretrain.parts.weights import TOKEN_STD, xavier_, xavier_vit
from pretrain.recipe import SINCOS, VIT_B, VIT_H, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import WarmupCosine

Masks = Literal["random", "block", "grid"]
GRID_RATIO = 0.75  # mask ratio of sampling=grid, which keeps one patch of each 2 x 2


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """Includes the ablations of table 1 and figure 5; the defaults are the paper's."""

    mask_ratio: UnitInterval = 0.75  # share of patches that are hidden (figure 5)
    decoder_width: PositiveInt = 512  # token width of the decoder (table 1b)
    decoder_depth: PositiveInt = 8  # blocks of the decoder (table 1a)
    decoder_heads: PositiveInt = 16  # attention heads of the decoder
    encoder_mask_tokens: bool = False  # the encoder also sees mask tokens in place of hidden patches (table 1c)
    norm_pixels: bool = True  # normalise the target pixels patch by patch (table 1d)
    # crop of random size, of fixed size, or at the centre without flip (table 1e); the last two are cut from an image
    # whose short side is resized to 256/224 of image_size (ours)
    crop: Literal["random", "fixed", "centre"] = "random"
    # least and largest share of the image's area in the crop of random size
    crop_scale: Annotated[AreaRange, ReadIf("crop", "random")] = (0.2, 1.0)
    colour_jitter: UnitInterval = 0.0  # probability of colour jitter (table 1e; its strength is ours)
    # shape of the mask: random patches, BEiT's rectangles, or all but one patch of each 2 x 2 (table 1f; which of the
    # four stays visible is drawn for each image: ours)
    sampling: Masks = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling == "grid" and self.mask_ratio != GRID_RATIO:
            raise ValueError(
                f"mask_ratio={self.mask_ratio} with sampling='grid': this sampling needs mask_ratio={GRID_RATIO}"
            )


class MaskedAutoencoder(nn.Module):
    """Encoder, decoder and pixel loss; LUT and CAN use it too.

    ids: (B, L) of all patches, the k visible ones first.
    """

    undecayed = ()  # names of parameters with more than one dimension that have no weight decay

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__()
        check_encoder(spec, position="sincos_column_first", class_token=True, registers=0)
        self.settings, self.grid = settings, spec.grid
        self.patches = spec.grid[0] * spec.grid[1]
        self.visible = visible_count(self.patches, settings.mask_ratio)
        if not 0 < self.visible < self.patches:
            raise ValueError(
                f"mask_ratio={settings.mask_ratio} leaves {self.visible} of {self.patches} patches visible"
            )
        if settings.sampling == "grid" and (spec.grid[0] % 2 or spec.grid[1] % 2):
            raise ValueError(f"sampling='grid' needs an even grid of patches, not {spec.grid[0]} x {spec.grid[1]}")
        self.vit = xavier_vit(ViT(spec))
        self.mask_token = None
        if settings.encoder_mask_tokens:
            self.mask_token = nn.Parameter(torch.empty(1, 1, spec.width).normal_(std=TOKEN_STD))
        self.decoder = TokenDecoder(spec, settings.decoder_width, settings.decoder_depth, settings.decoder_heads)
        self.decoder.mask_token.requires_grad_(not settings.encoder_mask_tokens)  # one of the two is used
        self.pixels = xavier_(nn.Linear(settings.decoder_width, spec.patch_size**2 * 3))

    def encode(self, images: Tensor, ids: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> class token and visible patches (B, 1+k, D), in the order of `ids`; with mask tokens
        in the encoder, all patches (B, 1+L, D)."""
        patches, seen_ids = self.vit.project(images), ids[:, : self.visible]
        if self.mask_token is not None:
            mask = mask_at(ids[:, self.visible :], self.patches)
            patches, seen_ids = with_mask_tokens(patches, mask, self.mask_token), ids
        return self.vit.encode(self.vit.add_positions(patches, self.grid), keep=seen_ids)[0]

    def context(self, latent: Tensor, ids: Tensor) -> Tensor:
        """Encoded tokens (B, 1+k, D) or (B, 1+L, D) -> the mean (B, D) of the visible patches."""
        return latent[:, 1 : 1 + self.visible].mean(dim=1)

    def loss(self, latent: Tensor, images: Tensor, ids: Tensor) -> Tensor:
        """Mean squared error of the hidden patches' pixels. latent: tokens from `encode`. images: (B, 3, H, W)."""
        prediction = self.predict(latent, ids)  # (B, L-k, 3pp)
        hidden_patches = take(patchify(images, self.vit.spec.patch_size), ids[:, self.visible :])
        return (prediction - self.target(hidden_patches)).square().mean()

    def predict(self, latent: Tensor, ids: Tensor) -> Tensor:
        """Tokens from `encode` -> predictions of the hidden patches (B, L-k, 3pp), in the order of `ids`."""
        decoded = self.decoder(latent, ids)  # (B, L, d)
        return self.pixels(decoded[:, self.visible :])

    def target(self, patches: Tensor) -> Tensor:
        """Patches (B, l, 3pp) -> their targets (B, l, 3pp), normalised if `norm_pixels`."""
        return normalised(patches) if self.settings.norm_pixels else patches

    def baseline_loss(self, images: Tensor) -> Tensor:
        """Loss of predicting the same patch everywhere, for images (B, 3, H, W)."""
        return patch_baseline(self.target(patchify(images, self.vit.spec.patch_size)))

    def mask_noise(self) -> MaskNoise:
        """The sampler of the noise that orders the patches: those with the largest numbers are hidden."""
        return MaskNoise(self.settings.sampling, self.grid, self.patches - self.visible)


class Mae(Method):
    """Views: "image" (B, 3, H, W) and "noise" (B, L)."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.autoencoder = MaskedAutoencoder(spec, settings)

    def views(self) -> Views:
        size, settings = self.spec.side, self.settings
        resized = round(size / self.preparation.crop)
        cropping = {
            "random": crop(size, settings.crop_scale),
            "fixed": fixed_crop(size, resized),
            "centre": [transforms.Resize(resized, InterpolationMode.BICUBIC), transforms.CenterCrop(size)],
        }
        steps = [*cropping[settings.crop], Colours(jitter_chance=settings.colour_jitter, grey=0.0)]
        return ImageViews({"image": view(steps, self.preparation)}, {"noise": self.autoencoder.mask_noise()})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images, ids = views["image"], order_of(views["noise"])  # (B, 3, H, W), (B, L)
        latent = self.autoencoder.encode(images, ids)  # (B, 1+k, D)
        return Step(self.autoencoder.loss(latent, images, ids), {})

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.autoencoder.baseline_loss(views["image"])}

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.autoencoder.vit)}


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
    "vit_b_100": replace(_VIT_B, epochs=100, source=f"LUT supplementary, table C (its baseline); else {_VIT_B.source}"),
    "vit_b_300": replace(_VIT_B, epochs=300, source=f"ExtreMA table 11 (300 epochs); else {_VIT_B.source}"),
    "vit_l": replace(_VIT_B, spec=replace(VIT_L, **SINCOS)),
    "vit_l_1600": replace(_VIT_B, spec=replace(VIT_L, **SINCOS), epochs=1600),
    "vit_h": replace(_VIT_B, spec=replace(VIT_H, **SINCOS)),  # in patches of 14 pixels
    "vit_h_1600": replace(_VIT_B, spec=replace(VIT_H, **SINCOS), epochs=1600),
    "32px": on_32px(
        _VIT_B,
        Settings(decoder_width=96, decoder_depth=2, decoder_heads=3, crop_scale=(0.4, 1.0)),
        epochs=5,
    ),
    "smoke": smoke(
        _VIT_B, Settings(decoder_width=32, decoder_depth=1, decoder_heads=2, crop_scale=(0.6, 1.0)), lr=2.5e-4
    ),
}
