"""Position tables: their construction, and their resizing to another grid.

Rules, by the name a ViTSpec gives:
  bilinear           exact target size, no antialias: MaskFeat video_model_builder.py:1118-1141 ("trilinear", one frame)
  bicubic            exact target size, no antialias: MAE, MOCA, MSN, BEiT's absolute table, LUT
  bicubic_antialias  the same with antialias: timm, DINOv2 with registers
  bicubic_offset     sampling scale (target + 0.1) / source: DINO vision_transformer.py:174-194, iBOT, DINOv2
  relative_spline    relative tables by a cubic spline on a geometric grid: SimMIM utils.py:223-282, BEiT, data2vec;
                     beside them an absolute table as by "bicubic": BEiT run_class_finetuning.py, CAE
  fixed              no other grid is allowed
Letters: D width, h x w grid, H heads.
"""

from functools import cache
from typing import Literal

import numpy as np
import torch
from scipy.interpolate import make_interp_spline
from torch import Tensor
from torch.nn import functional as F

from checkpoints.spec import PositionRule

PLAIN_MODES: dict[PositionRule, str] = {"bilinear": "bilinear", "bicubic": "bicubic", "relative_spline": "bicubic"}
OFFSET = 0.1  # added by DINO to both sides of the target grid; it shifts every sampling coordinate


def resize_positions(
    table: Tensor,
    source: tuple[int, int],
    target: tuple[int, int],
    rule: PositionRule,
    prefix: int = 0,
) -> Tensor:
    """Absolute table (1, prefix + h*w, D) of the `source` grid -> (1, prefix + h'*w', D) of the `target` grid.

    The first `prefix` rows (class token, registers) stay. Works in the table's dtype and is differentiable.
    """
    if source == target:
        return table
    if table.shape[1] != prefix + source[0] * source[1]:
        raise ValueError(f"position table has {table.shape[1]} rows, not {prefix} + {source[0]} x {source[1]}")
    head, body = table[:, :prefix], table[:, prefix:]
    body = body.reshape(1, *source, -1).permute(0, 3, 1, 2)
    if rule in PLAIN_MODES:
        body = F.interpolate(body, size=target, mode=PLAIN_MODES[rule], align_corners=False)
    elif rule == "bicubic_antialias":
        body = F.interpolate(body, size=target, mode="bicubic", align_corners=False, antialias=True)
    elif rule == "bicubic_offset":
        scales = [(new + OFFSET) / old for new, old in zip(target, body.shape[2:], strict=True)]
        # The operator takes size and scale separately, so rounding of the scale cannot change the requested grid.
        body = torch.ops.aten.upsample_bicubic2d(body, list(target), False, *scales)
    else:
        raise ValueError(f"the position table is for a {source[0]} x {source[1]} grid and its rule is {rule!r}")
    return torch.cat([head, body.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def sincos_positions(
    grid: tuple[int, int],
    width: int,
    first: Literal["column", "row"],
    prefix: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sine-cosine table (1, prefix + h*w, D), zero prefix rows; half the channels for each axis, `first` axis first.

    Column first: MAE util/pos_embed.py:20-67, MOCA, ExtreMA, LUT. Row first: MoCo-v3 vits.py:53-69.
    """
    if width % 4:
        raise ValueError(f"width={width}: a sine-cosine table needs a multiple of 4")
    omega = 10000.0 ** -(np.arange(width // 4) / (width / 4))
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    halves = []
    for axis in (columns, rows) if first == "column" else (rows, columns):
        angle = np.outer(axis.reshape(-1), omega)
        halves += [np.sin(angle), np.cos(angle)]
    table = np.concatenate([np.zeros((prefix, width)), np.concatenate(halves, axis=1)])
    return torch.from_numpy(table)[None].to(dtype)  # NumPy would give the new axis a stride of 0, which DDP cannot copy


def resize_relative(table: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Relative table ((2h-1)*(2w-1) + 3, H) of the `source` window -> that of the `target` window.

    The last three rows (class to patch, patch to class, class to class) stay. The spline is linear in the table, so
    it is two small matrices; differentiable.
    """
    if source == target:
        return table
    spans = [(2 * old - 1, 2 * new - 1) for old, new in zip(source, target, strict=True)]
    body, extra = table[:-3], table[-3:]
    body = body.reshape(spans[0][0], spans[1][0], -1)
    down, across = (torch.from_numpy(_spline_matrix(old, new)).to(table) for old, new in spans)
    body = torch.einsum("ij,jkh,lk->ilh", down, body, across)
    return torch.cat([body.flatten(0, 1), extra])


@cache
def _spline_matrix(old: int, new: int) -> np.ndarray:
    """(new, old) weights of the cubic spline from `old` geometrically spaced offsets to `new` whole offsets."""
    if old == new:
        return np.eye(old)
    ratio = _geometric_ratio(old, new)
    distances = np.cumsum([ratio**step for step in range(old // 2)])
    places = np.concatenate([-distances[::-1], [0.0], distances])
    spline = make_interp_spline(places, np.eye(old), k=3, bc_type="not-a-knot")
    return spline(np.arange(new) - new // 2.0)


def _geometric_ratio(old: int, new: int) -> float:
    """q with (1 - q^(old//2)) / (1 - q) = new // 2, bisected on [1.01, 1.5] to 1e-6.

    The sources use the last midpoint they tried, not the middle of the last interval; it shows in the fifth digit.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        middle = (low + high) / 2
        if (1 - middle ** (old // 2)) / (1 - middle) > new // 2:
            high = middle
        else:
            low = middle
    return middle
