"""Which patches a network sees, from uniform noise that came with the views: one number in [0, 1) for each patch.

Ids are patch numbers, row by row, without the class token. A mask is True where a patch is hidden.
Letters: B batch, L patches, l kept patches, M masks.
"""

import torch
from torch import Tensor


def kept(patches: int, ratio: float) -> int:
    """How many of `patches` stay visible at a mask ratio: the product as written, cut off, as in every source."""
    return int(patches * (1 - ratio))


def order_of(noise: Tensor) -> Tensor:
    """(..., L) noise -> (..., L) ids, ascending by noise; the first l of them are a random subset."""
    return noise.argsort(dim=-1)


def take(tokens: Tensor, ids: Tensor) -> Tensor:
    """Tokens (B, L, D) at ids (B, l) -> (B, l, D)."""
    return tokens.gather(1, ids.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def mask_at(ids: Tensor, patches: int) -> Tensor:
    """(B, l) ids -> (B, L) bool, True at the ids."""
    mask = torch.zeros(len(ids), patches, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, ids, True)
