"""Checks of the fields of a settings dataclass: ValueError with one line that names field, value and rule.

A field may hold a number or a tuple of numbers, which all have to pass. NaN passes no check. None passes those of
numbers where it is the field's default.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints


def annotations(settings: Any) -> None:
    """ValueError where a field is none of its Literal's choices, or its tuple has another length than annotated."""
    hints = _hints(type(settings))  # type: ignore[arg-type]  # mypy's: a type is hashable
    for field in fields(settings):
        value, kind, choices = getattr(settings, field.name), get_origin(hints[field.name]), get_args(hints[field.name])
        if kind is Literal and value not in choices:
            raise ValueError(f"{field.name}={value!r}: choose one of {', '.join(map(str, choices))}")
        if kind is tuple and ... not in choices and len(value) != len(choices):
            raise ValueError(f"{field.name}={value}: must be {len(choices)} values")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def counts(settings: Any, *names: str, least: int = 1, prefix: str = "") -> None:
    """ValueError for a whole number below `least`. prefix: as of `non_negative`."""
    _check(settings, names, lambda value: least <= value, f"{least} or more", prefix)


def whole_numbers(settings: Any, *names: str, least: int = 1) -> None:
    """As `counts`, where the value may come from outside and be no number."""
    _check(settings, names, lambda value: isinstance(value, int) and least <= value, f"a whole number, {least} or more")


def booleans(settings: Any, *names: str) -> None:
    """ValueError for anything but True and False, as from outside."""
    for name in names:
        if not isinstance(getattr(settings, name), bool):
            raise ValueError(f"{name}={getattr(settings, name)!r}: must be true or false")


def non_negative(settings: Any, *names: str, prefix: str = "") -> None:
    """ValueError for a number below 0 or not finite. prefix: to the name, as a user writes it."""
    _check(settings, names, lambda value: 0 <= value < inf, "a finite number, 0 or more", prefix)


def positive(settings: Any, *names: str, prefix: str = "") -> None:
    """ValueError for a number not above 0 or not finite. prefix: as of `non_negative`."""
    _check(settings, names, lambda value: 0 < value < inf, "a finite number above 0", prefix)


def in_unit_interval(settings: Any, *names: str, prefix: str = "") -> None:
    """ValueError for a share, chance or momentum outside of [0, 1]. prefix: as of `non_negative`."""
    _check(settings, names, lambda value: 0 <= value <= 1, "from 0 to 1", prefix)


def factors(settings: Any, *names: str) -> None:
    """ValueError for a factor outside of (0, 1]."""
    _check(settings, names, lambda value: 0 < value <= 1, "above 0 and up to 1")


def below_one(settings: Any, *names: str) -> None:
    """ValueError for a share or chance outside of [0, 1)."""
    _check(settings, names, lambda value: 0 <= value < 1, "0 or more, and less than 1")


def proper_shares(settings: Any, *names: str) -> None:
    """ValueError for a share outside of (0, 1), or for what is no number."""
    rule = "a number above 0 and below 1"
    _check(settings, names, lambda value: isinstance(value, float | int) and 0 < value < 1, rule)


def given(settings: Any, *names: str) -> None:
    """ValueError for a tuple without values."""
    for name in names:
        if not getattr(settings, name):
            raise ValueError(f"{name}=(): must be 1 or more values")


def distinct(settings: Any, *names: str, least: int = 1) -> None:
    """ValueError for a tuple of fewer than `least` values, or with the same value twice."""
    for name in names:
        values = getattr(settings, name)
        if len(values) < least or len(set(values)) < len(values):
            raise ValueError(f"{name}={values}: must be {least} or more different values")


def ranges(settings: Any, *names: str) -> None:
    """ValueError for two numbers that are not in order, or not above 0 and finite."""
    for name in names:
        low, high = getattr(settings, name)
        if not 0 < low <= high < inf:
            raise ValueError(f"{name}={low, high}: must be two numbers above 0, the smaller one first")


def below(settings: Any, name: str, limit: str) -> None:
    """ValueError unless the field `name` is less than the field `limit`."""
    if not getattr(settings, name) < getattr(settings, limit):
        raise ValueError(f"{name}={getattr(settings, name)}: must be less than {limit}={getattr(settings, limit)}")


def up_to(settings: Any, name: str, limit: str) -> None:
    """ValueError where the field `name` is more than the field `limit`, or than the least of its values."""
    bound = getattr(settings, limit)
    if not getattr(settings, name) <= (min(bound) if isinstance(bound, tuple) else bound):
        raise ValueError(f"{name}={getattr(settings, name)}: must be no more than {limit}={bound}")


def scales(settings: Any, *names: str) -> None:
    """ValueError for a crop's least and largest area that are not in order, or not shares of the image's."""
    for name in names:
        least, largest = getattr(settings, name)
        if not 0 < least <= largest <= 1:
            raise ValueError(f"{name}={least, largest}: must be two shares of the area, the smaller one first")


def _check(settings: Any, names: tuple[str, ...], passes: Callable[[Any], bool], rule: str, prefix: str = "") -> None:
    for name in names:
        value = getattr(settings, name)
        if value is None and settings.__dataclass_fields__[name].default is None:
            continue
        if not all(map(passes, value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{prefix}{name}={value!r}: must be {rule}")
