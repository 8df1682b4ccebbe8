"""Which pixels do heads train on? The papers' random crops with horizontal flips, as functions of (seed, epoch, image).

Neither the number of workers nor a kill changes a crop. Several augmentations can share the decoding of an image.

R augmentations, H x W pixels of a crop.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from engine.seeding import AUGMENT, seeded
from imagesets.augmentation import random_transform
from imagesets.decoding import releasing_large_images
from imagesets.random_crops import AREA, CropRule, GeneratorDraws, RandomResizedCrop
from imagesets.sets import ImageSet
from imagesets.transforms import Photo, image_to_tensor

FLIP = 0.5  # chance of a horizontal flip, in every source
TIMM_LOCK = threading.Lock()  # timm draws from the global random generators, which all threads share


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random resized crop and horizontal flip, optionally followed by a RandAugment or AutoAugment policy of timm."""

    interpolation: Literal["bilinear", "bicubic"]  # for resizing the crop
    rule: CropRule  # whose random resized crop it is
    policy: str = ""  # timm's name, such as rand-m9; empty: none
    erase: float = 0.0  # chance of random erasing; only with a policy

    @property
    def name(self) -> str:
        """`torchvision-crop-bilinear-flip_exact`"""
        policy = f"-{self.policy}-erase{self.erase:g}" if self.policy else ""
        return f"{self.rule}-crop-{self.interpolation}-flip_exact{policy}"


@dataclass(frozen=True, kw_only=True)
class TrainTransform(Augmentation):
    """The augmentation of all images in one epoch.

    With a policy, timm draws crop, flip, policy and erasing, and the result is rounded to 8 bits. Images are then
    decoded exactly whatever `decode` says, because the policy takes far longer than decoding.
    """

    size: int | tuple[int, int]  # side in pixels, or height and width
    seed: int
    epoch: int
    image_numbers: np.ndarray  # (N,) for each image of the set the number that, with seed and epoch, seeds its draws
    decode: Literal["exact", "fast"] = "exact"
    mean: Sequence[float] = ()  # (3,) of the network's input normalisation; only needed with a policy
    std: Sequence[float] = ()  # (3,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W) of a crop."""
        return 3, *(self.size if isinstance(self.size, tuple) else (self.size, self.size))

    @property
    def name(self) -> str:
        """Everything that the pixels depend on, other than the images and their numbers."""
        suffix = f"-{self.policy}-erase{self.erase:g}" if self.policy else "_fast" if self.decode == "fast" else ""
        return f"{self.rule}-crop{self.shape[1:]}-{self.interpolation}-flip_seed{self.seed}_epoch{self.epoch}{suffix}"

    @cached_property
    def timm_transform(self) -> Callable[[Image.Image], Tensor]:
        """RGB image -> (3, H, W) float32, normalised; for augmentations with a policy."""
        return random_transform(
            self.size,
            self.mean,
            self.std,
            policy=self.policy,
            crop_scale=AREA,
            flip=FLIP,
            erase=self.erase,
            interpolation=self.interpolation,
        )

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (3, H, W) uint8. Raises UnreadableImage."""
        return self.apply(Photo(image_set, index))

    def apply(self, photo: Photo) -> Tensor:
        """(3, H, W) uint8. Raises UnreadableImage."""
        numbers = self.seed, self.epoch, int(self.image_numbers[photo.index])
        if self.policy:
            image = photo.image
            with TIMM_LOCK, seeded(AUGMENT, *numbers):
                pixels = self.timm_transform(image)
            mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
            return (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
        generator = RandomState(numbers)
        crop = RandomResizedCrop(
            size=self.size, interpolation=self.interpolation, rule=self.rule, draws=GeneratorDraws(generator)
        )
        if self.decode == "fast":
            pixels = crop.crop_fast(photo)
            return (pixels.flip(-1) if generator.random_sample() < FLIP else pixels).contiguous()
        image = crop(photo.image)
        if generator.random_sample() < FLIP:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image_to_tensor(image)


@dataclass(frozen=True, kw_only=True)
class MultiTransform:
    """One crop of an image for each of several transforms; the image is decoded once."""

    transforms: Sequence[TrainTransform]

    @property
    def shape(self) -> tuple[int, ...]:
        """(R, 3, H, W) of an image's crops."""
        return len(self.transforms), *self.transforms[0].shape

    @property
    def name(self) -> str:
        """Everything that the pixels depend on, other than the images and their numbers."""
        return " + ".join(transform.name for transform in self.transforms)

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (R, 3, H, W) uint8. Raises UnreadableImage."""
        photo = Photo(image_set, index)
        return torch.stack([transform.apply(photo) for transform in self.transforms])
