"""From the bytes of an image file to RGB pixels, as the official ImageFolder loader does it, and nothing softer.

Pillow opens the file and converts it to RGB: grey is repeated, CMYK converted, a palette looked up, alpha dropped
(not blended), 16 bits reduced by Pillow's rule. An EXIF orientation is not applied, since the published numbers were
measured without. Of an animation the first frame counts. JPEG `draft` mode is never used: it changes pixels.
"""

import errno
import io
import threading

from PIL import Image, ImageFile, UnidentifiedImageError

# Pillow refuses images above 179 million pixels as possible attacks; real aerial and medical images are larger. A
# billion pixels (4 GiB decoded) is where this project stops.
MOST_PIXELS = 1 << 30

# What says something about the file; anything else (too many open files, say) is the machine's trouble and is raised.
FILE_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO}

_limit = threading.Lock()


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
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in FILE_ERRORS:
            raise UnreadableImage(path, error.strerror) from error
        raise


def decode_rgb(data: bytes, path: str) -> Image.Image:
    """Decode the bytes of an image file to an RGB image. Raises UnreadableImage; `path` is for its message."""
    if not data:
        raise UnreadableImage(path, "empty file, 0 bytes")
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other libraries turn it on, and half an image would count as one
    try:
        image = _open(data)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except UnidentifiedImageError as error:
        raise UnreadableImage(path, "not an image that Pillow knows") from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a corrupt field leads to: OSError, SyntaxError, ...
        raise UnreadableImage(path, " ".join(str(error).split()) or type(error).__name__) from error


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        with _limit:
            pillows_limit = Image.MAX_IMAGE_PIXELS
            Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow refuses at twice this number
            try:
                return Image.open(io.BytesIO(data))
            finally:
                Image.MAX_IMAGE_PIXELS = pillows_limit
