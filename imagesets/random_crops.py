"""The random resized crop of every training: a window of random area and aspect ratio, resized to the network's image.

There are two rules for the window and one way to apply it. What the sources' codes differ in beside the rule is who
draws the numbers: torch (torchvision, in pretraining), Python (timm, in fine-tuning), or a generator of the image's own
(ours, in linear probes). Their draws come in one order: area, ratio, top, left.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import resize_image, to_pil_image

from engine.settings import FactorRange, Validated
from imagesets.transforms import FAST_MODES, FILTERS, FastImage, Photo, planes

CropRule = Literal["torchvision", "mae"]
Window = tuple[int, int, int, int]  # left, top, right, bottom in pixels

AREA = (0.08, 1.0)  # of the image; torchvision's, which every supervised training leaves as it is
RATIO = (3 / 4, 4 / 3)  # width to height; torchvision's, which every source leaves as it is
LOG_RATIO = (math.log(RATIO[0]), math.log(RATIO[1]))
TRIES = 10


class Draws(Protocol):
    """Where random numbers come from."""

    def uniform(self, low: float, high: float) -> float: ...
    def ratio(self) -> float: ...  # exp of a uniform number in LOG_RATIO
    def below(self, count: int) -> int: ...


class TorchDraws:
    """torch's global generator, in torchvision's single precision (transforms.py, RandomResizedCrop.get_params)."""

    def uniform(self, low: float, high: float) -> float:
        return torch.empty(1).uniform_(low, high).item()

    def ratio(self) -> float:
        low, high = torch.log(torch.tensor(RATIO)).tolist()
        return torch.exp(torch.empty(1).uniform_(low, high)).item()

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
class OwnDraws:
    """A generator of one image's own. RandomState's streams are frozen for ever (NumPy NEP 19)."""

    generator: RandomState

    def uniform(self, low: float, high: float) -> float:
        return self.generator.uniform(low, high)

    def ratio(self) -> float:
        return math.exp(self.generator.uniform(*LOG_RATIO))

    def below(self, count: int) -> int:
        return int(self.generator.randint(count))


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Validated):
    """RGB image -> a window of it at size x size pixels, by Pillow; of a FastImage by `fast`.

    scale: least and largest area of the window, of which those above the image's are drawn again. size: or height and
    width. Ratios are then relative to that shape, so that squares stay about square (ours). rule: torchvision's ten
    tries for a window inside the image, else the largest central one of an allowed ratio; or MAE's one try, cut down to
    the image (util/crop.py:22-42).
    """

    size: int | tuple[int, int]
    scale: FactorRange = AREA
    interpolation: Literal["bilinear", "bicubic"]
    rule: CropRule = "torchvision"
    draws: Draws

    def __call__(self, image: Image.Image) -> Image.Image:
        if isinstance(image, FastImage):
            # Of several crops, later ones take what was decoded in whole for an earlier one.
            return to_pil_image(self.fast(image.photo, reduced=not image.photo.decoded_fast))
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        return image.crop(self.window(*image.size)).resize((width, height), FILTERS[self.interpolation])

    def fast(self, photo: Photo, reduced: bool = True) -> Tensor:
        """`--decode fast`: the window of an image -> (3, H, W) uint8. Raises UnreadableImage.

        torchvision decodes and resizes. If the window has twice the sides of the result or more, Pillow decodes a JPEG
        at 1/2, 1/4 or 1/8, such that the window is still no smaller than the result; not with `reduced` false.
        """
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        left, top, right, bottom = self.window(*photo.header.size)
        ratio = min((right - left) // width, (bottom - top) // height)
        if reduced and photo.encoded and photo.header.format == "JPEG" and ratio >= 2:
            shrink = 1 << min(ratio.bit_length() - 1, 3)
            box = (left / shrink, top / shrink, right / shrink, bottom / shrink)
            return planes(photo.shrunk(shrink).resize((width, height), FILTERS[self.interpolation], box=box))
        # In this layout resizing takes 0.7 of the time, with the same bits.
        window = photo.pixels[None, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
        resized = resize_image(window, [height, width], FAST_MODES[self.interpolation], antialias=True)
        return resized[0].expand(3, -1, -1)

    @property
    def shape(self) -> float:
        """Width by height."""
        return self.size[1] / self.size[0] if isinstance(self.size, tuple) else 1.0

    def window(self, width: int, height: int) -> Window:
        """The next window of an image of width x height pixels."""
        if self.rule == "mae":
            wide, high = self.sides(width, height)
            return self.placed(width, height, min(max(wide, 1), width), min(max(high, 1), height))
        for _ in range(TRIES):
            wide, high = self.sides(width, height)
            if 0 < wide <= width and 0 < high <= height:
                return self.placed(width, height, wide, high)
        wide = min(width, round(height * (RATIO[1] * self.shape)))
        high = min(height, round(width / (RATIO[0] * self.shape)))
        left, top = (width - wide) // 2, (height - high) // 2
        return left, top, left + wide, top + high

    def sides(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a window; it may be larger than the image."""
        area = width * height * self.draws.uniform(*self.scale)
        ratio = self.draws.ratio() * self.shape
        return round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))

    def placed(self, width: int, height: int, wide: int, high: int) -> Window:
        """A window of these sides somewhere in the image."""
        top, left = self.draws.below(height - high + 1), self.draws.below(width - wide + 1)
        return left, top, left + wide, top + high
