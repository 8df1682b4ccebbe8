"""results.parquet: every number of every result file in a row of its own, for DuckDB, pandas and the like.

A failed result has one row, without a metric. Texts from outside are escaped as everywhere; what is nested in a result
file (settings, facts, versions, ...) is JSON. docs/results.md has the columns.
"""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.results.board import group_of
from bench.results.record import MetricRecord, Result
from bench.statistics.matching import Measured
from engine.optional import require
from engine.printing import printable

LARGEST = 2**63 - 1  # of a column of integers
TEXT, REAL, WHOLE, FLAG = "string", "float64", "int64", "bool"
COLUMNS = {
    "checkpoint": TEXT,
    "digest": TEXT,
    "method": TEXT,
    "recipe": TEXT,
    "branch": TEXT,
    "architecture": TEXT,
    "parameters": WHOLE,
    "source": TEXT,
    "checkpoint_plugin": TEXT,
    "training_hours": REAL,
    "data": TEXT,
    "url": TEXT,
    "split": TEXT,
    "images": WHOLE,
    "fingerprint": TEXT,
    "task": TEXT,
    "protocol": TEXT,
    "version": WHOLE,
    "protocol_source": TEXT,
    "plugin": TEXT,
    "changes": TEXT,
    "group": TEXT,
    "metric": TEXT,
    "value": REAL,
    "unit": TEXT,
    "higher_is_better": FLAG,
    "low": REAL,
    "high": REAL,
    "interval_method": TEXT,
    "chosen_on_val": FLAG,
    "deviation_of": TEXT,
    "seed": WHOLE,
    "random": FLAG,
    "limit": WHOLE,
    "precision": TEXT,
    "decode": TEXT,
    "skipped": WHOLE,
    "status": TEXT,
    "message": TEXT,
    "settings": TEXT,
    "facts": TEXT,
    "device": TEXT,
    "compiled": FLAG,
    "processes": WHOLE,
    "seconds": REAL,
    "images_per_second": REAL,
    "date": TEXT,
    "versions": TEXT,
    "hardware": TEXT,
    "file": TEXT,
}
SPLIT = "val"  # that all metrics are of


def to_parquet(measured: Iterable[Measured], root: Path) -> bytes:
    """All results as a Parquet table. root: the folder below which the result files lie, which `file` leaves out.

    ValueError where pyarrow is missing.
    """
    require("pyarrow")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    rows = [row for each in measured for row in _rows(each, root)]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    buffer = io.BytesIO()
    write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def _rows(measured: Measured, root: Path) -> Iterator[dict[str, Any]]:
    result = measured.result
    shared = _facts(result) | {"file": printable(measured.path.relative_to(root))}
    for name, metric in result.metrics.items() if result.metrics else [(None, None)]:
        yield shared | _number(name, metric)


def _number(name: str | None, metric: MetricRecord | None) -> dict[str, Any]:
    if name is None or metric is None:
        absent = ("metric", "value", "unit", "higher_is_better", "low", "high", "chosen_on_val", "deviation_of")
        return dict.fromkeys(absent)
    low, high = metric.interval or (None, None)
    return {
        "metric": printable(name),
        "value": metric.value,
        "unit": printable(metric.unit),
        "higher_is_better": metric.higher_is_better,
        "low": low,
        "high": high,
        "chosen_on_val": metric.chosen_on_val,
        "deviation_of": None if metric.deviation_of is None else printable(metric.deviation_of),
    }


def _facts(result: Result) -> dict[str, Any]:
    """What all rows of a result share."""
    used, data, protocol = result.checkpoint, result.data, result.protocol
    found = {
        **{name: getattr(used, name) for name in ("digest", "method", "recipe", "branch", "architecture", "source")},
        "checkpoint": used.name,
        "parameters": used.parameters,
        "checkpoint_plugin": used.plugin,
        "training_hours": used.training_cost.hours,
        "data": data.name,
        "url": data.url,
        "split": SPLIT,
        "images": data.images.get(SPLIT),
        "fingerprint": data.fingerprints.get(SPLIT),
        "protocol": protocol.name,
        "version": protocol.version,
        "protocol_source": protocol.source,
        "plugin": protocol.plugin,
        "changes": _json(protocol.changes),
        "group": group_of(result),
    }
    same = ["task", "interval_method", "seed", "random", "limit", "precision", "decode", "skipped", "status", "message"]
    same += ["device", "compiled", "processes", "seconds", "images_per_second", "date"]
    found |= {name: getattr(result, name) for name in same}
    found |= {name: _json(getattr(result, name)) for name in ("settings", "facts", "versions", "hardware")}
    return {name: _kept(value) for name, value in found.items()}


def _json(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value))


def _kept(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return None if is_whole and abs(value) > LARGEST else value  # such a number is in the file, as JSON has it
