"""The pass over images for frozen features, as a plan counts it."""

from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenSpec
from engine.work import Kind, Part

FLOAT = 4  # bytes of a number


def feature_pass(spec: FrozenSpec, images: float, of: str, kind: Kind = "features") -> Part:
    """Images through the frozen network; `of` says which, so that tasks that read the same ones share the pass."""
    return Part(kind=kind, count=images, flops=forward_flops(spec), of=of)


def feature_bytes(spec: FrozenSpec, images: float, kinds: int = 1) -> float:
    """What the features of `images` take, on disk as in memory."""
    return FLOAT * spec.width * images * kinds
