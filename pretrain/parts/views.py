"""Views of an image: random crops, flips and colours, as tensors that are normalised for the network.

Built of torchvision's transforms, whose draws the sources made too. All work on PIL images, on the CPU, in the loader.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from checkpoints.spec import Preparation
from imagesets.random_crops import RandomResizedCrop, TorchDraws

Transform = Callable[[Image.Image], Image.Image]
SOLARISE_ABOVE = 128


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Chances and strengths of what happens to colours, in this order; BYOL's numbers (Grill et al. 2020, table 6).

    jitter: brightness, contrast, saturation, hue. blur: chance of a Gaussian of `blur_radius` pixels.
    """

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_chance: float = 0.8
    grey: float = 0.2
    blur: float = 0.0
    blur_radius: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0

    def transforms(self) -> list[Transform]:
        """What is to be composed; nothing for a chance of zero, which then draws nothing."""
        steps: list[Transform] = []
        if self.jitter_chance:
            steps.append(transforms.RandomApply([transforms.ColorJitter(*self.jitter)], self.jitter_chance))
        if self.grey:
            steps.append(transforms.RandomGrayscale(self.grey))
        if self.blur:
            steps.append(Blur(self.blur, self.blur_radius))
        if self.solarise:
            steps.append(transforms.RandomSolarize(SOLARISE_ABOVE, self.solarise))
        return steps


def even_jitter(strength: float) -> list[Transform]:
    """Brightness, contrast and saturation of every image by the same strength, nothing for 0; BEiT's, data2vec's and
    CAE's colours (beit/datasets.py, DataAugmentationForBEiT; data2vec_vision beit/datasets.py:66-74)."""
    return Colours(jitter=(strength, strength, strength, 0.0), jitter_chance=float(strength > 0), grey=0.0).transforms()


@dataclass(frozen=True)
class Blur:
    """With `chance`, Pillow's Gaussian blur of a radius drawn from `radius` (DINO utils.py:36-54)."""

    chance: float
    radius: tuple[float, float]

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.chance:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*self.radius)))


def crop(
    size: int,
    scale: tuple[float, float],
    interpolation: Literal["bilinear", "bicubic"] = "bicubic",
    flip: float = 0.5,
) -> list[Transform]:
    """A random part of the image, `scale` of its area, aspect 3/4 to 4/3, at size x size pixels; then a flip."""
    part = RandomResizedCrop(size=size, scale=scale, interpolation=interpolation, draws=TorchDraws())
    return [part, transforms.RandomHorizontalFlip(flip)] if flip else [part]


def fixed_crop(size: int, resized: int, padding: int = 0, flip: float = 0.5) -> list[Transform]:
    """The short side at `resized` pixels, a random part of size x size pixels of that, with `padding` mirrored around
    it before; then a flip."""
    return [
        transforms.Resize(resized, InterpolationMode.BICUBIC),
        transforms.RandomCrop(size, padding=padding or None, padding_mode="reflect"),
        transforms.RandomHorizontalFlip(flip),
    ]


@dataclass(frozen=True)
class TwoSizes:
    """A random part of the image, as in `crop`, at `size` pixels a side by a bicubic filter and at `second` by
    Lanczos's (BEiT transforms.py, RandomResizedCropAndInterpolationWithTwoPic)."""

    size: int
    second: int
    scale: tuple[float, float]

    def __call__(self, image: Image.Image) -> tuple[Image.Image, Image.Image]:
        rule = RandomResizedCrop(size=self.size, scale=self.scale, interpolation="bicubic", draws=TorchDraws())
        part = image.crop(rule.window(*image.size))
        first = part.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return first, part.resize((self.second, self.second), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Tensors:
    """RGB image -> (3, S, S) float32, normalised; torchvision's ToTensor and Normalize."""

    preparation: Preparation

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = transforms.functional.to_tensor(image)
        return transforms.functional.normalize(pixels, self.preparation.mean, self.preparation.std, inplace=True)


def view(steps: Sequence[Transform], preparation: Preparation) -> Callable[[Image.Image], Tensor]:
    """All `steps`, then a tensor."""
    return transforms.Compose([*steps, Tensors(preparation)])


@dataclass(frozen=True)
class ImageViews:
    """RGB image -> tensors by name: those that are made of it, then what is drawn beside it for masks and choices."""

    made: Mapping[str, Callable[[Image.Image], Tensor]]
    drawn: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        views = {name: make(image) for name, make in self.made.items()}
        return views | {name: draw() for name, draw in self.drawn.items()}


Makers = Sequence[Callable[[Image.Image], Tensor]]


@dataclass(frozen=True)
class Several:
    """RGB image -> views of one size (n, 3, S, S), drawn one after the other."""

    makers: Makers

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.stack([make(image) for make in self.makers])


def multi_crop(large: Makers, small: Makers = ()) -> ImageViews:
    """ "global" (G, 3, S, S) and, where there are any, "local" (N, 3, s, s)."""
    groups = {"global": large, "local": small}
    return ImageViews({name: Several(makers) for name, makers in groups.items() if makers})


def two_views(
    size: int,
    scale: tuple[float, float],
    blur: tuple[float, float],
    solarise: float,
    preparation: Preparation,
) -> ImageViews:
    """MoCo-v3's "first" and "second" view (main_moco.py:262-285): bilinear crops, BYOL's colours; `blur`: chance for
    each, `solarise`: for the second. The source flips last, which makes no difference to what is drawn before."""
    geometry = crop(size, scale, "bilinear")
    colours = [Colours(blur=blur[0]), Colours(blur=blur[1], solarise=solarise)]
    first, second = (view([*geometry, *augmentation.transforms()], preparation) for augmentation in colours)
    return ImageViews({"first": first, "second": second})
