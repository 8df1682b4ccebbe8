"""How images and masks get into the mm libraries' transforms, and how a broken file is reported.

Images are decoded as everywhere here (imagesets/decoding.py), not by mmcv's reader, OpenCV, which turns an image by its
EXIF orientation and not the masks and boxes that were drawn on it. For all other files both give the same 8 bits, but
those of JPEGs in CMYK and of TIFFs in YCbCr may differ by 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from downstream.data.listing import Instances, SceneFiles
from engine.files import read_regular
from engine.machine import own_cores
from engine.tasks import Workspace
from imagesets.decoding import FILE_ERRORS, MAX_BYTES, decode_rgb, reason_of

MAX_LOADERS = 8  # processes that read images
MIN_IMAGES = 500  # with fewer images, starting loader processes takes longer than they save
LOSSY_FORMATS = ("JPEG", "MPO")  # Pillow's names
Results = dict[str, Any]  # what mmcv's transforms pass on about an image
Transform = Callable[[Results], Results]


def loader_processes(space: Workspace, images: int) -> int:
    """Number of loader processes for so many images, of a training set or a pass over the validation images."""
    if space.workers is not None:
        return space.workers
    return min(MAX_LOADERS, own_cores()) if images >= MIN_IMAGES else 0


class ReadImage:
    """Transform that reads an image, in the place of mmcv's LoadImageFromFile.

    Raises ValueError, naming the file, if it is broken, or if the size differs from the listing's.
    """

    def __init__(self, listing: SceneFiles) -> None:
        self.listing = listing

    def __call__(self, results: Results) -> Results:
        import cv2

        path = results["img_path"]
        with named_in_errors(path):
            pixels = np.asarray(decode_rgb(read_regular(path, MAX_BYTES), path))
        size = pixels.shape[:2]
        if isinstance(self.listing, Instances):
            self.listing.check_size(results["sample_idx"], *size)
        bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)  # as the transforms expect; NumPy needs twice as long as decoding
        return results | {"img": bgr, "img_shape": size, "ori_shape": size}


@contextmanager
def named_in_errors(path: Path | str) -> Iterator[None]:
    """Turn any error of reading the file into a ValueError with its path, but pass on errors of the machine."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # decoders raise any class for a corrupt field: AssertionError, SyntaxError, ...
        if getattr(error, "errno", None) not in {None, *FILE_ERRORS}:
            raise
        raise ValueError(f"{path}: cannot be read ({reason_of(error)}); replace the file") from error


def check_lossless(image: Image.Image) -> None:
    """Raise ValueError for a mask or depth map, opened but not loaded, of a format that changes values."""
    if image.format in LOSSY_FORMATS:
        raise ValueError(
            "a JPEG, in which values are not exact; save it as PNG from the original values, not from this"
        )


def check_values(mask: Image.Image, coloured: bool = False) -> None:
    """Raise ValueError for a mask, opened but not loaded, that is a JPEG or has pixels of neither one byte nor, if
    coloured, RGB."""
    check_lossless(mask)
    if coloured:
        if mask.mode not in ("1", "L", "P", "RGB"):
            raise ValueError(f"a mask of Pillow's mode {mask.mode}; save its colours as 8-bit PNG without transparency")
    elif mask.mode not in ("1", "L", "P"):
        raise ValueError(
            f"a mask of Pillow's mode {mask.mode}; save the numbers of the classes as 8-bit PNG, grey or with a palette"
        )
