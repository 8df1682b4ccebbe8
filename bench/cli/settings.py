"""`--set NAME=VALUE`: texts into the types that a dataclass of settings declares, all changes of a call together.

One syntax: TASK.FIELD=VALUE for the tasks of a run (bench/run/suites.py), FIELD=VALUE for a pretraining recipe
(bench/pretraining/recipes.py). Which of them is meant is found there; what a text means is found here.

What a setting means is the comment beside its field, or above it, read from the source of the dataclass.
"""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from engine.printing import did_you_mean

TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One `NAME=VALUE` as it was written: `knn@dino.k=10,20`, `schedule.warmup=5`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def read_changes(texts: Sequence[str], form: str, example: str) -> list[Change]:
    """`NAME=VALUE ...`; the last value of a repeated name. ValueError, with the `form` and an `example`."""
    found: dict[str, Change] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and name):
            raise ValueError(f"--set {text}: write {form}, for example {example}")
        found[name] = Change(name=name, value=value)
    return list(found.values())


def changed(value: Any, changes: Mapping[str, Change], whose: str = "") -> Any:
    """A dataclass with the settings at some paths (`k`, `schedule.warmup`) set from text, all at once.

    ValueError names the change that is wrong by itself; or says what is wrong with all together, `whose` first.
    """
    types, new = types_of(value), chosen_alternatives(value, changes)
    for path, change in changes.items():
        if path.partition(".")[0] in new:
            continue
        if path not in types:
            raise ValueError(
                f"--set {change}: {type(value).__name__} has no setting {path!r}{did_you_mean(path, list(types))}"
            )
        try:
            new[path] = parsed(change.value, types[path])
        except ValueError as error:
            raise ValueError(f"--set {change}: {error}") from error
    try:
        return replaced(value, new)
    except ValueError as error:
        raise ValueError(f"--set: {whose}{error}") from error


def alternatives(value: Any) -> dict[str, Mapping[str, type]]:
    """Field -> name -> dataclass that its value may be of, where a field of `value` says so in its metadata."""
    said = {field.name: field.metadata.get("alternatives") for field in dataclasses.fields(value)}
    return {name: kinds for name, kinds in said.items() if kinds}


def chosen_alternatives(value: Any, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Field -> new value, of fields for which an alternative is named (`schedule=Multistep`, `schedule.start=0.1`).

    It keeps what the old value has under the same name. ValueError for what it needs beside, or has no use for.
    """
    found = {}
    for field, kinds in alternatives(value).items():
        if field in changes:
            parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{field}.")}
            found[field] = _alternative(getattr(value, field), changes[field], parts, kinds)
    return found


def _alternative(old: Any, choice: Change, parts: Mapping[str, Change], kinds: Mapping[str, type]) -> Any:
    try:
        kind = kinds[_choice(choice.value, tuple(kinds))]
    except ValueError as error:
        raise ValueError(f"--set {choice}: {error}") from error
    fields, hints = dataclasses.fields(kind), get_type_hints(kind)
    known = {each.name: getattr(old, each.name) for each in fields if hasattr(old, each.name)}
    for name, change in parts.items():
        if name not in hints:
            raise ValueError(
                f"--set {change}: {kind.__name__} has no setting {name!r}{did_you_mean(name, list(hints))}"
            )
        try:
            known[name] = parsed(change.value, hints[name])
        except ValueError as error:
            raise ValueError(f"--set {change}: {error}") from error
    required = [each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING]
    if lacking := [f"{choice.name}.{name}" for name in required if name not in known]:
        raise ValueError(f"--set {choice}: set {', '.join(lacking)} as well")
    try:
        return kind(**known)
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def types_of(value: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> annotated type of every setting of a dataclass and of the dataclasses in it, in their order."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(value))
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            found |= types_of(inner, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found


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
    return dataclasses.replace(value, **own, **inner)


def setting_text(value: Any) -> str:
    """A value as `--set` reads it: `0.2,1.0`."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def parsed(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type. ValueError says what was expected."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _choice(text, choices)
    if origin in (Union, UnionType):
        return _first_that_fits(text, hint, choices)
    if origin is tuple:
        return _tuple(text, hint, choices)
    if hint not in SCALARS:
        raise ValueError(f"a {name_of(hint)} cannot be given on the command line")
    try:
        return SCALARS[hint](text)
    except (ValueError, KeyError):
        raise ValueError(f"expected {name_of(hint)}") from None


SCALARS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: TRUTH[text.lower()],
    int: int,
    float: float,
    str: str,
    Path: Path,
    NoneType: lambda text: {"none": None}[text.lower()],
}
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "none"}


def name_of(hint: Any) -> str:
    """How a message calls a type."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, choices))
    if origin in (Union, UnionType):
        return " or ".join(name_of(choice) for choice in choices)
    if origin is tuple and choices[-1] is Ellipsis:
        return f"comma-separated values, each {name_of(choices[0])}"
    if origin is tuple:
        return f"{len(choices)} comma-separated values"
    return NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _choice(text: str, choices: tuple[Any, ...]) -> Any:
    by_text = {str(choice): choice for choice in choices}
    if text not in by_text:
        raise ValueError(f"choose one of {', '.join(by_text)}")
    return by_text[text]


def _first_that_fits(text: str, hint: Any, choices: tuple[Any, ...]) -> Any:
    # None first: with `str | None`, "none" would otherwise be a text.
    for choice in sorted(choices, key=lambda choice: choice is not NoneType):
        try:
            return parsed(text, choice)
        except ValueError:
            continue
    raise ValueError(f"expected {name_of(hint)}")


def _tuple(text: str, hint: Any, choices: tuple[Any, ...]) -> tuple[Any, ...]:
    words = [word.strip() for word in text.strip("()[] ").split(",") if word.strip()]
    kinds = [choices[0]] * len(words) if choices[-1] is Ellipsis else list(choices)
    if len(words) != len(kinds):
        raise ValueError(f"expected {name_of(hint)}")
    try:
        return tuple(parsed(word, kind) for word, kind in zip(words, kinds, strict=True))
    except ValueError:
        raise ValueError(f"expected {name_of(hint)}") from None


class Comment(NamedTuple):
    """text: without the sign. alone: nothing else is on its line."""

    text: str
    alone: bool


def meanings(kind: type) -> dict[str, str]:
    """Field -> its comment, of a dataclass and those that it inherits from; fields without a comment are not in it.

    The comment on the last line of the field, else all comment lines directly above it. Empty without a source file.
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if is_dataclass(each) and "__annotations__" in vars(each):
            found |= _own(each)
    return found


@cache  # a recipe is told field by field
def _own(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class that was made at run time, or from a compiled file
        return {}
    comments = _comments(source)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    fields = [entry for entry in definition.body if isinstance(entry, ast.AnnAssign)]
    texts = {entry.target.id: _beside(entry, comments) for entry in fields if isinstance(entry.target, ast.Name)}
    return {name: text for name, text in texts.items() if text}


def _comments(source: str) -> dict[int, Comment]:
    # Line number -> comment.
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: Comment(token.string.lstrip("# ").strip(), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _beside(entry: ast.AnnAssign, comments: dict[int, Comment]) -> str:
    if entry.end_lineno in comments:
        return comments[entry.end_lineno].text
    above: list[str] = []
    line = entry.lineno - 1
    while line in comments and comments[line].alone:
        above.insert(0, comments[line].text)
        line -= 1
    return " ".join(above)
