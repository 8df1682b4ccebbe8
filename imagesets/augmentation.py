"""timm's augmentation for training with labels: what DeiT, BEiT and MAE's fine-tuning do to an image."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from PIL import Image, ImageOps
from torch import Tensor

from imagesets.random_crops import PythonDraws, RandomResizedCrop


def random_transform(
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    policy: str,
    crop_scale: tuple[float, float],
    flip: float,
    erase: float,
    interpolation: Literal["bilinear", "bicubic"],
) -> Callable[[Image.Image], Tensor]:
    """RGB image -> (3, size, size) float32, normalised; draws from the global generators.

    policy: timm's name of a RandAugment policy, or empty. crop_scale: area of the random crop. flip: chance of a mirror
    image. erase: chance of one rectangle of noise.
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
