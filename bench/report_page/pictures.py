"""Image sets that are on this machine and still those that were measured, and their images as small pictures."""

import base64
import io
from collections.abc import Callable
from typing import Literal

from PIL import Image

from bench.results.record import Result
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, open_set

SIDE = 96  # pixels of the longer side of a small picture
Opened = Callable[[Result, Literal["train", "val"]], ImageSet | None]


def on_this_machine() -> Opened:
    """A function that opens a split of the images of a result, each once; None where they are not here, or are others.

    Of a result with a limit, the images that it saw.
    """
    found: dict[tuple[str, str], ImageSet | None] = {}

    def opened(result: Result, split: Literal["train", "val"]) -> ImageSet | None:
        url = result.data.url
        if (url, split) not in found:
            try:
                found[url, split] = open_set(url, split)
            except (ValueError, OSError):  # moved, unmounted, or no image set
                found[url, split] = None
        images = found[url, split]
        if images is None or images.fingerprint != result.data.fingerprints.get(split):
            return None
        return images if result.limit is None else images.limited(result.limit)

    return opened


def small_picture(images: ImageSet, index: int) -> str:
    """An image of a set as a data: URL of a small JPEG; "" where it cannot be read."""
    try:
        return data_url(images.image(index))
    except (UnreadableImage, OSError):
        return ""


def data_url(image: Image.Image, side: int = SIDE) -> str:
    """An RGB image as a data: URL of a JPEG of at most `side` pixels; one of less than half is enlarged pixel by pixel,
    so that browsers do not blur it."""
    times = side // max(image.size)
    if times > 1:
        image = image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)
    else:
        image = image.copy()
        image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
