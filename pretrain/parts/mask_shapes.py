"""Shapes of masks beside the random one. Masks are drawn in the loader, for one image on its h x w grid of patches.

Most methods take masks from noise: the patches with the least are visible. So a shape is noise that is high where it
hides. Those whose images may hide different numbers of patches take the mask itself.
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
ATTEMPTS = 10  # for one block
MIN_SHARE = 16 / 196  # share of the patches in a block: 16 of 14 x 14 in BEiT's recipe
ASPECT = 0.3  # of a block, up to its inverse


@dataclass(frozen=True)
class MaskNoise:
    """Draws noise (L,) by whose ascending order the last `hidden` patches have the shape that `sampling` names.

    block: BEiT's rectangles, filled up at random where they hide too few. grid: the visible ones are a quarter of the
    patches, the same one in each square of 2 x 2. square: one square, its side the root of `hidden`.
    """

    sampling: Literal["random", "block", "grid", "square"]
    grid: tuple[int, int]
    hidden: int

    def __call__(self) -> Tensor:
        if self.sampling == "grid":
            return torch.rand(2, 2).repeat(self.grid[0] // 2, self.grid[1] // 2).flatten()
        return torch.rand(self.grid[0] * self.grid[1]) + SHAPES[self.sampling](self.grid, self.hidden).flatten()


@dataclass(frozen=True)
class BlockMask:
    """Draws masks (L,) bool of BEiT's rectangles as they come: images may hide different numbers of patches, now and
    then none, as in the sources.

    hidden, least, most, exact: as in `blocks`. Raises ValueError, by the names that the sources' options have for
    them, for what hides everything, or for rectangles that hardly ever fit.
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
                f"min_mask_patches_per_block={self.least}: must be no more than num_mask_patches={self.hidden}, or "
                "hardly any image would have a mask"
            )
        if self.most is not None and self.most < self.least:
            raise ValueError(
                f"max_mask_patches_per_block={self.most}: must be no less than min_mask_patches_per_block="
                f"{self.least}, or hardly any image would have a mask"
            )

    def __call__(self) -> Tensor:
        return blocks(self.grid, self.hidden, self.least, self.most, self.exact).flatten()


@dataclass(frozen=True, kw_only=True)
class VaryingMask:
    """Draws masks that hide a share of the patches which is itself drawn: one of `ratios`, each give or take its part
    of `spreads` (iBOT loader.py:33-116, "random MIM" of Zhou et al. 2022, section 3.2)."""

    shape: MaskShape
    ratios: tuple[float, ...]
    spreads: tuple[float, ...]

    def ratio(self) -> float:
        """Every share is drawn, then one of them is taken."""
        pairs = zip(self.ratios, self.spreads, strict=True)
        drawn = [random.uniform(ratio - spread, ratio + spread) if spread else ratio for ratio, spread in pairs]
        return random.choice(drawn) if len(drawn) > 1 else drawn[0]

    def __call__(self, grid: tuple[int, int]) -> Tensor:
        """(h, w) bool, True hidden. Draws from Python's generator, and NumPy's for shape="random"."""
        hidden = self.ratio() * grid[0] * grid[1]
        if self.shape == "block":
            return blocks(grid, hidden, least=(min(grid) // 3) ** 2)
        mask = np.arange(grid[0] * grid[1]) >= grid[0] * grid[1] - int(hidden)
        np.random.shuffle(mask)
        return torch.from_numpy(mask).view(grid)

    def several(self, count: int, grid: tuple[int, int]) -> Tensor:
        """(count, L), drawn one after the other."""
        return torch.stack([self(grid).flatten() for _ in range(count)])


def one_block(grid: tuple[int, int], count: int, roll: bool = True) -> Tensor:
    """(h, w) bool, True for `count` patches: a rectangle of aspect 1/2 to 2 less its last patches. With `roll`, what
    leaves the image comes in again at the opposite edge (CAPI data.py, BlockMasking). Draws from Python's generator."""
    rows, columns = grid
    least = max(math.log(0.5), math.log(count / columns**2))
    most = min(math.log(2), math.log(rows**2 / (count + 1e-5)))
    aspect = math.exp(random.uniform(least, most))
    height, width = math.ceil(math.sqrt(count * aspect)), math.ceil(math.sqrt(count / aspect))
    top, left = random.randint(0, rows - height), random.randint(0, columns - width)
    ids = torch.arange(rows * columns).view(grid)[top : top + height, left : left + width]
    mask = torch.zeros(rows * columns, dtype=torch.bool)
    mask[ids.flatten()[:count]] = True
    shifts = (random.randint(0, rows - 1), random.randint(0, columns - 1)) if roll else (0, 0)
    return mask.view(grid).roll(shifts, dims=(0, 1))


@dataclass(frozen=True, kw_only=True)
class VisibleAndPredicted:
    """Draws ids (V+m,): the V patches that an image shows, in order, and m of the hidden ones in random order."""

    shape: HiddenShape
    grid: tuple[int, int]
    hidden: int
    predicted: int
    roll: bool

    @property
    def seen(self) -> int:
        return self.grid[0] * self.grid[1] - self.hidden

    def mask(self) -> Tensor:
        """(h, w) bool, True hidden."""
        if self.shape == "random":
            mask = np.arange(self.grid[0] * self.grid[1]) < self.hidden
            np.random.shuffle(mask)
            return torch.from_numpy(mask).view(self.grid)
        if self.shape == "block":
            return one_block(self.grid, self.hidden, self.roll)
        return ~one_block(self.grid, self.seen, self.roll)

    def __call__(self) -> Tensor:
        mask = self.mask().flatten()
        hidden = mask.nonzero().flatten()
        return torch.cat([(~mask).nonzero().flatten(), hidden[torch.rand(self.hidden).argsort()[: self.predicted]]])


def stratified_masks(crops: int, masked: int, ratios: tuple[float, float], grid: tuple[int, int]) -> Tensor:
    """Masks (crops, L) of BEiT's rectangles for `masked` of the crops, in random order; their shares of the patches
    are uniform, each in its own one of as many equal parts of `ratios` (DINOv2 data/collate.py, data/masking.py).
    Draws from Python's generator.
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
    """BEiT's blockwise mask (Bao et al. 2022, algorithm 1; beit/masking_generator.py) -> (h, w) bool, True hidden.

    Rectangles of `least` patches or more, each of which hides `most` new ones or fewer (None: as many as are left),
    until `hidden` patches are covered, never more. Where ten rectangles in a row do not fit there are fewer, or with
    `exact` further tries (CAE furnace/masking_generator.py). Draws from Python's generator.
    """
    mask = torch.zeros(grid, dtype=torch.bool)
    left = hidden
    while left > 0:
        added = _block(mask, least, left if most is None else min(left, most))
        if not added and not exact:
            break
        left -= added
    return mask


def _block(mask: Tensor, least: int, most: float) -> int:
    """Cover one more rectangle of `mask` that hides 1 to `most` new patches; how many, 0 if none was found."""
    rows, columns = mask.shape
    for _ in range(ATTEMPTS):
        area = random.uniform(least, most)
        ratio = math.exp(random.uniform(math.log(ASPECT), math.log(1 / ASPECT)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height >= rows or width >= columns:
            continue
        top, left = random.randint(0, rows - height), random.randint(0, columns - width)
        block = mask[top : top + height, left : left + width]
        added = int((~block).sum())
        if 0 < added <= most:
            block.fill_(True)
            return added
    return 0


def _square(grid: tuple[int, int], hidden: int) -> Tensor:
    side = math.isqrt(hidden)
    top, left = random.randint(0, grid[0] - side), random.randint(0, grid[1] - side)
    mask = torch.zeros(grid, dtype=torch.bool)
    mask[top : top + side, left : left + side] = True
    return mask


SHAPES: dict[str, Callable[[tuple[int, int], int], Tensor]] = {
    "random": lambda grid, hidden: torch.zeros(grid),
    "block": lambda grid, hidden: blocks(grid, hidden, least=max(1, round(MIN_SHARE * grid[0] * grid[1]))),
    "square": _square,
}
