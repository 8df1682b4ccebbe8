"""Views of an image: random crops, flips and colours, as tensors normalised for the network.

They are built of torchvision's transforms, as in the sources, and so draw the same random numbers. All transforms work
on PIL images, on the CPU, in the loader; only colours and normalisation can be left to a GPU.
S side of a view in pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from checkpoints.spec import Preparation
from imagesets.random_crops import RandomResizedCrop, TorchDraws
from imagesets.transforms import image_to_tensor
from pretrain.parts.colours import Colours, coloured_batch

Transform = Callable[[Image.Image], Image.Image]
NO_COLOURS = Colours(jitter_chance=0.0, grey=0.0)


def even_jitter(strength: float) -> Colours:
    """Jitter of brightness, contrast and saturation with one strength, for every image; none for 0. The augmentation of
    BEiT, data2vec and CAE (beit/datasets.py, DataAugmentationForBEiT; data2vec_vision beit/datasets.py:66-74)."""
    return Colours(jitter=(strength, strength, strength, 0.0), jitter_chance=float(strength > 0), grey=0.0)


def crop(
    size: int,
    scale: tuple[float, float],
    interpolation: Literal["bilinear", "bicubic"] = "bicubic",
    flip: float = 0.5,
) -> list[Transform]:
    """A random resized crop, then a flip.

    Args:
        size: side of the crop after resizing, in pixels.
        scale: least and largest share of the image's area; the aspect ratio is 3/4 to 4/3.
        interpolation: filter of the resizing.
        flip: probability of a horizontal flip.
    """
    resized_crop = RandomResizedCrop(size=size, scale=scale, interpolation=interpolation, draws=TorchDraws())
    return [resized_crop, transforms.RandomHorizontalFlip(flip)] if flip else [resized_crop]


def fixed_crop(size: int, resized: int, padding: int = 0, flip: float = 0.5) -> list[Transform]:
    """Resize the short side to `resized` pixels, pad with `padding` mirrored pixels, take a random crop of size x size
    pixels, then flip with probability `flip`."""
    return [
        transforms.Resize(resized, InterpolationMode.BICUBIC),
        transforms.RandomCrop(size, padding=padding or None, padding_mode="reflect"),
        transforms.RandomHorizontalFlip(flip),
    ]


@dataclass(frozen=True)
class TwoSizes:
    """A random crop, as in `crop`, resized to two sizes (BEiT transforms.py,
    RandomResizedCropAndInterpolationWithTwoPic)."""

    size: int  # of the first image, in pixels; bicubic
    second: int  # of the second image, in pixels; Lanczos
    scale: tuple[float, float]  # least and largest share of the image's area

    def __call__(self, image: Image.Image) -> tuple[Image.Image, Image.Image]:
        resized_crop = RandomResizedCrop(size=self.size, scale=self.scale, interpolation="bicubic", draws=TorchDraws())
        region = image.crop(resized_crop.window(*image.size))
        first = region.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return first, region.resize((self.second, self.second), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Tensors:
    """RGB image -> normalised tensor (3, S, S) float32: torchvision's ToTensor and Normalize bit for bit, without their
    checks, which take longer than the arithmetic at 32 px."""

    preparation: Preparation

    @cached_property
    def scale(self) -> Tensor:
        """Mean and standard deviation (2, 3) float32."""
        return torch.tensor([self.preparation.mean, self.preparation.std])

    def __call__(self, image: Image.Image) -> Tensor:
        mean, std = self.scale[..., None, None]
        return image_to_tensor(image).float().div_(255.0).sub_(mean).div_(std)


class Unfinished(NamedTuple):
    """A view whose colours and normalisation are left to the device, or several with leading dimensions (...)."""

    pixels: Tensor  # (..., 3, S, S) uint8
    changes: Tensor  # (..., 11) float64, rows of `Changes`, on the CPU
    scale: Tensor  # (..., 2, 3) float32, mean and standard deviation of the normalisation

    def finished(self) -> Tensor:
        """The views (..., 3, S, S) float32 on the device of the pixels, bit for bit as from `View.__call__`."""
        pixels = coloured_batch(self.pixels.flatten(0, -4), self.changes.flatten(0, -2)).view_as(self.pixels)
        mean, std = self.scale[..., None, None].unbind(-4)
        white = torch.full_like(mean, 255.0)  # a tensor: for a number, a GPU would multiply by its reciprocal
        return pixels.float().div_(white).sub_(mean).div_(std)


@dataclass(frozen=True)
class View:
    """RGB image -> (3, S, S) float32: all steps, then normalisation."""

    steps: Sequence[Transform]
    preparation: Preparation

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(self.preparation)

    def __call__(self, image: Image.Image) -> Tensor:
        for step in self.steps:
            image = step(image)
        return self.tensors(image)

    def unfinished(self, image: Image.Image) -> Unfinished:
        """The view before normalisation, and before the last step if that changes colours as a GPU can."""
        steps, colours = self.steps, NO_COLOURS
        if steps and isinstance(steps[-1], Colours) and not steps[-1].blur_kernel:
            *steps, colours = steps
        for step in steps:
            image = step(image)
        return Unfinished(image_to_tensor(image), colours.draw().row(), self.tensors.scale)


def view(steps: Sequence[Transform], preparation: Preparation) -> View:
    """A `View` with these steps."""
    return View(tuple(steps), preparation)


Makers = Sequence[Callable[[Image.Image], Tensor]]


@dataclass(frozen=True)
class Several:
    """RGB image -> views of one size (n, 3, S, S), drawn one after the other."""

    makers: Makers

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.stack([make(image) for make in self.makers])

    def unfinished(self, image: Image.Image) -> Tensor | Unfinished:
        """The views unfinished, or finished if any maker is not a `View`."""
        views = [make for make in self.makers if isinstance(make, View)]
        if len(views) < len(self.makers):
            return self(image)
        return default_collate([make.unfinished(image) for make in views])


@dataclass(frozen=True)
class ImageViews:
    """RGB image -> tensors by name: its views, then random numbers for masks and choices."""

    makers: Mapping[str, Callable[[Image.Image], Tensor]]  # of views, by name
    samplers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)  # of random numbers, by name

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        views = {name: make(image) for name, make in self.makers.items()}
        return views | {name: draw() for name, draw in self.samplers.items()}

    def unfinished(self, image: Image.Image) -> dict[str, Tensor | Unfinished]:
        """The same, with views unfinished if their colours and normalisation can be left to the device."""
        views: dict[str, Tensor | Unfinished] = {}
        for name, make in self.makers.items():
            views[name] = make.unfinished(image) if isinstance(make, View | Several) else make(image)
        return views | {name: draw() for name, draw in self.samplers.items()}


def multi_crop(large: Makers, small: Makers = ()) -> ImageViews:
    """Views "global" (G, 3, S, S) and, if there are small crops, "local" (N, 3, s, s). large, small: their makers."""
    groups = {"global": large, "local": small}
    return ImageViews({name: Several(makers) for name, makers in groups.items() if makers})


def two_views(
    size: int,
    scale: tuple[float, float],
    blur: tuple[float, float],
    solarise: float,
    preparation: Preparation,
) -> ImageViews:
    """MoCo-v3's views "first" and "second" (main_moco.py:262-285): bilinear crops and BYOL's colours.

    blur: probability for the first and for the second view. solarise: probability for the second view. The source flips
    last, which gives the same views for the same draws.
    """
    geometry = crop(size, scale, "bilinear")
    colours = [Colours(blur=blur[0]), Colours(blur=blur[1], solarise=solarise)]
    first, second = (view([*geometry, augmentation], preparation) for augmentation in colours)
    return ImageViews({"first": first, "second": second})
