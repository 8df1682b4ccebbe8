"""FLOPs and memory of a network: operations are counted on meta tensors, memory is estimated from sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod

import torch

from checkpoints.frozen import FrozenSpec
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT, skip_init
from engine.work import count_flops


@cache
def forward_flops(spec: FrozenSpec, image_size: int | None = None) -> int:
    """FLOPs of a forward pass of one image. image_size: its side in pixels; None: the network's native size."""
    if not isinstance(spec, ViTSpec):
        return spec.flops if image_size is None else round(spec.flops * image_size**2 / prod(spec.size))
    return _count_on_meta(spec, image_size, lambda vit, image: vit(image))


@cache
def training_flops(spec: ViTSpec, image_size: int | None = None) -> int:
    """FLOPs of a forward and a backward pass of one image, with all weights trained. image_size: as above."""

    def forward_and_backward(vit: ViT, image: torch.Tensor) -> None:
        tokens = vit(image)[0]
        if tokens.requires_grad:  # raw pixels have no weights
            tokens.sum().backward()

    return _count_on_meta(spec, image_size, forward_and_backward)


def _count_on_meta(spec: ViTSpec, image_size: int | None, function: Callable[[ViT, torch.Tensor], object]) -> int:
    """FLOPs of `function(vit, image)` for one image, on meta tensors, which take no memory.

    All blocks of a trunk cost the same, so that networks of one and two blocks tell the cost of any depth.
    """
    if image_size is not None:
        spec = replace(spec, image_size=image_size)
    if spec.depth > 2:
        one, two = (_count_on_meta(replace(spec, depth=depth), None, function) for depth in (1, 2))
        return one + (spec.depth - 1) * (two - one)
    height, width = (patches * spec.patch_size for patches in spec.grid)
    with torch.device("meta"):
        with skip_init():
            vit = ViT(spec, initialise=False)
        image = torch.zeros(1, 3, height, width)
        _, flops = count_flops(lambda: function(vit, image))
        return flops


@cache
def parameters(spec: FrozenSpec) -> int:
    """Number of parameters of the network."""
    if not isinstance(spec, ViTSpec):
        return spec.parameters
    with torch.device("meta"), skip_init():
        return sum(parameter.numel() for parameter in ViT(spec, initialise=False).parameters())


def training_bytes(spec: ViTSpec, images: int, image_size: int | None = None) -> float:
    """Estimated memory in bytes of training in float32 with batches of `images`.

    It is taken by weights, gradients, both moments of AdamW, and the activations of every block: 34 L D bytes in half
    precision (Korthikanti et al. 2022, Eq. 2), so twice as many here. Fused attention does not store the L x L maps.
    """
    return 16.0 * parameters(spec) + images * spec.depth * 2 * 34 * count_tokens(spec, image_size) * spec.width


def frozen_bytes(spec: FrozenSpec, images: int, image_size: int | None = None) -> float:
    """Estimated memory in bytes of a forward pass in float32 with batches of `images`.

    It is taken by the weights, and by ten values per token and channel of one block, whose MLP is four times as wide.
    The activations of earlier blocks are freed.
    """
    return 4 * (parameters(spec) + 10.0 * images * count_tokens(spec, image_size) * spec.width)


def count_tokens(spec: FrozenSpec, image_size: int | None = None) -> int:
    """Number of tokens of an image, prefix tokens included. image_size: as above."""
    return prod(spec.grid if image_size is None else spec.grid_of((image_size, image_size))) + spec.prefix
