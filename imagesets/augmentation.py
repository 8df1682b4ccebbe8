"""Augmentation of images and batches in supervised training: that of DeiT, BEiT and MAE's fine-tuning.

`random_transform` is timm's. Mixup and CutMix (Zhang et al. 2018, Yun et al. 2019) reproduce timm 0.3.2 to 0.4.12,
which DeiT, MAE, BEiT and later sources used, in its mode for whole batches: each image is mixed with that of the
reversed batch. In these versions (data/mixup.py, rand_bbox) a box extends equally far on both sides of its centre, so
an odd number of rows or columns becomes one smaller. timm 1.0 changed this, so its Mixup is not used here.

Shapes: B images, K classes.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

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
) -> Callable[[Image.Image], Tensor]:
    """Transform from an RGB image to (3, size, size) float32, normalised; its first step is the random crop.

    Random numbers come from the global generators.

    Args:
        size: Side of the crop in pixels, or height and width.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        policy: timm's name of a RandAugment or AutoAugment policy, or "".
        crop_scale: Smallest and largest area of the crop, as a share of the image's.
        flip: Probability of a horizontal flip.
        erase: Probability of random erasing, one rectangle of noise.
        interpolation: Filter for resizing the crop.
    """
    from timm.data import create_transform

    transform = create_transform(
        input_size=size,
        is_training=True,
        hflip=flip,
        color_jitter=None,  # DeiT's 0.3, BEiT's and ExtreMA's 0.4 have no effect when there is a policy
        auto_augment=policy or None,
        interpolation=interpolation,
        re_prob=erase,
        re_mode="pixel",
        re_count=1,
        mean=tuple(mean),
        std=tuple(std),
    )
    # Replaces timm's crop, with the same random numbers and pixels.
    transform.transforms[0] = RandomResizedCrop(
        size=size, scale=crop_scale, interpolation=interpolation, draws=PythonDraws()
    )
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
    return transform


def posterize(image: Image.Image, bits: int, **unused: Any) -> Image.Image:
    """The image reduced to the upper `bits` of each channel.

    At magnitude 10, which m9-mstd0.5 reaches, timm asks for 0 bits: a black image with the Pillow versions of the
    published numbers, but an error in Pillow 13.
    """
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def check_policy(policy: str) -> None:
    """Raise ValueError unless `policy` is "" or the name of a RandAugment policy."""
    if policy and not policy.startswith("rand-"):
        raise ValueError(f"policy={policy!r}: give a RandAugment policy of timm, rand-m9-mstd0.5-inc1, or none")


def draw_mix(mixup: float, cutmix: float) -> Tensor:
    """Random numbers (4,) for `mix_batch`, from the global generators.

    They are lambda, the share of the image itself; 1 for CutMix or 0 for mixup; and row and column of the box's centre
    in [0, 1). mixup, cutmix: alpha of each, 0 to switch it off; if both are on, each is used half of the time.
    """
    is_cutmix = cutmix > 0 and (mixup == 0 or random.random() < 0.5)
    alpha = cutmix if is_cutmix else mixup
    return torch.tensor([np.random.beta(alpha, alpha), float(is_cutmix), random.random(), random.random()])


def mix_batch(images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W) and target probabilities (B, K), both mixed with those of the reversed batch.

    draws: (4,) from `draw_mix`. If the border cuts off a CutMix box, the weight of the targets is the remaining area
    (timm's correct_lam).
    """
    weight, is_cutmix, row, column = draws
    height, width = images.shape[-2:]
    rows, columns = _box_interval(row, height, weight), _box_interval(column, width, weight)
    outside = 1.0 - rows[:, None] * columns[None, :]  # (H, W)
    pixel_weights = torch.where(is_cutmix > 0, outside, weight)
    # In place: fewer large tensors, 0.6 of the time.
    images = (pixel_weights * images).add_(images.flip(0).mul_(1.0 - pixel_weights))
    weight = pixel_weights.mean()
    return images, weight * targets + (1.0 - weight) * targets.flip(0)


def _box_interval(centre: Tensor, side: int, weight: Tensor) -> Tensor:
    """Mask (side,), 1 for rows (or columns) in the CutMix box, else 0.

    centre: of the box, in [0, 1). side: of the image in pixels. The box has about 1 - weight of the image's area.
    """
    half, middle = ((side * (1.0 - weight).sqrt()).floor() / 2).floor(), (side * centre).floor()
    positions = torch.arange(side, device=centre.device)
    inside = (positions >= middle - half) & (positions < middle + half)
    return inside.to(weight.dtype)


def smooth_labels(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Target probabilities (B, K) of labels (B,) with label smoothing (Szegedy et al. 2016).

    `smoothing` of the probability is spread over all classes. As in timm's mixup_target, both values are computed in
    float64 and rounded once.
    """
    spread = smoothing / classes
    return torch.where(F.one_hot(labels, classes).bool(), 1.0 - smoothing + spread, spread)
