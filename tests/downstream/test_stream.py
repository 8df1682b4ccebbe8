"""The order of training images: whole epochs, the same for every split into batches and processes, and skipping."""

import numpy as np
import pytest

from downstream.loop.running import PositionDataset, PositionSampler


class RandomItems:
    """A dataset of pairs of index and random number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.rand())


def test_epochs_are_permutations_with_different_random_numbers():
    stream = PositionDataset(RandomItems(), seed=0)
    items = [stream[position] for position in range(15)]
    for epoch in range(3):
        assert sorted(index for index, _ in items[5 * epoch : 5 * epoch + 5]) == list(range(5))
    assert len({number for _, number in items}) == 15
    assert items[7] == stream[7] != PositionDataset(RandomItems(), seed=1)[7]


@pytest.mark.parametrize(("size", "processes"), [(8, 1), (2, 1), (4, 2), (1, 4), (2, 4)])
def test_a_step_has_the_same_images_however_it_is_split(size, processes):
    parts = 8 // (size * processes)
    shares = [list(PositionSampler(size, 3 * parts, rank, processes)) for rank in range(processes)]
    for step in range(3):
        of_step = slice(step * parts * size, (step + 1) * parts * size)
        assert sorted(position for share in shares for position in share[of_step]) == list(
            range(8 * step, 8 * step + 8)
        )


def test_skipped_positions_are_left_out():
    full, rest = PositionSampler(2, 6, 1, 2), PositionSampler(2, 6, 1, 2)
    rest.skip(8)
    assert list(rest) == list(full)[8:] and len(full) == 12
