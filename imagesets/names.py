"""PackedNames: the file names of a large set as one byte string with offsets.

A list of 1.28 million Python strings takes over 100 MB, and as much again in every forked loader process, because
reading a string writes its reference count. The packed names of ImageNet-1k take 47 MB, which all processes share.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 16  # names that `take` copies at a time, so that its index of their bytes takes only megabytes


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedNames:
    """An immutable sequence of N names; name i is blob[ends[i - 1]:ends[i]]."""

    blob: bytes  # all names, concatenated
    ends: np.ndarray  # (N,) int64

    @staticmethod
    def pack(names: Iterable[str]) -> "PackedNames":
        """Pack names, which may be any that a file system can hold, even if they are not UTF-8."""
        encoded = [os.fsencode(name) for name in names]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return PackedNames(blob=b"".join(encoded), ends=np.cumsum(lengths))

    @staticmethod
    def joined(parts: Sequence["PackedNames"]) -> "PackedNames":
        """The names of all parts, concatenated."""
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return PackedNames(blob=b"".join(part.blob for part in parts), ends=np.cumsum(lengths))

    @property
    def lengths(self) -> np.ndarray:
        """Length (N,) int64 of each name in bytes."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"name {index} of {len(self.ends)}")
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.blob[start : self.ends[index]])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: np.ndarray) -> "PackedNames":
        """The names at `indices` (M,), in that order. Raises IndexError for an index out of range."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"names {indices.min()} to {indices.max()} of {len(self)}")
        parts = [self._take_block(indices[start : start + BLOCK]) for start in range(0, len(indices), BLOCK)]
        return PackedNames.joined(parts)

    def _take_block(self, indices: np.ndarray) -> "PackedNames":
        starts = np.where(indices > 0, self.ends[indices - 1], 0)
        lengths = self.ends[indices] - starts
        ends = np.cumsum(lengths)
        byte_indices = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())  # into `blob`
        return PackedNames(blob=np.frombuffer(self.blob, np.uint8)[byte_indices].tobytes(), ends=ends)
