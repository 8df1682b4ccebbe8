"""InfoNCE between two views of a batch (van den Oord et al. 2018), scaled as in MoCo-v3 (Chen et al. 2021)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(B, D), (B, D) -> mean cross-entropy of finding key i for query i among all keys; cosine similarities.

    The factor 2 * temperature of MoCo-v3's builder.py:63-73 keeps the gradient's size independent of temperature.
    """
    logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    targets = torch.arange(len(queries), device=queries.device)
    return F.cross_entropy(logits, targets) * 2 * temperature
