"""Random numbers that depend on what they are for, not on when they are drawn.

Augmentations and drop path draw from the global generators of Python, NumPy and torch. `seeded` seeds these from a few
numbers (seed, epoch, image, ...) for the length of a block. So an image's crop is the same in every process, order and
run, and a resumed training needs no state of generators. Saving and restoring the generators takes four times as long
as seeding them, so code that seeds for many images in a row calls `seed` inside one `fork_rng`.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

AUGMENT, MIX, DROP, START = range(4)  # purposes: the same numbers give each another stream


def stream_seeds(purpose: int, *numbers: int) -> np.ndarray:
    """Three seeds (3,) uint32 of the stream for a purpose and non-negative numbers."""
    return np.random.SeedSequence([purpose, *numbers]).generate_state(3)


def seed(purpose: int, *numbers: int, device: str = "cpu") -> None:
    """Seed the global generators of Python, NumPy and torch, and that of a CUDA `device`."""
    python_seed, numpy_seed, torch_seed = map(int, stream_seeds(purpose, *numbers))
    random.seed(python_seed)
    np.random.seed(numpy_seed)
    torch.default_generator.manual_seed(torch_seed)  # torch.manual_seed would initialise CUDA in every loader process
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(torch_seed)


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the CPU's global generators after a block. For one thread at a time."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)


@contextmanager
def seeded(purpose: int, *numbers: int, device: str = "cpu") -> Iterator[None]:
    """`seed` for a block, after which `fork_rng` restores the generators of NumPy, Python and the CPU, not of CUDA."""
    with fork_rng():
        seed(purpose, *numbers, device=device)
        yield


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order (count,) of `count` training images in an epoch."""
    # RandomState's streams are frozen forever (NumPy NEP 19); those of default_rng may change with a release.
    return np.random.RandomState([seed, epoch]).permutation(count)


def windowed(shards: Sequence[np.ndarray], window: int, seed: int, epoch: int) -> list[tuple[int, np.ndarray]]:
    """An epoch's order in which `window` shards are read at a time: (start, images (n,)) of each part of a shard.

    The shuffled shards form one sequence, which is cut into `window` lanes of equal length; in a lane the images of
    each shard are shuffled. The order takes one image of each lane in turn, so that image i of a part is at position
    start + i * window. Only shards that a cut divides are in two lanes.

    shards: the images (n,) of each shard in the order of its file, in which a cut divides it.
    """
    random = np.random.RandomState([seed, epoch])
    queue = [shards[shard] for shard in random.permutation(len(shards))]
    images = np.concatenate(queue)  # (N,)
    shard_numbers = np.repeat(np.arange(len(queue)), [len(shard) for shard in queue])  # of each image (N,)
    parts = []
    for lane, places in enumerate(np.array_split(np.arange(len(images)), window)):
        new_shard_places = np.flatnonzero(np.diff(shard_numbers[places])) + 1
        for part in np.split(places, new_shard_places):
            start = int(part[0] - places[0]) * window + lane
            parts.append((start, random.permutation(images[part])))
    return sorted(parts, key=lambda part: part[0])


def joined_order(parts: Sequence[tuple[int, np.ndarray]], window: int) -> np.ndarray:
    """The order (N,) of an epoch from the parts that `windowed` returns."""
    order = np.empty(sum(len(images) for _, images in parts), np.int64)
    for start, images in parts:
        order[start::window][: len(images)] = images
    return order
