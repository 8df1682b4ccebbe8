"""The one table of results: a row for each metric of each result, with everything that the number depends on.

`to_pandas()` in Python and results.parquet are this table; the columns are COLUMNS.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from bench.results.record import Result, pixels_text
from engine.optional import require
from engine.printing import html_template, printable

if TYPE_CHECKING:
    from pandas import DataFrame

LARGEST = 2**63 - 1  # value that a column of integers can hold
SPLIT = "val"  # all metrics are measured on it
TEXT, REAL, WHOLE, FLAG = "string", "float64", "int64", "bool"
# Column -> its type, and the attribute of the result or metric that it holds; "": computed in `rows_of`.
COLUMNS = {
    "checkpoint": (TEXT, "checkpoint.name"),
    "digest": (TEXT, "checkpoint.digest"),
    "method": (TEXT, "checkpoint.method"),
    "recipe": (TEXT, "checkpoint.recipe"),
    "branch": (TEXT, "checkpoint.branch"),
    "architecture": (TEXT, "checkpoint.architecture"),
    "parameters": (WHOLE, "checkpoint.parameters"),
    "source": (TEXT, "checkpoint.source"),
    "checkpoint_plugin": (TEXT, "checkpoint.plugin"),
    "training_hours": (REAL, "checkpoint.training_cost.hours"),
    "data": (TEXT, "data.name"),
    "url": (TEXT, "data.url"),
    "split": (TEXT, ""),
    "images": (WHOLE, ""),
    "fingerprint": (TEXT, ""),
    "task": (TEXT, "task"),
    "protocol": (TEXT, "protocol.name"),
    "version": (WHOLE, "protocol.version"),
    "protocol_source": (TEXT, "protocol.source"),
    "plugin": (TEXT, "protocol.plugin"),
    "changes": (TEXT, "protocol.changes"),
    "group": (TEXT, "group"),
    "metric": (TEXT, ""),
    "value": (REAL, "metric.value"),
    "unit": (TEXT, "metric.unit"),
    "higher_is_better": (FLAG, "metric.higher_is_better"),
    "low": (REAL, ""),
    "high": (REAL, ""),
    "interval_method": (TEXT, "interval_method"),
    "chosen_on_val": (FLAG, "metric.chosen_on_val"),
    "deviation_of": (TEXT, "metric.deviation_of"),
    "seed": (WHOLE, "seed"),
    "random": (FLAG, "random"),
    "limit": (WHOLE, "limit"),
    "image_size": (TEXT, ""),
    "precision": (TEXT, "precision"),
    "decode": (TEXT, "decode"),
    "skipped": (WHOLE, "skipped"),
    "status": (TEXT, "status"),
    "message": (TEXT, "message"),
    "settings": (TEXT, "settings"),
    "facts": (TEXT, "facts"),
    "device": (TEXT, "device"),
    "compiled": (FLAG, "compiled"),
    "processes": (WHOLE, "processes"),
    "seconds": (REAL, "seconds"),
    "images_per_second": (REAL, "images_per_second"),
    "date": (TEXT, "date"),
    "versions": (TEXT, "versions"),
    "hardware": (TEXT, "hardware"),
    "file": (TEXT, ""),
}


def rows_of(result: Result, file: str = "") -> Iterator[dict[str, Any]]:
    """A row for each metric of a result; a single row without numbers for a result that has none.

    file: of the result, relative to the folder of all.
    """
    data = result.data
    shared = {
        "split": SPLIT,
        "images": data.images.get(SPLIT),
        "fingerprint": data.fingerprints.get(SPLIT),
        "image_size": pixels_text(result.image_size) or None,
        "file": file,
    }
    metric_columns = {}
    for column, (_, attribute) in COLUMNS.items():
        if attribute.startswith("metric."):
            metric_columns[column] = attribute.removeprefix("metric.")
        elif attribute:
            shared[column] = attrgetter(attribute)(result)
    shared = {column: _cell(value) for column, value in shared.items()}
    if not result.metrics:
        yield {**dict.fromkeys(COLUMNS), **shared}
    for name, metric in result.metrics.items():
        low, high = metric.interval or (None, None)
        numbers = {column: _cell(getattr(metric, attribute)) for column, attribute in metric_columns.items()}
        yield {**dict.fromkeys(COLUMNS), **shared, **numbers, "metric": printable(name), "low": low, "high": high}


def _cell(value: Any) -> Any:
    """A value as a cell holds it: printable text, mappings as JSON, None for an integer beyond 64 bits."""
    if isinstance(value, Mapping):
        value = json.dumps(msgspec.to_builtins(value))
    if isinstance(value, str):
        return printable(value)
    is_whole_number = isinstance(value, int) and not isinstance(value, bool)
    return None if is_whole_number and abs(value) > LARGEST else value  # the result's JSON file still has the number


def to_pandas(rows: Iterable[Mapping[str, Any]]) -> "DataFrame":
    """Rows as a pandas DataFrame. ValueError if pandas is not installed."""
    require("pandas")
    from pandas import DataFrame

    return DataFrame(list(rows), columns=list(COLUMNS))


def to_parquet(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as a Parquet file. ValueError if pyarrow is not installed."""
    require("pyarrow")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    listed = list(rows)
    columns = {name: [row[name] for row in listed] for name in COLUMNS}
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, (kind, _) in COLUMNS.items()])
    buffer = io.BytesIO()
    write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


PREVIEW = """<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>"""


class Results(list[Result]):
    """A list of results, which prints as a line for each; a notebook shows it as a table."""

    def to_pandas(self) -> "DataFrame":
        """The table of these results as a pandas DataFrame. ValueError if pandas is not installed."""
        return to_pandas(row for result in self for row in rows_of(result))

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        heads = ("checkpoint", "data", "protocol", "metric", "value [95 % interval]")
        rows = [
            (result.checkpoint.name, result.data.name, " ".join((result.protocol.name, *result.variant)), name, metric)
            for result in self
            for name, metric in result.metrics.items()
        ]
        return html_template(PREVIEW).render(heads=heads, rows=rows)
