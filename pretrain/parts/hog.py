"""Histograms of oriented gradients as MaskFeat predicts them (Wei et al. 2022, section 3; SlowFast 287ec00,
slowfast/models/operators.py:62-112).

In float32 and with the official order of operations: for pixels without a horizontal gradient rounding decides between
two bins, and in flat cells all there is to be normalised is rounding.
B images, K bins, r x c cells, L patches.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

COLOURS = 3
SOBEL = ((1.0, 0.0, -1.0), (2.0, 0.0, -2.0), (1.0, 0.0, -1.0))  # the horizontal one


@torch.no_grad()
def hog(images: Tensor, bins: int = 9, cell: int = 8, window: int = 0) -> Tensor:
    """Images (B, 3, r*cell, c*cell) -> (B, 3, K, r, c) float32: for each colour and cell a histogram of unit length.

    bins: of unsigned directions, counted from the vertical gradient. cell: its side, in pixels. window: side of a
    Gaussian by which gradients are weighted, repeated over the image; 0 for none, as in the official configurations.
    """
    with torch.autocast(images.device.type, enabled=False):
        across, down = gradients(images.float())
    magnitude = torch.stack([across, down], dim=-1).norm(dim=-1)
    if window:
        magnitude = magnitude * gaussian(window, magnitude)
    # Of a negative number the remainder is positive, so that opposite gradients share a bin.
    chosen = (torch.atan2(across, down) / math.pi * bins).floor().long() % bins
    votes = magnitude.new_zeros(*magnitude.shape[:2], bins, *magnitude.shape[2:])
    votes.scatter_(2, chosen.unsqueeze(2), magnitude.unsqueeze(2))
    return F.normalize(votes.unfold(3, cell, cell).unfold(4, cell, cell).sum(dim=(-2, -1)), dim=2)


def gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 3, H, W) -> Sobel's horizontal and vertical gradients of each colour, images mirrored at their edges."""
    kernel = images.new_tensor(SOBEL).expand(COLOURS, 1, 3, 3)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    return F.conv2d(padded, kernel, groups=COLOURS), F.conv2d(padded, kernel.transpose(2, 3), groups=COLOURS)


def gaussian(window: int, images: Tensor) -> Tensor:
    """(H, W): a Gaussian over window x window pixels, of standard deviation window // 2, again and again."""
    places = torch.arange(window, dtype=images.dtype, device=images.device)
    weights = torch.exp(-0.5 * ((places - places.mean()) / (window // 2)).square())
    weights = torch.outer(weights, weights)
    return (weights / weights.sum()).repeat(images.shape[-2] // window, images.shape[-1] // window)


def by_patch(histograms: Tensor, cells: int) -> Tensor:
    """(B, 3, K, r, c) -> (B, L, 3*K*cells*cells) of patches of cells x cells: colour, bin, row, column (masked.py)."""
    batch, colours, bins, rows, columns = histograms.shape
    tiles = histograms.reshape(batch, colours, bins, rows // cells, cells, columns // cells, cells)
    return tiles.permute(0, 3, 5, 1, 2, 4, 6).reshape(batch, -1, colours * bins * cells**2)
