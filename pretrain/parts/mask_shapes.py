"""Shapes of masks: blocks, squares and grids, drawn in the loader for one image on its h x w grid of patches.

Most methods derive the mask from noise, one number for each patch: those with the lowest numbers are visible. For them,
a sampler draws noise that is high in the patches to hide (`MaskNoise`). Methods whose images may hide different numbers
of patches take the mask itself.
A mask is True for hidden patches. L = h w patches.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

MaskShape = Literal["random", "block"]
HiddenShape = Literal["inverse_block", "block", "random"]
MAX_ATTEMPTS = 10  # random rectangles that are tried for one block (beit/masking_generator.py)
MIN_SHARE = 16 / 196  # least share of the image's patches in a block: 16 of 14 x 14 in BEiT's recipe
MIN_ASPECT = 0.3  # least height over width of a block; the largest is its inverse (beit/masking_generator.py)


@dataclass(frozen=True)
class MaskNoise:
    """Draws noise (L,) whose `hidden` largest numbers form a mask of the shape `sampling`.

    block: BEiT's rectangles, and random patches if these hide too few. grid: one patch of each 2 x 2 is visible, at the
    same place in all of them. square: one square of side sqrt(hidden).
    """

    sampling: Literal["random", "block", "grid", "square"]
    grid: tuple[int, int]
    hidden: int

    def __call__(self) -> Tensor:
        rows, columns = self.grid
        if self.sampling == "grid":
            return torch.rand(2, 2).repeat(rows // 2, columns // 2).flatten()
        noise = torch.rand(rows * columns)
        return noise + SHAPES[self.sampling](self.grid, self.hidden).flatten()  # hidden patches have more than 1


@dataclass(frozen=True)
class BlockMask:
    """Draws masks (L,) bool of BEiT's rectangles. As in the sources, images may hide different numbers of patches, and
    occasionally none.

    hidden, least, most, exact: see `blocks`. Raises ValueError, which uses the names of the sources' options, if all
    patches would be hidden or rectangles would hardly ever fit.
    """

    grid: tuple[int, int]
    hidden: int
    least: int
    most: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        rows, columns = self.grid
        if not 0 < self.hidden < rows * columns:
            raise ValueError(f"num_mask_patches={self.hidden}: must be above 0 and below {rows} x {columns} patches")
        if not 0 <= self.least <= (rows - 1) * (columns - 1):
            raise ValueError(
                f"min_mask_patches_per_block={self.least}: must be 0 to {(rows - 1) * (columns - 1)}, the patches of "
                f"the largest rectangle, {rows - 1} x {columns - 1}"
            )
        if self.least > self.hidden:
            raise ValueError(
                f"min_mask_patches_per_block={self.least}: must be at most num_mask_patches={self.hidden}, or "
                "hardly any image would have a mask"
            )
        if self.most is not None and self.most < self.least:
            raise ValueError(
                f"max_mask_patches_per_block={self.most}: must be at least min_mask_patches_per_block="
                f"{self.least}, or hardly any image would have a mask"
            )

    def __call__(self) -> Tensor:
        return blocks(self.grid, self.hidden, self.least, self.most, self.exact).flatten()


@dataclass(frozen=True, kw_only=True)
class VaryingMask:
    """Draws masks with a random mask ratio: one of `ratios`, plus or minus its spread (iBOT loader.py:33-116; "random
    MIM" of Zhou et al. 2022, section 3.2)."""

    shape: MaskShape
    ratios: tuple[float, ...]
    spreads: tuple[float, ...]  # of each ratio, which is uniform in ratio - spread to ratio + spread

    def ratio(self) -> float:
        """A mask ratio. As in the source, all are drawn before one is chosen."""
        pairs = zip(self.ratios, self.spreads, strict=True)
        ratios = [random.uniform(ratio - spread, ratio + spread) if spread else ratio for ratio, spread in pairs]
        return random.choice(ratios) if len(ratios) > 1 else ratios[0]

    def __call__(self, grid: tuple[int, int]) -> Tensor:
        """A mask (h, w) bool, True for hidden patches. Draws from Python's generator, and from NumPy's for
        shape="random"."""
        hidden = self.ratio() * grid[0] * grid[1]
        if self.shape == "block":
            return blocks(grid, hidden, least=(min(grid) // 3) ** 2)
        patches = grid[0] * grid[1]
        mask = np.arange(patches) >= patches - int(hidden)
        np.random.shuffle(mask)
        return torch.from_numpy(mask).view(grid)

    def several(self, count: int, grid: tuple[int, int]) -> Tensor:
        """Masks (count, L), drawn one after the other."""
        return torch.stack([self(grid).flatten() for _ in range(count)])


def one_block(grid: tuple[int, int], count: int, roll: bool = True) -> Tensor:
    """A block (h, w) bool, True for `count` patches: the first patches of a rectangle of aspect ratio 1/2 to 2 (CAPI
    data.py, BlockMasking). Draws from Python's generator.

    roll: shift the block at random, wrapping around the image's edges.
    """
    rows, columns = grid
    # Bounds on the logarithm of height over width, within which the rectangle fits into the grid.
    min_log_aspect = max(math.log(0.5), math.log(count / columns**2))
    max_log_aspect = min(math.log(2), math.log(rows**2 / (count + 1e-5)))
    aspect = math.exp(random.uniform(min_log_aspect, max_log_aspect))
    height, width = math.ceil(math.sqrt(count * aspect)), math.ceil(math.sqrt(count / aspect))
    top, left = random.randint(0, rows - height), random.randint(0, columns - width)
    ids = torch.arange(rows * columns).view(grid)[top : top + height, left : left + width]
    mask = torch.zeros(rows * columns, dtype=torch.bool)
    mask[ids.flatten()[:count]] = True
    shifts = (random.randint(0, rows - 1), random.randint(0, columns - 1)) if roll else (0, 0)
    return mask.view(grid).roll(shifts, dims=(0, 1))


@dataclass(frozen=True, kw_only=True)
class VisibleAndPredicted:
    """Draws ids (V+m,): of the V visible patches, in raster order, then of m hidden patches, in random order."""

    shape: HiddenShape  # of the hidden patches
    grid: tuple[int, int]
    hidden: int  # hidden patches
    predicted: int  # m
    roll: bool  # see `one_block`

    @property
    def visible(self) -> int:
        """V."""
        return self.grid[0] * self.grid[1] - self.hidden

    def mask(self) -> Tensor:
        """A mask (h, w) bool, True for hidden patches."""
        if self.shape == "random":
            mask = np.arange(self.grid[0] * self.grid[1]) < self.hidden
            np.random.shuffle(mask)
            return torch.from_numpy(mask).view(self.grid)
        if self.shape == "block":
            return one_block(self.grid, self.hidden, self.roll)
        return ~one_block(self.grid, self.visible, self.roll)

    def __call__(self) -> Tensor:
        mask = self.mask().flatten()
        visible_ids, hidden_ids = (~mask).nonzero().flatten(), mask.nonzero().flatten()
        order = torch.rand(self.hidden).argsort()
        return torch.cat([visible_ids, hidden_ids[order[: self.predicted]]])


def stratified_masks(crops: int, masked: int, ratios: tuple[float, float], grid: tuple[int, int]) -> Tensor:
    """Masks (crops, L) bool of BEiT's rectangles for `masked` of the crops, in random order; the other crops have none
    (DINOv2 data/collate.py, data/masking.py). Draws from Python's generator.

    ratios: least and largest mask ratio. The range is divided into `masked` equal intervals, and each masked crop's
    ratio is uniform in one of them.
    """
    rows, columns = grid
    masks = []
    for low, high in pairwise(torch.linspace(*ratios, masked + 1).tolist()):
        hidden = int(rows * columns * random.uniform(low, high))
        masks.append(blocks(grid, hidden, least=4, most=rows // 2 * columns))
    masks += [torch.zeros(grid, dtype=torch.bool)] * (crops - masked)
    random.shuffle(masks)
    return torch.stack(masks).flatten(1)


def blocks(grid: tuple[int, int], hidden: float, least: int, most: int | None = None, exact: bool = False) -> Tensor:
    """BEiT's blockwise mask (h, w) bool, True for hidden patches (Bao et al. 2022, algorithm 1;
    beit/masking_generator.py). Draws from Python's generator.

    Args:
        grid: h and w.
        hidden: patches to hide; never more are hidden.
        least: patches in a rectangle, before its sides are rounded.
        most: patches that one rectangle may newly hide; None: as many as remain to be hidden.
        exact: keep trying until `hidden` patches are hidden (CAE furnace/masking_generator.py); otherwise stop after
            ten rectangles in a row that do not fit.
    """
    mask = torch.zeros(grid, dtype=torch.bool)
    remaining = hidden
    while remaining > 0:
        newly_hidden = _add_block(mask, least, remaining if most is None else min(remaining, most))
        if not newly_hidden and not exact:
            break
        remaining -= newly_hidden
    return mask


def _add_block(mask: Tensor, least: int, most: float) -> int:
    """Hide one more rectangle in `mask`, in place, with 1 to `most` newly hidden patches. Returns their number, or 0 if
    none of ten random rectangles fits."""
    rows, columns = mask.shape
    for _ in range(MAX_ATTEMPTS):
        area = random.uniform(least, most)
        aspect = math.exp(random.uniform(math.log(MIN_ASPECT), math.log(1 / MIN_ASPECT)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height >= rows or width >= columns:
            continue
        top, left = random.randint(0, rows - height), random.randint(0, columns - width)
        block = mask[top : top + height, left : left + width]
        newly_hidden = int((~block).sum())
        if 0 < newly_hidden <= most:
            block.fill_(True)
            return newly_hidden
    return 0


def _square(grid: tuple[int, int], hidden: int) -> Tensor:
    """A mask (h, w) bool, True for one square of side sqrt(hidden), rounded down."""
    side = math.isqrt(hidden)
    top, left = random.randint(0, grid[0] - side), random.randint(0, grid[1] - side)
    mask = torch.zeros(grid, dtype=torch.bool)
    mask[top : top + side, left : left + side] = True
    return mask


# Shape -> function of grid and number of hidden patches that draws a mask (h, w), 1 for patches to hide.
SHAPES: dict[str, Callable[[tuple[int, int], int], Tensor]] = {
    "random": lambda grid, hidden: torch.zeros(grid),
    "block": lambda grid, hidden: blocks(grid, hidden, least=max(1, round(MIN_SHARE * grid[0] * grid[1]))),
    "square": _square,
}
