"""The patches of other images whose tokens have the highest cosine similarity to those of chosen patches.

They show what the network considers similar: the same part of an object, texture, or position in the image.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.reports.pictures import Block, Box, Panel, Picture, Spot, arranged
from bench.reports.visualize import (
    NamedImage,
    PictureRequest,
    Viewer,
    block_text,
    check_places,
    image_panel,
    patches_at,
    points_at,
)
from engine.errors import UserError, option
from engine.neighbours import search, unit_rows
from engine.settings import NonNegativeInt, PositiveInt, Validated


class Neighbour(NamedTuple):
    """One neighbour of a query."""

    image: int  # index of the image
    patch: int  # index of the patch in it, row by row
    similarity: float  # cosine


@dataclass(frozen=True, kw_only=True)
class Retrieval(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    at: tuple[float, ...] = (0.5, 0.5)  # the query patches of each image: x,y of each as shares of width and height
    neighbours: PositiveInt = 5  # number of neighbours of each query
    context: NonNegativeInt = 3  # patches that are shown around a neighbour, in each direction

    def __post_init__(self) -> None:
        super().__post_init__()
        check_places(self.at)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are queries of each image, columns their neighbours according to each checkpoint."""
        if len(request.images) < 2:
            raise UserError(
                "images", f"neighbours come from other images: name two or more, or raise {option('limit')}"
            )
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
        """For each image: a row for each query, with the query first and then its neighbours."""
        maps = [viewer.patches(image.image, self.layer) for image in request.images]
        return [self.block(request.images, maps, number) for number in range(len(maps))]

    def block(self, images: Sequence[NamedImage], maps: Sequence[np.ndarray], number: int) -> Block:
        """The rows of image `number`. maps: tokens (h, w, D) of each image."""
        grids, points = [tokens.shape[:2] for tokens in maps], points_at(self.at)
        queries, rows = patches_at(points, grids[number]), []
        for point, query, neighbours in zip(points, queries, self.nearest(maps, number, queries), strict=True):
            row = [self.panel(images[number], grids[number], query, point, f"query {point.number + 1}")]
            for neighbour in neighbours:
                caption = f"cosine {neighbour.similarity:.2f}"
                row.append(self.panel(images[neighbour.image], grids[neighbour.image], neighbour.patch, point, caption))
            rows.append(row)
        return rows

    def nearest(self, maps: Sequence[np.ndarray], image: int, patches: Sequence[int]) -> list[list[Neighbour]]:
        """The neighbours of some patches of one image among the patches of all other images, the nearest first.

        maps: tokens (h, w, D) of each image. image: index of the image. patches: indices, row by row.
        """
        others = [number for number in range(len(maps)) if number != image]
        tokens = [unit_rows(grid.reshape(-1, grid.shape[-1])) for grid in maps]  # of each image (h * w, D)
        gallery = np.concatenate([tokens[number] for number in others])
        image_of_row = np.concatenate([np.full(len(tokens[number]), number) for number in others])
        patch_of_row = np.concatenate([np.arange(len(tokens[number])) for number in others])
        near = search(gallery, tokens[image][list(patches)], min(self.neighbours, len(gallery)), "torch")
        return [
            [
                Neighbour(int(image_of_row[row]), int(patch_of_row[row]), float(similarity))
                for row, similarity in zip(rows, similarities, strict=True)
            ]
            for rows, similarities in zip(near.indices, near.similarities, strict=True)
        ]

    def panel(self, image: NamedImage, grid: tuple[int, int], patch: int, point: Spot, caption: str = "") -> Panel:
        """A patch, marked by a box, and its surroundings. patch: its index, row by row, in the grid."""
        row, column = divmod(patch, grid[1])
        top, height = surroundings(row, grid[0], self.context)
        left, width = surroundings(column, grid[1], self.context)
        patch_height, patch_width = image.size[0] / grid[0], image.size[1] / grid[1]  # pixels
        edges = (
            round(left * patch_width),
            round(top * patch_height),
            round((left + width) * patch_width),
            round((top + height) * patch_height),
        )
        box = Box(
            left=(column - left) / width,
            right=(column + 1 - left) / width,
            top=(row - top) / height,
            bottom=(row + 1 - top) / height,
            style=point.number,
        )
        return image_panel(image.image.crop(edges), boxes=(box,), frame=point.number, caption=caption)


def surroundings(index: int, count: int, context: int) -> tuple[int, int]:
    """First patch and length of a window around patch `index` of `count` in a row or column, within the image."""
    length = min(2 * context + 1, count)
    return min(max(index - context, 0), count - length), length
