"""What losses come to for a prediction that is the same whatever the image: a training that learns falls below it.

Estimated from a batch, to which the constant is fitted: the fewer the targets, the further it lies below that of all
images. B images, L patches.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.precision import l2_normalize, to_float32

IMAGES = 64  # of a batch, whose patches or tokens are enough


def of_patches(targets: Tensor, loss: str = "l2", beta: float = 1.0) -> Tensor:
    """Targets (B, L, d), pixels or features -> the loss ("l1", "l2", "smooth_l1") of one patch in place of all, the
    better one of mean and median. beta: of "smooth_l1"."""
    rows = to_float32(targets[:IMAGES]).flatten(0, 1)
    guesses = torch.stack([rows.mean(dim=0), rows.median(dim=0).values])
    losses = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": partial(F.smooth_l1_loss, beta=beta)}
    return torch.stack([losses[loss](guess.expand_as(rows), rows) for guess in guesses]).amin()


def of_directions(targets: Tensor) -> Tensor:
    """Targets (B, d) -> losses.byol_loss of their mean direction; without the bias of |mean|^2."""
    count = len(targets)
    squared = l2_normalize(targets).mean(dim=0).square().sum()
    return 2.0 - 2.0 * ((count * squared - 1.0) / max(1, count - 1)).clamp(min=0.0).sqrt()


def of_assignments(shares: Tensor) -> Tensor:
    """Shares (N, K), which sum to 1 -> mean KL(q || mean q)."""
    mean = shares.mean(dim=0)
    return torch.special.entr(mean).sum() - torch.special.entr(shares).sum(dim=1).mean()


def of_tokens(tokens: Tensor, codes: int) -> Tensor:
    """Tokens (B, L), of `codes` -> the cross-entropy of their shares in the batch."""
    shares = torch.bincount(tokens.flatten(), minlength=codes) / tokens.numel()
    return torch.special.entr(shares).sum()
