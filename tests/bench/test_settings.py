"""`--set`: texts become what the dataclass declares, and everything else is one line with the choices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from bench.cli.settings import changed, settings_of, split_change


@dataclass(frozen=True, kw_only=True)
class Toy:
    k: tuple[int, ...] = (1,)
    pair: tuple[int, float] = (1, 2.0)
    layers: int = 3
    rate: float = 0.5
    centre: bool = False
    pool: Literal["cls", "avg"] = "cls"
    bits: Literal[8, 16] = 8
    depth: int | None = None
    label: str | None = None
    rates: tuple[float, ...] | None = None
    folder: Path = Path("here")
    table: dict | None = None

    def __post_init__(self):
        if self.layers < 1:
            raise ValueError("layers must be 1 or more")


GOOD = [
    ("k", "10,20", (10, 20)),
    ("k", "10", (10,)),
    ("k", "(10, 20,)", (10, 20)),
    ("k", "", ()),
    ("pair", "3,0.5", (3, 0.5)),
    ("layers", "7", 7),
    ("rate", "1e-3", 0.001),
    ("rate", "2", 2.0),
    ("centre", "true", True),
    ("centre", "No", False),
    ("pool", "avg", "avg"),
    ("bits", "16", 16),
    ("depth", "4", 4),
    ("depth", "none", None),
    ("label", "none", None),
    ("label", "some text", "some text"),
    ("rates", "0.1,1", (0.1, 1.0)),
    ("rates", "none", None),
    ("folder", "there/x", Path("there/x")),
]
BAD = [
    ("layers", "1.5", "layers='1.5': expected a whole number"),
    ("rate", "fast", "expected a number"),
    ("centre", "maybe", "expected true or false"),
    ("pool", "max", "choose one of cls, avg"),
    ("k", "1,x", "expected comma-separated values, each a whole number"),
    ("pair", "1", "expected 2 comma-separated values"),
    ("depth", "deep", "expected a whole number or none"),
    ("table", "{}", "expected dict or none"),
    ("layers", "0", "layers must be 1 or more"),
    ("layer", "1", "did you mean 'layers'? there are: k, pair, layers"),
]


@pytest.mark.parametrize(("field", "text", "expected"), GOOD)
def test_a_text_becomes_the_declared_type(field, text, expected):
    value = getattr(changed(Toy(), field, text), field)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(("field", "text", "message"), BAD)
def test_a_wrong_text_is_one_line(field, text, message):
    with pytest.raises(ValueError) as error:
        changed(Toy(), field, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_other_settings_stay():
    assert changed(Toy(rate=0.25), "k", "3") == Toy(rate=0.25, k=(3,))


@pytest.mark.parametrize("text", ["k=1", "knn.k", "knn.=1", ".k=1", ""])
def test_a_change_names_task_field_and_value(text):
    with pytest.raises(ValueError, match=r"write task\.field=value"):
        split_change(text)


def test_a_protocol_and_values_with_signs_can_be_named():
    assert split_change("knn@dino.k=a=b.c") == ("knn@dino", "k", "a=b.c")


def test_settings_are_json():
    settings = settings_of(Toy())
    assert settings["k"] == [1]
    assert settings["depth"] is None
    assert settings["folder"] == "here"
