"""Learning rates over training, as the sources compute them: one formula, asked at whole or at fractional epochs.

With e the epoch, W the warm-up and E the end: lr e / W before W, from then on
min + (lr - min) (1 + cos(pi (e - W) / (E - W))) / 2.
MAE and MoCo-v3 ask it every iteration at e = epoch + iteration / iterations, with W > 0. DINO, iBOT and MOCA ask it
once an epoch (torch's CosineAnnealingLR), DINOv2 and MSN every iteration, all of these with W = 0.
"""

import math
from typing import Literal

Pace = Literal["epoch", "iteration"]


def half_cosine(lr: float, epoch: float, epochs: float, warmup: float = 0.0, minimum: float = 0.0) -> float:
    """The rate at `epoch` of `epochs`, which may be fractional and counts from 0 (MAE util/lr_sched.py:9-21)."""
    if epoch < warmup:
        return lr * epoch / warmup
    done = (epoch - warmup) / (epochs - warmup)
    return minimum + (lr - minimum) * 0.5 * (1.0 + math.cos(math.pi * done))


def rate(
    lr: float,
    epoch: int,
    iteration: int,
    iterations: int,
    *,
    epochs: int,
    warmup: float = 0.0,
    pace: Pace = "iteration",
) -> float:
    """The rate for iteration `iteration` of `iterations` in `epoch`, both from 0; it falls to zero after `epochs`."""
    within = iteration / iterations if pace == "iteration" else 0.0
    return half_cosine(lr, epoch + within, epochs, warmup)
