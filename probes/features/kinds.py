"""What to keep of a forward pass: kinds of features, and readouts, which lay several side by side.

A readout is what a linear head reads: class tokens or mean patch tokens of the last n blocks. "cls4" is DINO's
n_last_blocks=4, "avg" the mean patch token of the last block, "cls1+avg" both (iBOT's avgpool mode 2), "avg4" the mean
patch tokens of the last 4 blocks (ours), "avg@8" that of the 8th block alone (SimMIM), "cls+avg@8" its class token and
mean (BEiT). Order as in iBOT eval_linear.py:184-197: blocks from early to late, then the mean. B images, D width.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from checkpoints.backbone import Backbone, Features
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenSpec
from engine.rows import Rows
from engine.settings import Validated
from engine.work import Kind, Part


@dataclass(frozen=True)
class FeatureKind(Validated):
    """One vector an image, or all its patches.

    pool: "cls", the class token, "avg", the mean of the patch tokens, or "patches", these themselves, which streams of
    features have and the store has not. layer: block number, negative from the end. norm: with the network's final
    LayerNorm applied.
    """

    pool: Literal["cls", "avg", "patches"]
    layer: int = -1
    norm: bool = True

    @property
    def name(self) -> str:
        """For file names and messages, e.g. cls-layer-1-norm."""
        return f"{self.pool}-layer{self.layer}-{'norm' if self.norm else 'raw'}"

    def exists_in(self, spec: FrozenSpec) -> bool:
        """Whether a network of this architecture has such a vector."""
        last = self.layer in (-1, spec.depth - 1)
        has_class = spec.class_token or (spec.class_attention > 0 and last)
        return -spec.depth <= self.layer < spec.depth and (has_class if self.pool == "cls" else spec.has_patches)

    def vectors(self, spec: FrozenSpec) -> int:
        """Vectors of an image, V."""
        return math.prod(spec.grid) if self.pool == "patches" else 1

    def at_every_block(self, spec: FrozenSpec) -> tuple["FeatureKind", ...]:
        """This feature, of the last block, and then the same of each block before it."""
        others = (replace(self, layer=layer) for layer in range(spec.depth - 1))
        return (self, *(kind for kind in others if kind.exists_in(spec)))

    def check(self, spec: FrozenSpec, task: str) -> None:
        """ValueError where a network of this architecture has no such vector, with the option of `task` that helps."""
        if not -spec.depth <= self.layer < spec.depth:
            raise ValueError(f"layer {self.layer}: the model has {spec.depth} blocks; the last: --set {task}.layer=-1")
        if not self.exists_in(spec):
            lacking, other = ("patch tokens", "cls") if self.pool == "avg" else ("class token", "avg")
            raise ValueError(f"the model has no {lacking} at layer {self.layer}; add --set {task}.pool={other}")

    def of(self, features: Features) -> Tensor:
        """(B, D), of patches (B, L, D). Raises ValueError where the model has no class token, or no patches."""
        if self.pool != "cls" and not features.patches.numel():
            raise ValueError("the network returns one vector per image, no patches: evaluate it with pool=cls")
        if self.pool != "cls":
            return features.avg if self.pool == "avg" else features.patches.flatten(1, 2)
        if features.cls is None:
            raise ValueError(f"the model has no class token at layer {self.layer}: evaluate it with pool=avg")
        return features.cls


def feature_rows(backbone: Backbone, images: Tensor, kinds: Sequence[FeatureKind]) -> dict[FeatureKind, np.ndarray]:
    """Prepared images (B, 3, H, W) -> (B, D) float32 for every kind, of patches (B, L, D), in one pass."""
    features = backbone.views(images, [(kind.layer, kind.norm) for kind in kinds])
    return {kind: kind.of(features[kind.layer, kind.norm]).cpu().numpy() for kind in kinds}


FLOAT = 4  # bytes of a number


def feature_pass(spec: FrozenSpec, images: float, of: str, kind: Kind = "features") -> Part:
    """Images through the frozen network; `of` says which, so that tasks that read the same ones share the pass."""
    return Part(kind=kind, count=images, flops=forward_flops(spec), of=of)


def feature_bytes(spec: FrozenSpec, images: float, kinds: int = 1) -> float:
    """What the features of `images` take, on disk as in memory."""
    return FLOAT * spec.width * images * kinds


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
        match = FORM.fullmatch(text)
        if not match:
            raise ValueError(
                f"readout {text!r}: write clsN, clsN+avg, avg or avgN, with N the number of last blocks, or cls@N, "
                "avg@N or cls+avg@N, with N that of one block, from 1 on"
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
