"""The order of a linear probe's training images, and batches of cached features.

An epoch's order depends on seed and epoch alone, so a training that was killed resumes with the same batches.

A file larger than memory cannot be read row by row in random order: each row would cost a read of the disk. So an epoch
goes through windows of about WINDOW rows, and within one its rows are shuffled. Images lie class by class in most sets,
so a window is no piece of the file: the file is cut into sections of as many runs of RUN rows as there are windows, and
each window takes one run of every section, drawn anew in every epoch. All windows then have the classes in nearly the
same shares, a window is one sweep through the file, and the next one is read while the heads train on this one. A set
of up to WINDOW images is one window, shuffled as a whole.

B images of a batch, n training images, N images of a table, D width. A row is the features of one image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.rows import Rows, copy_rows, read_ahead, release_pages, row_slices
from probes.features.kinds import FeatureKind, joined

WINDOW = 65536  # rows: 201 MB for D = 768
RUN = 16  # rows that lie together: 24 KB for D = 384. Of a class of 1300 images a window of 20 has 4 to 5 runs


def window_size(rows: int) -> int:
    """Rows of a window where there are so many in all."""
    return -(-rows // -(-rows // WINDOW))


def reading_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Places 0..rows-1 in the order of an epoch."""
    # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
    random = np.random.RandomState([seed, epoch])
    if rows <= WINDOW:
        return random.permutation(rows)
    windows, runs = -(-rows // WINDOW), -(-rows // RUN)
    sections = np.arange(-(-runs // windows))
    # Row s: the runs of section s, the w-th of which goes to window w; then row w: those of window w in random order,
    # as those with a run less end a little earlier.
    drawn = sections[:, None] * windows + random.random_sample((len(sections), windows)).argsort(axis=1, kind="stable")
    mixed = random.random_sample((windows, len(sections))).argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(drawn.T, mixed, axis=1).ravel()
    places = (ordered[ordered < runs, None] * RUN + np.arange(RUN)).ravel()
    places = places[places < rows]
    for window in row_slices(rows, window_size(rows)):
        places[window] = random.permutation(places[window])
    return places


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
        features = {name: torch.from_numpy(joined(self.arrays, kinds, rows)) for name, kinds in self.readouts.items()}
        labels = torch.from_numpy(self.labels[rows])
        return {name: value.to(self.device) for name, value in features.items()}, labels.to(self.device)

    def copy_of_rows(self, rows: np.ndarray) -> "Table":
        """A table of some rows (B,) alone, in memory."""
        arrays = {kind: copy_rows(values, rows) for kind, values in self.arrays.items()}
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

        Memory beyond a batch: a window of the table, 4 D bytes a row, D of all kinds, and 50
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
            near = self.table.copy_of_rows(rows)
            self.table.read_ahead(inside(following))
            for number in window:
                batch = order[number * size : (number + 1) * size]
                step(number, *near.read(np.searchsorted(rows, batch)))
            del near  # before the next window is copied
