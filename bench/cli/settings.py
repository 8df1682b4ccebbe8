"""`--set task.field=value`: texts into the types that a task's dataclass declares, and a task's settings as JSON."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine.tasks import Task

TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def settings_of(task: Task) -> dict[str, Any]:
    """All settings of a task as JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(task), default=str))


def split_change(text: str) -> tuple[str, str, str]:
    """`knn@dino.k=10,20` -> ("knn@dino", "k", "10,20")."""
    target, equals, value = text.partition("=")
    task, dot, field = target.rpartition(".")
    if not (equals and dot and task and field):
        raise ValueError(f"--set {text}: write task.field=value, for example knn.k=10,20")
    return task.strip(), field.strip(), value.strip()


def changed(task: Task, field: str, text: str) -> Task:
    """`task` with one field set from text. ValueError names the choices."""
    hints = {f.name: get_type_hints(type(task))[f.name] for f in dataclasses.fields(task)}
    if field not in hints:
        raise ValueError(f"{type(task).__name__} has no setting {field!r}{meant(field, hints)}")
    try:
        return dataclasses.replace(task, **{field: parsed(text, hints[field])})
    except ValueError as error:
        raise ValueError(f"{field}={text!r}: {error}") from error


def meant(word: str, choices: Sequence[str]) -> str:
    """The end of a message about an unknown word: the likely one, and all choices."""
    close = get_close_matches(word, list(choices), n=1)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" there are: {', '.join(choices) or 'none'}"


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
