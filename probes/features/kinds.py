"""What to keep of a forward pass, and how it is taken from the backbone. B images, D width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from checkpoints.backbone import Backbone, Features
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenSpec
from engine.settings import Validated
from engine.work import Kind, Part


@dataclass(frozen=True)
class FeatureKind(Validated):
    """One vector an image.

    pool: "cls", the class token, or "avg", the mean of the patch tokens. layer: block number, negative from the end.
    norm: with the network's final LayerNorm applied.
    """

    pool: Literal["cls", "avg"]
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
        return -spec.depth <= self.layer < spec.depth and (spec.has_patches if self.pool == "avg" else has_class)

    def check(self, spec: FrozenSpec, task: str) -> None:
        """ValueError where a network of this architecture has no such vector, with the option of `task` that helps."""
        if not -spec.depth <= self.layer < spec.depth:
            raise ValueError(f"layer {self.layer}: the model has {spec.depth} blocks; add --set {task}.layer=-1")
        if not self.exists_in(spec):
            lacking, other = ("patch tokens", "cls") if self.pool == "avg" else ("class token", "avg")
            raise ValueError(f"the model has no {lacking} at layer {self.layer}; add --set {task}.pool={other}")

    def of(self, features: Features) -> Tensor:
        """(B, D). Raises ValueError where the model has no class token, or no patches."""
        if self.pool == "avg" and not features.patches.numel():
            raise ValueError("the network gives one vector of an image, no patches: evaluate it with pool=cls")
        if self.pool == "avg":
            return features.avg
        if features.cls is None:
            raise ValueError(f"the model has no class token at layer {self.layer}: evaluate it with pool=avg")
        return features.cls


def feature_rows(backbone: Backbone, images: Tensor, kinds: Sequence[FeatureKind]) -> dict[FeatureKind, np.ndarray]:
    """Prepared images (B, 3, H, W) -> (B, D) float32 for every kind, in one pass."""
    found = backbone.views(images, [(kind.layer, kind.norm) for kind in kinds])
    return {kind: kind.of(found[kind.layer, kind.norm]).cpu().numpy() for kind in kinds}


FLOAT = 4  # bytes of a number


def feature_pass(spec: FrozenSpec, images: float, of: str, kind: Kind = "features") -> Part:
    """Images through the frozen network; `of` says which, so that tasks that read the same ones share the pass."""
    return Part(kind=kind, count=images, flops=forward_flops(spec), of=of)


def feature_bytes(spec: FrozenSpec, images: float, kinds: int = 1) -> float:
    """What the features of `images` take, on disk as in memory."""
    return FLOAT * spec.width * images * kinds
