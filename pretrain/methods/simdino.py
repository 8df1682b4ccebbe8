"""SimDINO (Wu et al. 2025): DINO without prototypes, centre and temperatures; a coding rate prevents the collapse.

Section 3; github.com/RobinWu218/SimDINO 8149fc4, simdino/main_dino.py (the loss: 497-559). As in its code, `eps` stands
for the paper's eps^2.
B images of this process, n of all processes, G = 2 global and N local crops, d bottleneck.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from checkpoints.spec import ViTSpec
from engine.distributed import current_world
from engine.precision import to_float32
from engine.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat
from pretrain.method import Step, TrainProgress
from pretrain.methods.dino import POSITIONS, SMALL_CROPS, SMOKE_CROPS, MultiCropSettings, TeacherStudent, small_recipes
from pretrain.methods.dino import RECIPES as DINO
from pretrain.parts.losses import in_chunks
from pretrain.recipe import VIT_B, VIT_L


@dataclass(frozen=True, kw_only=True)
class CodingRateSettings(MultiCropSettings):
    """The defaults are those of both README commands."""

    eps: PositiveFloat = 0.05  # allowed distortion, the paper's eps^2
    compression_weight: NonNegativeFloat = 1.0  # weight of the views' agreement; the weight of the coding rate is 1
    # vectors whose coding rate is maximised: the student's, or the mean of the student's and the teacher's
    expansion_of: Literal["student", "mean"] = "mean"
    covariance_images: NonNegativeInt = 0  # images with a covariance of their own, as a GPU's in the source; 0: all
    gather_covariance: bool = True  # whether all (covariance_images=0) are those of all processes, or of each one
    local_crops: NonNegativeInt = 10


def coding_rate(vectors: Tensor, eps: float, count: int, gathered: bool) -> Tensor:
    """Coding rate (...) of vectors Z (..., B, d): log det(I + d / (n eps) Z^T Z) / 2, times (d + n) / (d n).

    count: n. gathered: sum Z^T Z over all processes. NaN if there is no Cholesky factor.
    """
    width = vectors.shape[-1]
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = to_float32(vectors)
        covariance = vectors.mT @ vectors
        if gathered and current_world().size > 1:
            covariance = all_reduce(covariance)
        identity = torch.eye(width, dtype=vectors.dtype, device=vectors.device)
        factor = torch.linalg.cholesky_ex(identity + width / (count * eps) * covariance).L
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1) * (width + count) / (width * count)


def agreement(global_vectors: Tensor, local_vectors: Tensor | None, targets: Tensor) -> Tensor:
    """Mean inner product of every crop's vector with the targets of all global crops but itself.

    global_vectors: (B, G, d). local_vectors: (B, N, d), or None. targets: (B, G, d), of the global crops. These are
    G (G - 1 + N) pairs, as in `dino_loss`.
    """
    target_sum = targets.sum(dim=1, keepdim=True)  # (B, 1, d)
    total = ((target_sum - targets) * global_vectors).sum()
    crops_per_target = global_vectors.shape[1] - 1
    if local_vectors is not None:
        total = total + (target_sum * local_vectors).sum()
        crops_per_target += local_vectors.shape[1]
    return total / (len(global_vectors) * global_vectors.shape[1] * crops_per_target)


def simdino_loss(
    global_vectors: Tensor, local_vectors: Tensor | None, targets: Tensor, settings: CodingRateSettings, passes: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """SimDINO's loss, and name -> each of its two terms for the log. The tensors are those of `agreement`, of unit
    length. passes: forward passes of an update."""
    compression = agreement(global_vectors, local_vectors, targets)
    expanded = global_vectors if settings.expansion_of == "student" else (global_vectors + targets) / 2
    size = settings.covariance_images
    chunks = in_chunks(expanded, size, "covariance_images")  # (C, G, n, d)
    # Every GPU of the source divides its own covariance by the number of images of the whole update (main_dino.py:551).
    count = len(expanded) * current_world().size * (passes if size else 1)
    rates = coding_rate(chunks, settings.eps, count, settings.gather_covariance and not size)  # (C, G)
    expansion = rates.mean(dim=1).mean()
    logs = {"compression": compression.detach(), "expansion": expansion.detach()}
    return -settings.compression_weight * compression - expansion, logs


class SimDino(TeacherStudent):
    """Views: "global" (B, G, 3, S, S) and, if there are local crops, "local" (B, N, 3, s, s)."""

    remedy = ", or eps lower"

    def __init__(self, spec: ViTSpec, settings: CodingRateSettings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics, self.passes = True, 1
        self.chunks = {"covariance_images": settings.covariance_images}

    def before_forward(self, progress: TrainProgress) -> None:
        self.passes = progress.micro_batches

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        with torch.no_grad():
            targets = self.teacher({"global": views["global"]})["global"]  # (B, G, d)
        vectors = self.student(views)  # global (B, G, d) and local (B, N, d)
        loss, logs = simdino_loss(vectors["global"], vectors.get("local"), targets, self.settings, self.passes)
        return Step(loss, logs)


METHOD = SimDino

_VIT_B = replace(
    DINO["vit_s"],
    source="SimDINO README.md (ViT-B/16, 8 x 64 images, each 64 with a covariance of their own), simdino/main_dino.py",
    spec=replace(VIT_B, **POSITIONS),
    settings=CodingRateSettings(covariance_images=64),
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_l": replace(_VIT_B, source=f"{_VIT_B.source}; its table of results", spec=replace(VIT_L, **POSITIONS)),
    **small_recipes(_VIT_B, CodingRateSettings(**SMALL_CROPS), CodingRateSettings(**SMOKE_CROPS), of="ViT-B"),
}
