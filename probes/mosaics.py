"""Mosaics: validation images as tiles of one image, and candidate boxes in it, whose crops are an image set.

So it is known where an image of a class lies, which sets of labelled images do not say.
N images, T tiles of a mosaic, M mosaics, K boxes of each. Sizes are (width, height), boxes left, top, width and height,
both in pixels.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from PIL import Image

from engine.files import digest
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from imagesets.transforms import FILTERS, EvalTransform

KEPT = 16  # mosaics that stay in memory, as the crops of one follow each other


def tile_numbers(labels: np.ndarray, tiles: int) -> np.ndarray:
    """Labels (N,) -> which image lies on each tile (M, T); tiles of one mosaic differ in class as far as they can.

    M = N / T, rounded up; the last tiles repeat the first images where N is no multiple of T.
    """
    order, mosaics = np.argsort(labels, kind="stable"), -(-len(labels) // tiles)
    return order[(np.arange(tiles) * mosaics + np.arange(mosaics)[:, None]) % len(labels)]


def candidate_boxes(
    scenes: int, size: tuple[int, int], shape: tuple[int, int], scales: tuple[float, ...], locations: int, seed: int
) -> np.ndarray:
    """Boxes (M, K, 4) int64 in M scenes of a size, in the shape of what a network sees (width, height).

    For each scale, a share of the largest box of that shape, `locations` places inside the scene, drawn evenly.
    """
    largest = min(size[0] / shape[0], size[1] / shape[1])
    at_scales = [[max(1, round(scale * largest * side)) for side in shape] for scale in scales]
    sides = np.repeat(at_scales, locations, axis=0)  # (K, 2)
    # RandomState's streams are frozen for ever (NumPy NEP 19).
    places = np.random.RandomState(seed).random_sample((scenes, len(sides), 2))
    corners = np.floor(places * (np.array(size) - sides + 1)).astype(np.int64)
    return np.concatenate([corners, np.broadcast_to(sides, corners.shape)], axis=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mosaics:
    """The ImageSource whose image m * K + k is the crop of box k in mosaic m, at the size of a tile.

    source: the images. transform: makes a tile of one. tiles (M, T): which. boxes (M, K, 4). chosen: numbers of the
    crops that are there; None: all.
    """

    source: ImageSet
    transform: EvalTransform
    tiles: np.ndarray
    boxes: np.ndarray
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return self.boxes.shape[0] * self.boxes.shape[1] if self.chosen is None else len(self.chosen)

    def place(self, index: int) -> tuple[int, int]:
        """Mosaic and box of a crop."""
        mosaic, box = divmod(int(index if self.chosen is None else self.chosen[index]), self.boxes.shape[1])
        return mosaic, box

    def path(self, index: int) -> str:
        mosaic, box = self.place(index)
        return f"box {box} of mosaic {mosaic} of {self.source.url}"

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        """The crop. Raises UnreadableImage, which names the tile, where one cannot be read."""
        mosaic, box = self.place(index)
        left, top, width, height = map(int, self.boxes[mosaic, box])
        try:
            part = kept_mosaic(self, mosaic).crop((left, top, left + width, top + height))
        except UnreadableImage as error:
            raise UnreadableImage(self.path(index), f"{error.path}: {error.reason}") from error
        return part.resize(self.tile, FILTERS["bilinear"])

    @property
    def tile(self) -> tuple[int, int]:
        """Size of a tile."""
        return self.transform.window[1], self.transform.window[0]

    @property
    def across(self) -> int:
        """Tiles side by side, and rows of them."""
        return round(self.tiles.shape[1] ** 0.5)

    def mosaic(self, number: int) -> Image.Image:
        """One mosaic, its tiles row by row."""
        (width, height), across = self.tile, self.across
        sheet = Image.new("RGB", (across * width, across * height))
        for place, index in enumerate(self.tiles[number].tolist()):
            pixels = self.transform(self.source, index).permute(1, 2, 0).numpy()
            sheet.paste(Image.fromarray(pixels), (place % across * width, place // across * height))
        return sheet

    def take(self, indices: np.ndarray) -> "Mosaics":
        return replace(self, chosen=np.arange(len(self))[indices] if self.chosen is None else self.chosen[indices])

    def facts(self) -> tuple[bytes, ...]:
        chosen = np.arange(len(self)) if self.chosen is None else self.chosen
        arrays = (self.tiles, self.boxes, chosen)
        return self.source.fingerprint.encode(), self.transform.name.encode(), *(array.tobytes() for array in arrays)

    changed: ClassVar[None] = None

    @property
    def contents(self) -> str:
        return digest(self.source.contents)[:16] if self.source.contents else ""

    @property
    def modified(self) -> int:
        return self.source.modified

    def image_set(self, name: str) -> ImageSet:
        """All crops as an image set, without labels; `name` is appended to the source's URL."""
        url = f"{self.source.url}#{name}"
        return ImageSet(
            url=url, split=self.source.split, classes=(), labels=np.full(len(self), -1, np.int64), images=self
        )


@lru_cache(maxsize=KEPT)
def kept_mosaic(mosaics: Mosaics, number: int) -> Image.Image:
    """`mosaics.mosaic(number)`, kept for the crops that follow."""
    return mosaics.mosaic(number)


def centre_tiles(boxes: np.ndarray, tile: tuple[int, int], across: int) -> np.ndarray:
    """Boxes (M, K, 4) -> the number of the tile (M, K) on which the centre of each lies."""
    column, row = np.moveaxis((boxes[..., :2] + boxes[..., 2:] / 2) // tile, -1, 0)
    return (row * across + column).astype(np.int64)


def tile_overlaps(boxes: np.ndarray, tile: tuple[int, int], across: int) -> np.ndarray:
    """Boxes (M, K, 4) -> intersection over union (M, K, T) with each tile."""
    places = np.arange(across**2)
    starts = np.stack([places % across, places // across], axis=1) * np.array(tile)  # (T, 2)
    low = np.maximum(boxes[:, :, None, :2], starts)
    high = np.minimum(boxes[:, :, None, :2] + boxes[:, :, None, 2:], starts + np.array(tile))
    common = np.clip(high - low, 0, None).prod(axis=-1)
    return common / (boxes[..., 2:].prod(axis=-1)[..., None] + np.prod(tile) - common)
