"""InfoNCE between two views of a batch (van den Oord et al. 2018), scaled as in MoCo-v3 (Chen et al. 2021)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(queries: Tensor, keys: Tensor, temperature: float, positives: Tensor | None = None) -> Tensor:
    """(B, D) queries, (N, D) keys -> mean cross-entropy of finding its key for each query; cosine similarities.

    positives: (B,) number of each query's key; None: key i is that of query i. The factor 2 * temperature of MoCo-v3's
    builder.py:63-73 keeps the gradient's size independent of temperature. Autocast is off for the product: similarities
    of half precision are too coarse once they are divided by the temperature.
    """
    if positives is None:
        positives = torch.arange(len(queries), device=queries.device)
    with torch.autocast(queries.device.type, enabled=False):
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, positives) * 2 * temperature
