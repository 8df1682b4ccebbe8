"""`--set NAME=VALUE`, and the descriptions of settings: comments next to their fields, read from the source code.

TASK.FIELD=VALUE changes the tasks of a run (bench/run/suites.py), FIELD=VALUE a pretraining recipe
(bench/pretraining/recipes.py) or a picture. engine/settings.py parses a text as the annotated type.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from engine.errors import UserError
from engine.printing import did_you_mean
from engine.settings import annotations, from_text


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
    ValueError names the change that is invalid, or reports which rule between settings the changes together break.
    """
    hints, values = types_of(value), {}
    for name, kinds in alternatives(value).items():
        if name in changes:
            values[name] = _alternative(getattr(value, name), name, changes, kinds)
    for path, change in changes.items():
        if path.partition(".")[0] not in values:
            values[path] = setting_value(change, path, hints)
    try:
        return replaced(value, values)
    except ValueError as error:
        raise UserError("settings", f"{whose}{error}") from error


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
    fields = dataclasses.fields(value)
    return {field.name: kinds for field in fields if (kinds := field.metadata.get("alternatives"))}


def _alternative(old: Any, name: str, changes: Mapping[str, str], kinds: Mapping[str, type]) -> Any:
    """The dataclass that takes the place of `old` in the field `name`, with the changes of its settings."""
    kind = kinds.get(changes[name].partition("=")[2])
    if kind is None:
        raise UserError("settings", f"choose one of {', '.join(kinds)}", changes[name])
    fields = dataclasses.fields(kind)
    hints = {field.name: annotations(kind)[field.name] for field in fields}
    values = {field.name: getattr(old, field.name) for field in fields if hasattr(old, field.name)}
    parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{name}.")}
    values |= {part: setting_value(change, part, hints, f"{kind.__name__} has ") for part, change in parts.items()}
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
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
    for field in dataclasses.fields(value):
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
    return dataclasses.replace(value, **own, **inner)


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
