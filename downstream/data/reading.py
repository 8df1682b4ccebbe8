"""Files of scenes as the mm libraries' transforms read them; a file that is broken is named in one line.

They read images with OpenCV, which turns the modes of `imagesets.decoding.bits_of` into the same 8 bits as Pillow does
here, other modes into anything.
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

LOADERS = 8  # processes that read images, at most
MIN_IMAGES = 500  # images below which starting such processes takes longer than they save
Results = dict[str, Any]
Transform = Callable[[Results], Results]


def loader_processes(space: Workspace, images: int) -> int:
    """Processes that read so many images of a training or a pass."""
    if space.workers is not None:
        return space.workers
    return min(LOADERS, own_cores()) if images >= MIN_IMAGES else 0


class ReadImage:
    """An image by `load`, mmcv's LoadImageFromFile. ValueError, naming the file, where it is broken, where OpenCV would
    read it otherwise than Pillow here, and where it has other pixels than the listing says."""

    def __init__(self, load: Transform, listing: SceneFiles) -> None:
        self.load, self.listing = load, listing

    def __call__(self, results: Results) -> Results:
        with naming(results["img_path"]):
            check_pixels(open_image(read_regular(results["img_path"], MAX_BYTES)))
            results = self.load(results)
        if isinstance(self.listing, Instances):
            self.listing.check_size(results["sample_idx"], *results["ori_shape"][:2])
        return results


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """A block that reads `path`. ValueError, naming it, where the file, not the machine, is at fault."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever a corrupt field leads to: AssertionError, SyntaxError, ...
        if getattr(error, "errno", None) not in {None, *FILE_ERRORS}:
            raise
        raise ValueError(f"{path}: cannot be read ({reason_of(error)}); replace the file") from error


def check_pixels(image: Image.Image) -> None:
    """ValueError for an image, open_image but not loaded, that OpenCV would not read as Pillow does here."""
    bits_of(image)
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else []
    if image.format == "PPM" and tiles[0][0] != "raw":  # Pillow's decoders that scale, or read text
        raise ValueError("a PNM file in text, or whose white is not 255 or 65535; save it as PNG")


def check_values(mask: Image.Image, coloured: bool = False) -> None:
    """ValueError for a mask, open_image but not loaded, that does not hold one byte for each pixel, or a colour."""
    if coloured:
        if mask.mode not in ("1", "L", "P", "RGB"):
            raise ValueError(f"a mask of Pillow's mode {mask.mode}; save its colours as 8-bit PNG without transparency")
    elif mask.mode not in ("1", "L", "P"):
        raise ValueError(
            f"a mask of Pillow's mode {mask.mode}; save the numbers of the classes as 8-bit PNG, grey or with a palette"
        )
