"""The order of training images: whole epochs, the same step for step however it is shared, and after skipping."""

import numpy as np
import pytest

from downstream.loop.running import PositionDataset, PositionSampler


class Draws:
    """A dataset whose items are their index and a random number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.rand())


def test_epochs_are_permutations_and_draws_differ():
    stream = PositionDataset(Draws(), seed=0)
    items = [stream[position] for position in range(15)]
    for epoch in range(3):
        assert sorted(index for index, _ in items[5 * epoch : 5 * epoch + 5]) == list(range(5))
    assert len({draw for _, draw in items}) == 15
    assert items[7] == stream[7] != PositionDataset(Draws(), seed=1)[7]


@pytest.mark.parametrize(("size", "processes"), [(8, 1), (2, 1), (4, 2), (1, 4), (2, 4)])
def test_a_batch_is_the_same_set_however_it_is_split(size, processes):
    parts = 8 // (size * processes)
    shares = [list(PositionSampler(size, 3 * parts, rank, processes)) for rank in range(processes)]
    for step in range(3):
        own = slice(step * parts * size, (step + 1) * parts * size)
        assert sorted(p for share in shares for p in share[own]) == list(range(8 * step, 8 * step + 8))


def test_skipping():
    whole, rest = PositionSampler(2, 6, 1, 2), PositionSampler(2, 6, 1, 2)
    rest.skip(8)
    assert list(rest) == list(whole)[8:] and len(whole) == 12
