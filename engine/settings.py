"""Settings of tasks, methods, recipes and networks: each field's annotation defines its valid values.

    class Settings(Validated):
        mask_ratio: UnitInterval = 0.75  # share of the patches that are hidden
        crop_scale: AreaRange = (0.2, 1.0)

msgspec checks the annotations whenever such a dataclass is made: in Python, from `--set`, from a file. A function in an
annotation is a rule that msgspec does not have. Rules between fields belong in `__post_init__`, after super's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

T = TypeVar("T")
SETTING_TYPES = (bool, int, float, str, tuple, list, dict)  # of values that look like a setting

PositiveInt = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
NonNegativeInt = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
ImageShape = Annotated[tuple[PositiveInt, PositiveInt], Meta(description="height x width, such as 384x512")]
TwoOrMore = Annotated[int, Meta(ge=2, description="a whole number of at least 2")]
PositiveFloat = Annotated[float, Meta(gt=0, description="a number above 0")]
NonNegativeFloat = Annotated[float, Meta(ge=0, description="a number of at least 0")]
OneOrMore = Annotated[float, Meta(ge=1, description="a number of at least 1")]
UnitInterval = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
BelowOne = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Fraction = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and up to 1")]
ProperFraction = Annotated[float, Meta(gt=0, lt=1, description="a number above 0 and below 1")]


def ascending(values: tuple[float, ...]) -> bool:
    """Whether the values are in ascending order; equal neighbours are allowed."""
    return all(values[i] <= values[i + 1] for i in range(len(values) - 1))


def different(values: tuple[Any, ...]) -> bool:
    """Whether no value occurs twice."""
    return len(set(values)) == len(values)


AreaRange = Annotated[
    tuple[Fraction, Fraction], Meta(description="two shares of the image's area, the smaller one first"), ascending
]
FactorRange = Annotated[
    tuple[PositiveFloat, PositiveFloat], Meta(description="two numbers above 0, the smaller one first"), ascending
]
NonEmpty = Annotated[tuple[T, ...], Meta(min_length=1, description="1 or more values")]
Different = Annotated[tuple[T, ...], Meta(description="different values"), different]
OneOrMoreDifferent = Annotated[tuple[T, ...], Meta(min_length=1, description="1 or more different values"), different]


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Base of settings: a frozen dataclass whose values are checked against their annotations.

    ValueError for an invalid value names field, value and rule. Lists become tuples, and NumPy's numbers Python's. An
    int stays one in a float field, because digests of settings tell 1 and 1.0 apart. PREFIX: what `--set` writes before
    the field names, such as "schedule.".
    """

    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        validate(self)


def validate(settings: Any, refused: Callable[[str, str, Any], ValueError] | None = None) -> None:
    """Check the fields of a dataclass. ValueError for the first one that does not fit its annotation.

    refused: makes the error from the field's name, what it must be, and its value.
    """
    hints = annotations(type(settings))  # type: ignore[arg-type]  # mypy's: a type is hashable
    for field in fields(settings):
        value = _plain(getattr(settings, field.name))
        try:
            checked = convert(value, hints[field.name])
        except ValueError as error:
            if refused:
                raise refused(field.name, str(error), value) from None
            raise ValueError(f"{getattr(settings, 'PREFIX', '')}{field.name}={value!r}: {error}") from None
        object.__setattr__(settings, field.name, value if checked == value else checked)


def check_fields(kind: type) -> None:
    """Raise ValueError for an attribute of a dataclass that looks like a setting but is not a field: the class lacks
    @dataclass, or the attribute an annotation."""
    names, hints = {entry.name for entry in fields(kind)}, annotations(kind)
    if "__dataclass_fields__" not in vars(kind):
        annotated = [name for name, hint in hints.items() if get_origin(hint) is not ClassVar]
        if ignored := [name for name in annotated if name not in names]:
            fix = f"write @dataclass(frozen=True, kw_only=True) above class {kind.__name__}"
            raise ValueError(f"{kind.__name__} is not a dataclass, so {ignored[0]} is not a setting; {fix}")
    for name, value in vars(kind).items():
        looks_like_setting = isinstance(value, SETTING_TYPES) and name.islower() and not name.startswith("_")
        if looks_like_setting and name not in hints:
            fix = f"write {name}: TYPE = {value!r}"
            raise ValueError(f"{kind.__name__}.{name} has no type, so it is not a setting; {fix}")


@cache
def annotations(kind: type) -> dict[str, Any]:
    """Field -> annotated type with its constraints, of a dataclass, inherited fields included."""
    return get_type_hints(kind, include_extras=True)


def convert(value: Any, hint: Any, strict: bool = True) -> Any:
    """`value` as the annotated type. ValueError states what is allowed. strict: False to read strings as numbers."""
    for kind in union_members(hint):  # one by one: msgspec 0.22 crashes on `PositiveInt | tuple[int, int]`
        if kind is Path and isinstance(value, str):
            return Path(value)
        if isinstance(kind, type) and kind not in PLAIN:  # such as a dataclass, which has checked its own fields
            if kind is Any or getattr(kind, "_is_protocol", False) or isinstance(value, kind):
                return value
            continue
        try:
            converted = msgspec.convert(value, kind, strict=strict)
        except msgspec.ValidationError:
            continue
        numbers = converted if isinstance(converted, tuple) else (converted,)
        rules = [rule for rule in getattr(kind, "__metadata__", ()) if callable(rule)]
        if all(map(_finite, numbers)) and all(rule(converted) for rule in rules):
            return converted
    raise ValueError(f"{'choose' if get_origin(hint) is Literal else 'must be'} {describe(hint)}")


def from_text(text: str, hint: Any) -> Any:
    """A value of `--set`, such as `10,20`, `none` or `yes`, as the annotated type. ValueError for others."""
    kinds = {plain_type(kind) for kind in union_members(hint)}
    if NoneType in kinds and text.lower() == "none":
        return None
    if Any in kinds:
        raise ValueError("cannot be set by a text")
    if tuple in kinds and ("," in text or kinds <= {tuple, NoneType}):
        return convert([word.strip() for word in text.strip("()[] ").split(",") if word.strip()], hint, strict=False)
    if bool in kinds:  # msgspec reads true, false, 1 and 0
        text = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower(), text)
    return convert(text, hint, strict=False)


def describe(hint: Any) -> str:
    """The valid values of a type in words, for messages: `a number from 0 to 1`, `one of cls, avg`."""
    kinds = union_members(hint)
    if len(kinds) > 1:
        return " or ".join(map(describe, kinds))
    described = next((meta.description for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)), "")
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, choices))
    if get_origin(kind) is tuple and ... in choices:
        return f"{described or 'values'} separated by commas, each {describe(choices[0])}"
    if get_origin(kind) is tuple:
        return described or f"{len(choices)} values separated by commas, each {describe(choices[0])}"
    return described or (PLAIN | {Path: "a path", Mapping: "a dictionary"}).get(
        kind, getattr(kind, "__name__", str(kind))
    )


PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def check_less(settings: Any, name: str, limit: str) -> None:
    """Check that the field `name` is less than the field `limit`; ValueError otherwise."""
    if not getattr(settings, name) < getattr(settings, limit):
        raise ValueError(f"{name}={getattr(settings, name)}: must be less than {limit}={getattr(settings, limit)}")


def check_up_to(settings: Any, name: str, limit: str) -> None:
    """Check that the field `name` is at most the field `limit`, or the least of its values; ValueError otherwise."""
    bound = getattr(settings, limit)
    if getattr(settings, name) > (min(bound) if isinstance(bound, tuple) else bound):
        raise ValueError(f"{name}={getattr(settings, name)}: must be no more than {limit}={bound}")


def union_members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(hint) is Annotated and not any(
        isinstance(data, Meta) or callable(data) for data in hint.__metadata__
    ):
        return union_members(hint.__origin__)  # the metadata are no constraints
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def plain_type(kind: Any) -> Any:
    """The type without constraints and parameters: `tuple` for `Annotated[tuple[int, ...], ...]`."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(kind) or kind


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy":
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
