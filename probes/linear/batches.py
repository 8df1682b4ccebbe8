"""In which order does a linear probe see its training images, and how are cached features read in this order?

An epoch's order depends on seed and epoch alone, so a training that was killed resumes with the same batches.

A file larger than memory cannot be read row by row in random order, because each row would cost a read of the disk. So
an epoch goes through windows of about MAX_WINDOW rows, each of which is copied into memory and shuffled. While the
heads train on one window, the next one is read.

Most sets are sorted by class, so a window must not be one stretch of the file. The file is cut into runs of RUN rows,
and the runs into sections of as many consecutive runs as there are windows. Each window takes one run of every section,
drawn anew in each epoch. So all windows have nearly the same share of each class, and reading a window is one sweep
through the file. Sets of up to MAX_WINDOW images are one window, shuffled as a whole.

B images of a batch, n training images, N rows of a table, D width. A row is the features of one image.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.rows import Rows, copy_rows, read_ahead, release_pages, row_slices
from probes.features.kinds import FeatureKind, joined

MAX_WINDOW = 65536  # rows: 201 MB for D = 768
RUN = 16  # adjacent rows: 24 KB for D = 384. With 20 windows, each has 4 to 5 runs of a class of 1300 images


def window_size(rows: int) -> int:
    """Rows of each window if there are `rows` in all; the last one may be shorter."""
    return -(-rows // -(-rows // MAX_WINDOW))


def reading_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Rows 0..rows-1 in the order of an epoch (rows,)."""
    # RandomState's streams are frozen forever (NumPy NEP 19); those of default_rng may change with a release.
    random = np.random.RandomState([seed, epoch])
    if rows <= MAX_WINDOW:
        return random.permutation(rows)
    windows, runs = -(-rows // MAX_WINDOW), -(-rows // RUN)
    sections = np.arange(-(-runs // windows))
    # (sections, windows): the run of each section that each window takes.
    choice = random.random_sample((len(sections), windows)).argsort(axis=1, kind="stable")
    run_of = sections[:, None] * windows + choice
    # (windows, sections): each window's runs, shuffled. Windows are cut by rows below, and some lack a run of the last
    # section, so runs next to a cut move into the neighbouring window: random ones, thanks to the shuffling.
    shuffled = random.random_sample((windows, len(sections))).argsort(axis=1, kind="stable")
    run_order = np.take_along_axis(run_of.T, shuffled, axis=1).ravel()
    order = (run_order[run_order < runs, None] * RUN + np.arange(RUN)).ravel()
    order = order[order < rows]
    for window in row_slices(rows, window_size(rows)):
        order[window] = random.permutation(order[window])
    return order


BLOCK_ROWS = 1024  # rows that heads are evaluated on at a time

Readouts = Mapping[str, Sequence[FeatureKind]]  # name -> features that a head reads side by side


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How the training images of an epoch are divided into batches."""

    images: int  # training images
    requested_batch: int  # images of a batch, as set
    drop_last: bool  # leave out images that do not fill a batch
    seed: int  # of the order

    @property
    def batch(self) -> int:
        """Images of a batch; all training images if they are fewer than requested."""
        return min(self.requested_batch, self.images)

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.batch if self.drop_last else -(-self.images // self.batch)

    @property
    def images_per_epoch(self) -> int:
        """Images without those that an epoch leaves out."""
        return min(self.images, self.steps_per_epoch * self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """Numbers 0..images-1 in the order of an epoch, without those that are left out."""
        return reading_order(self.images, self.seed, epoch)[: self.images_per_epoch]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cached features and labels of N images."""

    arrays: Mapping[FeatureKind, Rows]  # kind -> (N, D)
    labels: np.ndarray  # (N,)
    readouts: Readouts
    device: str  # of the rows that are returned

    def read(self, rows: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        """Features (B, D) of every readout and labels (B,) of some rows, on the device."""
        features = {name: torch.from_numpy(joined(self.arrays, kinds, rows)) for name, kinds in self.readouts.items()}
        labels = torch.from_numpy(self.labels[rows])
        return {name: value.to(self.device) for name, value in features.items()}, labels.to(self.device)

    def copy_of_rows(self, rows: np.ndarray) -> "Table":
        """A table in memory with copies of some rows (B,)."""
        arrays = {kind: copy_rows(values, rows) for kind, values in self.arrays.items()}
        return replace(self, arrays=arrays, labels=self.labels[rows])

    def read_ahead(self, rows: np.ndarray) -> None:
        """Ask the kernel to read some rows (B,), ascending, from disk in the background."""
        for values in self.arrays.values():
            read_ahead(values, rows)

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Features (B, D) of every readout and labels (B,) of some rows, at most BLOCK_ROWS rows at a time."""
        for start in range(0, len(rows), BLOCK_ROWS):
            yield self.read(rows[start : start + BLOCK_ROWS])
            for values in self.arrays.values():
                release_pages(values)

    def batches(
        self, rows: np.ndarray, plan: EpochPlan, epoch: int, first: int = 0
    ) -> Iterator[tuple[int, dict[str, Tensor], Tensor]]:
        """The batches of an epoch, from number `first` on: number, features (B, D) of every readout, labels (B,).

        Every epoch has the same features in another order. Memory beyond a batch: a window of the table, 4 D bytes per
        row with D of all kinds together, and 50 bytes per row of the file while the order is drawn.

        rows: (n,) rows of the table to train on.
        """
        batch, steps = plan.batch, plan.steps_per_epoch
        order = rows[plan.order(epoch)]
        # The first batch that begins in each window: a batch that lies in two windows is read with the first of them.
        starts = sorted({-(-start // batch) for start in range(0, len(order), window_size(plan.images))})
        windows = [range(max(start, first), end) for start, end in pairwise([*starts, steps]) if end > first]

        def rows_of(window: range) -> np.ndarray:
            """The rows of a window's batches, ascending."""
            return np.sort(order[window.start * batch : window.stop * batch])

        for window, next_window in pairwise([*windows, range(0)]):
            window_rows = rows_of(window)
            copy = self.copy_of_rows(window_rows)
            self.read_ahead(rows_of(next_window))
            for number in window:
                batch_rows = order[number * batch : (number + 1) * batch]
                yield number, *copy.read(np.searchsorted(window_rows, batch_rows))
            del copy  # before the next window is copied
