"""`python -m tools.result_fields` writes the table in docs/results.md of the fields of a result file.

The table is made from the types in bench/results/record.py: from their JSON schema, which msgspec makes, and from the
comment of each field.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from bench.results.record import Result
from engine.files import write_atomic
from engine.settings import meanings

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
START, END = "<!-- fields: python -m tools.result_fields -->\n", "<!-- end of fields -->\n"


def table() -> str:
    """Markdown: field, type, meaning, in the order of the file."""
    schema = msgspec.json.schema(Result)["$defs"]
    lines = ["| field | type | meaning |", "|---|---|---|", *_rows(Result, schema, "")]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A page with the table between START and END. ValueError if one of these lines is missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{PAGE}: has no lines {START.strip()} and {END.strip()} around the table of fields")
    return before + start + table() + end + after


def _rows(kind: type, schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Rows for the fields of a type, each followed by those of a type inside it. schema: name of a type -> schema."""
    texts = meanings(kind)
    for name, hint in get_type_hints(kind).items():
        yield f"| `{prefix}{name}` | {_type_text(schema[kind.__name__]['properties'][name])} | {texts[name]} |"
        for inner_type, path in ((hint, name), *((value_type, f"{name}.<name>") for value_type in get_args(hint))):
            if getattr(inner_type, "__name__", "") in schema:
                yield from _rows(inner_type, schema, f"{prefix}{path}.")


def _type_text(schema: Mapping[str, Any]) -> str:
    """A type in the words of JSON: `number or null`, `array of strings`, `"failed" or "ok"`."""
    if choices := schema.get("anyOf"):
        return " or ".join(map(_type_text, choices))
    if choices := schema.get("enum"):
        return " or ".join(f"`{choice}`" for choice in choices)
    if "$ref" in schema:
        return "object"
    if items := schema.get("prefixItems"):
        return f"array of {len(items)} {_type_text(items[0])}s"
    values = schema.get("additionalProperties") or schema.get("items")
    return f"{schema['type']} of {_type_text(values)}s" if values else schema["type"]


if __name__ == "__main__":
    write_atomic(PAGE, with_table(PAGE.read_text(encoding="utf-8")))
