"""Lists of images and their masks, and how the values of a mask become classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

IGNORED = 255  # value of pixels that no loss and no score counts


@dataclass(frozen=True, kw_only=True)
class Listing:
    """images, masks: paths (N,) below a root. classes: names (K,). classes_of: class of each value 0..255 of a mask."""

    images: tuple[str, ...]
    masks: tuple[str, ...]
    classes: tuple[str, ...]
    classes_of: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """What a fingerprint is of."""
        return (*self.images, *self.masks)

    @cached_property
    def table(self) -> np.ndarray:
        """(256,) uint8."""
        return np.array(self.classes_of, np.uint8)

    def coded(self, mask: np.ndarray) -> np.ndarray:
        """Values of a mask's file (H, W) uint8 -> classes (H, W) uint8, IGNORED where there is none."""
        return self.table[mask]

    @property
    def allowed(self) -> str:
        """The values that a mask's file may hold, such as "0 to 150, 255"."""
        known = {*range(len(self.classes)), IGNORED}
        values = [value for value, number in enumerate(self.classes_of) if number in known]
        starts = [value for value in values if value - 1 not in values]
        ends = [value for value in values if value + 1 not in values]
        return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))

    def take(self, indices: Sequence[int] | np.ndarray) -> "Listing":
        images, masks = self.images, self.masks
        return replace(self, images=tuple(images[i] for i in indices), masks=tuple(masks[i] for i in indices))


def files_below(folder: Path, suffix: str) -> list[str]:
    """Sorted paths, relative to `folder`, of the files below it that end in `suffix`."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}") if path.is_file())
