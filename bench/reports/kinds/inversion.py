"""Images that a deep image prior reconstructs from a ViT's tokens of the visible patches, at several mask ratios.

ExtreMA figure 2 and appendix C: f is the pretrained ViT, and t = f(visible patches of x). A network r, whose input z is
fixed noise, is fitted so that f(r(z)) equals t at these patches; r(z) is the reconstruction. ExtreMA does not specify
r; we use that of the deep image prior's feature inversion (Ulyanov et al. 2018; DmitryUlyanov/deep-image-prior
feature_inversion.ipynb, models/skip.py), which has the same learning rate and number of steps. One network is fitted to
each image and ratio, in thousands of steps: minutes on a GPU.

In shapes, H x W are pixels, L is the number of patches and l of visible ones, and D is the width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log2

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.reports.pictures import Block, Panel, Picture, arranged
from bench.reports.visualize import PictureRequest, Viewer, as_image, errors_naming, image_panel
from checkpoints.vit import ViT
from engine.errors import option
from engine.progress import Progress
from engine.settings import BelowOne, NonEmpty, PositiveFloat, PositiveInt, Validated
from pretrain.parts.masking import visible_count

# feature_inversion.ipynb, of each level, in the encoder and the decoder.
CHANNELS = (16, 32, 64, 128, 128, 128)
KERNELS = (7, 7, 5, 5, 3, 3)
SKIP_CHANNELS = 4  # of the skip connection of each level
NOISE_CHANNELS, MAX_NOISE = 32, 0.1  # of z
SLOPE = 0.2  # of the leaky ReLU
MIN_SIDE = 4  # pixels at the deepest level


class Level(nn.Module):
    """One level of the encoder and decoder: (B, in_channels, H, W) -> (B, channels, H, W).

    inner: the next deeper level, with `inner_channels` outputs; None for the deepest.
    """

    def __init__(
        self, in_channels: int, channels: int, kernel: int, inner: nn.Module | None, inner_channels: int
    ) -> None:
        super().__init__()
        self.across = _conv_norm_relu(in_channels, SKIP_CHANNELS, 1)
        self.down = nn.Sequential(
            nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2),
            nn.AvgPool2d(2),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(SLOPE),
            *_conv_norm_relu(channels, channels, kernel),
        )
        self.inner = inner or nn.Identity()
        self.up = nn.Sequential(
            nn.BatchNorm2d(SKIP_CHANNELS + inner_channels),
            *_conv_norm_relu(SKIP_CHANNELS + inner_channels, channels, kernel),
            *_conv_norm_relu(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        upsampled = F.interpolate(self.inner(self.down(x)), scale_factor=2, mode="nearest")
        return self.up(torch.cat([self.across(x), upsampled], dim=1))


def _conv_norm_relu(in_channels: int, channels: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.LeakyReLU(SLOPE))


class DeepImagePrior(nn.Module):
    """The network r and its fixed noise z; `forward()` returns r(z), an image (1, 3, H, W) from 0 to 1.

    It has six levels for 224 pixels, as in the source, and fewer for images whose deepest level would have fewer than
    MIN_SIDE pixels a side. size: (H, W). seed: of the initial weights and of z.
    """

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        super().__init__()
        self.size = size
        levels = max(1, min(len(CHANNELS), round(log2(min(size) / MIN_SIDE))))
        multiple = 2**levels
        height, width = (-(-side // multiple) * multiple for side in size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.register_buffer("noise", MAX_NOISE * torch.rand(1, NOISE_CHANNELS, height, width))
            inner: nn.Module | None = None
            for level in reversed(range(levels)):
                in_channels = CHANNELS[level - 1] if level else NOISE_CHANNELS
                inner_channels = CHANNELS[level + 1] if inner else CHANNELS[level]
                inner = Level(in_channels, CHANNELS[level], KERNELS[level], inner, inner_channels)
            self.layers = nn.Sequential(inner, nn.Conv2d(CHANNELS[0], 3, 1), nn.Sigmoid())

    def forward(self) -> Tensor:
        return self.layers(self.noise)[..., : self.size[0], : self.size[1]]


def visible_tokens(vit: ViT, images: Tensor, keep: Tensor | None) -> Tensor:
    """Tokens (1, l, D) of the last block for an image (1, 3, H, W) of which the ViT gets only the visible patches.

    keep: indices (1, l) of the visible patches; None: all.
    """
    patch = vit.spec.patch_size
    grid = (images.shape[-2] // patch, images.shape[-1] // patch)
    tokens = vit.encode(vit.add_positions(vit.project(images), grid), keep, norm=False, grid=grid)[0]
    return tokens[:, -(grid[0] * grid[1] if keep is None else keep.shape[1]) :]


def invert(
    vit: ViT,
    image: Tensor,
    keep: Tensor | None,
    normalised: Callable[[Tensor], Tensor],
    steps: int,
    lr: float,
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Tensor, list[float]]:
    """Reconstruct an image from a frozen ViT's tokens of its visible patches.

    Args:
        vit: the frozen ViT.
        image: normalised, (1, 3, H, W).
        keep: indices (1, l) of the visible patches; None: all.
        normalised: a function that normalises images from 0 to 1 as the ViT was trained.
        steps: of Adam.
        lr: learning rate.
        seed: of the deep image prior.
        advance: called after each step with 1.

    Returns:
        The reconstruction (1, 3, H, W), from 0 to 1, and the loss of each step.
    """
    with torch.no_grad():
        target = visible_tokens(vit, image, keep)
    prior = DeepImagePrior((image.shape[-2], image.shape[-1]), seed).to(image.device)
    optimizer, losses = torch.optim.Adam(prior.parameters(), lr=lr), []
    for _ in range(steps):
        tokens = visible_tokens(vit, normalised(prior()), None)
        tokens = tokens if keep is None else tokens.gather(1, keep.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        loss = F.mse_loss(tokens, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        advance(1)
    with torch.no_grad():
        return prior(), losses


@dataclass(frozen=True, kw_only=True)
class Inversion(Validated):
    """Settings of the picture."""

    # shares of hidden patches, from 0 to below 1; ExtreMA does not state those of its figure 2
    mask_ratios: NonEmpty[BelowOne] = (0.5, 0.6, 0.75, 0.8, 0.9)
    steps: PositiveInt = 3000  # of the fit (appendix C)
    lr: PositiveFloat = 1e-3  # of Adam (appendix C)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are masked images, each above its reconstruction; columns are mask ratios."""
        viewers = request.viewers()
        fits = len(self.mask_ratios) * len(request.images) * len(viewers)
        with Progress("inversion", fits * self.steps, "steps") as progress:
            blocks = [
                (viewer.name, [self.block(viewer, request, n, progress) for n in range(len(request.images))])
                for viewer in viewers
            ]
        yield arranged(
            "inversion",
            [image_panel(image.image) for image in request.images],
            blocks,
            note="Below the visible patches, the image that a deep image prior reconstructs from a network's tokens "
            f"of them in {self.steps} steps. The error is the root mean square over the hidden pixels, of 255 grey "
            "levels.",
        )

    def block(self, viewer: Viewer, request: PictureRequest, number: int, progress: Progress) -> Block:
        """Two rows for image `number`: visible patches, and reconstructions."""
        image = viewer.tensor(request.images[number].image)
        columns = [self.column(viewer, image, ratio, (request.seed, number), progress) for ratio in self.mask_ratios]
        return [list(row) for row in zip(*columns, strict=True)]

    def column(
        self, viewer: Viewer, image: Tensor, ratio: float, seeds: tuple[int, int], progress: Progress
    ) -> tuple[Panel, Panel]:
        """An image (1, 3, H, W) with a share of its patches hidden, and its reconstruction."""
        preparation, grid = viewer.export.preparation, viewer.grid(image)
        order = np.random.RandomState(seeds).permutation(grid[0] * grid[1])  # the same patches first at every ratio
        hidden = np.ones(len(order), bool)
        hidden[order[: max(1, visible_count(len(order), ratio))]] = False
        keep = torch.tensor(np.flatnonzero(~hidden), device=image.device)[None] if hidden.any() else None
        with errors_naming(viewer.name):
            if hidden.any() and viewer.spec.relative_position != "none":
                raise ValueError(
                    f"relative positions need all patches of an image; add {option('settings', {'mask_ratios': 0})}"
                )
            reconstructions, _ = invert(
                viewer.backbone.vit,
                image,
                keep,
                partial(normalise, viewer),
                self.steps,
                self.lr,
                seeds[0],
                progress.advance,
            )
        masked = as_image(image[0], preparation, hidden.reshape(grid))
        reconstruction = reconstructions[0].cpu().mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        error = hidden_error(as_image(image[0], preparation), reconstruction, hidden.reshape(grid))
        return (
            Panel(values=masked, size=masked.shape[:2], title=f"{hidden.mean():.0%} hidden"),
            Panel(values=reconstruction, size=reconstruction.shape[:2], title="found", caption=f"error {error:.1f}"),
        )


def normalise(viewer: Viewer, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) from 0 to 1, normalised as the network was trained."""
    return (images - viewer.backbone.mean) / viewer.backbone.std


def hidden_error(image: np.ndarray, reconstruction: np.ndarray, hidden: np.ndarray) -> float:
    """Root mean square difference of images (H, W, 3) uint8 over the hidden patches; over all pixels if none is hidden.

    hidden: (h, w) bool, True for hidden patches.
    """
    patch = image.shape[0] // hidden.shape[0]
    is_hidden = np.kron(hidden, np.ones((patch, patch), bool)) if hidden.any() else np.ones(image.shape[:2], bool)
    return float(np.sqrt(np.square(image[is_hidden].astype(np.float64) - reconstruction[is_hidden]).mean()))
