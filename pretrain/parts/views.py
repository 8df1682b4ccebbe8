"""Views of an image: random crops, flips and colours, as tensors that are normalised for the network.

Built of torchvision's transforms, whose draws the sources made too. All work on PIL images, on the CPU, in the loader,
except that colours and the normalisation can be left to a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from checkpoints.spec import Preparation
from imagesets.random_crops import RandomResizedCrop, TorchDraws
from imagesets.transforms import planes
from pretrain.parts.colours import Colours, coloured_batch

Transform = Callable[[Image.Image], Image.Image]
NO_COLOURS = Colours(jitter_chance=0.0, grey=0.0)


def even_jitter(strength: float) -> Colours:
    """Brightness, contrast and saturation of every image by the same strength, nothing for 0; BEiT's, data2vec's and
    CAE's colours (beit/datasets.py, DataAugmentationForBEiT; data2vec_vision beit/datasets.py:66-74)."""
    return Colours(jitter=(strength, strength, strength, 0.0), jitter_chance=float(strength > 0), grey=0.0)


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


class Unfinished(NamedTuple):
    """A view whose colours and normalisation are left to the device; or several, with leading dimensions (...)."""

    pixels: Tensor  # (..., 3, S, S) uint8
    changes: Tensor  # (..., 11) float64, rows of `Changes`, on the CPU
    scale: Tensor  # (..., 2, 3) float32, mean and standard deviation

    def finished(self) -> Tensor:
        """(..., 3, S, S) float32 on the device of the pixels, with the bits of `View.__call__`."""
        pixels = coloured_batch(self.pixels.flatten(0, -4), self.changes.flatten(0, -2)).view_as(self.pixels)
        mean, std = self.scale[..., None, None].unbind(-4)
        white = torch.full_like(mean, 255.0)  # no number, by whose reciprocal a GPU would multiply
        return pixels.float().div_(white).sub_(mean).div_(std)


@dataclass(frozen=True)
class View:
    """RGB image -> (3, S, S) float32: all steps, then normalised."""

    steps: Sequence[Transform]
    preparation: Preparation

    def __call__(self, image: Image.Image) -> Tensor:
        for step in self.steps:
            image = step(image)
        return Tensors(self.preparation)(image)

    def unfinished(self, image: Image.Image) -> Unfinished:
        steps, colours = self.steps, NO_COLOURS
        if steps and isinstance(steps[-1], Colours):
            *steps, colours = steps
        for step in steps:
            image = step(image)
        scale = torch.tensor([self.preparation.mean, self.preparation.std])
        return Unfinished(planes(image), colours.draw().row(), scale)


def view(steps: Sequence[Transform], preparation: Preparation) -> View:
    """All `steps`, then a tensor."""
    return View(tuple(steps), preparation)


Makers = Sequence[Callable[[Image.Image], Tensor]]


@dataclass(frozen=True)
class Several:
    """RGB image -> views of one size (n, 3, S, S), drawn one after the other."""

    makers: Makers

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.stack([make(image) for make in self.makers])

    def unfinished(self, image: Image.Image) -> Tensor | Unfinished:
        """The views as they are where one is made by something else than a `View`."""
        views = [make for make in self.makers if isinstance(make, View)]
        if len(views) < len(self.makers):
            return self(image)
        return default_collate([make.unfinished(image) for make in views])


@dataclass(frozen=True)
class ImageViews:
    """RGB image -> tensors by name: those that are made of it, then what is drawn beside it for masks and choices."""

    made: Mapping[str, Callable[[Image.Image], Tensor]]
    drawn: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        views = {name: make(image) for name, make in self.made.items()}
        return views | {name: draw() for name, draw in self.drawn.items()}

    def unfinished(self, image: Image.Image) -> dict[str, Tensor | Unfinished]:
        """The same, with what can be left to the device unfinished."""
        views: dict[str, Tensor | Unfinished] = {}
        for name, make in self.made.items():
            views[name] = make.unfinished(image) if isinstance(make, View | Several) else make(image)
        return views | {name: draw() for name, draw in self.drawn.items()}


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
    first, second = (view([*geometry, augmentation], preparation) for augmentation in colours)
    return ImageViews({"first": first, "second": second})
