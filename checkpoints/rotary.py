"""Rotary positions: queries and keys of a patch turn by angles that its position sets, two channels together.

Kinds, by the name a ViTSpec gives:
  axial    half of the channels turn by the row, half by the column, at periods 2 pi theta^(4i/d): EVA-02 (Fang et al.
           2023), RoPE-ViT (Heo et al. 2024), Perception Encoder (Bolya et al. 2025). Positions count patches, or are
           scaled to the grid of the pretraining (EVA-02 rope.py, VisionRotaryEmbeddingFast, ft_seq_len over pt_seq_len)
  centred  the same with positions from -1 to 1, at periods theta^(4i/d): DINOv3, rope_position_encoding.py
  mixed    every channel turns by row and column at once, at trained rates of its block and head: RoPE-ViT
The numbers are those of timm's modules, computed in float32 at least, whatever the precision of the network.
Letters: H heads, d channels of a head, L patches, l kept patches.
"""

from typing import Any

import torch
from timm.layers import RotaryEmbeddingDinoV3
from torch import Tensor, nn


class RoundedPeriods(RotaryEmbeddingDinoV3):
    """Periods with the precision of bfloat16: DINOv3 keeps them so in its files, and computes with them in float32."""

    def _compute_periods(self, *args: Any, **kwargs: Any) -> Tensor:
        exact = super()._compute_periods(*args, **kwargs)
        return exact.to(torch.bfloat16).to(exact.dtype)


def rounded(rope: RotaryEmbeddingDinoV3) -> RoundedPeriods:
    """The same positions with rounded periods."""
    return RoundedPeriods(
        rope.dim,
        temperature=rope.temperature,
        grid_offset=rope.grid_offset,
        grid_indexing=rope.grid_indexing,
        rotate_half=rope.rotate_half,
    )


def turns(rope: nn.Module, depth: int, grid: tuple[int, int], keep: Tensor | None) -> list[Tensor]:
    """For each block sines and cosines (L, 2d), or (H, L, 2d) of mixed ones, for the patches of `grid`.

    keep: (B, l) indices of the patches to encode; the tables are then (B, 1, l, 2d) or (B, H, l, 2d).
    """
    table = rope.get_embed(shape=list(grid))
    if table.ndim == 2:
        return [table if keep is None else table[keep].unsqueeze(1)] * depth
    return [of_block if keep is None else of_block[:, keep].transpose(0, 1) for of_block in table]
