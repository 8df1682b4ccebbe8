"""Settings of tasks, methods, recipes and networks: each field's annotation defines its valid values.

    class Settings(Validated):
        mask_ratio: UnitInterval = 0.75  # share of the patches that are hidden
        crop_scale: AreaRange = (0.2, 1.0)

msgspec checks the annotations whenever such a dataclass is made: in Python, from `--set`, from a file. A function in an
annotation is a rule that msgspec does not have. Rules between fields belong in `__post_init__`, after super's.

`--set` changes settings: TASK.FIELD=VALUE those of the tasks of a run (bench/run/suites.py), FIELD=VALUE those of a
pretraining recipe (bench/pretraining/recipes.py) or a picture. A setting is described by the comment next to it.
"""

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine.errors import UserError
from engine.printing import did_you_mean

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


class ReadIf:
    """In the annotation of a setting: another setting must have one of some values, or it is never read.

    `Annotated[PositiveInt, ReadIf("head", "ep")]`; without values: any that switches the other on (not 0, false, none,
    empty, or only zeros). Several marks must all hold.
    """

    def __init__(self, setting: str, *values: Any) -> None:
        self.setting, self.values = setting, values

    def holds(self, value: Any) -> bool:
        if self.values:
            return value in self.values
        return any(value) if isinstance(value, tuple) else bool(value)

    def __str__(self) -> str:
        return f"{self.setting}={' or '.join(map(setting_text, self.values))}" if self.values else self.setting


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


def unread(kind: type, values: Mapping[str, Any]) -> dict[str, ReadIf]:
    """Setting -> the condition that does not hold, of those that are never read. kind: a dataclass; values: by name."""
    conditions = {
        name: [mark for mark in getattr(annotations(kind)[name], "__metadata__", ()) if isinstance(mark, ReadIf)]
        for name in values
    }
    return {
        name: failed[0]
        for name, marks in conditions.items()
        if (failed := [mark for mark in marks if not mark.holds(values.get(mark.setting, True))])
    }


def unread_paths(value: Any, prefix: str = "") -> dict[str, str]:
    """Path -> what it is read with, of the settings of a dataclass and of the dataclasses in it that are never read."""
    values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    paths = {f"{prefix}{name}": str(mark) for name, mark in unread(type(value), values).items()}
    for name, inner in values.items():
        if is_dataclass(inner):
            paths |= unread_paths(inner, f"{prefix}{name}.")
    return paths


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


def named_values(texts: Sequence[str], argument: str, form: str, pattern: str = ".+") -> dict[str, str]:
    """Name -> value of `NAME=VALUE ...`; of a repeated name the last value counts.

    pattern: a regular expression that values must match. ValueError, with `form` as what to write, for other texts.
    """
    values = {}
    for text in texts:
        match = re.fullmatch(rf"\s*([^=\s].*?)\s*=\s*({pattern})\s*", text)
        if not match:
            raise UserError(argument, f"write {form}", text)
        values[match[1]] = match[2]
    return values


def read_changes(texts: Sequence[str], form: str, example: str) -> dict[str, str]:
    """Name -> `NAME=VALUE` of the values of `--set`. ValueError, with the `form` and an `example`, for others."""
    changes = named_values(texts, "settings", f"{form}, for example {example}", ".*?")
    return {name: f"{name}={value}" for name, value in changes.items()}


def changed(value: Any, changes: Mapping[str, str], whose: str = "") -> Any:
    """A dataclass with the settings at some paths (`k`, `schedule.warmup`) changed, all at once.

    If a field's dataclass is exchanged for an alternative (`schedule=Multistep schedule.start=0.1`), the new one takes
    over the old one's values of equal names.

    changes: path -> `NAME=VALUE` as the user wrote it. whose: begins a message about several changes together.
    ValueError names the change that is invalid or of a setting that is never read, or reports which rule between
    settings the changes together break.
    """
    hints, values = types_of(value), {}
    for name, kinds in alternatives(value).items():
        if name in changes:
            values[name] = _alternative(getattr(value, name), name, changes, kinds)
    for path, change in changes.items():
        if path.partition(".")[0] not in values:
            values[path] = setting_value(change, path, hints)
    try:
        result = replaced(value, values)
    except ValueError as error:
        raise UserError("settings", f"{whose}{error}") from error
    for path, condition in unread_paths(result).items():
        if path in values and values[path] != reduce(getattr, path.split("."), value):
            text = f"{whose}it changes nothing, as it is read only with {condition}: set that too, or leave it out"
            raise UserError("settings", text, changes[path])
    return result


def setting_value(change: str, path: str, hints: Mapping[str, Any], whose: str = "") -> Any:
    """The new value of the setting at `path`. ValueError for an unknown setting, or a text that is no value of it."""
    if path not in hints:
        raise UserError("settings", f"{whose}no setting {path!r}{did_you_mean(path, list(hints))}", change)
    try:
        return from_text(change.partition("=")[2], hints[path])
    except ValueError as error:
        raise UserError("settings", str(error), change) from error


def alternatives(value: Any) -> dict[str, Mapping[str, type]]:
    """Field -> name -> dataclass, of the fields whose metadata list the dataclasses that their value may be."""
    return {field.name: kinds for field in fields(value) if (kinds := field.metadata.get("alternatives"))}


def _alternative(old: Any, name: str, changes: Mapping[str, str], kinds: Mapping[str, type]) -> Any:
    """The dataclass that takes the place of `old` in the field `name`, with the changes of its settings."""
    kind = kinds.get(changes[name].partition("=")[2])
    if kind is None:
        raise UserError("settings", f"choose one of {', '.join(kinds)}", changes[name])
    hints = {field.name: annotations(kind)[field.name] for field in fields(kind)}
    values = {name: getattr(old, name) for name in hints if hasattr(old, name)}
    parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{name}.")}
    values |= {part: setting_value(change, part, hints, f"{kind.__name__} has ") for part, change in parts.items()}
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    if missing := [f"{name}.{part}" for part in required if part not in values]:
        raise UserError("settings", f"set {', '.join(missing)} as well", changes[name])
    try:
        return kind(**values)
    except ValueError as error:
        raise UserError("settings", str(error)) from error


def types_of(value: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> annotated type of every setting of a dataclass and of the dataclasses in it, in their order."""
    types: dict[str, Any] = {}
    hints = annotations(type(value))  # type: ignore[arg-type]  # mypy's: a type is hashable
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            types |= types_of(inner, f"{prefix}{field.name}.")
        else:
            types[prefix + field.name] = hints[field.name]
    return types


def replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    """A dataclass with the values at some paths changed, inner dataclasses first."""
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        name, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(name, {})[rest] = new
        else:
            own[name] = new
    inner = {name: replaced(getattr(value, name), parts) for name, parts in nested.items()}
    return replace(value, **own, **inner)


def setting_text(value: Any) -> str:
    """A value as it is written for `--set`: `0.2,1.0`."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def meanings(kind: type) -> dict[str, str]:
    """Field -> its comment, of a dataclass and its base classes; fields without a comment are omitted.

    A field's comment is the one on its last line, or else all comment lines directly above it. Empty if there is no
    source file.
    """
    texts: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if is_dataclass(ancestor) and "__annotations__" in vars(ancestor):
            texts |= _own_comments(ancestor)
    return texts


@cache  # `bench list METHOD` asks again for every field of a recipe
def _own_comments(kind: type) -> dict[str, str]:
    """Field -> its comment, of the fields that the class itself defines."""
    lines, definitions = _classes(kind.__module__)
    texts = {}
    for entry in definitions[kind.__name__].body if kind.__name__ in definitions else ():
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            trailing = lines[(entry.end_lineno or 0) - 1].encode()[entry.end_col_offset :].decode()
            above = takewhile(lambda line: line.startswith("#"), map(str.strip, lines[entry.lineno - 2 :: -1]))
            comments = [trailing] if "#" in trailing else [*above][::-1]
            texts[entry.target.id] = " ".join(comment.lstrip("# ").strip() for comment in comments)
    return {name: text for name, text in texts.items() if text}


@cache
def _classes(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The lines of a module, and its classes by name."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # made at run time, or from a compiled file
        return [], {}
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return source.splitlines(), {node.name: node for node in reversed(nodes)}
