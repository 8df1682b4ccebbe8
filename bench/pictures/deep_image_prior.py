"""Inverting a representation: the image that an untrained convolutional network finds for it.

ExtreMA appendix C: f is the pretrained ViT, t what it says of the visible patches of x alone. r(z), z being fixed
noise, is fitted so that f(r(z)) is t at these patches, and is the image. The network is not named there; it is that of
the deep image prior's feature inversion (Ulyanov et al. 2018; DmitryUlyanov/deep-image-prior feature_inversion.ipynb,
models/skip.py), which has the same rate and number of steps. H x W pixels, L patches, l visible ones, D width.
"""

from collections.abc import Callable
from math import log2

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.vit import ViT

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
    """What the last block says of the patches `keep` (1, l), where it gets no others -> (1, l, D); None: of all."""
    patch = vit.spec.patch_size
    grid = (images.shape[-2] // patch, images.shape[-1] // patch)
    tokens = vit.encode(vit.place(vit.project(images), grid), keep, norm=False, grid=grid)[0]
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
        said = visible_tokens(vit, normalised(prior()), None)
        said = said if keep is None else said.gather(1, keep.unsqueeze(-1).expand(-1, -1, said.shape[-1]))
        loss = F.mse_loss(said, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        advance(1)
    with torch.no_grad():
        return prior(), losses
