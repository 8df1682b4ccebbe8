"""Principal components of the patch tokens of all images together, as colours.

DINOv2's figure 1 and DINOv3's: what has one colour in several images is alike to the network.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.pictures.arrangement import Block, arranged
from bench.pictures.components import in_lab, in_rgb, is_foreground, principal_components, spread_evenly
from bench.pictures.pictures import Panel, Picture
from bench.pictures.queries import block_text
from bench.pictures.shown import Shown, Viewer, viewers
from engine import checks

COLOURINGS = {"lab": in_lab, "rgb": in_rgb}
EMPTY = 255  # white, for the background
LEAST = 4  # patches, for three components


@dataclass(frozen=True, kw_only=True)
class Pca:
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    # which patches are analysed: all, or the foreground by the first component of all, the others being left white
    patches: Literal["all", "foreground"] = "all"
    # lab: the first component is the lightness, the second blue to yellow, the third green to red, which can be read in
    # grey and by colour-blind readers; rgb: red, green and blue, as DINOv2's
    colours: Literal["lab", "rgb"] = "lab"

    def __post_init__(self) -> None:
        checks.annotations(self)

    def pictures(self, shown: Shown) -> Iterator[Picture]:
        """One picture: rows are images, columns checkpoints."""
        yield arranged(
            "pca",
            [image.panel() for image in shown.images],
            [(viewer.checkpoint.name, self.blocks(viewer, shown)) for viewer in viewers(shown)],
            note=f"First three principal components of the patch tokens of {block_text(self.layer)}, of all images "
            "together; at the bottom, the share of the variance that each holds.",
        )

    def blocks(self, viewer: Viewer, shown: Shown) -> list[Block]:
        """A panel for each image."""
        maps = [viewer.patches(image.image, self.layer) for image in shown.images]
        found, shares = self.coloured(maps)
        last, caption = len(found) - 1, ", ".join(f"{share:.0%}" for share in shares)
        return [
            [[Panel(values=colours, size=image.size, caption=caption if place == last else "")]]
            for place, (image, colours) in enumerate(zip(shown.images, found, strict=True))
        ]

    def coloured(self, maps: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """Patch tokens (h, w, D) of each image -> colours (h, w, 3) uint8, and the components' shares of the variance.

        ValueError for too few patches.
        """
        tokens = np.concatenate([each.reshape(-1, each.shape[-1]) for each in maps])
        chosen = self.chosen(tokens, np.concatenate([at_border(each.shape[:2]) for each in maps]))
        if chosen.sum() < LEAST or tokens.shape[1] < 3:
            raise ValueError(f"{chosen.sum()} patches are too few for three components; add images, or raise --size")
        components, shares = principal_components(tokens[chosen])
        colours = np.full((len(tokens), 3), EMPTY, np.uint8)
        colours[chosen] = COLOURINGS[self.colours](spread_evenly(components))
        ends = np.cumsum([each.shape[0] * each.shape[1] for each in maps])[:-1]
        parts = np.split(colours, ends)
        return [part.reshape(*each.shape[:2], 3) for part, each in zip(parts, maps, strict=True)], shares

    def chosen(self, tokens: np.ndarray, on_border: np.ndarray) -> np.ndarray:
        """Which patches (N,) are analysed."""
        if self.patches == "all":
            return np.ones(len(tokens), bool)
        return is_foreground(principal_components(tokens, 1)[0][:, 0], on_border)


def at_border(grid: tuple[int, int]) -> np.ndarray:
    """Which patches of a grid, row by row, lie at its border (L,) bool."""
    inner = np.ones(grid, bool)
    inner[1:-1, 1:-1] = False
    return inner.ravel()
