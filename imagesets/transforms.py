"""The evaluation transform: decode, resize the short side, crop the centre, as unsigned bytes; and normalisation.

Decoders: "exact" gives the bytes of the published recipes, torchvision's Resize + CenterCrop on Pillow images;
"fast" decodes JPEG by torchvision.io and resizes tensors, about twice as fast, and differs by up to 2 grey levels.
"Exact" means the bytes of the installed Pillow, whose version results record: from 13 on it resizes some tall images
(300 x 900, not 375 x 500) vertically first, with other roundings than Pillow 11 and 12 (its pull request 9549).
Letters: B images, H x W crop in pixels, S its side where it is square.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize_image, to_pil_image

from engine.settings import Fraction, PositiveInt, Validated
from imagesets.decoding import decode_rgb, open_header, open_image, releasing_large_images, wait_for_room
from imagesets.sets import ImageSet

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# torchvision resizes tensors with antialiasing by these two alone.
FAST_MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@dataclass(frozen=True, kw_only=True)
class EvalTransform(Validated):
    """Resize the short side to floor(size / crop), crop size x size from the centre.

    size: crop side in pixels, or its height and width: then the image is resized, its shape kept, until it just covers
    floor(height / crop) x floor(width / crop), as in timm (data/transforms.py, ResizeKeepRatio). crop: the fraction of
    the resized side that is kept, timm's crop_pct and, with 0.875, the papers' Resize(256) + CenterCrop(224). Raises
    ValueError for settings outside their range.
    """

    size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    crop: Fraction = 0.875
    interpolation: str = "bicubic"  # a key of FILTERS; "fast" has two of them
    decode: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.size, tuple) and self.size[0] == self.size[1]:
            object.__setattr__(self, "size", self.size[0])
        choices = FILTERS if self.decode == "exact" else FAST_MODES
        if self.interpolation not in choices:
            where = f"with decode={self.decode}, choose one of {', '.join(choices)}"
            raise ValueError(f"interpolation={self.interpolation!r}: {where}")

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of the crop."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what is made of an image."""
        return 3, *self.window

    @property
    def resize(self) -> int | tuple[int, int]:
        """Length of the short side after resizing, in pixels; of another shape, the height and width to cover."""
        if isinstance(self.size, int):
            return math.floor(self.size / self.crop)
        return math.floor(self.size[0] / self.crop), math.floor(self.size[1] / self.crop)

    @property
    def name(self) -> str:
        """All that decides about pixels, e.g. resize256-bicubic_crop224_exact."""
        return f"resize{_text(self.resize)}-{self.interpolation}_crop{_text(self.size)}_{self.decode}"

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (3, H, W) uint8. Raises UnreadableImage."""
        if self.decode == "fast":
            return self._crop_tensor(Photo(image_set, index).pixels)
        return planes(self._crop_image(image_set.image(index)))

    def _crop_image(self, image: Image.Image) -> Image.Image:
        # Resizing only the window (`box`), or cropping between two one-axis passes, would save 13 % of the time, but
        # is not the same bits: `box` is float32, and which axis Pillow 13 resizes first is its own affair.
        width, height = resized_size(*image.size, self.resize)
        resized = image if image.size == (width, height) else image.resize((width, height), FILTERS[self.interpolation])
        left, top = window_start(width, self.window[1]), window_start(height, self.window[0])
        return resized.crop((left, top, left + self.window[1], top + self.window[0]))

    def _crop_tensor(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[1:]
        new_width, new_height = resized_size(width, height, self.resize)
        resized = resize_image(pixels, [new_height, new_width], FAST_MODES[self.interpolation], antialias=True)
        top, left = window_start(new_height, self.window[0]), window_start(new_width, self.window[1])
        window = resized[:, top : top + self.window[0], left : left + self.window[1]]
        return window.expand(3, -1, -1).contiguous()


def resized_size(width: int, height: int, short: int | tuple[int, int]) -> tuple[int, int]:
    """(width, height) after torchvision's Resize(short): the long side is cut down to whole pixels.

    short: or the height and width to cover, after timm's ResizeKeepRatio, which rounds.
    """
    if isinstance(short, tuple):
        ratio = min(height / short[0], width / short[1])
        return round(width / ratio), round(height / ratio)
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def _text(size: int | tuple[int, int]) -> str:
    """224, or 224x336 of height and width."""
    return "x".join(map(str, size)) if isinstance(size, tuple) else str(size)


def window_start(length: int, crop: int) -> int:
    """First pixel of a centred window, rounded half to even as in torchvision's center_crop."""
    return round((length - crop) / 2)


def planes(image: Image.Image) -> Tensor:
    """RGB image -> (3, H, W) uint8 that owns its memory; torchvision's PILToTensor with one copy fewer."""
    width, height = image.size
    joined = bytearray().join([image.getchannel(band).tobytes() for band in range(3)])
    return torch.frombuffer(joined, dtype=torch.uint8).view(3, height, width)


class Photo:
    """Image `index` of a set, which is read and decoded once for all that is made of it. Raises UnreadableImage."""

    # Kept without cached_property, which before Python 3.12 lets one thread at a time compute, of all photos.
    def __init__(self, image_set: ImageSet, index: int) -> None:
        self.image_set, self.index = image_set, index
        self._kept: dict[str, Any] = {}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def path(self) -> str:
        return self.image_set.path(self.index)

    @property
    def encoded(self) -> bytes | None:
        """The bytes of its file, None of an image in memory."""
        return self._once("encoded", lambda: self.image_set.encoded(self.index))

    @property
    def header(self) -> Image.Image:
        """With its size and format, not decoded yet where it is a file."""
        data = self.encoded
        return self.image if data is None else self._once("header", lambda: open_header(data, self.path))

    def opened(self, decode: Literal["exact", "fast"]) -> Image.Image:
        """For transforms of Pillow's images."""
        return self.image if decode == "exact" else FastImage(self)

    @property
    def image(self) -> Image.Image:
        """Decoded exactly."""
        return self._once("image", lambda: self.image_set.image(self.index))

    @property
    def pixels(self) -> Tensor:
        """(3, H, W) uint8, or (1, H, W) of a grey JPEG, decoded by `fast_decoded`."""
        data = self.encoded
        return self._once("pixels", lambda: planes(self.image) if data is None else fast_decoded(data, self.path))

    @property
    def decoded_fast(self) -> bool:
        """Whether `pixels` are there already."""
        return "pixels" in self._kept

    def shrunk(self, shrink: int) -> Image.Image:
        """A JPEG file decoded at 1 / shrink of its sides."""
        return self._once(f"shrunk {shrink}", lambda: decode_rgb(self.encoded or b"", self.path, shrink))


class FastImage(Image.Image):
    """A photo as Pillow's RGB image, which `fast_decoded` decodes when a transform needs it, so that any can take it.

    `RandomResizedCrop` takes the photo instead. Raises UnreadableImage where size or pixels are asked for.
    """

    def __init__(self, photo: Photo) -> None:
        super().__init__()
        self.photo = photo

    @property
    def mode(self) -> str:
        return "RGB"

    @property
    def size(self) -> tuple[int, int]:
        return self.photo.header.size

    def load(self) -> Any:
        """Decode, where that has not been done; Pillow calls it before it reads pixels."""
        if super().load() is None:
            self.im = to_pil_image(self.photo.pixels.expand(3, -1, -1)).im
        return super().load()


def fast_decoded(data: bytes, path: str) -> Tensor:
    """An image file's bytes -> (3, H, W) uint8, or (1, H, W) for a grey JPEG. Raises UnreadableImage.

    torchvision takes JPEGs of one or three channels, where its pixels are Pillow's. What it refuses, and all other
    formats, go to Pillow, so that both decoders agree on which files are readable and on how CMYK or alpha is dropped.
    """
    if data.startswith(b"\xff\xd8\xff"):  # a JPEG's start-of-image marker and the next marker's first byte
        try:
            wait_for_room(open_image(data))  # torchvision has no limit of its own
            pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.UNCHANGED)
            if pixels.shape[0] in (1, 3):
                return pixels
        except MemoryError:
            raise
        except Exception:  # of any type, as in decode_rgb, which has the last word
            pass
    return planes(decode_rgb(data, path))


def normalise(batch: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(B, 3, S, S) uint8 -> float32, (x / 255 - mean) / std; bit for bit torchvision's ToTensor and Normalize."""
    mean_, std_ = (
        torch.tensor(values, dtype=torch.float32, device=batch.device).view(-1, 1, 1) for values in (mean, std)
    )
    return batch.to(torch.float32).div_(255).sub_(mean_).div_(std_)
