"""Features as the classifier sees them, read from their file and prepared a few rows at a time.

N rows of the file, D width, n and B rows of some fit or block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.rows import Rows, row_slices, taken

Preprocess = Literal["centre_and_normalise", "normalise", "none"]
READ = 8192  # rows prepared at once


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """The rows of `features` (N, D) prepared in the way `how`, on `device`. Nothing is kept in memory."""

    features: Rows
    how: Preprocess
    device: str = "cpu"

    def __len__(self) -> int:
        return len(self.features)

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def read(self, rows: np.ndarray) -> Tensor:
        """Some rows (B,) -> (B, D) float32."""
        return torch.from_numpy(preprocessed(taken(self.features, rows), self.how)[0]).to(self.device)

    def pieces(self, rows: np.ndarray) -> Iterator[Tensor]:
        """The same, at most READ rows at a time."""
        return (self.read(rows[part]) for part in row_slices(len(rows), READ))

    def shapeless(self, rows: np.ndarray) -> int:
        """How many of some rows (n,) have no direction."""
        parts = row_slices(len(rows), READ)
        return sum(preprocessed(taken(self.features, rows[part]), self.how)[1] for part in parts)


def preprocessed(rows: np.ndarray, how: Preprocess) -> tuple[np.ndarray, int]:
    """Features (N, D) float32 as the classifier sees them, and how many have no direction.

    "centre_and_normalise" subtracts from each row the mean over its D values and divides by its length (cyanure's
    preprocess with columns=False, MSN logistic_eval.py:172 and :214), "normalise" divides only. Rows without direction,
    constant or zero, become zero here, on which all classes score alike. cyanure gives them a random direction (its
    matrix.h, normalize); iBOT's and MOCA's own code divide by something near zero.
    """
    if how == "none":
        return np.array(rows), 0
    moved = rows - rows.mean(axis=1, keepdims=True) if how == "centre_and_normalise" else np.array(rows)
    lengths = np.linalg.norm(moved, axis=1, keepdims=True)
    # What float32 leaves of a constant row after centring is rounding, not zero.
    shapeless = lengths <= 1e-6 * np.linalg.norm(rows, axis=1, keepdims=True)
    moved /= np.where(shapeless, np.float32(np.inf), lengths)
    return moved, int(shapeless.sum())
