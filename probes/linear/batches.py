"""The order of a linear probe's training images, and batches of cached features.

An epoch's order depends on seed and epoch alone, so a training that was killed resumes with the same batches.
B images of a batch, n training images, N images of a table, D width. A row is the features of one image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from probes.features.kinds import FeatureKind
from probes.features.readouts import joined
from probes.features.rows import Rows

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
        # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
        shuffled = np.random.RandomState([self.seed, epoch]).permutation(self.rows)
        return shuffled[: self.count * self.size]

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """The places (B,) of every batch."""
        order = self.order(epoch)
        for start in range(0, len(order), self.size):
            yield order[start : start + self.size]


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

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """The same, at most BLOCK rows at a time."""
        for start in range(0, len(rows), BLOCK):
            yield self.read(rows[start : start + BLOCK])


@dataclass(frozen=True, kw_only=True)
class CachedBatches:
    """Batches of cached features, the same in every epoch but for their order."""

    table: Table
    rows: np.ndarray  # (n,) rows of the table to train on
    plan: EpochPlan

    def run(self, epoch: int, step: Step, first: int = 0) -> None:
        for number, places in islice(enumerate(self.plan.batches(epoch)), first, None):
            step(number, *self.table.read(self.rows[places]))
