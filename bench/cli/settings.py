"""`--set NAME=VALUE`: texts into the types that a dataclass of settings declares, all changes of a call together.

TASK.FIELD=VALUE for the tasks of a run (bench/run/suites.py), FIELD=VALUE for a pretraining recipe
(bench/pretraining/recipes.py) and for pictures. engine/settings.py turns each text into the annotated type.

What a setting means is the comment beside its field, or above it, read from the source of the dataclass.
"""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple

from engine.printing import did_you_mean
from engine.settings import annotations, from_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One `NAME=VALUE` as it was written: `knn@dino.k=10,20`, `schedule.warmup=5`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def read_changes(texts: Sequence[str], form: str, example: str) -> list[Change]:
    """`NAME=VALUE ...`; the last value of a repeated name. ValueError, with the `form` and an `example`."""
    changes: dict[str, Change] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and name):
            raise ValueError(f"--set {text}: write {form}, for example {example}")
        changes[name] = Change(name=name, value=value)
    return list(changes.values())


def changed(value: Any, changes: Mapping[str, Change], whose: str = "") -> Any:
    """A dataclass with the settings at some paths (`k`, `schedule.warmup`) set from text, all at once.

    ValueError names the change that is wrong by itself; or says what is wrong with all together, `whose` first.
    """
    hints, values = types_of(value), chosen_alternatives(value, changes)
    for path, change in changes.items():
        if path.partition(".")[0] not in values:
            values[path] = _value(change, path, hints, type(value))
    try:
        return replaced(value, values)
    except ValueError as error:
        raise ValueError(f"--set: {whose}{error}") from error


def _value(change: Change, path: str, hints: Mapping[str, Any], kind: type) -> Any:
    if path not in hints:
        raise ValueError(f"--set {change}: {kind.__name__} has no setting {path!r}{did_you_mean(path, list(hints))}")
    try:
        return from_text(change.value, hints[path])
    except ValueError as error:
        raise ValueError(f"--set {change}: {error}") from error


def alternatives(value: Any) -> dict[str, Mapping[str, type]]:
    """Field -> name -> dataclass that its value may be of, where a field of `value` says so in its metadata."""
    fields = dataclasses.fields(value)
    return {field.name: kinds for field in fields if (kinds := field.metadata.get("alternatives"))}


def chosen_alternatives(value: Any, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Field -> new value, of fields for which an alternative is named (`schedule=Multistep`, `schedule.start=0.1`).

    It keeps what the old value has under the same name. ValueError for settings that it lacks or does not have.
    """
    chosen = {}
    for name, kinds in alternatives(value).items():
        if name in changes:
            parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{name}.")}
            chosen[name] = _alternative(getattr(value, name), changes[name], parts, kinds)
    return chosen


def _alternative(old: Any, choice: Change, parts: Mapping[str, Change], kinds: Mapping[str, type]) -> Any:
    if choice.value not in kinds:
        raise ValueError(f"--set {choice}: choose one of {', '.join(kinds)}")
    kind = kinds[choice.value]
    fields = dataclasses.fields(kind)
    hints = {field.name: annotations(kind)[field.name] for field in fields}
    values = {field.name: getattr(old, field.name) for field in fields if hasattr(old, field.name)}
    values |= {name: _value(change, name, hints, kind) for name, change in parts.items()}
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if lacking := [f"{choice.name}.{name}" for name in required if name not in values]:
        raise ValueError(f"--set {choice}: set {', '.join(lacking)} as well")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def types_of(value: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> annotated type of every setting of a dataclass and of the dataclasses in it, in their order."""
    types: dict[str, Any] = {}
    hints = annotations(type(value))  # type: ignore[arg-type]  # mypy's: a type is hashable
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
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
    """A value as `--set` reads it: `0.2,1.0`."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Comment(NamedTuple):
    """text: without the sign. alone: nothing else is on its line."""

    text: str
    alone: bool


def meanings(kind: type) -> dict[str, str]:
    """Field -> its comment, of a dataclass and those that it inherits from; fields without a comment are not in it.

    The comment on the last line of the field, else all comment lines directly above it. Empty without a source file.
    """
    texts: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if is_dataclass(ancestor) and "__annotations__" in vars(ancestor):
            texts |= _own(ancestor)
    return texts


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
