"""The patches of other images that are most like chosen patches, by the cosine of their tokens.

What is alike to the network: the same part of a thing, the same texture, the same place in the image.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.reporting.panels import Block, Box, Panel, Picture, Spot, arranged
from bench.reporting.visualize import (
    NamedImage,
    PictureRequest,
    Viewer,
    block_text,
    check_places,
    image_panel,
    patches_at,
    points_at,
)
from engine.neighbours import search, unit_rows
from engine.settings import NonNegativeInt, PositiveInt, Validated


class Near(NamedTuple):
    """One neighbour of a query."""

    image: int
    patch: int  # of that image, row by row
    similarity: float


@dataclass(frozen=True, kw_only=True)
class Retrieval(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    at: tuple[float, ...] = (0.5, 0.5)  # the query patches of each image: x,y of each as shares of width and height
    neighbours: PositiveInt = 5  # shown of each query
    context: NonNegativeInt = 3  # patches that are shown around a neighbour, in each direction

    def __post_init__(self) -> None:
        super().__post_init__()
        check_places(self.at)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are queries of each image, columns their neighbours under each checkpoint."""
        if len(request.images) < 2:
            raise ValueError("--images: neighbours come from other images: name two or more, or raise --limit")
        points = points_at(self.at)
        blocks = [(viewer.name, self.blocks(viewer, request)) for viewer in request.viewers()]
        yield arranged(
            "retrieval",
            [image_panel(image.image, points=points) for image in request.images],
            blocks,
            note=f"Patches of the other images that are nearest to the numbered ones, by the cosine of the tokens of "
            f"{block_text(self.layer)}; the box is the patch, around it is its surroundings.",
        )

    def blocks(self, viewer: Viewer, request: PictureRequest) -> list[Block]:
        """For each image: a row for each query, which comes first, then its neighbours."""
        maps = [viewer.patches(image.image, self.layer) for image in request.images]
        return [self.block(request.images, maps, number) for number in range(len(maps))]

    def block(self, images: Sequence[NamedImage], maps: Sequence[np.ndarray], number: int) -> Block:
        """Of one image; maps: tokens (h, w, D) of all images."""
        grids, points = [tokens.shape[:2] for tokens in maps], points_at(self.at)
        asked, rows = patches_at(points, grids[number]), []
        for point, patch, nearest in zip(points, asked, self.nearest(maps, number, asked), strict=True):
            row = [self.panel(images[number], grids[number], patch, point, f"query {point.number + 1}")]
            for near in nearest:
                caption = f"cosine {near.similarity:.2f}"
                row.append(self.panel(images[near.image], grids[near.image], near.patch, point, caption))
            rows.append(row)
        return rows

    def nearest(self, maps: Sequence[np.ndarray], image: int, patches: Sequence[int]) -> list[list[Near]]:
        """Tokens (h, w, D) of all images -> the neighbours of some patches of one image in the others, the nearest
        first."""
        others = [number for number in range(len(maps)) if number != image]
        rows = [unit_rows(tokens.reshape(-1, tokens.shape[-1])) for tokens in maps]
        owner = np.concatenate([np.full(len(rows[number]), number) for number in others])
        place = np.concatenate([np.arange(len(rows[number])) for number in others])
        gallery = np.concatenate([rows[number] for number in others])
        near = search(gallery, rows[image][list(patches)], min(self.neighbours, len(gallery)), "torch")
        return [
            [Near(int(owner[index]), int(place[index]), float(value)) for index, value in zip(*pair, strict=True)]
            for pair in zip(near.indices, near.similarities, strict=True)
        ]

    def panel(self, image: NamedImage, grid: tuple[int, int], patch: int, point: Spot, caption: str = "") -> Panel:
        """A patch, boxed, in its surroundings, which are moved into the image where they would leave it."""
        (top, height), (left, width) = (
            surroundings(place, count, self.context) for place, count in zip(divmod(patch, grid[1]), grid, strict=True)
        )
        row, column = divmod(patch, grid[1])
        down, across = image.size[0] / grid[0], image.size[1] / grid[1]  # pixels of a patch
        edges = round(left * across), round(top * down), round((left + width) * across), round((top + height) * down)
        box = Box(
            left=(column - left) / width,
            right=(column + 1 - left) / width,
            top=(row - top) / height,
            bottom=(row + 1 - top) / height,
            style=point.number,
        )
        return image_panel(image.image.crop(edges), boxes=(box,), frame=point.number, caption=caption)


def surroundings(place: int, count: int, context: int) -> tuple[int, int]:
    """Along one side of a grid of `count` patches: the first patch of a window around `place`, and its length."""
    length = min(2 * context + 1, count)
    return min(max(place - context, 0), count - length), length
