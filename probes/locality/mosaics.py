"""Mosaics: validation images as tiles of one image, and candidate boxes in it, whose crops are an image set.

So it is known where an image of a class lies, which sets of labelled images do not say.
N images, T tiles of a mosaic of S x S pixels each, M mosaics, K boxes of each.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image

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
    scenes: int, size: tuple[int, int], scales: tuple[float, ...], locations: int, seed: int
) -> np.ndarray:
    """Square boxes (M, K, 3) int64 in M scenes of size = (width, height): left, top and side in pixels.

    For each scale, a share of the scene's short side, `locations` places inside it, drawn evenly.
    """
    sides = np.repeat([max(1, round(scale * min(size))) for scale in scales], locations)
    # RandomState's streams are frozen for ever (NumPy NEP 19).
    places = np.random.RandomState(seed).random_sample((scenes, len(sides), 2))
    corners = np.floor(places * (np.array(size) - sides[:, None] + 1)).astype(np.int64)
    return np.concatenate([corners, np.broadcast_to(sides[:, None], (*corners.shape[:2], 1))], axis=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mosaics:
    """The ImageSource whose image m * K + k is the crop of box k in mosaic m, at S x S pixels.

    source: the images. transform: makes a tile of one. tiles (M, T): which. boxes (M, K, 3). chosen: numbers of the
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
        left, top, side = map(int, self.boxes[mosaic, box])
        try:
            part = kept_mosaic(self, mosaic).crop((left, top, left + side, top + side))
        except UnreadableImage as error:
            raise UnreadableImage(self.path(index), f"{error.path}: {error.reason}") from error
        return part.resize((self.transform.size, self.transform.size), FILTERS["bilinear"])

    def mosaic(self, number: int) -> Image.Image:
        """One mosaic, its tiles row by row."""
        size, across = self.transform.size, round(self.tiles.shape[1] ** 0.5)
        sheet = Image.new("RGB", (across * size, across * size))
        for place, index in enumerate(self.tiles[number].tolist()):
            pixels = self.transform(self.source, index).permute(1, 2, 0).numpy()
            sheet.paste(Image.fromarray(pixels), (place % across * size, place // across * size))
        return sheet

    def take(self, indices: np.ndarray) -> "Mosaics":
        return replace(self, chosen=np.arange(len(self))[indices] if self.chosen is None else self.chosen[indices])

    def facts(self) -> tuple[bytes, ...]:
        chosen = np.arange(len(self)) if self.chosen is None else self.chosen
        arrays = (self.tiles, self.boxes, chosen)
        return self.source.fingerprint.encode(), self.transform.name.encode(), *(each.tobytes() for each in arrays)

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


def centre_tiles(boxes: np.ndarray, size: int, tiles: int) -> np.ndarray:
    """Boxes (M, K, 3) -> the number of the tile (M, K) on which the centre of each lies."""
    across = round(tiles**0.5)
    column, row = ((boxes[..., axis] + boxes[..., 2] / 2) // size for axis in (0, 1))
    return (row * across + column).astype(np.int64)


def tile_overlaps(boxes: np.ndarray, size: int, tiles: int) -> np.ndarray:
    """Boxes (M, K, 3) -> intersection over union (M, K, T) with each tile."""
    across = round(tiles**0.5)
    places = np.arange(tiles)
    starts = np.stack([places % across, places // across], axis=1) * size  # (T, 2)
    low = np.maximum(boxes[:, :, None, :2], starts)
    high = np.minimum(boxes[:, :, None, :2] + boxes[:, :, None, 2:], starts + size)
    common = np.clip(high - low, 0, None).prod(axis=-1)
    return common / (np.square(boxes[..., 2])[..., None] + size**2 - common)
