"""Kinds of features, and readouts, which concatenate several of them.

A readout is the input of a linear head: class tokens or mean patch tokens of the last n blocks. "cls4" is DINO's
n_last_blocks=4; "avg" the mean patch token of the last block; "cls1+avg" both (iBOT's avgpool mode 2); "avg4" the mean
patch tokens of the last 4 blocks (ours); "avg@8" that of the 8th block only (SimMIM); "cls+avg@8" class token and mean
patch token of the 8th block (BEiT). The order is that of iBOT eval_linear.py:184-197: blocks from first to last, then
the mean.

B: images of a batch. L: patches. D: width.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from checkpoints.backbone import Backbone, Features
from checkpoints.frozen import FrozenSpec
from engine.errors import option
from engine.rows import Rows
from engine.settings import Validated


@dataclass(frozen=True)
class FeatureKind(Validated):
    """A feature of an image: one vector, or all its patches.

    pool: "cls", the class token; "avg", the mean of the patch tokens; or "patches", all of them, which are never
    stored on disk. layer: index of the block, negative from the end. norm: apply the network's final LayerNorm.
    """

    pool: Literal["cls", "avg", "patches"]
    layer: int = -1
    norm: bool = True

    @property
    def name(self) -> str:
        """For file names and messages, such as cls-layer-1-norm."""
        return f"{self.pool}-layer{self.layer}-{'norm' if self.norm else 'raw'}"

    def exists_in(self, spec: FrozenSpec) -> bool:
        """Whether a network has this feature."""
        last = self.layer in (-1, spec.depth - 1)
        has_class = spec.class_token or (spec.class_attention > 0 and last)
        return -spec.depth <= self.layer < spec.depth and (has_class if self.pool == "cls" else spec.has_patches)

    def vectors(self, spec: FrozenSpec) -> int:
        """Number of vectors per image."""
        return math.prod(spec.grid) if self.pool == "patches" else 1

    def at_every_block(self, spec: FrozenSpec) -> tuple["FeatureKind", ...]:
        """This feature of the last block, and then that of each earlier block that has it."""
        earlier = (replace(self, layer=layer) for layer in range(spec.depth - 1))
        return (self, *(kind for kind in earlier if kind.exists_in(spec)))

    def check(self, spec: FrozenSpec, task: str = "") -> None:
        """Raises ValueError, naming the setting of `task` to change, if a network does not have this feature."""

        def set_to(name: str, value: Any) -> str:
            return option("settings", {f"{task}.{name}": value}) if task else option(name, value)

        if not -spec.depth <= self.layer < spec.depth:
            last = set_to("layer", -1)
            raise ValueError(f"layer {self.layer}: the model has {spec.depth} blocks; the last: {last}")
        if not self.exists_in(spec):
            lacking, other = ("patch tokens", "cls") if self.pool == "avg" else ("class token", "avg")
            raise ValueError(f"the model has no {lacking} at layer {self.layer}; add {set_to('pool', other)}")

    def of(self, features: Features) -> Tensor:
        """(B, D), or (B, L, D) for patches. Raises ValueError if the network has no class token, or no patches."""
        if self.pool != "cls" and not features.patches.numel():
            raise ValueError("the network returns one vector per image, no patches: evaluate it with pool=cls")
        if self.pool != "cls":
            return features.avg if self.pool == "avg" else features.patches.flatten(1, 2)
        if features.cls is None:
            raise ValueError(f"the model has no class token at layer {self.layer}: evaluate it with pool=avg")
        return features.cls


def feature_rows(backbone: Backbone, images: Tensor, kinds: Sequence[FeatureKind]) -> dict[FeatureKind, np.ndarray]:
    """(B, D) float32 for every kind, or (B, L, D) for patches, in one forward pass. images: (B, 3, H, W), prepared."""
    features = backbone.views(images, [(kind.layer, kind.norm) for kind in kinds])
    return {kind: kind.of(features[kind.layer, kind.norm]).cpu().numpy() for kind in kinds}


FLOAT = 4  # bytes of a float32


def feature_bytes(spec: FrozenSpec, images: float, kinds: int = 1) -> float:
    """Bytes of the features of `images`, on disk or in memory."""
    return FLOAT * spec.width * images * kinds


FORM = re.compile(r"(cls)([1-9]\d*)(\+avg)?|(avg)([1-9]\d*)?|(cls|avg|cls\+avg)@([1-9]\d*)")


class Readout(NamedTuple):
    """The parts of a readout: `pool` of the last `blocks` blocks, or of one block.

    with_average: the mean patch token of the last block follows the class tokens. block: number of the one block, from
    1, or 0 for the last `blocks`; with_average then adds the mean patch token of the same block.
    """

    pool: Literal["cls", "avg"]
    blocks: int
    with_average: bool
    block: int = 0

    @classmethod
    def parse(cls, text: str) -> "Readout":
        """ "cls2+avg" -> ("cls", 2, True). Raises ValueError for any other form."""
        match = FORM.fullmatch(text)
        if not match:
            raise ValueError(
                f"readout {text!r}: write clsN, clsN+avg, avg or avgN, where N is the number of last blocks, or cls@N, "
                "avg@N or cls+avg@N, where N is the number of one block, from 1"
            )
        pool: Literal["cls", "avg"] = "cls" if (match[1] or match[6] or "").startswith("cls") else "avg"
        with_average = bool(match[3]) or match[6] == "cls+avg"
        return cls(pool, int(match[2] or match[5] or 1), with_average, int(match[7] or 0))

    def __str__(self) -> str:
        if self.block:
            return f"{self.pool}{'+avg' if self.with_average else ''}@{self.block}"
        blocks = "" if self.pool == "avg" and self.blocks == 1 else self.blocks
        return f"{self.pool}{blocks}{'+avg' if self.with_average else ''}"


def kinds_of(readout: str, norm: bool) -> tuple[FeatureKind, ...]:
    """The kinds of features that a readout such as "cls2+avg" concatenates. norm: apply the final norm to every block.

    Raises ValueError for any other form.
    """
    pool, blocks, with_average, block = Readout.parse(readout)
    if block:
        average = (FeatureKind("avg", block - 1, norm),) if with_average else ()
        return (FeatureKind(pool, block - 1, norm), *average)
    kinds = tuple(FeatureKind(pool, layer, norm) for layer in range(-blocks, 0))
    return (*kinds, FeatureKind("avg", -1, norm)) if with_average else kinds


def joined(arrays: Mapping[FeatureKind, Rows], kinds: Sequence[FeatureKind], rows: np.ndarray | slice) -> np.ndarray:
    """Some rows of several kinds (N, D), concatenated and copied: (B, D * kinds) float32."""
    return np.concatenate([arrays[kind][rows] for kind in kinds], axis=1)
