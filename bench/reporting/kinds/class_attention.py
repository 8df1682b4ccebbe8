"""What the class token attends to: in a block of the ViT, or in ExtreMA's class-attention blocks.

ExtreMA figure 1, right; DINO's figure 1. A map sums to one over all tokens, of which the patches are drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from bench.reporting.panels import Block, Panel, Picture, arranged
from bench.reporting.viewers import (
    PictureRequest,
    ShownImage,
    Viewer,
    block_text,
    check_heads,
    heads_text,
    of_heads,
    viewers,
)
from engine import checks


@dataclass(frozen=True, kw_only=True)
class ClassAttention:
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end; of models with class-attention blocks one of those
    heads: str = "mean"  # of the heads, or all of them in columns, or numbers from 0 such as 0,3

    def __post_init__(self) -> None:
        checks.annotations(self)
        check_heads(self.heads)

    def pictures(self, shown: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, columns are heads under each checkpoint."""
        blocks = [
            (viewer.checkpoint.name, [self.block(viewer, image) for image in shown.images]) for viewer in viewers(shown)
        ]
        yield arranged(
            "class-attention",
            [image.panel() for image in shown.images],
            blocks,
            note=f"Attention of the class token in {block_text(self.layer)}{heads_text(self.heads)}. Each map is drawn "
            "from 0, dark, to its maximum, yellow; it sums to 1 over patches and other tokens.",
        )

    def block(self, viewer: Viewer, image: ShownImage) -> Block:
        """One row of heads."""
        maps, grid = self.maps(viewer, image.image)
        with viewer.named():
            chosen = of_heads(maps[:, -grid[0] * grid[1] :].unflatten(-1, grid), self.heads)
        return [
            [
                Panel(
                    values=one.numpy(),
                    size=image.size,
                    low=0.0,
                    title=title,
                    caption=f"maximum {float(one.max()):.2g}, patches {float(one.sum()):.0%}",
                )
                for title, one in chosen.items()
            ]
        ]

    @torch.inference_mode()
    def maps(self, viewer: Viewer, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """The class token's attention (H, N) to all tokens, and the grid of the patches."""
        tensor = viewer.tensor(image)
        with viewer.named():
            return viewer.backbone.vit.class_map(tensor, self.layer)[0].float().cpu(), viewer.grid(tensor)
