"""The loss of SimDINO and SimDINOv2: views of an image agree, and the coding rate of a batch keeps them apart.

Wu et al. 2025, section 3; github.com/RobinWu218/SimDINO 8149fc4 (simdino/main_dino.py:497-559). The paper writes eps^2
where its code, and this, has eps. Letters: B images of this process, n of all processes, G = 2 global and N local
crops, d projected width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from engine.distributed import current_world
from engine.precision import to_float32
from engine.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat
from pretrain.parts.self_distillation import MultiCropSettings


@dataclass(frozen=True, kw_only=True)
class CodingRateSettings(MultiCropSettings):
    """The defaults are those of both README commands."""

    eps: PositiveFloat = 0.05  # allowed distortion, the paper's eps^2
    compression_weight: NonNegativeFloat = 1.0  # of the agreement of the views; that of the coding rate is 1
    expansion_of: Literal["student", "mean"] = "mean"  # coding rate of the student's, or of its and the teacher's mean
    gather_covariance: bool = True  # of the images of all processes; the source's default is each process's own
    local_crops: NonNegativeInt = 10


def coding_rate(vectors: Tensor, eps: float, gathered: bool = True) -> Tensor:
    """Vectors (..., B, d) -> half of log det(I + d / (n eps) Z^T Z), times (d + n) / (d n).

    gathered: whether Z^T Z is of the vectors of all processes, or of this process's. NaN if it has no Cholesky factor.
    """
    world, (images, width) = current_world(), vectors.shape[-2:]
    count = images * world.size
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = to_float32(vectors)
        covariance = vectors.mT @ vectors
        if gathered and world.size > 1:
            covariance = all_reduce(covariance)
        identity = torch.eye(width, dtype=vectors.dtype, device=vectors.device)
        factor = torch.linalg.cholesky_ex(identity + width / (count * eps) * covariance).L
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1) * (width + count) / (width * count)


def agreement(views: Tensor, others: Tensor | None, targets: Tensor) -> Tensor:
    """Mean product of every view's vector with the targets of all views but itself.

    views (B, G, d), others (B, N, d) or None, targets (B, G, d): of the views. G (G - 1 + N) pairs, as in dino_loss.
    """
    everything = targets.sum(dim=1, keepdim=True)
    total, pairs = ((everything - targets) * views).sum(), views.shape[1] - 1
    if others is not None:
        total, pairs = total + (everything * others).sum(), pairs + others.shape[1]
    return total / (len(views) * views.shape[1] * pairs)


def simdino_loss(
    views: Tensor, others: Tensor | None, targets: Tensor, settings: CodingRateSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and its two terms for the log. Arguments as of `agreement`, all of unit length."""
    compression = agreement(views, others, targets)
    expanded = views if settings.expansion_of == "student" else (views + targets) / 2
    expansion = coding_rate(expanded.transpose(0, 1), settings.eps, settings.gather_covariance).mean()
    logs = {"compression": compression.detach(), "expansion": expansion.detach()}
    return -settings.compression_weight * compression - expansion, logs
