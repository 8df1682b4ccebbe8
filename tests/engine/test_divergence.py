"""What is said of a loss that is not finite."""

import pytest

from engine.training.divergence import check_finite


def test_a_finite_loss_passes():
    check_finite(1.5, "loss", "step 3 of 9", [2.0], "lower lr")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_another_one_is_named_with_those_before_it(value):
    with pytest.raises(ValueError) as caught:
        check_finite(value, "loss", "step 9 of 9", [float(number) for number in range(9)], "lower lr")
    assert str(caught.value) == f"the loss is {value} in step 9 of 9, losses before: 4, 5, 6, 7, 8; lower lr"


def test_the_first_loss_has_none_before_it():
    with pytest.raises(ValueError, match="losses before: none; lower lr"):
        check_finite(float("nan"), "loss", "step 0 of 9", [], "lower lr")
