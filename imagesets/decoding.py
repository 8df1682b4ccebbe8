"""Decode the bytes of an image file to RGB pixels, as the loader of torchvision's ImageFolder does.

Pillow opens the file and converts it to RGB: grey is repeated, CMYK converted, a palette looked up, alpha dropped
(not blended). Of 16-bit values the upper 8 bits are kept. Pixels are refused if the format does not define which value
is white (docs/images.md). EXIF orientation is ignored in every format, because published numbers were measured so and
masks and boxes are drawn on the pixels as they are stored. The first frame of an animation is read. JPEG's `draft`
mode, which changes pixels, is used only by `--decode fast`.
"""

import errno
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from engine.errors import option
from engine.files import read_regular
from engine.machine import return_memory

# Pillow refuses images above 179 million pixels as possible attacks; real aerial and medical images are larger. The
# limit here is a billion pixels (4 GiB decoded).
MAX_PIXELS = 1 << 30
MAX_BYTES = 1 << 31  # of an image file
# Images of more than LARGE_IMAGE pixels are decoded at the same time up to MAX_LARGE_PIXELS in all threads together; an
# image above that limit is decoded alone.
LARGE_IMAGE = 1 << 24
MAX_LARGE_PIXELS = 1 << 28

# Errors caused by the file. Others, such as too many open files, are caused by the machine and are raised as they are.
FILE_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO}

# Pillow's modes that its convert("RGB") converts correctly. It clips the values of all others at 255.
EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
# Formats and modes with grey values from 0 (black) to 65535 (white), by definition or because Pillow scales them.
SIXTEEN_BIT_MODES = {("PNG", "I;16"), ("JPEG2000", "I;16"), ("PPM", "I")}
MAX_PAGES = 1000  # to count in a TIFF file, because millions of empty pages would take minutes
TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MODES_WITHOUT_WHITE = {"F": "floating-point pixels", "I": "pixels of 32 bits or with a sign"}
SAVE_AS_8_BITS = "save it as 8-bit PNG, scaled to 0..255"
CUT_TO_8_BITS = "cut to 8 bits"  # key in an image's `info`: whether the file has channels of more than 8 bits
ORIENTATION = "orientation"  # key in a TIFF's `info`: its EXIF orientation, if that is not 1
# Orientation of a TIFF -> how to turn it back: Pillow turns TIFFs when it loads them, and no other format.
TURNED_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

_pillow_limit_lock = threading.Lock()
_large_pixels_changed = threading.Condition()
_large_pixels: dict[int, int] = {}  # thread in `releasing_large_images` -> pixels of its large images


class UnreadableImage(ValueError):
    """Raised for a file of an image set that is missing, truncated, corrupt or no image."""

    def __init__(self, path: str, reason: str):
        super().__init__(path, reason)  # sets `args`, so that the error survives pickling between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        advice = f"replace the file, or run with {option('skip_bad', True)}"
        return f"{self.path}: cannot be read as an image ({self.reason}); {advice}"


def read_bytes(path: str) -> bytes:
    """The file's bytes. Raises UnreadableImage for FILE_ERRORS, and OSError for those of the machine."""
    try:
        return read_regular(path, MAX_BYTES)
    except ValueError as error:
        raise UnreadableImage(path, str(error)) from error
    except OSError as error:
        if error.errno in FILE_ERRORS:
            raise UnreadableImage(path, error.strerror or str(error)) from error
        raise


@contextmanager
def releasing_large_images() -> Iterator[None]:
    """Context in which one image is decoded, and released before the end.

    Until then a large image counts towards MAX_LARGE_PIXELS. Contexts may be nested in one thread.
    """
    thread = threading.get_ident()
    if thread in _large_pixels:  # nested
        yield
        return
    _large_pixels[thread] = 0
    try:
        yield
    finally:
        if _large_pixels[thread]:
            return_memory()  # of this thread's heap, before that of another thread grows
        with _large_pixels_changed:
            if _large_pixels.pop(thread):
                _large_pixels_changed.notify_all()


def wait_for_room(image: Image.Image) -> None:
    """Wait until an opened, but not decoded image fits under MAX_LARGE_PIXELS with those of other threads.

    Does not wait outside of `releasing_large_images`, because the caller may keep any number of images. A thread that
    already has a large image never waits, so threads cannot deadlock.
    """
    pixels, thread = image.width * image.height, threading.get_ident()
    if pixels <= LARGE_IMAGE or thread not in _large_pixels:
        return

    def has_room() -> bool:
        total = sum(list(_large_pixels.values()))
        return not total or total + pixels <= MAX_LARGE_PIXELS

    with _large_pixels_changed:
        if not _large_pixels[thread]:
            _large_pixels_changed.wait_for(has_room)
        _large_pixels[thread] += pixels


def decode_rgb(data: bytes, path: str, shrink: int = 1) -> Image.Image:
    """The RGB image in the bytes of an image file. Raises UnreadableImage.

    path: for messages. shrink: 2, 4 or 8 decodes a JPEG at 1 / shrink of its sides, rounded up, from the low
    frequencies of its DCT.
    """
    image = open_header(data, path)
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # set by some libraries; a truncated image must not pass as readable
    try:
        orientation = orientation_of(image) if image.format == "TIFF" else 1
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        wait_for_room(image)
        is_deep = has_deep_channels(image)
        image.load()
        rgb = image if image.mode == "RGB" else as_rgb(image)
        if is_deep:
            rgb.info[CUT_TO_8_BITS] = True
        if orientation != 1:
            rgb = rgb.transpose(TURNED_BACK[orientation])
            rgb.info[ORIENTATION] = orientation
        return rgb
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a corrupt field leads to: OSError, SyntaxError, ...
        raise UnreadableImage(path, reason_of(error)) from error


def open_header(data: bytes, path: str) -> ImageFile.ImageFile:
    """The opened image, with pixels not decoded yet. Raises UnreadableImage. path: for messages."""
    if not data:
        raise UnreadableImage(path, "empty file, 0 bytes")
    try:
        return open_image(data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a corrupt field leads to: OSError, SyntaxError, ...
        raise UnreadableImage(path, reason_of(error)) from error


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation of an image, 2 to 8 if viewers turn it or mirror it; 1 if not, or if its EXIF is damaged.

    Of a PNG with EXIF behind its pixels it is known once the image is loaded.
    """
    try:
        orientation = image.info.get(ORIENTATION) or image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow's parsers raise whatever a corrupt field leads to
        return 1
    return orientation if orientation in TURNED_BACK else 1


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of an opened image as it is stored, before it is loaded."""
    is_turned = image.format == "TIFF" and orientation_of(image) > 4
    return image.size[::-1] if is_turned else image.size


def load_as_stored(image: Image.Image) -> Image.Image:
    """An opened image with its pixels decoded, as they are stored: Pillow turns a TIFF by its orientation."""
    orientation = orientation_of(image) if image.format == "TIFF" else 1
    image.load()
    return image if orientation == 1 else image.transpose(TURNED_BACK[orientation])


def count_pages(file: BinaryIO) -> int:
    """Number of pages of a TIFF file, up to MAX_PAGES; 1 for other files. Decodes no pixels."""
    if file.read(4) not in TIFF_SIGNATURES:
        return 1
    pages = 1
    try:
        image = Image.open(file)
        while pages < MAX_PAGES:
            image.seek(pages)
            pages += 1
    except MemoryError:
        raise
    except Exception:  # EOFError after the last page, or any type for a damaged file, which decode_rgb reports
        pass
    return pages


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one line, from an exception of Pillow or another library."""
    if isinstance(error, UnreadableImage):
        return error.reason  # without the path, which the caller's message has
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"  # its own message is the address of the buffer
    return " ".join(str(error).split()) or type(error).__name__


def as_rgb(image: Image.Image) -> Image.Image:
    """RGB image of an opened file in any mode. Raises ValueError if the format does not define which value is white."""
    bits = bits_of(image)
    if bits == 8:
        return image.convert("RGB")
    return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8)).convert("RGB")


def has_deep_channels(image: ImageFile.ImageFile) -> bool:
    """Whether channels of an opened file, before it is loaded, have more than 8 bits.

    Pillow cuts colours to 8 bits, and only the arguments of its decoders tell. Those of JPEG 2000 do not.
    """
    if image.mode not in EIGHT_BIT_MODES:
        return True
    arguments = image.tile[0].args if image.tile else ""
    if image.format == "PPM":
        return isinstance(arguments, tuple) and arguments[1] > 255  # mode and white
    return bool(re.search(";16[BLN]", str(arguments)))  # "RGB;16B", ("RGB;16N", ...) in a TIFF; "BGR;16" has 5 or 6


def bits_of(image: Image.Image) -> int:
    """Bits of each channel of an opened file. Raises ValueError if the format does not define which value is white."""
    if image.mode in EIGHT_BIT_MODES:
        return 8
    if (image.format, image.mode) in SIXTEEN_BIT_MODES:
        return 16
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.mode.startswith("I;16"):
        if image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0) == 0:  # Pillow inverts only 8-bit images
            raise ValueError(f"a TIFF of more than 8 bits in which 0 is white; {SAVE_AS_8_BITS}")
        return image.tag_v2[TiffImagePlugin.BITSPERSAMPLE][0]  # 16 or 12
    pixels = MODES_WITHOUT_WHITE.get(image.mode, "pixels")
    raise ValueError(f"{pixels}, Pillow's mode {image.mode}: nothing says which value is white; {SAVE_AS_8_BITS}")


def open_image(data: bytes) -> ImageFile.ImageFile:
    """The opened image of up to MAX_PIXELS, with pixels not decoded yet. Raises Pillow's exceptions."""
    try:
        return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        with _pillow_limit_lock:
            previous_limit = Image.MAX_IMAGE_PIXELS
            Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses images of more than twice this number
            try:
                return Image.open(io.BytesIO(data))
            finally:
                Image.MAX_IMAGE_PIXELS = previous_limit
