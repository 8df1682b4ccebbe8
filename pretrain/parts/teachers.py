"""Teachers: weights that are a moving average of a student's, and what keeps their outputs from collapsing.

The centre and the temperature are DINO's (Caron et al. 2021, Eq. 4; main_dino.py:363-416).
Letters: B images of this process, K outputs.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from engine.distributed import current_world
from engine.precision import to_float32


def frozen_copy(network: nn.Module, drop_path: bool = False) -> nn.Module:
    """A copy of `network` that no optimiser moves and that drops neither paths nor attention, as in every source but
    CAE's, whose target encoder drops paths."""
    teacher = copy.deepcopy(network).requires_grad_(False)
    for module in teacher.modules():
        if isinstance(module, DropPath) and not drop_path:
            module.drop_prob = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return teacher


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float, buffers: bool = False) -> None:
    """Exponential moving average: teacher <- momentum * teacher + (1 - momentum) * student, over parameters in order.

    buffers: those of floating point too (LUT). Whole numbers are never averaged: data2vec's code truncates them.
    """
    pairs = list(zip(_values(teacher, buffers), _values(student, buffers), strict=True))
    torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 1.0 - momentum)


def _values(network: nn.Module, buffers: bool) -> Iterable[Tensor]:
    yield from network.parameters()
    if buffers:
        yield from (buffer for buffer in network.buffers() if buffer.is_floating_point())


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """From `start` to `end` in equal steps over `warmup` epochs, the first of which has `start` and the last `end`;
    constant within an epoch (main_dino.py:374-378). delay: epochs at `start` before that (main_ibot.py:502-512)."""

    start: float
    end: float
    warmup: int
    delay: int = 0

    def at(self, epoch: int) -> float:
        epoch -= self.delay
        if epoch >= self.warmup:
            return self.end
        return self.start + (self.end - self.start) * max(0, epoch) / max(1, self.warmup - 1)


class Centre(nn.Module):
    """The running mean c of the teacher's outputs: c <- m c + (1 - m) mean over the images of an update.

    enabled: whether c is taken off (DINO, table 7); if not, it stays zero.
    """

    def __init__(self, outputs: int, momentum: float, enabled: bool = True) -> None:
        super().__init__()
        self.momentum, self.enabled = momentum, enabled
        self.register_buffer("center", torch.zeros(outputs))
        # Mean over this process's images so far in the update. No buffer: those are the first process's everywhere.
        self.mean: Tensor | None = None

    def soften(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits (..., K) -> probabilities softmax((logits - c) / temperature), in float32 at least."""
        return ((to_float32(logits) - self.center) / temperature).softmax(dim=-1)

    @torch.no_grad()
    def add(self, mean: Tensor, part: int, parts: int) -> None:
        """Take in the mean output (K,) over the images of one of the update's parts."""
        if self.enabled:
            self.mean = mean / parts if part == 0 else self.mean + mean / parts

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the mean over the update's images of all processes."""
        if self.mean is None:
            return
        world = current_world()
        world.all_reduce(self.mean)
        self.center.lerp_(self.mean / world.size, 1.0 - self.momentum)
        self.mean = None


def mean_output(logits: Tensor) -> Tensor:
    """Logits (..., K) -> their mean (K,) over all images and views, in float32 at least."""
    return to_float32(logits).flatten(0, -2).mean(dim=0)


@torch.no_grad()
def sinkhorn(shares: Tensor, iterations: int = 3, eps: float = 0.0) -> Tensor:
    """Probabilities (..., B, K) of this process's images -> others, nearer to using all K alike over the images of all
    processes: Sinkhorn-Knopp, which ends with rows that sum to 1 (MSN src/losses.py:93-127; SwAV, Caron et al. 2020).
    """
    shares = shares.clone()
    for _ in range(iterations):
        uses = shares.sum(dim=-2, keepdim=True)
        current_world().all_reduce(uses)
        shares /= uses + eps
        shares /= shares.sum(dim=-1, keepdim=True) + eps
    return shares


@torch.no_grad()
def largest(values: Tensor) -> Tensor:
    """The largest of each value over all processes."""
    return torch.stack(current_world().gather_tensors(values)).amax(dim=0)


@torch.no_grad()
def sinkhorn_targets(logits: Tensor, temperature: float) -> Tensor:
    """The teacher's logits (..., K) -> probabilities by Sinkhorn-Knopp on exp(logits / temperature), whose scale does
    not matter (DINOv2 loss/dino_clstoken_loss.py:35-61)."""
    logits = to_float32(logits) / temperature
    top = logits.amax() if logits.numel() else logits.new_tensor(-torch.inf)
    return sinkhorn((logits - largest(top)).flatten(0, -2).exp()).view_as(logits)
