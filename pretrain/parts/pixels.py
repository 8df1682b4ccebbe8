"""Pixels as targets: an image cut into patches, and what MAE makes of a patch's contrast.

B batch, L patches of h rows and w columns, p patch side.
"""

import torch
from torch import Tensor

EPS = 1e-6  # of a patch's variance (MAE models_mae.py:207)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, h*p, w*p) -> (B, L, p*p*3): row in the patch, column in it, channel (MAE models_mae.py:95-107)."""
    batch, channels, height, width = images.shape
    cells = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch**2 * channels)


def normalised(patches: Tensor) -> Tensor:
    """Each patch (..., 3pp) less its mean, over its standard deviation, with n-1 (MAE models_mae.py:204-207)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()
