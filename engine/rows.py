"""Reading long arrays a few rows at a time, in particular features that are memory-mapped from a file.

A file of features may be larger than memory. Code that reads all of it reads a few rows at a time and then calls
`release_pages`, so that they do not count as this process's memory; the kernel caches as many as it has room for.

Letters: N rows of the file, n of them chosen, D width.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

ROWS_AT_ONCE = 16384  # rows that are read together: 48 MiB of a ViT-B's features
ROUNDING = 1e-5  # rounding error of a forward pass in float32, relative to the largest feature
MAX_COPIED_ROWS = 64  # rows, perhaps far apart, that are copied together: 8 MiB of pages
PAGE = mmap.PAGESIZE
RowIndex = int | slice | np.ndarray  # selects one row or several


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """A view (n, D) of chosen rows of an array: rows are copied when they are indexed; numpy.asarray copies all."""

    array: np.ndarray  # (N, D)
    chosen: np.ndarray  # (n,) rows of `array`

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.chosen), self.array.shape[1]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: RowIndex) -> np.ndarray:
        return self.array[self.chosen[rows]]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


Rows = np.ndarray | ChosenRows  # (n, D) float32


def row_slices(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` >= 1 rows that cover range(count); the last one may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def release_pages(features: Rows) -> None:
    """Release the pages of a memory-mapped file, so that they no longer count as this process's memory."""
    if (mapped := _mapped(features)) is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def copy_rows(features: Rows, rows: np.ndarray) -> np.ndarray:
    """A copy (B, D) of some rows (B,), made with the pages of at most MAX_COPIED_ROWS rows resident in addition to it.

    The kernel maps 128 KiB around every row that is read; for rows far apart this is many times their own size.
    """
    copy = np.empty((len(rows), features.shape[1]), features.dtype)
    for part in row_slices(len(rows), MAX_COPIED_ROWS):
        copy[part] = features[rows[part]]
        release_pages(features)
    return copy


def read_ahead(features: Rows, rows: np.ndarray) -> None:
    """Ask the kernel to read rows (B,) of a memory-mapped file in the background. rows: in ascending order."""
    mapped = _mapped(features)
    if mapped is None or not hasattr(mmap, "MADV_WILLNEED") or not len(rows):
        return
    places = features.chosen[rows] if isinstance(features, ChosenRows) else rows
    width = features.shape[1] * features.dtype.itemsize
    first_pages, last_pages = places * width // PAGE, ((places + 1) * width - 1) // PAGE  # of each row (B,)
    gaps = np.flatnonzero(first_pages[1:] > last_pages[:-1] + 1)  # where a page lies between one row and the next
    # Runs of pages without a gap.
    starts, ends = first_pages[np.append(0, gaps + 1)], last_pages[np.append(gaps, len(last_pages) - 1)]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        mapped.madvise(mmap.MADV_WILLNEED, start * PAGE, min((end + 1) * PAGE, len(mapped)) - start * PAGE)


def are_equal(features: Rows) -> bool:
    """Whether all rows are equal up to rounding, which on some processors depends on the position in a batch."""
    first = features[0]
    tolerance = ROUNDING * np.abs(first).max()
    for rows in row_slices(len(features), ROWS_AT_ONCE):
        same = bool((np.abs(features[rows] - first) <= tolerance).all())
        release_pages(features)
        if not same:
            return False
    return True


def _mapped(features: Rows) -> mmap.mmap | None:
    """The memory map of the file that holds the rows, or None if they are in memory."""
    array = features.array if isinstance(features, ChosenRows) else features
    mapped = getattr(array, "_mmap", None)
    return mapped if isinstance(mapped, mmap.mmap) else None
