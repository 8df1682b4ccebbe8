"""File names of a large set as one byte string and its offsets.

A list of 1.28 million Python strings costs over 100 MB and, since reading one touches its reference count, a copy of it
in every forked loader process. Packed, the names of ImageNet-1k take 47 MB, and processes share them.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


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
        """The names at `indices` (M,), in that order."""
        return PackedNames.pack(self[index] for index in indices)
