"""Principal components of the patch tokens of all images together, as colours.

DINOv2's figure 1 and DINOv3's: what has one colour in several images is alike to the network.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.reporting.panels import Block, Panel, Picture, arranged
from bench.reporting.visualize import PictureRequest, Viewer, block_text, image_panel
from engine.settings import Validated

# OKLab to linear sRGB (B. Ottosson, bottosson.github.io/posts/oklab): to cone responses, cubed, then to colours.
TO_CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)
LIGHT = (0.25, 0.92)  # lightness of the least and the largest value
CHROMA = 0.11  # of the largest value of the other components; more leaves sRGB
TAILS = (1, 99)  # percentiles between which a component is spread


def principal_components(tokens: np.ndarray, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (N, D) -> their first components (N, K), and the shares (K,) of the variance that these hold.

    A direction and its opposite are the same component: the one is taken whose largest entry is positive.
    """
    from sklearn.decomposition import PCA

    with np.errstate(invalid="ignore"):  # tokens that are all the same have no variance to share
        fitted = PCA(count, svd_solver="covariance_eigh").fit(tokens.astype(np.float64))
    return fitted.transform(tokens), np.nan_to_num(fitted.explained_variance_ratio_)


def is_foreground(component: np.ndarray, on_border: np.ndarray) -> np.ndarray:
    """First component (N,), which patches lie at an image's border (N,) bool -> which are foreground (N,) bool.

    The component is cut where that divides it best into two (Otsu 1979); the foreground is the side of which a smaller
    share lies at a border.
    """
    upper = component > _threshold(component)
    if upper.all() or not upper.any():
        return np.ones(len(component), bool)
    return upper if on_border[upper].mean() <= on_border[~upper].mean() else ~upper


def _threshold(values: np.ndarray) -> float:
    # Otsu's: the greatest variance between the two sides.
    ordered = np.sort(values)
    below = np.arange(1, len(ordered))
    sums = ordered.cumsum()
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(ordered) - below)
    between = below * (len(ordered) - below) * np.square(means[0] - means[1])
    return float(ordered[between.argmax()]) if len(ordered) > 1 else 0.0


def spread_evenly(components: np.ndarray) -> np.ndarray:
    """(N, K) -> values from 0 to 1, between the percentiles TAILS of each."""
    low, high = np.percentile(components, TAILS, axis=0)
    return np.clip((components - low) / np.maximum(high - low, 1e-12), 0, 1)


def in_rgb(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as red, green and blue -> uint8."""
    return np.rint(255 * values).astype(np.uint8)


def in_lab(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as lightness, blue to yellow and green to red of OKLab -> sRGB uint8.

    A grey print shows the first, and nearly all colour-blind readers see the second.
    """
    lightness = LIGHT[0] + (LIGHT[1] - LIGHT[0]) * values[..., 0]
    yellow, red = (CHROMA * (2 * values[..., part] - 1) for part in (1, 2))
    cones = np.stack([lightness, red, yellow], axis=-1) @ TO_CONES.T
    linear = np.clip(cones**3 @ TO_RGB.T, 0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)  # IEC 61966-2-1
    return in_rgb(curved)


COLOURINGS = {"lab": in_lab, "rgb": in_rgb}
EMPTY = 255  # white, for the background
LEAST = 4  # patches, for three components


@dataclass(frozen=True, kw_only=True)
class Pca(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    # which patches are analysed: all, or the foreground by the first component of all, the others being left white
    patches: Literal["all", "foreground"] = "all"
    # lab: the first component is the lightness, the second blue to yellow, the third green to red, which can be read in
    # grey and by colour-blind readers; rgb: red, green and blue, as DINOv2's
    colours: Literal["lab", "rgb"] = "lab"

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, columns checkpoints."""
        yield arranged(
            "pca",
            [image_panel(image.image) for image in request.images],
            [(viewer.name, self.blocks(viewer, request)) for viewer in request.viewers()],
            note=f"First three principal components of the patch tokens of {block_text(self.layer)}, of all images "
            "together; at the bottom, the share of the variance that each holds.",
        )

    def blocks(self, viewer: Viewer, request: PictureRequest) -> list[Block]:
        """A panel for each image."""
        maps = [viewer.patches(image.image, self.layer) for image in request.images]
        coloured, shares = self.coloured(maps)
        last, caption = len(coloured) - 1, ", ".join(f"{share:.0%}" for share in shares)
        return [
            [[Panel(values=colours, size=image.size, caption=caption if place == last else "")]]
            for place, (image, colours) in enumerate(zip(request.images, coloured, strict=True))
        ]

    def coloured(self, maps: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """Patch tokens (h, w, D) of each image -> colours (h, w, 3) uint8, and the components' shares of the variance.

        ValueError for too few patches.
        """
        tokens = np.concatenate([grid.reshape(-1, grid.shape[-1]) for grid in maps])
        chosen = self.chosen(tokens, np.concatenate([at_border(grid.shape[:2]) for grid in maps]))
        if chosen.sum() < LEAST or tokens.shape[1] < 3:
            raise ValueError(f"{chosen.sum()} patches are too few for three components; add images, or raise --size")
        components, shares = principal_components(tokens[chosen])
        colours = np.full((len(tokens), 3), EMPTY, np.uint8)
        colours[chosen] = COLOURINGS[self.colours](spread_evenly(components))
        ends = np.cumsum([grid.shape[0] * grid.shape[1] for grid in maps])[:-1]
        parts = np.split(colours, ends)
        return [part.reshape(*grid.shape[:2], 3) for part, grid in zip(parts, maps, strict=True)], shares

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
