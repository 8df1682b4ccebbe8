"""Splitting a batch."""

import pytest

from engine.training.micro_batches import micro_batch_size, share_of


def test_a_share_is_equal_for_all_processes():
    assert share_of(16, 4) == 4
    with pytest.raises(ValueError, match="batch=15 cannot be shared by 2 processes; set batch=14"):
        share_of(15, 2)
    with pytest.raises(ValueError, match="set batch=8"):
        share_of(3, 8)


@pytest.mark.parametrize(
    ("share", "largest", "even", "size"),
    [(12, 5, False, 4), (12, 100, False, 12), (7, 6, False, 1), (12, 5, True, 4), (6, 3, True, 2), (9, 9, True, 0)],
)
def test_the_largest_divisor(share, largest, even, size):
    assert micro_batch_size(share, largest, even) == size
