"""What a setting means: the comment beside its field, or above it, read from the source of the dataclass."""

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import is_dataclass
from functools import cache
from typing import NamedTuple


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
