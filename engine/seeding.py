"""Random numbers that depend on what they are for, not on when they are drawn.

Augmentations and drop path draw from the global generators of Python, NumPy and torch. `seeded` lends them a state made
from a few numbers (seed, epoch, image, ...) for the length of a block, so that an image's crop is the same in whichever
process, order or run it is made, and a training that goes on after a kill needs no generator's state. Keeping and
giving back the generators takes four times as long as seeding them: blocks that many follow share one `fork_rng`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

AUGMENT, MIX, DROP, START = range(4)  # what a stream is for: the same numbers give each an own one


def stream_seeds(purpose: int, *numbers: int) -> np.ndarray:
    """Three seeds (3,) uint32 of the stream that `purpose` and `numbers`, each from 0 on, name."""
    return np.random.SeedSequence([purpose, *numbers]).generate_state(3)


def seed(purpose: int, *numbers: int, device: str = "cpu") -> None:
    """Python's, NumPy's and torch's global generators begin the stream. device: a CUDA device's generator does too."""
    python, numpy, torchs = map(int, stream_seeds(purpose, *numbers))
    random.seed(python)
    np.random.seed(numpy)
    torch.default_generator.manual_seed(torchs)  # torch.manual_seed would wake CUDA in every loader process
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(torchs)


@contextmanager
def fork_rng() -> Iterator[None]:
    """Whatever a block draws, the global generators of the CPU end as they were. For one thread at a time."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])


@contextmanager
def seeded(purpose: int, *numbers: int, device: str = "cpu") -> Iterator[None]:
    """A block that draws from the stream, between the draws of others; see `seed` and `fork_rng`."""
    with fork_rng():
        seed(purpose, *numbers, device=device)
        yield


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order (count,) of `count` training images in an epoch."""
    # RandomState's streams are frozen for ever (NumPy NEP 19); those of default_rng may change with a release.
    return np.random.RandomState([seed, epoch]).permutation(count)
