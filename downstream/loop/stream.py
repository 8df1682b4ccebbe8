"""The order of training images, and the random numbers of their augmentation, as functions of the step alone.

Position p of the stream is image p mod N of epoch p div N's permutation, augmented by random numbers of its own. Step t
of batch size b takes positions tb..(t+1)b-1, however processes and micro-batches share them. A training that resumes
therefore reads the same images as without the interruption, and nothing has to be stored. N images of the set.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from engine.seeding import AUGMENT, seeded, shuffled


class Stream(Dataset):
    """Endless passes over `images`, a dataset of the mm libraries; item p is the image at position p."""

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
    """The positions of one process: `micro_batches` times `size` of them. mmengine's loop calls `skip` on resuming."""

    def __init__(self, size: int, micro_batches: int, rank: int, processes: int) -> None:
        self.size, self.micro_batches, self.rank, self.processes = size, micro_batches, rank, processes
        self.done = 0

    def skip(self, images: int) -> None:
        """Leave out the first `images` of this process."""
        self.done += images // self.size

    def __len__(self) -> int:
        return self.micro_batches * self.size

    def __iter__(self) -> Iterator[int]:
        for number in range(self.done, self.micro_batches):
            first = (number * self.processes + self.rank) * self.size
            yield from range(first, first + self.size)
