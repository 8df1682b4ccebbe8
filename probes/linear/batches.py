"""The order of a linear probe's training images, and batches of cached features.

An epoch's order depends on seed and epoch alone, so a training that was killed resumes with the same batches.
B images of a batch, n training images, N images of a table, D width. A row is the features of one image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from probes.features.kinds import FeatureKind
from probes.features.readouts import joined
from probes.features.rows import Rows, read_ahead, release_pages, taken
from probes.linear.windows import reading_order, window_size

BLOCK = 1024  # rows of a block, where the heads are only evaluated

# Called with a batch: its number in the epoch, features (B, D) of every readout, and labels (B,).
Step = Callable[[int, Mapping[str, Tensor], Tensor], None]
Readouts = Mapping[str, Sequence[FeatureKind]]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How the training images of an epoch are divided into batches."""

    rows: int  # training images
    asked: int  # images of a batch; fewer training images make a single batch
    drop_last: bool  # leave out images that do not fill a batch
    seed: int  # of the order

    @property
    def size(self) -> int:
        return min(self.asked, self.rows)

    @property
    def count(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)

    def order(self, epoch: int) -> np.ndarray:
        """Places 0..rows-1 in the order of an epoch, without images that are left out."""
        return reading_order(self.rows, self.seed, epoch)[: self.count * self.size]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cached features of a set of images."""

    arrays: Mapping[FeatureKind, Rows]  # kind -> (N, D)
    labels: np.ndarray  # (N,)
    readouts: Readouts  # name -> kinds side by side
    device: str  # on which rows are returned

    def read(self, rows: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        """Features (B, D) of every readout and labels (B,) of some rows, on the device."""
        found = {name: torch.from_numpy(joined(self.arrays, kinds, rows)) for name, kinds in self.readouts.items()}
        labels = torch.from_numpy(self.labels[rows])
        return {name: value.to(self.device) for name, value in found.items()}, labels.to(self.device)

    def taken(self, rows: np.ndarray) -> "Table":
        """A table of some rows (B,) alone, in memory."""
        arrays = {kind: taken(values, rows) for kind, values in self.arrays.items()}
        return replace(self, arrays=arrays, labels=self.labels[rows])

    def read_ahead(self, rows: np.ndarray) -> None:
        """Have the kernel read some rows (B,), ascending, from disk meanwhile."""
        for values in self.arrays.values():
            read_ahead(values, rows)

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """The same, at most BLOCK rows at a time."""
        for start in range(0, len(rows), BLOCK):
            yield self.read(rows[start : start + BLOCK])
            for values in self.arrays.values():
                release_pages(values)


@dataclass(frozen=True, kw_only=True)
class CachedBatches:
    """Batches of cached features, the same in every epoch but for their order."""

    table: Table
    rows: np.ndarray  # (n,) rows of the table to train on
    plan: EpochPlan

    def run(self, epoch: int, step: Step, first: int = 0) -> None:
        """Call `step` with the batches of an epoch in order, from number `first` on.

        Memory beyond a batch: a window (probes/linear/windows.py) of the table, 4 D bytes a row, D of all kinds, and 50
        bytes for the place of each row of the file while the order is drawn.
        """
        size, count = self.plan.size, self.plan.count
        order = self.rows[self.plan.order(epoch)]
        # The first batches of all windows: a batch that lies in two windows is read with the first of them.
        starts = sorted({-(-start // size) for start in range(0, len(order), window_size(self.plan.rows))})
        windows = [range(max(start, first), end) for start, end in pairwise([*starts, count]) if end > first]

        def inside(window: range) -> np.ndarray:
            return np.sort(order[window.start * size : window.stop * size])

        for window, following in pairwise([*windows, range(0)]):
            rows = inside(window)
            near = self.table.taken(rows)
            self.table.read_ahead(inside(following))
            for number in window:
                batch = order[number * size : (number + 1) * size]
                step(number, *near.read(np.searchsorted(rows, batch)))
            del near  # before the next window is copied
