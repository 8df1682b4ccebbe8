"""Lists of images and their masks, and how the values of a mask become classes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

IGNORED = 255  # value of pixels that no loss and no score counts
WHITE = 0xFFFFFF  # their colour, where masks show colours


@dataclass(frozen=True, kw_only=True)
class Listing:
    """images, masks: paths (N,) below a root. classes: names (K,). classes_of: class of each value 0..255 of a mask.

    colours: red, green and blue (K,) of each class where masks show colours; empty where they hold values.
    own_classes: whether a file of the set lists them, and not the layout.
    """

    images: tuple[str, ...]
    masks: tuple[str, ...]
    classes: tuple[str, ...]
    classes_of: tuple[int, ...]
    colours: tuple[tuple[int, ...], ...] = ()
    own_classes: bool = False
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
        """Values of a mask's file (H, W) uint8 -> classes (H, W) uint8, IGNORED where there is none.

        Of colours (H, W, 3). ValueError for a value or colour that is no class's and is not ignored.
        """
        return self._coded_colours(mask) if self.colours else self._coded_values(mask)

    def _coded_values(self, mask: np.ndarray) -> np.ndarray:
        values = np.flatnonzero(np.bincount(mask.ravel(), minlength=256))  # four times as fast as np.unique
        unknown = values[(self.table[values] >= len(self.classes)) & (self.table[values] != IGNORED)]
        if len(unknown):
            raise ValueError(
                f"the mask holds the value {unknown[0]}, allowed are {self.allowed}; "
                "is this the annotation of another version of the set?"
            )
        return self.table[mask]

    def _coded_colours(self, mask: np.ndarray) -> np.ndarray:
        known = {_packed(np.array(colour)): number for number, colour in enumerate(self.colours)}
        shown, places = np.unique(_packed(mask), return_inverse=True)
        codes = [({WHITE: IGNORED} | known).get(value) for value in shown.tolist()]
        if None in codes:
            value = int(shown[codes.index(None)])
            colour = f"{value >> 16} {value >> 8 & 255} {value & 255}"
            raise ValueError(f"the mask shows the colour {colour}, which is that of none of the {len(known)} classes")
        return np.array(codes, np.uint8)[places].reshape(mask.shape[:2])

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


def _packed(colours: np.ndarray) -> np.ndarray:
    """Red, green and blue (..., 3) -> numbers (...), red first."""
    red, green, blue = np.moveaxis(colours.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def paired(root: Path, split: str, pictures: Sequence[str], folder: str, hint: str = "") -> tuple[str, ...]:
    """Paths below `root` of the masks in `folder`, which have the pictures' names, as PNG. ValueError if any lacks."""
    there = set(files_below(root / folder, ".png"))
    masks = [f"{name.rpartition('.')[0]}.png" for name in pictures]
    lacking = [name for name in masks if name not in there]
    if lacking:
        some = f"{len(lacking)} of {len(pictures)} images of {split}"
        raise ValueError(f"{some} have no annotation, such as {folder}/{lacking[0]}{hint}")
    if twice := [name for name, count in Counter(masks).items() if count > 1]:
        raise ValueError(f"two images of {split} have the mask {folder}/{twice[0]}; give them names of their own")
    return tuple(f"{folder}/{name}" for name in masks)


def files_below(folder: Path, suffix: str) -> list[str]:
    """Sorted paths, relative to `folder`, of whatever below it ends in `suffix` and is no folder.

    Pipes and broken links are among them, so that reading names them instead of passing over an image.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}") if not path.is_dir())
