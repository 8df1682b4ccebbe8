"""Augmentation for training with labels: what DeiT, BEiT and MAE's fine-tuning do to an image and to a batch.

`random_transform` is timm's. Mixup and CutMix (Zhang et al. 2018, Yun et al. 2019) are as timm's Mixup computed them
for a whole batch when the sources were written: DeiT, MAE, BEiT and what followed them, with timm 0.3.2 to 0.4.12.
There (data/mixup.py, rand_bbox) a box reaches as far beyond its centre as before it, so that one with an odd number of
rows or columns has one less. timm 1.0 no longer leaves it out, which is why its Mixup is not used here. Images are
mixed with those of the reversed batch. B images, K classes.
"""

import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import Compose

from imagesets.random_crops import PythonDraws, RandomResizedCrop


def random_transform(
    size: int | tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    policy: str,
    crop_scale: tuple[float, float],
    flip: float,
    erase: float,
    interpolation: Literal["bilinear", "bicubic"],
) -> Compose:
    """RGB image -> (3, size, size) float32, normalised; draws from the global generators. A random crop is the first of
    its transforms.

    policy: timm's name of a RandAugment or AutoAugment policy, or empty. crop_scale: area of the random crop. flip:
    chance of a mirror image. erase: chance of one rectangle of noise.
    """
    from timm.data import create_transform

    chain = create_transform(
        input_size=size,
        is_training=True,
        hflip=flip,
        color_jitter=None,  # DeiT's 0.3, BEiT's and ExtreMA's 0.4 are without effect beside a policy
        auto_augment=policy or None,
        interpolation=interpolation,
        re_prob=erase,
        re_mode="pixel",
        re_count=1,
        mean=tuple(mean),
        std=tuple(std),
    )
    # In place of timm's own; the draws and the pixels are the same.
    chain.transforms[0] = RandomResizedCrop(
        size=size, scale=crop_scale, interpolation=interpolation, draws=PythonDraws()
    )
    for operation in (operation for step in chain.transforms for operation in getattr(step, "ops", ())):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterized
    return chain


def posterized(image: Image.Image, bits: int, **unused: Any) -> Image.Image:
    """The image with the upper `bits` of each channel.

    At magnitude 10, which m9-mstd0.5 reaches, timm asks for 0 bits: a black image with the Pillow of the published
    numbers, an error with Pillow 13.
    """
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def check_policy(policy: str) -> None:
    """ValueError for what is neither empty nor the name of a RandAugment policy."""
    if policy and not policy.startswith("rand-"):
        raise ValueError(f"policy={policy!r}: give a RandAugment policy of timm, rand-m9-mstd0.5-inc1, or none")


def drawn_mix(mixup: float, cutmix: float) -> Tensor:
    """(4,) share lambda of the image itself, 1 for a box and 0 for a blend, row and column of the box's centre in
    [0, 1). mixup, cutmix: alpha of each, 0 for none; with both, either is as likely. Draws from the global generators.
    """
    boxed = cutmix > 0 and (mixup == 0 or random.random() < 0.5)
    alpha = cutmix if boxed else mixup
    return torch.tensor([np.random.beta(alpha, alpha), float(boxed), random.random(), random.random()])


def mixed(images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 3, H, W), (B, K) probabilities, (4,) of `drawn_mix` -> images and targets, mixed with the reversed batch's.

    The targets' share is the area that is left, where a box was cut off by the border (timm's correct_lam).
    """
    share, boxed, row, column = draws
    height, width = images.shape[-2:]
    down, across = (_within(centre, side, share) for centre, side in ((row, height), (column, width)))
    outside = 1.0 - down[:, None] * across[None, :]  # (H, W)
    own = torch.where(boxed > 0, outside, share)
    images = (own * images).add_(images.flip(0).mul_(1.0 - own))  # in place: fewer large tensors, 0.6 of the time
    share = own.mean()
    return images, share * targets + (1.0 - share) * targets.flip(0)


def _within(centre: Tensor, side: int, share: Tensor) -> Tensor:
    """(side,) 1 for the rows (columns) of the box with an area of about 1 - share around `centre`, else 0."""
    half, middle = ((side * (1.0 - share).sqrt()).floor() / 2).floor(), (side * centre).floor()
    places = torch.arange(side, device=centre.device)
    inside = (places >= middle - half) & (places < middle + half)
    return inside.to(share.dtype)


def smoothed(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Labels (B,) -> (B, K) probabilities: `smoothing` of each is spread over all classes (Szegedy et al. 2016).

    Rounded as by timm's mixup_target: both values are computed in float64 and rounded once.
    """
    spread = smoothing / classes
    return torch.where(F.one_hot(labels, classes).bool(), 1.0 - smoothing + spread, spread)
