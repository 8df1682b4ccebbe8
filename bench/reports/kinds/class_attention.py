"""Attention of the class token to all patches, in a block of the ViT or in ExtreMA's class-attention blocks.

ExtreMA figure 1, right; DINO figure 1. A map sums to one over all tokens, of which the patches are drawn.
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
class ClassAttention(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end; in a model with class-attention blocks one of these
    heads: str = "mean"  # mean over the heads; all: each head in a column; or numbers of heads from 0, such as 0,3

    def __post_init__(self) -> None:
        super().__post_init__()
        visualize.check_heads(self.heads)

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, columns are heads of each checkpoint."""
        yield arranged(
            "class-attention",
            [image_panel(image.image) for image in request.images],
            [(viewer.name, [self.block(viewer, image) for image in viewer.images()]) for viewer in request.viewers()],
            note=visualize.attention_note("the class token", self.layer, self.heads),
        )

    def block(self, viewer: Viewer, image: NamedImage) -> Block:
        """Maps of one image: a row of heads."""
        maps, grid = self.maps(viewer, image.image)
        with errors_naming(viewer.name):
            by_head = visualize.maps_by_head(maps[:, -grid[0] * grid[1] :].unflatten(-1, grid), self.heads)
        return [[map_panel(values, image.size, head) for head, values in by_head.items()]]

    @torch.inference_mode()
    def maps(self, viewer: Viewer, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Attention (heads, N) of the class token to all N tokens, and the grid (rows, columns) of the patches."""
        tensor = viewer.tensor(image)
        with errors_naming(viewer.name):
            return viewer.backbone.vit.class_token_attention(tensor, self.layer)[0].float().cpu(), viewer.grid(tensor)
