"""Settings: an invalid value, in Python or as text, is an error of one line with the field, the value and the rule."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from engine.settings import (
    AreaRange,
    BelowOne,
    Different,
    FactorRange,
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    TwoOrMore,
    UnitInterval,
    Validated,
    check_less,
    check_up_to,
    describe,
    from_text,
)

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Inner:
    side: PositiveInt | tuple[PositiveInt, PositiveInt] = 1


@dataclass(frozen=True, kw_only=True)
class Example(Validated):
    kind: Literal["one", "two"] = "one"
    pair: tuple[float, float] = (0.5, 1.0)
    row: tuple[float, ...] = ()
    number: float = 0.5
    on: bool = False
    limit: PositiveFloat | None = None
    side: PositiveInt | tuple[PositiveInt, PositiveInt] = 8
    words: OneOrMoreDifferent[str] = ("a",)
    folder: Path = Path("here")
    inner: Inner = Inner()


def test_a_wrong_value_names_its_field():
    """On construction and by dataclasses.replace."""
    for name, wrong in [
        ("kind", "three"),
        ("pair", (0.5,)),
        ("pair", (0.5, 0.6, 0.7)),
        ("pair", 0.5),
        ("row", (1.0, "x")),
        ("row", (1.0, NAN)),
        ("number", INF),
        ("number", "0.5"),
        ("number", None),
        ("number", True),
        ("on", 1),
        ("limit", 0),
        ("side", 0),
        ("side", (8, 0)),
        ("side", 1.5),
        ("words", ()),
        ("words", ("a", "a")),
        ("folder", 3),
        ("inner", {"side": 3}),
    ]:
        for make in (Example, partial(replace, Example())):
            with pytest.raises(ValueError) as error:
                make(**{name: wrong})
            assert str(error.value).startswith((f"{name}={wrong!r}: must be ", f"{name}={wrong!r}: choose one of "))
            assert "\n" not in str(error.value)


def test_values_keep_their_numeric_types():
    """Digests of settings tell 1 and 1.0 apart, but not lists and tuples."""
    settings = Example(number=1, row=[1, 0.5], side=[8, 4], limit=None, folder="there", words=np.array(["b", "c"]))
    assert type(settings.number) is int and list(map(type, settings.row)) == [int, float]
    assert (settings.row, settings.side, settings.folder, settings.words) == (
        (1, 0.5),
        (8, 4),
        Path("there"),
        ("b", "c"),
    )
    assert type(Example(number=np.float32(0.5)).number) is float and type(Example(side=np.int64(3)).side) is int


def test_numeric_types_enforce_their_bounds():
    """As a value, as an item of a tuple, and where None is allowed too."""
    for kind, good, bad, rule in [
        (PositiveInt, [1, 7], [0, -1, 1.5, NAN, True, "1"], "at least 1"),
        (NonNegativeInt, [0, 7], [-1, 0.5], "at least 0"),
        (TwoOrMore, [2], [1], "at least 2"),
        (ProperFraction, [0.1, 0.99], [0, 1, "half", NAN], "above 0 and below 1"),
        (Fraction, [1, 0.75], [0.0, 1.1, NAN], "above 0 and up to 1"),
        (NonNegativeFloat, [0, 0.0, 9.5], [-0.1, INF, NAN], "at least 0"),
        (PositiveFloat, [1e-9, 3], [0, -1, INF, NAN], "above 0"),
        (OneOrMore, [1, 1.25], [0.99, INF], "at least 1"),
        (UnitInterval, [0, 0.3, 1], [-0.1, 1.1, NAN], "from 0 to 1"),
        (BelowOne, [0, 0.99], [-0.1, 1, NAN], "below 1"),
    ]:

        @dataclass(frozen=True, kw_only=True)
        class Settings(Validated):
            number: kind = good[0]
            row: tuple[kind, ...] = ()
            limit: kind | None = None

        for value in good:
            Settings(number=value, row=(value, value), limit=value)
        for value in bad:
            for wrong in ({"number": value}, {"row": (good[0], value)}, {"limit": value}):
                with pytest.raises(ValueError, match=rule):
                    Settings(**wrong)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (NonEmpty[int], [(1, 1)], [()]),
        (Different[int], [(), (1, 2)], [(1, 1)]),
        (OneOrMoreDifferent[int], [(1, 2)], [(), (1, 1)]),
        (FactorRange, [(0.5, 3.0), (1, 1)], [(2, 1), (0, 1), (1, INF), (1,)]),
        (AreaRange, [(0.2, 1.0), (1.0, 1.0)], [(0.0, 1.0), (0.5, 0.2), (0.5, 1.1), (NAN, 1.0), (0.5, NAN)]),
    ],
)
def test_tuple_types_enforce_their_rules(kind, good, bad):
    @dataclass(frozen=True, kw_only=True)
    class Settings(Validated):
        row: kind

    for value in good:
        assert Settings(row=value).row == value
    for value in bad:
        with pytest.raises(ValueError, match="row="):
            Settings(row=value)


def test_comparisons_name_both_fields():
    settings = Example(number=0.5, limit=0.6, row=(0.5, 1.0))
    check_less(settings, "number", "limit")
    check_up_to(settings, "number", "row")
    with pytest.raises(ValueError, match=r"number=0\.5.*limit=0\.5"):
        check_less(replace(settings, limit=0.5), "number", "limit")
    with pytest.raises(ValueError, match=r"number=0\.5.*row=\(0\.4, 1\.0\)"):
        check_up_to(replace(settings, row=(0.4, 1.0)), "number", "row")


def test_text_is_converted_to_the_fields_type():
    for text, kind, value in [
        ("10,20", tuple[int, ...], (10, 20)),
        ("(10, 20,)", tuple[int, ...], (10, 20)),
        ("", tuple[int, ...], ()),
        ("384,512", PositiveInt | tuple[PositiveInt, PositiveInt], (384, 512)),
        ("384", PositiveInt | tuple[PositiveInt, PositiveInt], 384),
        ("None", PositiveFloat | None, None),
        ("0.5", PositiveFloat | None, 0.5),
        ("16", Literal[8, 16], 16),
        ("1e-3", float, 0.001),
        ("2", float, 2.0),
        ("none", str | None, None),
        ("some text", str | None, "some text"),
        ("3,0.5", tuple[int, float], (3, 0.5)),
        ("there/x", Path, Path("there/x")),
        ("TRUE", bool, True),
        ("0", bool, False),
        ("yes", bool, True),
        ("Off", bool, False),
        ("no", bool | None, False),
    ]:
        result = from_text(text, kind)
        assert result == value and type(result) is type(value)


def test_text_of_another_type_is_refused_with_the_rule():
    for text, kind, rule in [
        ("maybe", bool, "true or false"),
        ("1.5", int, "a whole number"),
        ("nan", float, "a number"),
        ("3", Literal["cls", "avg"], "cls, avg"),
        ("1,x", OneOrMoreDifferent[PositiveInt], "at least 1"),
        ("1,2,3", tuple[int, int], "2 values"),
        ("deep", int | None, "a whole number or none"),
        ("{}", dict | None, "dict or none"),
    ]:
        with pytest.raises(ValueError, match=rule):
            from_text(text, kind)
        assert rule in describe(kind)
