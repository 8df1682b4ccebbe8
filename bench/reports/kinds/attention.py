"""Attention of chosen patches to all patches, in any block and head of a ViT.

ExtreMA figures 1 and 9: four query patches, last block, mean over the heads; a map's frame has its query's colour. Maps
are outputs of the softmax: each sums to one over all tokens, of which the patches are drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from bench.reports import visualize
from bench.reports.pictures import Block, Picture, arranged
from bench.reports.visualize import NamedImage, PictureRequest, Viewer, errors_naming, image_panel, map_panel
from engine.settings import Validated


@dataclass(frozen=True, kw_only=True)
class Attention(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    heads: str = "mean"  # mean over the heads; all: each head in a row; or numbers of heads from 0, such as 0,3
    # the query patches: x,y of each as shares of width and height, from the top left
    at: tuple[float, ...] = visualize.QUARTERS

    def __post_init__(self) -> None:
        super().__post_init__()
        visualize.check_places(self.at)
        visualize.check_heads(self.heads)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, or heads of each image; columns are the queries of each checkpoint."""
        points = visualize.points_at(self.at)
        yield arranged(
            "attention",
            [image_panel(image.image, title="queries", points=points) for image in request.images],
            [(viewer.name, [self.block(viewer, image) for image in viewer.images()]) for viewer in request.viewers()],
            note=visualize.attention_note("the numbered patches", self.layer, self.heads),
        )

    def block(self, viewer: Viewer, image: NamedImage) -> Block:
        """Maps of one image: rows of heads, columns of queries."""
        maps, grid = self.maps(viewer, image.image)
        with errors_naming(viewer.name):
            by_head = visualize.maps_by_head(maps[..., viewer.spec.prefix :].unflatten(-1, grid), self.heads)
        return [
            [
                map_panel(values, image.size, f"query {number + 1}, {head}" if head else f"query {number + 1}", number)
                for number, values in enumerate(maps_of_head)
            ]
            for head, maps_of_head in by_head.items()
        ]

    @torch.inference_mode()
    def maps(self, viewer: Viewer, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Attention (heads, Q, N) of Q query patches to all N tokens, and the grid (rows, columns) of the patches."""
        tensor = viewer.tensor(image)
        grid = viewer.grid(tensor)
        with errors_naming(viewer.name):
            attention = viewer.backbone.vit.attention(tensor, self.layer)[0].float().cpu()
        queries = visualize.patches_at(visualize.points_at(self.at), grid)
        return attention[:, [viewer.spec.prefix + patch for patch in queries]], grid
