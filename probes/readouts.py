"""What a linear head reads: class tokens of the last n blocks and the mean patch token, side by side.

"cls4" is DINO's n_last_blocks=4, "avg" the mean patch token of the last block, "cls1+avg" both (iBOT's avgpool mode 2).
Order as in iBOT eval_linear.py:184-197: blocks from early to late, then the mean.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from probes.kinds import FeatureKind

FORM = re.compile(r"cls([1-9]\d*)|avg|cls([1-9]\d*)\+avg")


def kinds_of(readout: str, norm: bool) -> tuple[FeatureKind, ...]:
    """ "cls2+avg" -> the kinds to lay side by side; norm: with the final norm applied to every block's output.

    Raises ValueError for a text of another form.
    """
    found = FORM.fullmatch(readout)
    if not found:
        raise ValueError(f"readout {readout!r}: write clsN, avg or clsN+avg, with N the number of last blocks")
    blocks = int(found[1] or found[2] or 0)
    kinds = [FeatureKind("cls", layer, norm) for layer in range(-blocks, 0)]
    return (*kinds, FeatureKind("avg", -1, norm)) if readout.endswith("avg") else tuple(kinds)


def joined(
    arrays: Mapping[FeatureKind, np.ndarray], kinds: Sequence[FeatureKind], rows: np.ndarray | slice
) -> np.ndarray:
    """Some rows of several kinds (N, D) side by side -> (B, D * kinds) float32, in memory of its own."""
    return np.concatenate([arrays[kind][rows] for kind in kinds], axis=1)
