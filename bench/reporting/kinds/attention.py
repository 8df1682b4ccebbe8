"""What chosen patches attend to, in any block and head of a ViT.

ExtreMA figures 1 and 9: four query patches, last block, mean over the heads; a map's frame has its query's colour. The
maps are the softmax's own: each sums to one over all tokens, of which the patches are drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from bench.reporting.panels import Block, Panel, Picture, arranged
from bench.reporting.viewers import (
    QUARTERS,
    PictureRequest,
    ShownImage,
    Viewer,
    block_text,
    check_heads,
    check_places,
    heads_text,
    of_heads,
    patches_at,
    points_at,
    viewers,
)
from engine import checks


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    heads: str = "mean"  # of the heads, or all of them in rows, or numbers from 0 such as 0,3
    at: tuple[float, ...] = QUARTERS  # the query patches: x,y of each as shares of width and height, from the top left

    def __post_init__(self) -> None:
        checks.annotations(self)
        check_places(self.at)
        check_heads(self.heads)

    def pictures(self, shown: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, or heads of each; columns are the queries under each checkpoint."""
        points = points_at(self.at)
        blocks = [
            (viewer.checkpoint.name, [self.block(viewer, image) for image in shown.images]) for viewer in viewers(shown)
        ]
        yield arranged(
            "attention",
            [image.panel(title="queries", points=points) for image in shown.images],
            blocks,
            note=f"Attention of the numbered patches in {block_text(self.layer)}{heads_text(self.heads)}. Each map is "
            "drawn from 0, dark, to its maximum, yellow; it sums to 1 over patches and other tokens.",
        )

    def block(self, viewer: Viewer, image: ShownImage) -> Block:
        """Rows of heads, columns of queries."""
        maps, grid = self.maps(viewer, image.image)
        with viewer.named():
            chosen = of_heads(maps[..., viewer.spec.prefix :].unflatten(-1, grid), self.heads)
        return [
            [self.panel(one, image, number, title) for number, one in enumerate(queries)]
            for title, queries in chosen.items()
        ]

    def panel(self, one: Tensor, image: ShownImage, number: int, head: str) -> Panel:
        """The map (h, w) of one query in one head."""
        return Panel(
            values=one.numpy(),
            size=image.size,
            frame=number,
            low=0.0,
            title=f"query {number + 1}, {head}" if head else f"query {number + 1}",
            caption=f"maximum {float(one.max()):.2g}, patches {float(one.sum()):.0%}",
        )

    @torch.inference_mode()
    def maps(self, viewer: Viewer, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Attention (H, Q, N) of the query patches to all tokens, and the grid of the patches."""
        tensor = viewer.tensor(image)
        grid = viewer.grid(tensor)
        with viewer.named():
            found = viewer.backbone.vit.attention(tensor, self.layer)[0].float().cpu()
        queries = [viewer.spec.prefix + patch for patch in patches_at(points_at(self.at), grid)]
        return found[:, queries], grid
