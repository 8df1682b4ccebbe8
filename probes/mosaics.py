"""Mosaics of validation images, and crops of candidate boxes in them as an image set.

In a mosaic, the position of an image of a given class is known, unlike in ordinary images with labels.

N: images. M: mosaics. T: tiles of a mosaic. K: boxes in a mosaic. Sizes are (width, height), and boxes are (left, top,
width, height), both in pixels.
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

CACHED = 16  # mosaics in memory; the crops of one are read one after another


def tile_numbers(labels: np.ndarray, tiles: int) -> np.ndarray:
    """Index of the image on each tile (M, T), such that tiles of a mosaic belong to as many classes as possible.

    labels: (N,). M = N / T, rounded up; if N is not a multiple of T, the last tiles repeat the first images.
    """
    order, mosaics = np.argsort(labels, kind="stable"), -(-len(labels) // tiles)
    return order[(np.arange(tiles) * mosaics + np.arange(mosaics)[:, None]) % len(labels)]


def candidate_boxes(
    scenes: int, size: tuple[int, int], shape: tuple[int, int], scales: tuple[float, ...], locations: int, seed: int
) -> np.ndarray:
    """Random boxes (M, K, 4) int64 in M scenes: for each scale, `locations` uniformly drawn positions in the scene.

    size: of a scene. shape: size of the network's images, which gives the aspect ratio of boxes. scales: sizes of
    boxes, as shares of the largest box of this aspect ratio in the scene.
    """
    largest = min(size[0] / shape[0], size[1] / shape[1])
    sizes_by_scale = [[max(1, round(scale * largest * side)) for side in shape] for scale in scales]
    box_sizes = np.repeat(sizes_by_scale, locations, axis=0)  # (K, 2)
    # The random numbers of RandomState never change (NumPy NEP 19).
    positions = np.random.RandomState(seed).random_sample((scenes, len(box_sizes), 2))
    corners = np.floor(positions * (np.array(size) - box_sizes + 1)).astype(np.int64)
    return np.concatenate([corners, np.broadcast_to(box_sizes, corners.shape)], axis=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mosaics:
    """ImageSource whose image m * K + k is the crop of box k in mosaic m, resized to the size of a tile.

    source: set of the images. transform: makes a tile of an image. tiles: (M, T), index of the image on each tile.
    boxes: (M, K, 4). chosen: numbers of the crops in this source; None for all.
    """

    source: ImageSet
    transform: EvalTransform
    tiles: np.ndarray
    boxes: np.ndarray
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return self.boxes.shape[0] * self.boxes.shape[1] if self.chosen is None else len(self.chosen)

    def mosaic_and_box(self, index: int) -> tuple[int, int]:
        """Numbers of the mosaic and the box of a crop."""
        mosaic, box = divmod(int(index if self.chosen is None else self.chosen[index]), self.boxes.shape[1])
        return mosaic, box

    def path(self, index: int) -> str:
        mosaic, box = self.mosaic_and_box(index)
        return f"box {box} of mosaic {mosaic} of {self.source.url}"

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        """The crop. Raises UnreadableImage, which names the file, if an image of the mosaic cannot be read."""
        mosaic, box = self.mosaic_and_box(index)
        left, top, width, height = map(int, self.boxes[mosaic, box])
        try:
            crop = cached_mosaic(self, mosaic).crop((left, top, left + width, top + height))
        except UnreadableImage as error:
            raise UnreadableImage(self.path(index), f"{error.path}: {error.reason}") from error
        return crop.resize(self.tile_size, FILTERS["bilinear"])

    @property
    def tile_size(self) -> tuple[int, int]:
        return self.transform.window[1], self.transform.window[0]

    @property
    def side(self) -> int:
        """Number of tiles in a row, and of rows."""
        return round(self.tiles.shape[1] ** 0.5)

    def mosaic(self, number: int) -> Image.Image:
        """A mosaic, with its tiles row by row."""
        (width, height), side = self.tile_size, self.side
        mosaic = Image.new("RGB", (side * width, side * height))
        for tile, index in enumerate(self.tiles[number].tolist()):
            pixels = self.transform(self.source, index).permute(1, 2, 0).numpy()
            mosaic.paste(Image.fromarray(pixels), (tile % side * width, tile // side * height))
        return mosaic

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

    def image_set(self, name: str) -> ImageSet:
        """All crops as an image set, without labels; `name` is appended to the source's URL."""
        url = f"{self.source.url}#{name}"
        return ImageSet(
            url=url, split=self.source.split, classes=(), labels=np.full(len(self), -1, np.int64), images=self
        )


@lru_cache(maxsize=CACHED)
def cached_mosaic(mosaics: Mosaics, number: int) -> Image.Image:
    return mosaics.mosaic(number)


def centre_tiles(boxes: np.ndarray, tile_size: tuple[int, int], side: int) -> np.ndarray:
    """Number of the tile (M, K) that contains the centre of each box (M, K, 4). side: tiles in a row."""
    column, row = np.moveaxis((boxes[..., :2] + boxes[..., 2:] / 2) // tile_size, -1, 0)
    return (row * side + column).astype(np.int64)


def tile_overlaps(boxes: np.ndarray, tile_size: tuple[int, int], side: int) -> np.ndarray:
    """Intersection over union (M, K, T) of each box (M, K, 4) with each tile. side: tiles in a row."""
    tiles = np.arange(side**2)
    starts = np.stack([tiles % side, tiles // side], axis=1) * np.array(tile_size)  # (T, 2)
    low = np.maximum(boxes[:, :, None, :2], starts)
    high = np.minimum(boxes[:, :, None, :2] + boxes[:, :, None, 2:], starts + np.array(tile_size))
    intersection = np.clip(high - low, 0, None).prod(axis=-1)
    return intersection / (boxes[..., 2:].prod(axis=-1)[..., None] + np.prod(tile_size) - intersection)
