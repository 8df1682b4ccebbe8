"""Teachers, whose weights are a moving average of a student's, and the centring and Sinkhorn-Knopp that keep their
outputs from collapsing.

The centre and the temperature are DINO's (Caron et al. 2021, Eq. 4; main_dino.py:363-416).
Letters: B images of this process, K outputs.
"""

import copy
from dataclasses import dataclass

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from engine.distributed import current_world
from engine.precision import to_float32


def frozen_copy(network: nn.Module, drop_path: bool = False) -> nn.Module:
    """A copy of `network` without gradients, dropout and drop path, as in every source but CAE's.

    drop_path: keep drop path, as CAE's target encoder does.
    """
    teacher = copy.deepcopy(network).requires_grad_(False)
    for module in teacher.modules():
        if isinstance(module, DropPath) and not drop_path:
            module.drop_prob = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return teacher


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float, buffers: bool = False) -> None:
    """Exponential moving average: teacher <- momentum * teacher + (1 - momentum) * student.

    Parameters are paired by their order. buffers: average floating-point buffers too (LUT). Integer buffers are never
    averaged; data2vec's code averages and truncates them.
    """
    teacher_tensors, student_tensors = _averaged(teacher, buffers), _averaged(student, buffers)
    assert len(teacher_tensors) == len(student_tensors)
    torch._foreach_lerp_(teacher_tensors, student_tensors, 1.0 - momentum)


def _averaged(network: nn.Module, buffers: bool) -> list[Tensor]:
    """The tensors of a network that `ema_update` averages."""
    tensors: list[Tensor] = list(network.parameters())
    if buffers:
        tensors += [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    return tensors


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """A temperature that rises linearly, from `start` in the first epoch of the warm-up to `end` in its last, and is
    constant within an epoch (main_dino.py:374-378).

    warmup: epochs. delay: epochs at `start` before the warm-up (main_ibot.py:502-512).
    """

    start: float
    end: float
    warmup: int
    delay: int = 0

    def at(self, epoch: int) -> float:
        """The temperature in `epoch`, counted from 0."""
        epoch -= self.delay
        if epoch >= self.warmup:
            return self.end
        return self.start + (self.end - self.start) * max(0, epoch) / max(1, self.warmup - 1)


class Centre(nn.Module):
    """The centre c of the teacher's outputs: c <- m c + (1 - m) * mean over the images of an update (Eq. 4).

    outputs: K. enabled: whether to centre; if not, c stays zero (DINO, table 7).
    """

    def __init__(self, outputs: int, momentum: float, enabled: bool = True) -> None:
        super().__init__()
        self.momentum, self.enabled = momentum, enabled
        self.register_buffer("center", torch.zeros(outputs))
        # Mean over this process's images so far in the update. Not a buffer: DDP overwrites those with the first
        # process's.
        self.mean: Tensor | None = None

    def soften(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits (..., K) -> probabilities softmax((logits - c) / temperature), in float32 or higher precision."""
        return ((to_float32(logits) - self.center) / temperature).softmax(dim=-1)

    @torch.no_grad()
    def add(self, mean: Tensor, part: int, parts: int) -> None:
        """Add the mean output (K,) of micro-batch `part` of the update's `parts`."""
        if self.enabled:
            self.mean = mean / parts if part == 0 else self.mean + mean / parts

    @torch.no_grad()
    def update(self) -> None:
        """Move the centre towards the mean over the update's images of all processes."""
        if self.mean is None:
            return
        world = current_world()
        world.all_reduce(self.mean)
        self.center.lerp_(self.mean / world.size, 1.0 - self.momentum)
        self.mean = None


def mean_output(logits: Tensor) -> Tensor:
    """Logits (..., K) -> their mean (K,) over all leading dimensions, in float32 or higher precision."""
    return to_float32(logits).flatten(0, -2).mean(dim=0)


@torch.no_grad()
def sinkhorn(assignments: Tensor, iterations: int = 3, eps: float = 0.0) -> Tensor:
    """Sinkhorn-Knopp (SwAV, Caron et al. 2020; MSN src/losses.py:93-127): assignments (..., B, K) -> probabilities
    (..., B, K) that use the K columns more equally over the images of all processes. Rows sum to 1.

    eps: added to the denominators.
    """
    assignments = assignments.clone()
    for _ in range(iterations):
        column_sums = assignments.sum(dim=-2, keepdim=True)
        current_world().all_reduce(column_sums)
        assignments /= column_sums + eps
        assignments /= assignments.sum(dim=-1, keepdim=True) + eps
    return assignments


@torch.no_grad()
def max_over_processes(values: Tensor) -> Tensor:
    """Elementwise maximum of `values` over all processes."""
    return torch.stack(current_world().gather_tensors(values)).amax(dim=0)


@torch.no_grad()
def sinkhorn_targets(logits: Tensor, temperature: float) -> Tensor:
    """The teacher's logits (..., K) -> probabilities (..., K) by Sinkhorn-Knopp on exp(logits / temperature) (DINOv2
    loss/dino_clstoken_loss.py:35-61). The largest logit is subtracted first, which changes only the scale."""
    logits = to_float32(logits) / temperature
    largest = logits.amax() if logits.numel() else logits.new_tensor(-torch.inf)  # in this process
    assignments = (logits - max_over_processes(largest)).flatten(0, -2).exp()
    return sinkhorn(assignments).view_as(logits)
