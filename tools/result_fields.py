"""The table of a result file's fields in docs/results.md, made from the types of bench/results/record.py.

`python -m tools.result_fields` writes it anew. Types are those of the JSON schema that msgspec makes of them; what a
field means is the comment beside it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from bench.cli.settings import meanings
from bench.results.record import Result
from engine.files import write_atomic

DOCUMENT = Path(__file__).parents[1] / "docs" / "results.md"
START, END = "<!-- fields: python -m tools.result_fields -->\n", "<!-- end of fields -->\n"


def table() -> str:
    """Markdown: field, type, meaning, in the order of the file."""
    schema = msgspec.json.schema(Result)["$defs"]
    lines = ["| field | type | meaning |", "|---|---|---|", *_rows(Result, schema, "")]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A document with the table between its two marks. ValueError where it lacks one."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{DOCUMENT}: has no lines {START.strip()} and {END.strip()} around the table of fields")
    return before + start + table() + end + after


def _rows(kind: type, schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    texts = meanings(kind)
    for name, hint in get_type_hints(kind).items():
        yield f"| `{prefix}{name}` | {_type(schema[kind.__name__]['properties'][name])} | {texts[name]} |"
        for inside, place in ((hint, name), *((part, f"{name}.<name>") for part in get_args(hint))):
            if getattr(inside, "__name__", "") in schema:
                yield from _rows(inside, schema, f"{prefix}{place}.")


def _type(schema: Mapping[str, Any]) -> str:
    # JSON's own words: `number or null`, `array of string`, `"failed" or "ok"`.
    if choices := schema.get("anyOf"):
        return " or ".join(map(_type, choices))
    if choices := schema.get("enum"):
        return " or ".join(f"`{choice}`" for choice in choices)
    if "$ref" in schema:
        return "object"
    inside = schema.get("additionalProperties") or schema.get("items")
    if items := schema.get("prefixItems"):
        return f"array of {len(items)} {_type(items[0])}s"
    return f"{schema['type']} of {_type(inside)}s" if inside else schema["type"]


if __name__ == "__main__":
    write_atomic(DOCUMENT, with_table(DOCUMENT.read_text(encoding="utf-8")))
