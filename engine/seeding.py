"""Random numbers that depend on what they are for, not on when they are drawn.

Augmentations and drop path draw from the global generators of Python, NumPy and torch. `seeded` seeds these from a few
numbers (seed, epoch, image, ...) for the length of a block. So an image's crop is the same in every process, order and
run, and a training that resumes needs no generator's state. Saving and restoring the generators takes four times as
long as seeding them, so code that seeds for many images in a row calls `seed` inside one `fork_rng`.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

AUGMENT, MIX, DROP, START = range(4)  # purposes: each has a stream of its own for the same numbers


def stream_seeds(purpose: int, *numbers: int) -> np.ndarray:
    """Three seeds (3,) uint32 of the stream for `purpose` and `numbers`, each 0 or more."""
    return np.random.SeedSequence([purpose, *numbers]).generate_state(3)


def seed(purpose: int, *numbers: int, device: str = "cpu") -> None:
    """Seed the global generators of Python, NumPy and torch, and that of a CUDA `device`, with the stream."""
    python, numpy, torchs = map(int, stream_seeds(purpose, *numbers))
    random.seed(python)
    np.random.seed(numpy)
    torch.default_generator.manual_seed(torchs)  # torch.manual_seed would wake CUDA in every loader process
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(torchs)


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the global generators of the CPU after a block, whatever it draws. For one thread at a time."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])


@contextmanager
def seeded(purpose: int, *numbers: int, device: str = "cpu") -> Iterator[None]:
    """A block that draws from the stream and leaves the global generators as they were: `seed` in `fork_rng`."""
    with fork_rng():
        seed(purpose, *numbers, device=device)
        yield


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order (count,) of `count` training images in an epoch."""
    # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
    return np.random.RandomState([seed, epoch]).permutation(count)


def windowed(shards: Sequence[np.ndarray], window: int, seed: int, epoch: int) -> list[tuple[int, np.ndarray]]:
    """The order of an epoch in which `window` shards are read at a time: (start, images (n,)) of each part of a shard.

    Image i of a part is at start + i * window of the order. The shards follow each other at random and are cut into
    `window` lanes of equal length, in which the images of a shard are shuffled; the order takes one image of each lane
    in turn. So every stretch of `window` places has one image of each lane, and no shard is in two lanes but for those
    that a cut divides.

    shards: the images (n,) of each, in the order of the file, by which a divided shard falls into two halves.
    """
    random = np.random.RandomState([seed, epoch])
    queue = [shards[shard] for shard in random.permutation(len(shards))]
    images, numbers = np.concatenate(queue), np.repeat(np.arange(len(queue)), [len(shard) for shard in queue])
    parts = []
    for lane, places in enumerate(np.array_split(np.arange(len(images)), window)):
        for part in np.split(places, np.flatnonzero(np.diff(numbers[places])) + 1):
            parts.append((int(part[0] - places[0]) * window + lane, random.permutation(images[part])))
    return sorted(parts, key=lambda part: part[0])


def joined_order(parts: Sequence[tuple[int, np.ndarray]], window: int) -> np.ndarray:
    """The order (N,) of an epoch that consists of `parts`, see `windowed`."""
    order = np.empty(sum(len(images) for _, images in parts), np.int64)
    for start, images in parts:
        order[start::window][: len(images)] = images
    return order
