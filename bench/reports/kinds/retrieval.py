"""The patches of other images whose tokens have the highest cosine similarity to those of chosen patches.

They show what the network considers similar: the same part of an object, texture, or position in the image. Queries are
validation images and neighbours training images, where a set has both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
from engine.neighbours import unit_rows
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
    tokens: Literal["patches", "class"] = "patches"  # compare patches, or whole images by their class tokens
    at: tuple[float, ...] = (0.5, 0.5)  # the query patches of each image: x,y of each as shares of width and height
    neighbours: PositiveInt = 5  # number of neighbours of each query, each in another image
    gallery: PositiveInt = 100  # training images of a URL among which neighbours are looked for
    context: NonNegativeInt = 3  # patches that are shown around a neighbour, in each direction

    def __post_init__(self) -> None:
        super().__post_init__()
        check_places(self.at)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are queries of each image, columns their neighbours according to each checkpoint."""
        gallery = request.gallery(self.gallery)
        if not gallery and len(request.images) < 2:
            raise UserError(
                "images", f"neighbours come from other images: name two or more, or raise {option('limit')}"
            )
        note = f"Nearest of {f'{len(gallery)} training images' if gallery else 'the other images'}, by the cosine of "
        if self.tokens == "class":
            note += f"class tokens of {block_text(self.layer)}."
        else:
            note += f"tokens of {block_text(self.layer)}: in the box the patch most similar to the numbered one."
        yield arranged(
            "retrieval",
            [image_panel(image.image, points=self.points) for image in request.images],
            [(viewer.name, self.blocks(viewer, request, gallery)) for viewer in request.viewers],
            note,
        )

    @property
    def points(self) -> tuple[Spot, ...]:
        """The query patches of an image; none for whole images."""
        return points_at(self.at) if self.tokens == "patches" else ()

    def blocks(self, viewer: Viewer, request: PictureRequest, gallery: Sequence[NamedImage] = ()) -> list[Block]:
        """For each image: a row for each query, with the query first and then its neighbours.

        gallery: images with neighbours; empty: the other images.
        """
        read = viewer.class_token if self.tokens == "class" else viewer.patches
        queries, others = (
            [(image, read(image.image, self.layer)) for image in viewer.images(images)]
            for images in (request.images, gallery)
        )
        return [
            self.block(image, tokens, others or [*queries[:number], *queries[number + 1 :]])
            for number, (image, tokens) in enumerate(queries)
        ]

    def block(self, image: NamedImage, tokens: np.ndarray, others: Sequence[tuple[NamedImage, np.ndarray]]) -> Block:
        """The rows of an image with tokens (h, w, D). others: the gallery's images and their tokens."""
        grid, points = (tokens.shape[0], tokens.shape[1]), self.points or points_at((0.5, 0.5))
        patches, rows = patches_at(points, grid), []
        found = self.nearest(tokens.reshape(-1, tokens.shape[2])[patches], [other for _, other in others])
        for point, patch, neighbours in zip(points, patches, found, strict=True):
            title = f"query {point.number + 1}" if self.points else "query"
            row = [self.panel(image, grid, patch, point, title)]
            for neighbour in neighbours:
                other, other_tokens = others[neighbour.image]
                caption = f"cosine {neighbour.similarity:.2f}"
                grid_of_other = (other_tokens.shape[0], other_tokens.shape[1])
                row.append(self.panel(other, grid_of_other, neighbour.patch, point, caption))
            rows.append(row)
        return rows

    def nearest(self, queries: np.ndarray, gallery: Sequence[np.ndarray]) -> list[list[Neighbour]]:
        """For each query (Q, D) its most similar patch in each of the nearest images, the nearest first.

        gallery: tokens (h, w, D) of each image.
        """
        unit_queries = unit_rows(queries)
        similarities = [unit_rows(tokens.reshape(-1, tokens.shape[2])) @ unit_queries.T for tokens in gallery]
        best = np.stack([of_image.max(0) for of_image in similarities])  # (images, Q)
        order = np.argsort(-best, axis=0, kind="stable")[: self.neighbours]
        return [
            [
                Neighbour(image, int(similarities[image][:, query].argmax()), float(best[image, query]))
                for image in order[:, query].tolist()
            ]
            for query in range(len(queries))
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
