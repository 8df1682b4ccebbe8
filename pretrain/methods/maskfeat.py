"""MaskFeat (Wei et al. 2022): mask tokens replace blocks of patches, and one linear layer predicts their HOG features.

Figure 2 and section 3 of the paper, on images; facebookresearch/SlowFast 287ec00, slowfast/models/masked.py. Of its
ablations, pixels and features of networks as targets are not implemented.
B images, L patches, M hidden patches of the whole batch, D width; HOG features have K bins and r x c cells.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import AreaRange, NonNegativeInt, PositiveInt, UnitInterval, Validated
from pretrain.method import Encoder, Method, Step, Views, check_encoder
from pretrain.parts.losses import patch_baseline
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import hidden_tokens
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import TOKEN_STD, truncated_
from pretrain.recipe import VIT_B, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import WarmupCosine

MAX_BLOCKS = 5  # a rectangle hides at least a fifth of all hidden patches (slowfast/datasets/imagenet.py:173-192)
INITIAL_BIAS = 0.02  # of the trunk's linear layers and norms (video_model_builder.py:1085-1092)
TRUNK = dict(position="learned", position_resize="bilinear", pool="avg")


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of configs/masked_ssl/in1k_VIT_B_MaskFeat_PT.yaml."""

    mask_ratio: UnitInterval = 0.4  # largest share of patches that are hidden
    hog_bins: PositiveInt = 9  # K, bins of a HOG histogram: orientations of gradients
    hog_cell: PositiveInt = 8  # side of the cell of a HOG histogram, in pixels
    # side of the Gaussian window that weights HOG gradients, in pixels; 16 in mmpretrain; 0: no weights
    hog_window: NonNegativeInt = 0
    crop_scale: AreaRange = (0.5, 1.0)  # least and largest share of the image's area in the crop


class MaskFeat(Method):
    """Views: "image" (B, 3, H, W) and "mask" (B, L), True for hidden patches."""

    batch_statistics = True  # the loss is a mean over all hidden patches, of which images have different numbers

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_maskfeat(spec, settings)
        hidden = round(spec.grid[0] * spec.grid[1] * settings.mask_ratio)
        self.draw_mask = BlockMask(spec.grid, hidden, hidden // MAX_BLOCKS)
        self.cells = spec.patch_size // settings.hog_cell
        self.vit = maskfeat_vit(ViT(spec))
        self.mask_token = nn.Parameter(torch.empty(1, 1, spec.width))
        nn.init.trunc_normal_(self.mask_token, std=TOKEN_STD)
        self.projection = truncated_(nn.Linear(spec.width, COLOURS * settings.hog_bins * self.cells**2))

    def views(self) -> Views:
        steps = crop(self.spec.side, self.settings.crop_scale)
        return ImageViews({"image": view(steps, self.preparation)}, {"mask": self.draw_mask})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images, mask = views["image"], views["mask"].bool()
        predictions = self.predict(images, mask)  # (M, 3*K*cells*cells)
        targets = self.targets(images)[mask]
        return Step((predictions - targets).square().mean(), {})

    def targets(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) -> HOG features of their patches (B, L, 3*K*cells*cells), float32."""
        s = self.settings
        return by_patch(hog(images, s.hog_bins, s.hog_cell, s.hog_window), self.cells)

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Images (B, 3, H, W), mask (B, L) -> predicted features of the hidden patches (M, 3*K*cells*cells)."""
        return to_float32(self.projection(hidden_tokens(self.vit, images, mask, self.mask_token)))

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": patch_baseline(self.targets(views["image"]))}

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.vit)}


def check_maskfeat(spec: ViTSpec, settings: Settings) -> None:
    """Raise ValueError if settings and encoder do not fit each other."""
    check_encoder(spec, position="learned", class_token=True, registers=0, final_norm="all")
    patches = spec.grid[0] * spec.grid[1]
    hidden = round(patches * settings.mask_ratio)
    if not 0 < hidden < patches:
        raise ValueError(
            f"mask_ratio={settings.mask_ratio} hides {hidden} of {patches} patches: some must be hidden, but not all"
        )
    if spec.patch_size % settings.hog_cell:
        raise ValueError(f"hog_cell={settings.hog_cell}: must divide patch_size={spec.patch_size}")
    if settings.hog_window == 1 or (settings.hog_window and spec.side % settings.hog_window):
        raise ValueError(
            f"hog_window={settings.hog_window}: must be 0, or at least 2 and a divisor of image_size={spec.side}"
        )


def maskfeat_vit(vit: ViT) -> ViT:
    """Initialise `vit` in place: truncated normal 0.02 for linear layers, patch embedding, class token and positions;
    biases of 0.02 in the blocks, torch's own in the patch embedding."""
    trunk = truncated_(vit).trunk
    for tensor in (trunk.patch_embed.proj.weight, trunk.cls_token, trunk.pos_embed):
        nn.init.trunc_normal_(tensor, std=TOKEN_STD)
    for name, parameter in trunk.blocks.named_parameters():
        if name.endswith(".bias"):
            nn.init.constant_(parameter, INITIAL_BIAS)
    return vit


# HOG as MaskFeat predicts it (section 3; slowfast/models/operators.py:62-112), in float32 and with the official order
# of operations: for pixels without a horizontal gradient, rounding decides between two bins, and in flat cells only
# rounding errors are left to normalise.
COLOURS = 3
SOBEL = ((1.0, 0.0, -1.0), (2.0, 0.0, -2.0), (1.0, 0.0, -1.0))  # the horizontal one


@torch.no_grad()
def hog(images: Tensor, bins: int = 9, cell: int = 8, window: int = 0) -> Tensor:
    """HOG: images (B, 3, r*cell, c*cell) -> (B, 3, K, r, c) float32, a histogram of unit length per colour and cell.

    bins: K, of unsigned orientations, counted from the vertical gradient. cell: side in pixels. window: side in pixels
    of a Gaussian, repeated over the image, that weights the gradients; 0: none, as in the official configurations.
    """
    with torch.autocast(images.device.type, enabled=False):
        horizontal, vertical = gradients(images.float())
    magnitude = torch.stack([horizontal, vertical], dim=-1).norm(dim=-1)
    if window:
        magnitude = magnitude * gaussian(window, magnitude)
    # The remainder of a negative number is positive, so that opposite gradients share a bin.
    bin_ids = (torch.atan2(horizontal, vertical) / math.pi * bins).floor().long() % bins
    votes = magnitude.new_zeros(*magnitude.shape[:2], bins, *magnitude.shape[2:])
    votes.scatter_(2, bin_ids.unsqueeze(2), magnitude.unsqueeze(2))
    return F.normalize(votes.unfold(3, cell, cell).unfold(4, cell, cell).sum(dim=(-2, -1)), dim=2)


def gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W) -> horizontal and vertical Sobel gradients of each colour (B, 3, H, W), edges mirrored."""
    kernel = images.new_tensor(SOBEL).expand(COLOURS, 1, 3, 3)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    return F.conv2d(padded, kernel, groups=COLOURS), F.conv2d(padded, kernel.transpose(2, 3), groups=COLOURS)


def gaussian(window: int, images: Tensor) -> Tensor:
    """Weights (H, W) for `images` (..., H, W): a Gaussian over window x window pixels, of standard deviation
    window // 2, repeated over the image."""
    positions = torch.arange(window, dtype=images.dtype, device=images.device)
    weights = torch.exp(-0.5 * ((positions - positions.mean()) / (window // 2)).square())
    weights = torch.outer(weights, weights)
    return (weights / weights.sum()).repeat(images.shape[-2] // window, images.shape[-1] // window)


def by_patch(histograms: Tensor, cells: int) -> Tensor:
    """Histograms (B, 3, K, r, c) -> features (B, L, 3*K*cells*cells) of patches of cells x cells, ordered by colour,
    bin, row and column (masked.py)."""
    batch, colours, bins, rows, columns = histograms.shape
    tiles = histograms.reshape(batch, colours, bins, rows // cells, cells, columns // cells, cells)
    return tiles.permute(0, 3, 5, 1, 2, 4, 6).reshape(batch, -1, colours * bins * cells**2)


METHOD = MaskFeat

_VIT_B = Recipe(
    source="SlowFast 287ec00, configs/masked_ssl/in1k_VIT_B_MaskFeat_PT.yaml (published weights: 1600 epochs); a batch "
    "of 2048 is mmpretrain's, with which the rates agree",
    spec=replace(VIT_B, **TRUNK),
    settings=Settings(),
    epochs=300,
    batch=2048,
    lr=2e-4,
    schedule=WarmupCosine(warmup=30, start=0.005, floor=8e-6),  # from and to 1e-6 for each 256 images of a batch
    weight_decay=0.05,
    clip=0.02,
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_b_1600": replace(_VIT_B, epochs=1600),
    "vit_l": replace(_VIT_B, spec=replace(VIT_L, **TRUNK)),
    "vit_l_1600": replace(_VIT_B, spec=replace(VIT_L, **TRUNK), epochs=1600),
    "32px": on_32px(
        _VIT_B,
        Settings(hog_cell=4),
        source="ours: the ViT-B recipe on images of 32 px with a cell for each patch, for two cores",
        epochs=12,
        schedule=WarmupCosine(warmup=0.5),
        clip=1.0,
    ),
    "smoke": smoke(_VIT_B, Settings(hog_cell=4), schedule=WarmupCosine(warmup=0.5), clip=1.0),
}
