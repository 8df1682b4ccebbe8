"""Results that were never measured, for tests of what is made of result files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.results.record import (
    CheckpointUsed,
    DataUsed,
    MetricRecord,
    ProtocolUsed,
    Result,
    result_path,
    result_stem,
    write_result,
)
from bench.statistics.matching import Measured
from engine.tasks import Workspace

EVIL = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "$x_1$ & 'quotes', commas",
    "{{ 7 * 7 }}{% raw %}",
    "l\u00ednea \u202e\x1b[31m\n\x00 \udcff \U0001f600",
    "_hidden",
)


def made_checkpoint(name: str = "alpha", number: int = 0, **others) -> CheckpointUsed:
    """A checkpoint. number: what its digest is made of."""
    fields = dict(digest=f"{number:064x}", architecture="ViT-S/16", parameters=22_000_000)
    return CheckpointUsed(name=name, **fields | others)


def made_metrics(values: Mapping[str, float], intervals=None, **others) -> dict[str, MetricRecord]:
    """Metrics of these values, with intervals where they are given."""
    ends = intervals or {}
    return {name: MetricRecord(value=value, interval=ends.get(name), **others) for name, value in values.items()}


def made_result(checkpoint: CheckpointUsed, metrics: Mapping[str, MetricRecord], **others) -> Result:
    """A result of k-NN on the digits, unless `others` say something else."""
    fields = dict(
        status="ok",
        task="knn",
        protocol=ProtocolUsed(name="knn@dino", version=1, source="eval_knn.py"),
        metrics=dict(metrics),
        checkpoint=checkpoint,
        data=DataUsed(name="digits", url="digits:", images={"train": 1297, "val": 500}),
        seed=0,
        date="2026-01-02T03:04:05+00:00",
    )
    return Result(**fields | others)


def save_result(out: Path, found: Result, arrays: Mapping[str, np.ndarray] | None = None, log: str = "") -> Measured:
    """Write it to where a run writes it."""
    space = Workspace(
        cache=out, data="", seed=found.seed, limit=found.limit, precision=found.precision, decode=found.decode
    )
    path = result_path(out, found.checkpoint, found.data.name, result_stem(found.protocol, found.settings, space))
    write_result(path, found, arrays or {}, log)
    return Measured(path=path, result=found)
