"""What keeps a teacher's outputs from collapsing: a running centre is taken off them, a low temperature sharpens them.

DINO (Caron et al. 2021), Eq. 4; main_dino.py:363-416. B images of this process, K outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from engine.distributed import current_world
from pretrain.parts.losses import to_float32


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """From `start` to `end` in equal steps over `warmup` epochs, the first of which has `start` and the last `end`;
    constant within an epoch (main_dino.py:374-378)."""

    start: float
    end: float
    warmup: int

    def at(self, epoch: int) -> float:
        if epoch >= self.warmup:
            return self.end
        return self.start + (self.end - self.start) * epoch / max(1, self.warmup - 1)


class Centre(nn.Module):
    """The running mean c of the teacher's outputs: c <- m c + (1 - m) mean over the images of an update.

    enabled: whether c is taken off (DINO, table 7); if not, it stays zero.
    """

    def __init__(self, outputs: int, momentum: float, enabled: bool = True) -> None:
        super().__init__()
        self.momentum, self.enabled = momentum, enabled
        self.register_buffer("center", torch.zeros(outputs))
        # Mean over this process's images so far in the update. No buffer: those are the first process's everywhere.
        self.seen: Tensor | None = None

    def soften(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits (..., K) -> probabilities softmax((logits - c) / temperature), in float32 at least."""
        return ((to_float32(logits) - self.center) / temperature).softmax(dim=-1)

    @torch.no_grad()
    def see(self, logits: Tensor, part: int, parts: int) -> None:
        """Take in the logits (..., K) of one of the update's parts."""
        if self.enabled:
            mean = to_float32(logits).flatten(0, -2).mean(dim=0) / parts
            self.seen = mean if part == 0 else self.seen + mean

    @torch.no_grad()
    def update(self) -> None:
        """Move to what all processes have seen."""
        if self.seen is None:
            return
        world = current_world()
        if world.size > 1:
            distributed.all_reduce(self.seen)
            self.seen /= world.size
        self.center.lerp_(self.seen, 1.0 - self.momentum)
        self.seen = None
