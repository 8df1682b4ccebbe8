"""What a dataclass of settings checks about its own fields: one line that names the field, its value and the rule.

A field may hold a number or a tuple of numbers, which all have to pass. NaN passes no check.
"""

from collections.abc import Callable
from dataclasses import fields
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints


def annotations(settings: Any) -> None:
    """ValueError where a field is none of its Literal's choices, or its tuple has another length than annotated."""
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value, kind, choices = getattr(settings, field.name), get_origin(hints[field.name]), get_args(hints[field.name])
        if kind is Literal and value not in choices:
            raise ValueError(f"{field.name}={value!r}: choose one of {', '.join(map(str, choices))}")
        if kind is tuple and ... not in choices and len(value) != len(choices):
            raise ValueError(f"{field.name}={value}: must be {len(choices)} values")


def counts(settings: Any, *names: str, least: int = 1) -> None:
    """ValueError for a whole number below `least`."""
    _check(settings, names, lambda value: least <= value, f"{least} or more")


def amounts(settings: Any, *names: str, prefix: str = "") -> None:
    """ValueError for a number below 0 or not finite. prefix: to the name, as a user writes it."""
    _check(settings, names, lambda value: 0 <= value < inf, "a finite number, 0 or more", prefix)


def positive(settings: Any, *names: str) -> None:
    """ValueError for a number not above 0 or not finite."""
    _check(settings, names, lambda value: 0 < value < inf, "a finite number above 0")


def shares(settings: Any, *names: str) -> None:
    """ValueError for a share, chance or momentum outside of [0, 1]."""
    _check(settings, names, lambda value: 0 <= value <= 1, "from 0 to 1")


def factors(settings: Any, *names: str) -> None:
    """ValueError for a factor outside of (0, 1]."""
    _check(settings, names, lambda value: 0 < value <= 1, "above 0 and up to 1")


def below_one(settings: Any, *names: str) -> None:
    """ValueError for a share or chance outside of [0, 1)."""
    _check(settings, names, lambda value: 0 <= value < 1, "0 or more, and less than 1")


def scales(settings: Any, *names: str) -> None:
    """ValueError for a crop's least and largest area that are not in order, or not shares of the image's."""
    for name in names:
        least, largest = getattr(settings, name)
        if not 0 < least <= largest <= 1:
            raise ValueError(f"{name}={least, largest}: must be two shares of the area, the smaller one first")


def _check(settings: Any, names: tuple[str, ...], passes: Callable[[Any], bool], rule: str, prefix: str = "") -> None:
    for name in names:
        value = getattr(settings, name)
        if not all(map(passes, value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{prefix}{name}={value}: must be {rule}")
