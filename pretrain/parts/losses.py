"""Losses between what a student predicts of an image and what its teacher says of it. In float32 at least.

Letters: B images of this process, M predictions of each (masks, views), N images of all processes, d projected width.
"""

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from engine.contrastive import info_nce
from engine.distributed import current_world


def byol_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """BYOL's loss (Grill et al. 2020, Eq. 2): mean of |p - t|^2 = 2 - 2 cos(p, t) over unit vectors.

    predictions (..., B, d), targets (B, d); every prediction of an image has the image's one target.
    """
    difference = l2_normalize(predictions) - l2_normalize(targets)
    return difference.square().sum(dim=-1).mean()


def contrast(predictions: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """InfoNCE of (M, B, d) predictions: each finds its image's target among the (N, d) of all processes.

    As in MoCo-v3 builder.py:63-73, the other processes' targets come without gradient. The M predictions of an image
    are M problems, not each other's negatives.
    """
    masks, batch, _ = predictions.shape
    own = current_world().rank * batch + torch.arange(batch, device=predictions.device)
    return info_nce(
        to_float32(predictions).flatten(0, 1), gathered(to_float32(targets)), temperature, own.repeat(masks)
    )


def dino_loss(views: Tensor, others: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of every view's softmax(logits / temperature) to the targets of all views but itself.

    views (B, G, K): logits of the views that have targets. others (B, N, K): of views that have none.
    targets (B, G, K): probabilities. DINO (Caron et al. 2021) Eq. 3, main_dino.py:380-404: G (G - 1 + N) pairs.
    Cross-entropy is linear in the target, and a distribution sums to one: each view meets the sum of its targets once.
    """
    pairs = views.shape[1] - 1  # of each target
    views, everything = to_float32(views) / temperature, targets.sum(dim=1)
    loss = pairs * views.logsumexp(dim=-1).sum() - ((everything.unsqueeze(1) - targets) * views).sum()
    if others is not None:
        pairs += others.shape[1]
        others = to_float32(others) / temperature
        loss = loss + views.shape[1] * others.logsumexp(dim=-1).sum() - (everything * others.sum(dim=1)).sum()
    return loss / (len(views) * views.shape[1] * pairs)


@torch.no_grad()
def gathered(rows: Tensor) -> Tensor:
    """(B, d) of every process -> (N, d), in the order of ranks, without gradient. The same B everywhere."""
    world = current_world()
    if world.size == 1:
        return rows.detach()
    parts = [torch.empty_like(rows) for _ in range(world.size)]
    distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def l2_normalize(vectors: Tensor) -> Tensor:
    """Vectors (..., d) of length one, in float32 at least."""
    return F.normalize(to_float32(vectors), dim=-1)


def to_float32(tensor: Tensor) -> Tensor:
    """In float32, or in the wider type it has: autocast's half precision is too coarse for a loss."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
