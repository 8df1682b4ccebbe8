"""What a linear head reads: class tokens or mean patch tokens of the last n blocks, side by side.

"cls4" is DINO's n_last_blocks=4, "avg" the mean patch token of the last block, "cls1+avg" both (iBOT's avgpool mode 2),
"avg4" the mean patch tokens of the last 4 blocks (ours), "avg@8" that of the 8th block alone (SimMIM), "cls+avg@8" its
class token and mean (BEiT). Order as in iBOT
eval_linear.py:184-197: blocks from early to late, then the mean.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from engine.rows import Rows
from probes.features.kinds import FeatureKind

FORM = re.compile(r"(cls)([1-9]\d*)(\+avg)?|(avg)([1-9]\d*)?|(cls|avg|cls\+avg)@([1-9]\d*)")


class Readout(NamedTuple):
    """`pool` of the last `blocks` blocks; with_average: and behind class tokens the mean patch of the last block.

    block: of this one block instead, counted from 1; with_average: and the mean patch of the same.
    """

    pool: Literal["cls", "avg"]
    blocks: int
    with_average: bool
    block: int = 0

    @classmethod
    def parse(cls, text: str) -> "Readout":
        """ "cls2+avg" -> ("cls", 2, True). Raises ValueError for a text of another form."""
        found = FORM.fullmatch(text)
        if not found:
            raise ValueError(
                f"readout {text!r}: write clsN, clsN+avg, avg or avgN, with N the number of last blocks, or cls@N, "
                "avg@N or cls+avg@N, with N that of one block, from 1 on"
            )
        pool: Literal["cls", "avg"] = "cls" if (found[1] or found[6] or "").startswith("cls") else "avg"
        with_average = bool(found[3]) or found[6] == "cls+avg"
        return cls(pool, int(found[2] or found[5] or 1), with_average, int(found[7] or 0))

    def __str__(self) -> str:
        if self.block:
            return f"{self.pool}{'+avg' if self.with_average else ''}@{self.block}"
        blocks = "" if self.pool == "avg" and self.blocks == 1 else self.blocks
        return f"{self.pool}{blocks}{'+avg' if self.with_average else ''}"


def kinds_of(readout: str, norm: bool) -> tuple[FeatureKind, ...]:
    """ "cls2+avg" -> the kinds to lay side by side; norm: with the final norm applied to every block's output.

    Raises ValueError for a text of another form.
    """
    pool, blocks, with_average, block = Readout.parse(readout)
    if block:
        average = (FeatureKind("avg", block - 1, norm),) if with_average else ()
        return (FeatureKind(pool, block - 1, norm), *average)
    kinds = tuple(FeatureKind(pool, layer, norm) for layer in range(-blocks, 0))
    return (*kinds, FeatureKind("avg", -1, norm)) if with_average else kinds


def joined(arrays: Mapping[FeatureKind, Rows], kinds: Sequence[FeatureKind], rows: np.ndarray | slice) -> np.ndarray:
    """Some rows of several kinds (N, D) side by side -> (B, D * kinds) float32, in memory of its own."""
    return np.concatenate([arrays[kind][rows] for kind in kinds], axis=1)
