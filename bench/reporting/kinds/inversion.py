"""The image that a deep image prior finds for what a ViT says of some patches, at several mask ratios.

ExtreMA figure 2 and appendix C: f is the pretrained ViT, t what it computes from the visible patches of x alone. r(z),
z being fixed noise, is fitted so that f(r(z)) is t at these patches, and is the image. The network r is not named
there; ours is that of the deep image prior's feature inversion (Ulyanov et al. 2018; DmitryUlyanov/deep-image-prior
feature_inversion.ipynb, models/skip.py), which has the same rate and number of steps. One is fitted to each image and
ratio, in thousands of steps: minutes on a GPU. H x W pixels, L patches, l visible ones, D width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log2

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.reporting.panels import Block, Panel, Picture, arranged
from bench.reporting.visualize import PictureRequest, Viewer, as_image, errors_naming, image_panel
from checkpoints.vit import ViT
from engine.progress import Progress
from engine.settings import BelowOne, NonEmpty, PositiveFloat, PositiveInt, Validated
from pretrain.parts.masking import visible_count

CHANNELS = (16, 32, 64, 128, 128, 128)  # of the levels, down and up
KERNELS = (7, 7, 5, 5, 3, 3)
SKIPPED = 4  # channels that go across at each level
NOISE, STRENGTH = 32, 0.1  # channels of z, and its largest value
SLOPE = 0.2  # of the leaky ReLU
SMALLEST = 4  # pixels of a side at the deepest level


class Level(nn.Module):
    """One level of the hourglass: (B, C, H, W) -> (B, channels, H, W). inner: what lies below, of the same channels."""

    def __init__(self, incoming: int, channels: int, kernel: int, inner: nn.Module | None, deeper: int) -> None:
        super().__init__()
        self.across = _convolved(incoming, SKIPPED, 1)
        self.down = nn.Sequential(
            nn.Conv2d(incoming, channels, kernel, padding=kernel // 2),
            nn.AvgPool2d(2),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(SLOPE),
            *_convolved(channels, channels, kernel),
        )
        self.inner = inner or nn.Identity()
        self.up = nn.Sequential(
            nn.BatchNorm2d(SKIPPED + deeper),
            *_convolved(SKIPPED + deeper, channels, kernel),
            *_convolved(channels, channels, 1),
        )

    def forward(self, values: Tensor) -> Tensor:
        below = F.interpolate(self.inner(self.down(values)), scale_factor=2, mode="nearest")
        return self.up(torch.cat([self.across(values), below], dim=1))


def _convolved(incoming: int, channels: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(incoming, channels, kernel, padding=kernel // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.LeakyReLU(SLOPE))


class DeepImagePrior(nn.Module):
    """r: fixed noise -> an image (1, 3, H, W) from 0 to 1. Initial weights and noise are drawn by `seed`.

    Six levels for 224 pixels, as in the source; fewer where the deepest would have fewer than SMALLEST pixels a side.
    """

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        super().__init__()
        self.size = size
        levels = max(1, min(len(CHANNELS), round(log2(min(size) / SMALLEST))))
        step = 2**levels
        height, width = (-(-side // step) * step for side in size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.register_buffer("noise", STRENGTH * torch.rand(1, NOISE, height, width))
            inner: nn.Module | None = None
            for level in reversed(range(levels)):
                incoming = CHANNELS[level - 1] if level else NOISE
                deeper = CHANNELS[level + 1] if inner else CHANNELS[level]
                inner = Level(incoming, CHANNELS[level], KERNELS[level], inner, deeper)
            self.layers = nn.Sequential(inner, nn.Conv2d(CHANNELS[0], 3, 1), nn.Sigmoid())

    def forward(self) -> Tensor:
        return self.layers(self.noise)[..., : self.size[0], : self.size[1]]


def visible_tokens(vit: ViT, images: Tensor, keep: Tensor | None) -> Tensor:
    """Outputs of the last block for the patches `keep` (1, l), where it gets no others -> (1, l, D); None: of all."""
    patch = vit.spec.patch_size
    grid = (images.shape[-2] // patch, images.shape[-1] // patch)
    tokens = vit.encode(vit.add_positions(vit.project(images), grid), keep, norm=False, grid=grid)[0]
    return tokens[:, -(grid[0] * grid[1] if keep is None else keep.shape[1]) :]


def inverted(
    vit: ViT,
    image: Tensor,
    keep: Tensor | None,
    normalised: Callable[[Tensor], Tensor],
    steps: int,
    lr: float,
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Tensor, list[float]]:
    """A normalised image (1, 3, H, W) of which the frozen ViT sees the patches `keep` (1, l) -> the image (1, 3, H, W),
    from 0 to 1, that is found for what it says of them; and the loss of each step.

    normalised: from 0 to 1 -> as the ViT gets images. advance: called after each step.
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


UNIFORM = (0.5, 0.6, 0.75, 0.8, 0.9)


@dataclass(frozen=True, kw_only=True)
class Inversion(Validated):
    """Settings of the picture."""

    mask_ratios: NonEmpty[BelowOne] = UNIFORM  # shares of hidden patches, from 0 on; the text does not name figure 2's
    steps: PositiveInt = 3000  # of the fit (appendix C)
    lr: PositiveFloat = 1e-3  # of Adam (appendix C)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: of each image what is seen and, below, what is found; columns are mask ratios."""
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
            note=f"Below what a network sees, the image that a deep image prior finds for what it says of it, in "
            f"{self.steps} steps. The error is the root mean square over the hidden pixels, of 255 grey levels.",
        )

    def block(self, viewer: Viewer, request: PictureRequest, number: int, progress: Progress) -> Block:
        """Two rows: seen, and found."""
        image = viewer.tensor(request.images[number].image)
        columns = [self.column(viewer, image, ratio, (request.seed, number), progress) for ratio in self.mask_ratios]
        return [list(row) for row in zip(*columns, strict=True)]

    def column(
        self, viewer: Viewer, image: Tensor, ratio: float, seeds: tuple[int, int], progress: Progress
    ) -> tuple[Panel, Panel]:
        """The image (1, 3, H, W) with a share of its patches hidden, and what is found for it."""
        preparation, grid = viewer.export.preparation, viewer.grid(image)
        order = np.random.RandomState(seeds).permutation(grid[0] * grid[1])  # the same patches first at every ratio
        hidden = np.ones(len(order), bool)
        hidden[order[: max(1, visible_count(len(order), ratio))]] = False
        keep = torch.tensor(np.flatnonzero(~hidden), device=image.device)[None] if hidden.any() else None
        with errors_naming(viewer.name):
            if hidden.any() and viewer.spec.relative_position != "none":
                raise ValueError("relative positions need all patches of an image; add --set mask_ratios=0")
            inversions, _ = inverted(
                viewer.backbone.vit,
                image,
                keep,
                partial(for_network, viewer),
                self.steps,
                self.lr,
                seeds[0],
                progress.advance,
            )
        seen = as_image(image[0], preparation, hidden.reshape(grid))
        drawn = inversions[0].cpu().mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        error = hidden_error(as_image(image[0], preparation), drawn, hidden.reshape(grid))
        return (
            Panel(values=seen, size=seen.shape[:2], title=f"{hidden.mean():.0%} hidden"),
            Panel(values=drawn, size=drawn.shape[:2], title="found", caption=f"error {error:.1f}"),
        )


def for_network(viewer: Viewer, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) from 0 to 1 as the network gets them."""
    return (images - viewer.backbone.mean) / viewer.backbone.std


def hidden_error(image: np.ndarray, inversion: np.ndarray, hidden: np.ndarray) -> float:
    """Root mean square difference of colours (H, W, 3) uint8 over the hidden patches (h, w); over all where all are
    seen."""
    side = image.shape[0] // hidden.shape[0]
    where = np.kron(hidden, np.ones((side, side), bool)) if hidden.any() else np.ones(image.shape[:2], bool)
    return float(np.sqrt(np.square(image[where].astype(np.float64) - inversion[where]).mean()))
