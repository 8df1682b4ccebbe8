"""Stop at the first loss or gradient that is not finite, and say at which step and what to change."""

import math
from collections.abc import Iterable

SHOWN = 5  # losses before the bad value, in its message


def check_finite(value: float, what: str, where: str, losses: Iterable[float], advice: str) -> None:
    """ValueError, one line, unless `value` is finite.

    what: its name, "loss". where: "step 3 of 20 (epoch 0.15, rate 0.001)". losses: those before it, the newest last.
    """
    if math.isfinite(value):
        return
    before = ", ".join(f"{loss:.4g}" for loss in list(losses)[-SHOWN:]) or "none"
    raise ValueError(f"the {what} is {value} in {where}, losses before: {before}; {advice}")
