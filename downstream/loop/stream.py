"""The order of training images, and the random numbers of their augmentation, as functions of the step alone.

Position p of the stream is image p mod N of epoch p div N's permutation, augmented by random numbers of its own. Step t
of a batch of B takes positions tB..(t+1)B-1, however they are shared by processes and accumulated parts. A training
that goes on after a kill therefore sees what it would have seen; nothing has to be stored.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from engine.seeding import AUGMENT, seeded, shuffled


class Stream(Dataset):
    """Passes without end over `images`, a dataset of the mm libraries; items are asked for by position."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    @property
    def metainfo(self) -> dict[str, Any]:
        """Class names, for the Runner."""
        return self.images.metainfo

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> Any:
        epoch, place = divmod(position, len(self.images))
        with seeded(AUGMENT, self.seed, position):
            return self.images[int(shuffled(len(self.images), self.seed, epoch)[place])]


class Positions(Sampler[int]):
    """Positions of one process, `parts` times `at_once`. `skip` is what mmengine's loop calls on resuming."""

    def __init__(self, at_once: int, parts: int, rank: int, processes: int) -> None:
        self.at_once, self.parts, self.rank, self.processes = at_once, parts, rank, processes
        self.done = 0

    def skip(self, images: int) -> None:
        """Leave out the first `images` of this process."""
        self.done += images // self.at_once

    def __len__(self) -> int:
        return self.parts * self.at_once

    def __iter__(self) -> Iterator[int]:
        for part in range(self.done, self.parts):
            first = (part * self.processes + self.rank) * self.at_once
            yield from range(first, first + self.at_once)
