"""File names of a large set as one byte string and its offsets.

A list of 1.28 million Python strings costs over 100 MB and, since reading one touches its reference count, a copy of it
in every forked loader process. Packed, the names of ImageNet-1k take 47 MB, and processes share them.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 16  # names taken at a time, so that the places of their bytes take megabytes


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedNames:
    """An immutable sequence of N names. `blob` holds their bytes end to end; name i is blob[ends[i - 1]:ends[i]]."""

    blob: bytes
    ends: np.ndarray  # (N,) int64

    @staticmethod
    def pack(names: Iterable[str]) -> "PackedNames":
        """Pack names; any name that the file system can hold survives, also one that is not UTF-8."""
        encoded = [os.fsencode(name) for name in names]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return PackedNames(blob=b"".join(encoded), ends=np.cumsum(lengths))

    @staticmethod
    def joined(parts: Sequence["PackedNames"]) -> "PackedNames":
        """The names of all parts, one after another."""
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return PackedNames(blob=b"".join(part.blob for part in parts), ends=np.cumsum(lengths))

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each name (N,) int64."""
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
        """The names at `indices` (M,), in that order. IndexError for one that there is not."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"names {indices.min()} to {indices.max()} of {len(self)}")
        parts = [self._taken(indices[start : start + BLOCK]) for start in range(0, len(indices), BLOCK)]
        return PackedNames.joined(parts)

    def _taken(self, indices: np.ndarray) -> "PackedNames":
        starts = np.where(indices > 0, self.ends[indices - 1], 0)
        lengths = self.ends[indices] - starts
        ends = np.cumsum(lengths)
        # The place in `blob` of every byte of the result.
        places = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
        return PackedNames(blob=np.frombuffer(self.blob, np.uint8)[places].tobytes(), ends=ends)
