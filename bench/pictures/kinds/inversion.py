"""The image that a deep image prior finds for what a ViT says of some patches, at several mask ratios.

ExtreMA figure 2 and appendix C. A network is fitted to each image and ratio, in thousands of steps: minutes on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.pictures.arrangement import Block, arranged
from bench.pictures.deep_image_prior import inverted
from bench.pictures.inputs import as_image
from bench.pictures.pictures import Panel, Picture
from bench.pictures.shown import Shown, Viewer, viewers
from engine import checks
from engine.progress import Progress
from pretrain.parts.masking import kept

UNIFORM = (0.5, 0.6, 0.75, 0.8, 0.9)


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """Settings of the picture."""

    mask_ratios: tuple[float, ...] = UNIFORM  # shares of hidden patches, from 0 on; the text does not name figure 2's
    steps: int = 3000  # of the fit (appendix C)
    lr: float = 1e-3  # of Adam (appendix C)

    def __post_init__(self) -> None:
        checks.annotations(self)
        checks.counts(self, "steps")
        checks.positive(self, "lr")
        if not self.mask_ratios or not all(0 <= ratio < 1 for ratio in self.mask_ratios):
            raise ValueError(f"mask_ratios={self.mask_ratios}: give shares from 0 to below 1")

    def pictures(self, shown: Shown) -> Iterator[Picture]:
        """One picture: of each image what is seen and, below, what is found; columns are mask ratios."""
        found, fits = viewers(shown), len(self.mask_ratios) * len(shown.images) * len(shown.checkpoints)
        with Progress("inversion", fits * self.steps, "steps") as progress:
            blocks = [
                (viewer.checkpoint.name, [self.block(viewer, shown, n, progress) for n in range(len(shown.images))])
                for viewer in found
            ]
        yield arranged(
            "inversion",
            [image.panel() for image in shown.images],
            blocks,
            note=f"Below what a network sees, the image that a deep image prior finds for what it says of it, in "
            f"{self.steps} steps. The error is the root mean square over the hidden pixels, of 255 grey levels.",
        )

    def block(self, viewer: Viewer, shown: Shown, number: int, progress: Progress) -> Block:
        """Two rows: seen, and found."""
        image = viewer.tensor(shown.images[number].image)
        columns = [self.column(viewer, image, ratio, (shown.seed, number), progress) for ratio in self.mask_ratios]
        return [list(row) for row in zip(*columns, strict=True)]

    def column(
        self, viewer: Viewer, image: Tensor, ratio: float, seeds: tuple[int, int], progress: Progress
    ) -> tuple[Panel, Panel]:
        """The image (1, 3, H, W) with a share of its patches hidden, and what is found for it."""
        preparation, grid = viewer.checkpoint.export.preparation, viewer.grid(image)
        order = np.random.RandomState(seeds).permutation(grid[0] * grid[1])  # the same patches first at every ratio
        hidden = np.ones(len(order), bool)
        hidden[order[: max(1, kept(len(order), ratio))]] = False
        keep = torch.tensor(np.flatnonzero(~hidden), device=image.device)[None] if hidden.any() else None
        with viewer.named():
            if hidden.any() and viewer.spec.relative_position != "none":
                raise ValueError("relative positions need all patches of an image; add --set mask_ratios=0")
            said, _ = inverted(viewer.backbone.vit, image, keep, partial(for_network, viewer), self.steps, self.lr,
                               seeds[0], progress.advance)  # fmt: skip
        seen = as_image(image[0], preparation, hidden.reshape(grid))
        drawn = said[0].cpu().mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        error = hidden_error(as_image(image[0], preparation), drawn, hidden.reshape(grid))
        return (
            Panel(values=seen, size=seen.shape[:2], title=f"{hidden.mean():.0%} hidden"),
            Panel(values=drawn, size=drawn.shape[:2], title="found", caption=f"error {error:.1f}"),
        )


def for_network(viewer: Viewer, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) from 0 to 1 as the network gets them."""
    return (images - viewer.backbone.mean) / viewer.backbone.std


def hidden_error(image: np.ndarray, found: np.ndarray, hidden: np.ndarray) -> float:
    """Root mean square difference of colours (H, W, 3) uint8 over the hidden patches (h, w); over all where all are
    seen."""
    side = image.shape[0] // hidden.shape[0]
    where = np.kron(hidden, np.ones((side, side), bool)) if hidden.any() else np.ones(image.shape[:2], bool)
    return float(np.sqrt(np.square(image[where].astype(np.float64) - found[where]).mean()))
