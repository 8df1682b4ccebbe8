"""The order in which a linear probe sees its training images, and the batches of features that are on disk already.

An epoch's order depends on seed and epoch alone, so that a training that was killed goes on as if it had not been.
B rows of a batch, n training rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from probes.features.kinds import FeatureKind
from probes.features.readouts import joined

BLOCK = 1024  # rows read at once where no step is made

# What is done with a batch: its number in the epoch, features (B, D) of every readout, and labels (B,).
Step = Callable[[int, Mapping[str, Tensor], Tensor], None]
Readouts = Mapping[str, Sequence[FeatureKind]]


class Batches(Protocol):
    """One training set, cut into batches anew for every epoch."""

    @property
    def plan(self) -> "EpochPlan": ...
    @property
    def skipped(self) -> dict[int, str]: ...  # images that could not be read so far, and why
    @property
    def forwards(self) -> int: ...  # images that went through the backbone, so far
    # Call `step` with the batches of an epoch in order, from number `first` on.
    def run(self, epoch: int, step: Step, first: int = 0) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How `rows` training rows are plan. asked: rows of a batch; all rows make one batch where they are fewer.

    drop_last: leave out what does not fill a batch.
    """

    rows: int
    asked: int
    drop_last: bool
    seed: int

    @property
    def size(self) -> int:
        return min(self.asked, self.rows)

    @property
    def count(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)

    def order(self, epoch: int) -> np.ndarray:
        """Places 0..rows-1 in the order of an epoch, without those that are left out."""
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
    """Features that are on disk. arrays: kind -> (N, D). labels (N,). readouts: name -> kinds side by side."""

    arrays: Mapping[FeatureKind, np.ndarray]
    labels: np.ndarray
    readouts: Readouts
    device: str

    def read(self, rows: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        """Features of every readout (B, D) and labels (B,) of some rows, on the device."""
        found = {name: torch.from_numpy(joined(self.arrays, kinds, rows)) for name, kinds in self.readouts.items()}
        labels = torch.from_numpy(self.labels[rows])
        return {name: value.to(self.device) for name, value in found.items()}, labels.to(self.device)

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Some rows, at most BLOCK at once."""
        for start in range(0, len(rows), BLOCK):
            yield self.read(rows[start : start + BLOCK])


@dataclass(frozen=True, kw_only=True)
class CachedBatches:
    """Batches of features that never change. rows (n,): those of the table to train on."""

    table: Table
    rows: np.ndarray
    plan: EpochPlan
    skipped: dict[int, str] = field(default_factory=dict)
    forwards: int = 0

    def run(self, epoch: int, step: Step, first: int = 0) -> None:
        for number, places in islice(enumerate(self.plan.batches(epoch)), first, None):
            step(number, *self.table.read(self.rows[places]))
