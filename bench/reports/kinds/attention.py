"""Attention of chosen patches, or of the class token, to all patches, in any block and head of a ViT.

ExtreMA figures 1 and 9: four query patches, last block, mean over the heads; a map's frame has its query's colour. DINO
figure 1: the class token. Maps are outputs of the softmax: each sums to one over all tokens, of which the patches are
drawn.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from bench.reports.pictures import Block, Panel, Picture, Spot, arranged
from bench.reports.visualize import (
    NamedImage,
    PictureRequest,
    Viewer,
    block_text,
    check_places,
    errors_naming,
    image_panel,
    patches_at,
    points_at,
)
from engine.settings import Validated

QUARTERS = (0.25, 0.25, 0.75, 0.25, 0.25, 0.75, 0.75, 0.75)  # x,y of four patches, as in ExtreMA's figure 1
HEADS = re.compile(r"mean|all|\d+(,\d+)*")  # values of the setting `heads`


@dataclass(frozen=True, kw_only=True)
class Attention(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end; of the class token in ExtreMA one of its class-attention blocks
    tokens: Literal["patches", "class"] = "patches"  # whose attention: chosen patches', or the class token's
    # mean over the heads; all: each head in a row, of the class token in a column; or numbers from 0, such as 0,3
    heads: str = "mean"
    # the query patches: x,y of each as shares of width and height, from the top left
    at: tuple[float, ...] = QUARTERS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_places(self.at)
        if not HEADS.fullmatch(self.heads):
            raise ValueError(f"heads={self.heads}: write mean, all, or numbers from 0 such as 0,3")

    @property
    def points(self) -> tuple[Spot, ...]:
        """The query patches; none for the class token."""
        return points_at(self.at) if self.tokens == "patches" else ()

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, or heads of each image; columns are the queries of each checkpoint."""
        query = "the numbered patches" if self.points else "the class token"
        mean = ", the mean of all heads" if self.heads == "mean" else ""
        yield arranged(
            "attention",
            [
                image_panel(image.image, title="queries" if self.points else "", points=self.points)
                for image in request.images
            ],
            [(viewer.name, [self.block(viewer, image) for image in viewer.images()]) for viewer in request.viewers],
            note=f"Attention of {query} in {block_text(self.layer)}{mean}. Each map is drawn from 0, dark, to its "
            "maximum, yellow; it sums to 1 over patches and other tokens.",
        )

    def block(self, viewer: Viewer, image: NamedImage) -> Block:
        """Maps of one image: rows of heads, columns of queries; of the class token columns of heads."""
        maps, grid = self.maps(viewer, image.image)
        with errors_naming(viewer.name):
            by_head = maps_by_head(maps[..., -grid[0] * grid[1] :].unflatten(-1, grid), self.heads)
        rows = [
            [self.panel(values, image.size, number, head) for number, values in enumerate(maps_of_head)]
            for head, maps_of_head in by_head.items()
        ]
        return rows if self.points else [[panel for row in rows for panel in row]]

    def panel(self, values: Tensor, size: tuple[int, int], number: int, head: str) -> Panel:
        """The map (h, w) of query `number` of an image of this height and width; its frame has the query's colour."""
        queries = [f"query {number + 1}"] if self.points else []
        return Panel(
            values=values.numpy(),
            size=size,
            low=0.0,
            title=", ".join(filter(None, [*queries, head])),
            caption=f"maximum {float(values.max()):.2g}, patches {float(values.sum()):.0%}",
            frame=number if self.points else None,
        )

    @torch.inference_mode()
    def maps(self, viewer: Viewer, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Attention (heads, Q, N) of Q queries to all N tokens, and the grid (rows, columns) of the patches."""
        tensor = viewer.tensor(image)
        grid, vit = viewer.grid(tensor), viewer.backbone.vit
        with errors_naming(viewer.name):
            if not self.points:
                return vit.class_token_attention(tensor, self.layer)[0].float().cpu().unsqueeze(1), grid
            attention = vit.attention(tensor, self.layer)[0].float().cpu()
        return attention[:, [viewer.spec.prefix + patch for patch in patches_at(self.points, grid)]], grid


def maps_by_head(maps: Tensor, heads: str) -> dict[str, Tensor]:
    """Title -> map (...) of the chosen heads; the mean over the heads has the title "".

    maps: (heads, ...). heads: mean, all, or numbers with commas. ValueError for a head that does not exist.
    """
    if heads == "mean":
        return {"": maps.mean(dim=0)}
    numbers = range(len(maps)) if heads == "all" else [int(number) for number in heads.split(",")]
    if missing := [number for number in numbers if number >= len(maps)]:
        raise ValueError(f"heads={heads}: there is no head {missing[0]}, they are numbered 0 to {len(maps) - 1}")
    return {f"head {number}": maps[number] for number in numbers}
