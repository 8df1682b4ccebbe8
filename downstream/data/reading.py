"""How the mm libraries' transforms read images and masks, and how a broken file is reported.

mmcv reads images with OpenCV. For the modes that `imagesets.decoding.bits_of` accepts it gives the same 8 bits as
Pillow does here; images of other modes are refused, because it would give arbitrary values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile

from downstream.data.listing import Instances, SceneFiles
from engine.files import read_regular
from engine.machine import own_cores
from engine.tasks import Workspace
from imagesets.decoding import FILE_ERRORS, MAX_BYTES, bits_of, open_image, reason_of

MAX_LOADERS = 8  # processes that read images
MIN_IMAGES = 500  # with fewer images, starting loader processes takes longer than they save
Results = dict[str, Any]  # what mmcv's transforms pass on about an image
Transform = Callable[[Results], Results]


def loader_processes(space: Workspace, images: int) -> int:
    """Number of loader processes for so many images, of a training set or a pass over the validation images."""
    if space.workers is not None:
        return space.workers
    return min(MAX_LOADERS, own_cores()) if images >= MIN_IMAGES else 0


class ReadImage:
    """Transform that reads an image with `load`, which is mmcv's LoadImageFromFile, after checking the file.

    Raises ValueError, naming the file, if it is broken, if OpenCV would read other pixels than Pillow, or if the size
    differs from the listing's.
    """

    def __init__(self, load: Transform, listing: SceneFiles) -> None:
        self.load, self.listing = load, listing

    def __call__(self, results: Results) -> Results:
        with named_in_errors(results["img_path"]):
            check_pixels(open_image(read_regular(results["img_path"], MAX_BYTES)))
            results = self.load(results)
        if isinstance(self.listing, Instances):
            self.listing.check_size(results["sample_idx"], *results["ori_shape"][:2])
        return results


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


def check_pixels(image: Image.Image) -> None:
    """Raise ValueError for an image, opened but not loaded, that OpenCV would read differently from Pillow."""
    bits_of(image)
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else []
    if image.format == "PPM" and tiles[0][0] != "raw":  # Pillow's decoders that rescale values, or read text
        raise ValueError("a PNM file in text, or whose white is not 255 or 65535; save it as PNG")


def check_values(mask: Image.Image, coloured: bool = False) -> None:
    """Raise ValueError for a mask, opened but not loaded, whose pixels are neither one byte nor, if coloured, RGB."""
    if coloured:
        if mask.mode not in ("1", "L", "P", "RGB"):
            raise ValueError(f"a mask of Pillow's mode {mask.mode}; save its colours as 8-bit PNG without transparency")
    elif mask.mode not in ("1", "L", "P"):
        raise ValueError(
            f"a mask of Pillow's mode {mask.mode}; save the numbers of the classes as 8-bit PNG, grey or with a palette"
        )
