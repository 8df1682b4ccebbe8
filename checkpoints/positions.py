"""Position tables: sine-cosine tables, and how tables are resized to another grid.

Rules, by their name in ViTSpec.position_resize:
  bilinear           exact target size, no antialias: MaskFeat video_model_builder.py:1118-1141 ("trilinear", one frame)
  bicubic            exact target size, no antialias: MAE, MOCA, MSN, BEiT's absolute table, LUT
  bicubic_antialias  the same with antialias: timm, DINOv2 with registers
  bicubic_offset     sampling scale (target + 0.1) / source: DINO vision_transformer.py:174-194, iBOT, DINOv2
  relative_spline    relative tables by a cubic spline on a geometric grid: SimMIM utils.py:223-282, BEiT, data2vec;
                     absolute tables in such models by "bicubic": BEiT run_class_finetuning.py, CAE
  fixed              cannot be resized
Shapes: D width, h x w grid, H heads.
"""

from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints.spec import PositionRule

INTERPOLATE_MODES: dict[PositionRule, str] = {
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "relative_spline": "bicubic",
}
DINO_OFFSET = 0.1  # patches; added to both sides of the target grid, which shifts all sampling coordinates


def resize_positions(
    table: Tensor,
    source: tuple[int, int],
    target: tuple[int, int],
    rule: PositionRule,
    prefix: int = 0,
) -> Tensor:
    """Resize an absolute table (1, prefix + h*w, D) to (1, prefix + h'*w', D). Differentiable.

    Args:
        table: The table.
        source: Its grid (h, w).
        target: The new grid (h', w').
        rule: How to resize, see above.
        prefix: Number of rows for class token and registers, which come first and stay unchanged.

    Raises:
        ValueError: The table is not of the source grid, or its rule is "fixed".
    """
    if source == target:
        return table
    if table.shape[1] != prefix + source[0] * source[1]:
        raise ValueError(f"position table has {table.shape[1]} rows, not {prefix} + {source[0]} x {source[1]}")
    patches = table[:, prefix:].reshape(1, *source, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    if rule in INTERPOLATE_MODES:
        patches = F.interpolate(patches, size=target, mode=INTERPOLATE_MODES[rule], align_corners=False)
    elif rule == "bicubic_antialias":
        patches = F.interpolate(patches, size=target, mode="bicubic", align_corners=False, antialias=True)
    elif rule == "bicubic_offset":
        scales = [(new + DINO_OFFSET) / old for new, old in zip(target, source, strict=True)]
        # The operator takes size and scale separately, so rounding of the scale cannot change the requested grid.
        patches = torch.ops.aten.upsample_bicubic2d(patches, list(target), False, *scales)
    else:
        raise ValueError(f"the position table is for a {source[0]} x {source[1]} grid and its rule is {rule!r}")
    return torch.cat([table[:, :prefix], patches.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def sincos_positions(
    grid: tuple[int, int],
    width: int,
    first: Literal["column", "row"],
    prefix: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sine-cosine table (1, prefix + h*w, D) of a grid (h, w), with zeros in the first `prefix` rows.

    Half of the channels encode each axis, the `first` one in the first half. Column first: MAE util/pos_embed.py:20-67,
    MOCA, ExtreMA, LUT. Row first: MoCo-v3 vits.py:53-69. Raises ValueError unless the width is a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"width={width}: a sine-cosine table needs a multiple of 4")
    omega = 10000.0 ** -(np.arange(width // 4) / (width / 4))
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    channels = []
    for axis in (columns, rows) if first == "column" else (rows, columns):
        angles = np.outer(axis.reshape(-1), omega)
        channels += [np.sin(angles), np.cos(angles)]
    table = np.concatenate([np.zeros((prefix, width)), np.concatenate(channels, axis=1)])
    return torch.from_numpy(table)[None].to(dtype)  # NumPy would give the new axis a stride of 0, which DDP cannot copy


def resize_relative(table: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Resize a relative table ((2h-1)*(2w-1) + 3, H) of a window (h, w) to another window (h', w'). Differentiable.

    The last three rows (class to patch, patch to class, class to class) stay unchanged. The spline is linear in the
    table, so it is applied as a small matrix for each axis.
    """
    if source == target:
        return table
    old_rows, old_columns = 2 * source[0] - 1, 2 * source[1] - 1
    new_rows, new_columns = 2 * target[0] - 1, 2 * target[1] - 1
    offsets = table[:-3].reshape(old_rows, old_columns, -1)
    row_matrix = torch.from_numpy(_spline_matrix(old_rows, new_rows)).to(table)
    column_matrix = torch.from_numpy(_spline_matrix(old_columns, new_columns)).to(table)
    offsets = torch.einsum("ij,jkh,lk->ilh", row_matrix, offsets, column_matrix)
    return torch.cat([offsets.flatten(0, 1), table[-3:]])


@cache
def _spline_matrix(old: int, new: int) -> np.ndarray:
    """Weights (new, old) of a cubic spline from `old` geometrically spaced offsets to `new` whole offsets."""
    from scipy.interpolate import make_interp_spline

    if old == new:
        return np.eye(old)
    ratio = _geometric_ratio(old, new)
    distances = np.cumsum([ratio**step for step in range(old // 2)])
    positions = np.concatenate([-distances[::-1], [0.0], distances])
    spline = make_interp_spline(positions, np.eye(old), k=3, bc_type="not-a-knot")
    return spline(np.arange(new) - new // 2.0)


def _geometric_ratio(old: int, new: int) -> float:
    """The ratio q with (1 - q^(old//2)) / (1 - q) = new // 2, by bisection of [1.01, 1.5] to 1e-6.

    The official codes use the last midpoint, not the middle of the last interval; the fifth digit depends on it.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        middle = (low + high) / 2
        if (1 - middle ** (old // 2)) / (1 - middle) > new // 2:
            high = middle
        else:
            low = middle
    return middle
