"""Floating-point operations of a network on one image, counted on tensors without memory ("meta"); and its memory."""

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
    """FLOPs of a forward pass of one image. image_size: its side in pixels, by default the network's own."""
    if not isinstance(spec, ViTSpec):
        return spec.flops if image_size is None else round(spec.flops * image_size**2 / prod(spec.size))
    return _on_meta(spec, image_size, lambda vit, images: vit(images))


@cache
def training_flops(spec: ViTSpec, image_size: int | None = None) -> int:
    """FLOPs of a forward and a backward pass of one image, with all weights trained."""

    def forward_and_backward(vit: ViT, images: torch.Tensor) -> None:
        tokens = vit(images)[0]
        if tokens.requires_grad:  # raw pixels have no weights
            tokens.sum().backward()

    return _on_meta(spec, image_size, forward_and_backward)


def _on_meta(spec: ViTSpec, image_size: int | None, work: Callable[[ViT, torch.Tensor], object]) -> int:
    sized = spec if image_size is None else replace(spec, image_size=image_size)
    height, width = (patches * spec.patch_size for patches in sized.grid)
    with torch.device("meta"):
        with skip_init():
            vit = ViT(sized, initialise=False)
        images = torch.zeros(1, 3, height, width)
        return count_flops(lambda: work(vit, images))[1]


def parameters(spec: FrozenSpec) -> int:
    """Weights of the network."""
    if not isinstance(spec, ViTSpec):
        return spec.parameters
    with torch.device("meta"), skip_init():
        return sum(parameter.numel() for parameter in ViT(spec, initialise=False).parameters())


def training_bytes(spec: ViTSpec, images: int, image_size: int | None = None) -> float:
    """Bytes of memory that training with `images` in a batch takes: weights, gradients, both moments of AdamW, and the
    activations of every block in float32 (34 L D bytes in half precision, Korthikanti et al. 2022, Eq. 2, so twice as
    many here); the fused attention kernel does not store the L x L attention weights."""
    return 16.0 * parameters(spec) + images * spec.depth * 2 * 34 * tokens_of(spec, image_size) * spec.width


def frozen_bytes(spec: FrozenSpec, images: int, image_size: int | None = None) -> float:
    """Bytes of memory that a forward pass of `images` in a batch takes in float32: weights, and ten activations of one
    block, whose MLP is four times as wide; earlier blocks' activations are freed."""
    return 4 * (parameters(spec) + 10.0 * images * tokens_of(spec, image_size) * spec.width)


def tokens_of(spec: FrozenSpec, image_size: int | None = None) -> int:
    """Tokens of an image."""
    return prod(spec.grid if image_size is None else spec.grid_of((image_size, image_size))) + spec.prefix
