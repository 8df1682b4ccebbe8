"""Checks of settings: a value that cannot be is refused in one line that says field, value and rule."""

from dataclasses import dataclass
from typing import Literal

import pytest

from engine import checks

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Settings:
    kind: Literal["one", "two"] = "one"
    pair: tuple[float, float] = (0.5, 1.0)
    row: tuple[float, ...] = ()
    number: float = 0.5
    limit: float | None = None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "three"}, "kind='three': choose one of one, two"),
        ({"pair": (0.5,)}, "pair=(0.5,): must be 2 values"),
        ({"pair": (0.5, 0.6, 0.7)}, "pair=(0.5, 0.6, 0.7): must be 2 values"),
    ],
)
def test_annotations(changes, told):
    checks.annotations(Settings(row=(1.0, 2.0, 3.0)))
    with pytest.raises(ValueError) as refused:
        checks.annotations(Settings(**changes))
    assert str(refused.value) == told


@pytest.mark.parametrize(
    ("check", "good", "bad", "rule"),
    [
        (checks.counts, [1, 7], [0, -1, NAN], "1 or more"),
        (checks.whole_numbers, [1, 7], [0, 1.5, "1", NAN], "a whole number, 1 or more"),
        (checks.proper_shares, [0.1, 0.99], [0, 1, "half", NAN], "a number above 0 and below 1"),
        (checks.factors, [1, 0.75], [0.0, 1.1, NAN], "above 0 and up to 1"),
        (checks.non_negative, [0, 0.0, 9.5], [-0.1, INF, NAN], "a finite number, 0 or more"),
        (checks.positive, [1e-9, 3], [0, -1, INF, NAN], "a finite number above 0"),
        (checks.in_unit_interval, [0, 0.3, 1], [-0.1, 1.1, NAN], "from 0 to 1"),
        (checks.below_one, [0, 0.99], [-0.1, 1, NAN], "0 or more, and less than 1"),
    ],
)
def test_numbers(check, good, bad, rule):
    """Alone, and as one of a tuple."""
    for value in good:
        check(Settings(number=value, row=(value, value)), "number", "row")
    check(Settings(row=()), "row")
    for value in bad:
        for name, wrong in (("number", value), ("row", (good[0], value))):
            with pytest.raises(ValueError) as refused:
                check(Settings(**{name: wrong}), name)
            assert str(refused.value) == f"{name}={wrong!r}: must be {rule}"


def test_none_passes_where_it_is_the_default():
    checks.positive(Settings(), "limit")
    with pytest.raises(ValueError, match=r"^number=None: must be a whole number, 1 or more$"):
        checks.whole_numbers(Settings(number=None), "number")


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (lambda: checks.booleans(Settings(number=1), "number"), "number=1: must be true or false"),
        (lambda: checks.given(Settings(), "row"), "row=(): must be 1 or more values"),
        (lambda: checks.distinct(Settings(row=(1, 1)), "row"), "row=(1, 1): must be 1 or more different values"),
        (lambda: checks.distinct(Settings(), "row"), "row=(): must be 1 or more different values"),
        (
            lambda: checks.ranges(Settings(pair=(2, 1)), "pair"),
            "pair=(2, 1): must be two numbers above 0, the smaller one first",
        ),
        (lambda: checks.below(Settings(limit=0.5), "number", "limit"), "number=0.5: must be less than limit=0.5"),
        (
            lambda: checks.up_to(Settings(row=(0.4, 1)), "number", "row"),
            "number=0.5: must be no more than row=(0.4, 1)",
        ),
    ],
)
def test_values_beside_each_other(check, told):
    checks.booleans(Settings(number=True), "number")
    checks.given(Settings(row=(1, 1)), "row")
    checks.distinct(Settings(row=(1, 2)), "row")
    checks.distinct(Settings(), "row", least=0)
    checks.ranges(Settings(pair=(0.5, 3.0)), "pair")
    checks.below(Settings(limit=0.6), "number", "limit")
    checks.up_to(Settings(row=(0.5, 1)), "number", "row")
    with pytest.raises(ValueError) as refused:
        check()
    assert str(refused.value) == told


def test_a_count_from_another_number_on():
    checks.counts(Settings(number=0), "number", least=0)
    with pytest.raises(ValueError, match=r"^number=-1: must be 0 or more$"):
        checks.counts(Settings(number=-1), "number", least=0)


@pytest.mark.parametrize("pair", [(0.0, 1.0), (0.5, 0.2), (0.5, 1.1), (NAN, 1.0), (0.5, NAN)])
def test_scales(pair):
    for good in ((0.2, 1.0), (1.0, 1.0)):
        checks.scales(Settings(pair=good), "pair")
    with pytest.raises(ValueError) as refused:
        checks.scales(Settings(pair=pair), "pair")
    assert str(refused.value) == f"pair={pair}: must be two shares of the area, the smaller one first"
