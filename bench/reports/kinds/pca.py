"""Principal components of the patch tokens of all images together, as colours.

Figure 1 of DINOv2 and of DINOv3: patches with the same colour, also in different images, have similar tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.reports.pictures import Block, Panel, Picture, arranged
from bench.reports.visualize import PictureRequest, Viewer, block_text, image_panel
from engine.errors import option
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
LIGHTNESS = (0.25, 0.92)  # of the lowest and the highest value
MAX_CHROMA = 0.11  # of OKLab; colours with more are outside of sRGB
PERCENTILES = (1, 99)  # of a component that get the darkest and the lightest colour


def principal_components(tokens: np.ndarray, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The first K components (N, K) of tokens (N, D), and their shares (K,) of the variance.

    The sign of a component is such that its largest entry is positive.
    """
    from sklearn.decomposition import PCA

    with np.errstate(invalid="ignore"):  # 0 / 0 for identical tokens, which have no variance
        fitted = PCA(count, svd_solver="covariance_eigh").fit(tokens.astype(np.float64))
    return fitted.transform(tokens), np.nan_to_num(fitted.explained_variance_ratio_)


def is_foreground(component: np.ndarray, on_border: np.ndarray) -> np.ndarray:
    """Mask (N,) of the foreground patches, True for foreground; all patches if the component does not separate them.

    Patches are separated by Otsu's threshold of the first component; the foreground is the side of which a smaller
    share lies at an image's border.

    Args:
        component: first principal component (N,).
        on_border: (N,) bool, True for patches at the border of an image.
    """
    is_above = component > _otsu_threshold(component)
    if is_above.all() or not is_above.any():
        return np.ones(len(component), bool)
    return is_above if on_border[is_above].mean() <= on_border[~is_above].mean() else ~is_above


def _otsu_threshold(values: np.ndarray) -> float:
    """The threshold of values (N,) with the largest variance between the two sides (Otsu 1979)."""
    if len(values) < 2:
        return 0.0
    ordered = np.sort(values)
    count_below = np.arange(1, len(ordered))
    count_above = len(ordered) - count_below
    sums = ordered.cumsum()
    mean_below, mean_above = sums[:-1] / count_below, (sums[-1] - sums[:-1]) / count_above
    variance_between = count_below * count_above * np.square(mean_below - mean_above)
    return float(ordered[variance_between.argmax()])


def spread_evenly(components: np.ndarray) -> np.ndarray:
    """Components (N, K) scaled to values from 0 to 1 between their PERCENTILES."""
    low, high = np.percentile(components, PERCENTILES, axis=0)
    return np.clip((components - low) / np.maximum(high - low, 1e-12), 0, 1)


def in_rgb(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as red, green and blue (..., 3) uint8."""
    return np.rint(255 * values).astype(np.uint8)


def in_lab(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as lightness, blue to yellow and green to red of OKLab; sRGB (..., 3) uint8.

    The first is visible in grey prints, the second to nearly all colour-blind readers.
    """
    darkest, lightest = LIGHTNESS
    lightness = darkest + (lightest - darkest) * values[..., 0]
    yellow, red = (MAX_CHROMA * (2 * values[..., component] - 1) for component in (1, 2))
    cones = np.stack([lightness, red, yellow], axis=-1) @ TO_CONES.T
    linear = np.clip(cones**3 @ TO_RGB.T, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)  # IEC 61966-2-1
    return in_rgb(srgb)


COLOURINGS = {"lab": in_lab, "rgb": in_rgb}
BACKGROUND = 255  # white
MIN_PATCHES = 4  # for three components


@dataclass(frozen=True, kw_only=True)
class Pca(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    # all patches are analysed, or only the foreground, which the first component of all patches separates from the
    # background, shown white
    patches: Literal["all", "foreground"] = "all"
    # lab: the first component is the lightness, the second blue to yellow, the third green to red; this can be read in
    # grey and by colour-blind readers. rgb: red, green and blue, as in DINOv2
    colours: Literal["lab", "rgb"] = "lab"

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, columns checkpoints."""
        yield arranged(
            "pca",
            [image_panel(image.image) for image in request.images],
            [(viewer.name, self.blocks(viewer, request)) for viewer in request.viewers],
            note=f"First three principal components of the patch tokens of {block_text(self.layer)}, of all images "
            "together; at the bottom, the share of the variance that each holds.",
        )

    def blocks(self, viewer: Viewer, request: PictureRequest) -> list[Block]:
        """A panel for each image."""
        maps = [viewer.patches(image.image, self.layer) for image in viewer.images()]
        coloured, shares = self.coloured(maps)
        captions = [""] * (len(coloured) - 1) + [", ".join(f"{share:.0%}" for share in shares)]
        return [
            [[Panel(values=colours, size=image.size, caption=caption)]]
            for image, colours, caption in zip(request.images, coloured, captions, strict=True)
        ]

    def coloured(self, maps: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """Colours (h, w, 3) uint8 of each image, and the shares (3,) of the components in the variance.

        maps: patch tokens (h, w, D) of each image. ValueError for too few patches.
        """
        tokens = np.concatenate([grid.reshape(-1, grid.shape[-1]) for grid in maps])
        on_border = np.concatenate([at_border(grid.shape[:2]) for grid in maps])
        is_analysed = self.analysed_patches(tokens, on_border)
        if is_analysed.sum() < MIN_PATCHES or tokens.shape[1] < 3:
            few = f"{is_analysed.sum()} patches are too few for three components"
            raise ValueError(f"{few}; add images, or raise {option('image_size')}")
        components, shares = principal_components(tokens[is_analysed])
        colours = np.full((len(tokens), 3), BACKGROUND, np.uint8)
        colours[is_analysed] = COLOURINGS[self.colours](spread_evenly(components))
        ends = np.cumsum([grid.shape[0] * grid.shape[1] for grid in maps])[:-1]
        colours_of_images = np.split(colours, ends)
        return [part.reshape(*grid.shape[:2], 3) for part, grid in zip(colours_of_images, maps, strict=True)], shares

    def analysed_patches(self, tokens: np.ndarray, on_border: np.ndarray) -> np.ndarray:
        """Mask (N,), True for patches that are analysed. tokens: (N, D). on_border: (N,), from `at_border`."""
        if self.patches == "all":
            return np.ones(len(tokens), bool)
        return is_foreground(principal_components(tokens, 1)[0][:, 0], on_border)


def at_border(grid: tuple[int, int]) -> np.ndarray:
    """Mask (h * w,) of the patches of a grid, row by row, True at its border. grid: (h, w)."""
    on_border = np.ones(grid, bool)
    on_border[1:-1, 1:-1] = False
    return on_border.ravel()
