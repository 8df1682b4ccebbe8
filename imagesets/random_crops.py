"""The random resized crop of all trainings: a window of random area and aspect ratio, resized to the network's input.

The sources differ in the rule for the window (torchvision's or MAE's) and in the random generator: torch's (in
pretraining, by torchvision), Python's (in fine-tuning, by timm), or one for each image (in linear probes, this
project's). Random numbers are always drawn in the order area, ratio, top, left.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from engine.settings import FactorRange, Validated
from imagesets.transforms import FILTERS, FastImage, Photo, image_to_tensor, resize_tensor, tensor_to_image

CropRule = Literal["torchvision", "mae"]
Window = tuple[int, int, int, int]  # left, top, right, bottom in pixels

AREA = (0.08, 1.0)  # share of the image's area; torchvision's default, which all supervised trainings use
RATIO = (3 / 4, 4 / 3)  # width by height; torchvision's default, which all sources use
LOG_RATIO = (math.log(RATIO[0]), math.log(RATIO[1]))
LOG_RATIO_FLOAT32 = torch.log(torch.tensor(RATIO)).tolist()  # as torchvision rounds them
MAX_TRIES = 10  # torchvision's


class Draws(Protocol):
    """A source of random numbers."""

    def uniform(self, low: float, high: float) -> float: ...
    def ratio(self) -> float: ...  # exp of a uniform number in LOG_RATIO
    def below(self, count: int) -> int: ...  # a uniform integer in 0..count-1


class TorchDraws:
    """torch's global generator, in torchvision's single precision (transforms.py, RandomResizedCrop.get_params)."""

    def uniform(self, low: float, high: float) -> float:
        return torch.empty(1).uniform_(low, high).item()

    def ratio(self) -> float:
        return torch.exp(torch.empty(1).uniform_(*LOG_RATIO_FLOAT32)).item()

    def below(self, count: int) -> int:
        return int(torch.randint(0, count, (1,)).item())


class PythonDraws:
    """Python's global generator, as timm uses it (data/transforms.py, RandomResizedCropAndInterpolation)."""

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)

    def ratio(self) -> float:
        return math.exp(random.uniform(*LOG_RATIO))

    def below(self, count: int) -> int:
        return random.randrange(count)


@dataclass(frozen=True)
class GeneratorDraws:
    """A generator that the caller passes, such as one for each image. RandomState's streams never change (NEP 19)."""

    generator: RandomState

    def uniform(self, low: float, high: float) -> float:
        return self.generator.uniform(low, high)

    def ratio(self) -> float:
        return math.exp(self.generator.uniform(*LOG_RATIO))

    def below(self, count: int) -> int:
        return int(self.generator.randint(count))


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Validated):
    """Transform from an RGB image to a random window of it, resized by Pillow; a FastImage is resized by `crop_fast`.

    The rule "torchvision" tries MAX_TRIES times to draw a window inside the image, and falls back to the largest
    central one with an allowed ratio. "mae" draws once and cuts the window down to the image (util/crop.py:22-42).
    """

    size: int | tuple[int, int]  # of the result in pixels: side, or height and width; ratios are relative to its shape
    scale: FactorRange = AREA  # smallest and largest area of a window, as a share of the image's
    interpolation: Literal["bilinear", "bicubic"]
    rule: CropRule = "torchvision"
    draws: Draws

    def __call__(self, image: Image.Image) -> Image.Image:
        if isinstance(image, FastImage):
            # If an earlier crop has decoded the whole image, this one reuses it.
            return tensor_to_image(self.crop_fast(image.photo, reduced=not image.photo.is_decoded_fast))
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        return image.crop(self.window(*image.size)).resize((width, height), FILTERS[self.interpolation])

    def crop_fast(self, photo: Photo, reduced: bool = True) -> Tensor:
        """The crop (3, H, W) uint8 of an image under `--decode fast`. Raises UnreadableImage.

        torchvision decodes and resizes. reduced: allows Pillow to decode a JPEG at 1/2, 1/4 or 1/8 of its sides, if the
        window is then still at least as large as the result.
        """
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        left, top, right, bottom = self.window(*photo.size)
        ratio = min((right - left) // width, (bottom - top) // height)
        if reduced and photo.encoded and photo.header.format == "JPEG" and ratio >= 2:
            shrink = 1 << min(ratio.bit_length() - 1, 3)
            box = (left / shrink, top / shrink, right / shrink, bottom / shrink)
            resized = photo.shrunk(shrink).resize((width, height), FILTERS[self.interpolation], box=box)
            return image_to_tensor(resized)
        # In this memory layout resizing takes 0.7 of the time, with the same bits.
        window = photo.pixels[None, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
        resized = resize_tensor(window, height, width, self.interpolation)
        return resized[0].expand(3, -1, -1)

    @property
    def shape(self) -> float:
        """Aspect ratio of the result, width by height."""
        return self.size[1] / self.size[0] if isinstance(self.size, tuple) else 1.0

    def window(self, width: int, height: int) -> Window:
        """A random window of an image of width x height pixels."""
        if self.rule == "mae":
            window_width, window_height = self.window_size(width, height)
            window_width, window_height = min(max(window_width, 1), width), min(max(window_height, 1), height)
            return self.random_position(width, height, window_width, window_height)
        for _ in range(MAX_TRIES):
            window_width, window_height = self.window_size(width, height)
            if 0 < window_width <= width and 0 < window_height <= height:
                return self.random_position(width, height, window_width, window_height)
        window_width = min(width, round(height * (RATIO[1] * self.shape)))
        window_height = min(height, round(width / (RATIO[0] * self.shape)))
        left, top = (width - window_width) // 2, (height - window_height) // 2
        return left, top, left + window_width, top + window_height

    def window_size(self, width: int, height: int) -> tuple[int, int]:
        """Random width and height of a window, which may exceed those of the image."""
        area = width * height * self.draws.uniform(*self.scale)
        ratio = self.draws.ratio() * self.shape
        return round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))

    def random_position(self, width: int, height: int, window_width: int, window_height: int) -> Window:
        """A window of this size at a random position in an image of width x height pixels."""
        top, left = self.draws.below(height - window_height + 1), self.draws.below(width - window_width + 1)
        return left, top, left + window_width, top + window_height
