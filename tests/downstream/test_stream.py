"""The order of training images: whole epochs, and the same step for step however it is shared."""

import numpy as np
import pytest

from downstream.training import Stream, own_positions
from engine.distributed import World


class Draws:
    """A dataset whose items are their index and a random number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.rand())


def test_epochs_are_permutations_and_draws_differ():
    stream = Stream(Draws(), seed=0)
    items = [stream[position] for position in range(15)]
    for epoch in range(3):
        assert sorted(index for index, _ in items[5 * epoch : 5 * epoch + 5]) == list(range(5))
    assert len({draw for _, draw in items}) == 15
    assert items[7] == stream[7] != Stream(Draws(), seed=1)[7]


@pytest.mark.parametrize(("size", "processes"), [(8, 1), (2, 1), (4, 2), (1, 4), (2, 4)])
def test_a_batch_is_the_same_set_however_it_is_split(size, processes):
    parts = 8 // (size * processes)
    for step in range(3):
        passes = range(step * parts, (step + 1) * parts)
        shares = [own_positions(passes, size, World(rank=rank, size=processes)) for rank in range(processes)]
        assert {len(own) for share in shares for own in share} == {size}
        assert sorted(p for share in shares for own in share for p in own) == list(range(8 * step, 8 * step + 8))
