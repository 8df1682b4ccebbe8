"""The evaluation transform: decode an image, resize its short side, crop the centre; and normalisation of batches.

There are two decoders. "exact" reproduces the published recipes: torchvision's Resize and CenterCrop on Pillow images.
"fast" decodes JPEG by torchvision.io and resizes tensors; it is about twice as fast and differs by up to 2 grey levels.
Exact means the bytes of the installed Pillow, whose version results record: since version 13 it resizes some tall
images (300 x 900, not 375 x 500) vertically first, with other rounding than versions 11 and 12 (pull request 9549).

Shapes: B images, H x W crop in pixels, S its side if it is square.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from engine.settings import Fraction, PositiveInt, Validated
from imagesets.decoding import decode_rgb, open_header, open_image, releasing_large_images, stored_size, wait_for_room
from imagesets.sets import ImageSet

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# The only two that torchvision offers for tensors with antialiasing.
FAST_MODES = ("bilinear", "bicubic")


@dataclass(frozen=True, kw_only=True)
class EvalTransform(Validated):
    """Resize the short side to floor(size / crop), then crop size x size from the centre.

    Attributes:
        size: Side of the crop in pixels, or its height and width: then the image is resized so that it just covers
            floor(height / crop) x floor(width / crop), as in timm (data/transforms.py, ResizeKeepRatio).
        crop: Share of the resized side that is kept: timm's crop_pct. 0.875 is the papers' Resize(256) and
            CenterCrop(224).
        interpolation: A key of FILTERS, or of FAST_MODES if decode is "fast".
        decode: The decoder, see above.

    Raises ValueError for invalid settings.
    """

    size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    crop: Fraction = 0.875
    interpolation: str = "bicubic"
    decode: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.size, tuple) and self.size[0] == self.size[1]:
            object.__setattr__(self, "size", self.size[0])
        choices = FILTERS if self.decode == "exact" else FAST_MODES
        if self.interpolation not in choices:
            raise ValueError(
                f"interpolation={self.interpolation!r}: with decode={self.decode}, choose one of {', '.join(choices)}"
            )

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of the crop."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (3, H, W) of a transformed image."""
        return 3, *self.window

    @property
    def resize(self) -> int | tuple[int, int]:
        """Short side after resizing in pixels; or height and width to cover, if the crop is not square."""
        if isinstance(self.size, int):
            return math.floor(self.size / self.crop)
        return math.floor(self.size[0] / self.crop), math.floor(self.size[1] / self.crop)

    @property
    def name(self) -> str:
        """Text that identifies the transform, such as resize256-bicubic_crop224_exact."""
        return f"resize{_size_text(self.resize)}-{self.interpolation}_crop{_size_text(self.size)}_{self.decode}"

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set as (3, H, W) uint8. Raises UnreadableImage."""
        if self.decode == "fast":
            return self._crop_tensor(Photo(image_set, index).pixels)
        return image_to_tensor(self._crop_image(image_set.image(index)))

    def _crop_image(self, image: Image.Image) -> Image.Image:
        """The centre crop of a Pillow image."""
        # Resizing only the window (`box`), or cropping between two one-axis passes, would save 13 % of the time, but
        # gives other bits: `box` is float32, and Pillow 13 decides itself which axis to resize first.
        width, height = resized_size(*image.size, self.resize)
        resized = image if image.size == (width, height) else image.resize((width, height), FILTERS[self.interpolation])
        left, top = window_start(width, self.window[1]), window_start(height, self.window[0])
        return resized.crop((left, top, left + self.window[1], top + self.window[0]))

    def _crop_tensor(self, pixels: Tensor) -> Tensor:
        """The centre crop (3, H, W) of pixels (3, h, w) or (1, h, w) uint8."""
        height, width = pixels.shape[1:]
        new_width, new_height = resized_size(width, height, self.resize)
        resized = resize_tensor(pixels, new_height, new_width, self.interpolation)
        top, left = window_start(new_height, self.window[0]), window_start(new_width, self.window[1])
        window = resized[:, top : top + self.window[0], left : left + self.window[1]]
        return window.expand(3, -1, -1).contiguous()


def resize_tensor(pixels: Tensor, height: int, width: int, interpolation: str) -> Tensor:
    """Pixels (..., h, w) uint8 -> (..., height, width) by torchvision; interpolation: one of FAST_MODES."""
    from torchvision.transforms.v2 import InterpolationMode  # a second of imports, which few commands need
    from torchvision.transforms.v2.functional import resize_image

    return resize_image(pixels, [height, width], InterpolationMode(interpolation), antialias=True)


def resized_size(width: int, height: int, short: int | tuple[int, int]) -> tuple[int, int]:
    """(width, height) of an image after torchvision's Resize(short), which truncates the long side to whole pixels.

    short: may also be the height and width to cover, as in timm's ResizeKeepRatio, which rounds.
    """
    if isinstance(short, tuple):
        ratio = min(height / short[0], width / short[1])
        return round(width / ratio), round(height / ratio)
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def _size_text(size: int | tuple[int, int]) -> str:
    """224, or 224x336 for a height and width."""
    return "x".join(map(str, size)) if isinstance(size, tuple) else str(size)


def window_start(length: int, crop: int) -> int:
    """First pixel of a centred window, rounded half to even as in torchvision's center_crop."""
    return round((length - crop) / 2)


def image_to_tensor(image: Image.Image) -> Tensor:
    """RGB image as (3, H, W) uint8 that owns its memory; torchvision's PILToTensor with one copy fewer."""
    width, height = image.size
    channels = bytearray().join([image.getchannel(band).tobytes() for band in range(3)])
    return torch.frombuffer(channels, dtype=torch.uint8).view(3, height, width)


def tensor_to_image(pixels: Tensor) -> Image.Image:
    """Pixels (3, H, W) uint8 as an RGB image."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


class Photo:
    """Image `index` of a set, read and decoded at most once, whatever is computed from it.

    Its properties raise UnreadableImage.
    """

    # Has its own cache, because before Python 3.12 cached_property holds one lock for the photos of all threads.
    def __init__(self, image_set: ImageSet, index: int) -> None:
        self.image_set, self.index = image_set, index
        self._cache: dict[str, Any] = {}

    def _cached(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

    @property
    def path(self) -> str:
        return self.image_set.path(self.index)

    @property
    def encoded(self) -> bytes | None:
        """The bytes of the image's file, or None for an image in memory."""
        return self._cached("encoded", lambda: self.image_set.encoded(self.index))

    @property
    def header(self) -> Image.Image:
        """The image with its size and format; a file is not decoded yet."""
        data = self.encoded
        return self.image if data is None else self._cached("header", lambda: open_header(data, self.path))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; a file is not decoded yet."""
        return stored_size(self.header)

    def pil_image(self, decode: Literal["exact", "fast"]) -> Image.Image:
        """The image for transforms of Pillow images; with "fast" it is decoded when a transform needs it."""
        return self.image if decode == "exact" else FastImage(self)

    @property
    def image(self) -> Image.Image:
        """The RGB image, decoded exactly."""
        return self._cached("image", lambda: self.image_set.image(self.index))

    @property
    def pixels(self) -> Tensor:
        """(3, H, W) uint8, or (1, H, W) for a grey JPEG, decoded by `decode_fast`."""
        data = self.encoded
        if data is None:
            return self._cached("pixels", lambda: image_to_tensor(self.image))
        return self._cached("pixels", lambda: decode_fast(data, self.path))

    @property
    def is_decoded_fast(self) -> bool:
        """Whether `pixels` have been computed."""
        return "pixels" in self._cache

    def shrunk(self, shrink: int) -> Image.Image:
        """The image of a JPEG file, decoded at 1 / shrink of its sides (2, 4 or 8)."""
        return self._cached(f"shrunk {shrink}", lambda: decode_rgb(self.encoded or b"", self.path, shrink))


class FastImage(Image.Image):
    """A Photo in the form of a Pillow RGB image, decoded by `decode_fast` once a transform needs size or pixels.

    `RandomResizedCrop` uses the photo itself. Raises UnreadableImage when decoded.
    """

    def __init__(self, photo: Photo) -> None:
        super().__init__()
        self.photo = photo

    @property
    def mode(self) -> str:
        return "RGB"

    @property
    def size(self) -> tuple[int, int]:
        return self.photo.size

    def load(self) -> Any:
        """Decode the photo, unless that is done already. Pillow calls this before it reads pixels."""
        if super().load() is None:
            self.im = tensor_to_image(self.photo.pixels.expand(3, -1, -1)).im
        return super().load()


def decode_fast(data: bytes, path: str) -> Tensor:
    """Pixels (3, H, W) uint8, or (1, H, W) for a grey JPEG, of the bytes of an image file. Raises UnreadableImage.

    torchvision decodes JPEGs of one or three channels, with the same pixels as Pillow. Pillow decodes those that it
    refuses and all other formats, so that both decoders read the same files and convert CMYK and alpha alike.

    path: for messages.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    if data.startswith(b"\xff\xd8\xff"):  # a JPEG's start-of-image marker and the next marker's first byte
        try:
            wait_for_room(open_image(data))  # torchvision has no limit on the number of pixels
            pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.UNCHANGED)
            if pixels.shape[0] in (1, 3):
                return pixels
        except MemoryError:
            raise
        except Exception:  # of any type; decode_rgb decides below whether the file is readable
            pass
    return image_to_tensor(decode_rgb(data, path))


def normalise(batch: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x / 255 - mean) / std in float32 of a batch x (B, 3, H, W) uint8; the bits of ToTensor and Normalize."""
    channel_means = torch.tensor(mean, dtype=torch.float32, device=batch.device).view(-1, 1, 1)
    channel_stds = torch.tensor(std, dtype=torch.float32, device=batch.device).view(-1, 1, 1)
    return batch.to(torch.float32).div_(255).sub_(channel_means).div_(channel_stds)
