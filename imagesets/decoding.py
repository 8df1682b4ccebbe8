"""From the bytes of an image file to RGB pixels, as the official ImageFolder loader does it, and nothing softer.

Pillow opens the file and converts it to RGB: grey is repeated, CMYK converted, a palette looked up, alpha dropped
(not blended). Of 16 bits the upper 8 are kept; pixels whose white is a matter of opinion are refused (docs/images.md).
An EXIF orientation is not applied, since the published numbers were measured without. Of an animation the first frame
counts. Only `--decode fast` uses JPEG's `draft` mode, which changes pixels.
"""

import errno
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from engine.files import read_regular
from engine.machine import return_memory

# Pillow refuses images above 179 million pixels as possible attacks; real aerial and medical images are larger. A
# billion pixels (4 GiB decoded) is where this project stops.
MAX_PIXELS = 1 << 30
MAX_BYTES = 1 << 31  # of an image file
# Images of more than LARGE pixels share room for LARGE_TOGETHER over all threads; one that is larger is read alone.
LARGE = 1 << 24
LARGE_TOGETHER = 1 << 28

# What says something about the file; anything else (too many open files, say) is the machine's trouble and is raised.
FILE_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO}

# Pillow's modes that its convert("RGB") turns into the colours that the file means. It clips all others at 255.
EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
# Formats and modes of grey values from 0, black, to 65535, white: by the format's definition, or as Pillow scales them.
SIXTEEN_BITS = {("PNG", "I;16"), ("JPEG2000", "I;16"), ("PPM", "I")}
MOST_PAGES = 1000  # counted, as a file of millions of empty ones would take minutes
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
UNLIMITED = {"F": "floating-point pixels", "I": "pixels of 32 bits or with a sign"}
AS_8_BITS = "save it as 8-bit PNG, scaled to 0..255"
GREY_BITS = "grey bits"  # entry of an image's `info`, for grey that had more than 8

_limit = threading.Lock()
_large_left = threading.Condition()
_large_held: dict[int, int] = {}  # thread -> pixels of its large images


class UnreadableImage(ValueError):
    """A file of an image set that is missing, truncated, corrupt or no image."""

    def __init__(self, path: str, reason: str):
        super().__init__(path, reason)  # both in `args`, so that the error survives pickling between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: cannot be read as an image ({self.reason}); replace the file, or run with --skip-bad"


def read_bytes(path: str) -> bytes:
    """The file's bytes. Raises UnreadableImage where the file, not the machine, is at fault."""
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
    """A block that decodes and drops one image. Until it ends, a large image of it counts for LARGE_TOGETHER."""
    thread = threading.get_ident()
    if thread in _large_held:  # within another such block
        yield
        return
    _large_held[thread] = 0
    try:
        yield
    finally:
        if _large_held[thread]:
            return_memory()  # of this thread's heap, before another thread's grows
        with _large_left:
            if _large_held.pop(thread):
                _large_left.notify_all()


def wait_for_room(image: Image.Image) -> None:
    """Wait until a large image, opened but not loaded, may be decoded beside those of other threads.

    Outside of `releasing_large_images` the caller may keep any number of images, so nothing is waited for. A thread
    that has a large image already never waits, so two threads cannot wait for each other.
    """
    pixels, thread = image.width * image.height, threading.get_ident()
    if pixels <= LARGE or thread not in _large_held:
        return

    def is_room() -> bool:
        held = sum(list(_large_held.values()))
        return not held or held + pixels <= LARGE_TOGETHER

    with _large_left:
        if not _large_held[thread]:
            _large_left.wait_for(is_room)
        _large_held[thread] += pixels


def decode_rgb(data: bytes, path: str, shrink: int = 1) -> Image.Image:
    """Decode the bytes of an image file to an RGB image. Raises UnreadableImage; `path` is for its message.

    shrink: 2, 4 or 8 decodes a JPEG at 1 / shrink of its sides, rounded up, without the high frequencies of its DCT.
    """
    image = open_header(data, path)
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other libraries turn it on, and half an image would count as one
    try:
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        wait_for_room(image)
        image.load()
        return image if image.mode == "RGB" else as_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a corrupt field leads to: OSError, SyntaxError, ...
        raise UnreadableImage(path, reason_of(error)) from error


def open_header(data: bytes, path: str) -> Image.Image:
    """The image, nothing decoded. Raises UnreadableImage."""
    if not data:
        raise UnreadableImage(path, "empty file, 0 bytes")
    try:
        return open_image(data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a corrupt field leads to: OSError, SyntaxError, ...
        raise UnreadableImage(path, reason_of(error)) from error


def count_pages(file: BinaryIO) -> int:
    """Pages of a TIFF file, up to MOST_PAGES, of which the first is read; 1 of other files. Decodes nothing."""
    if file.read(4) not in TIFF:
        return 1
    pages = 1
    try:
        image = Image.open(file)
        while pages < MOST_PAGES:
            image.seek(pages)
            pages += 1
    except MemoryError:
        raise
    except Exception:  # EOFError after the last page; of any type, as in decode_rgb, which says what is wrong
        pass
    return pages


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one line, from what Pillow or another library raised."""
    if isinstance(error, UnreadableImage):
        return error.reason  # its message names the file, as the caller's does
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"  # its message is the address of the bytes
    return " ".join(str(error).split()) or type(error).__name__


def as_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode, opened from a file -> RGB. ValueError where nothing says which value is white."""
    bits = bits_of(image)
    if bits == 8:
        return image.convert("RGB")
    upper = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    upper.info[GREY_BITS] = bits
    return upper.convert("RGB")


def bits_of(image: Image.Image) -> int:
    """Bits from black to white in each channel, as the file's format fixes them. ValueError where it does not."""
    if image.mode in EIGHT_BITS:
        return 8
    if (image.format, image.mode) in SIXTEEN_BITS:
        return 16
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.mode.startswith("I;16"):
        if image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0) == 0:  # Pillow inverts 8 bits alone
            raise ValueError(f"a TIFF of more than 8 bits in which 0 is white; {AS_8_BITS}")
        return image.tag_v2[TiffImagePlugin.BITSPERSAMPLE][0]  # 16 or 12
    kind = UNLIMITED.get(image.mode, "pixels")
    raise ValueError(f"{kind}, Pillow's mode {image.mode}: nothing says which value is white; {AS_8_BITS}")


def open_image(data: bytes) -> Image.Image:
    """The image of these bytes, its header read and nothing decoded, up to MAX_PIXELS. Raises what Pillow does."""
    try:
        return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        with _limit:
            pillows_limit = Image.MAX_IMAGE_PIXELS
            Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses at twice this number
            try:
                return Image.open(io.BytesIO(data))
            finally:
                Image.MAX_IMAGE_PIXELS = pillows_limit
