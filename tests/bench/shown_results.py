"""Results as files hold them, for tests of what is shown of them."""

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


def used(name: str, number: int = 0, **others) -> CheckpointUsed:
    return CheckpointUsed(name=name, digest=f"{number:064x}", architecture="ViT-S/16", parameters=22_000_000, **others)


def result(checkpoint: CheckpointUsed, top1: float, **others) -> Result:
    fields = dict(
        status="ok",
        task="knn",
        protocol=ProtocolUsed(name="knn@dino", version=1, source="eval_knn.py"),
        metrics={
            "top1": MetricRecord(value=top1, interval=(top1 - 2, top1 + 2), array="top1"),
            "seconds": MetricRecord(value=100 - top1, unit="s", higher_is_better=False),
        },
        checkpoint=checkpoint,
        data=DataUsed(name="digits", url="digits:", images={"train": 1297, "val": 500}),
        seed=0,
        date="2026-01-02T03:04:05+00:00",
    )
    return Result(**fields | others)


def saved(folder: Path, found: Result, arrays: dict[str, np.ndarray]) -> Measured:
    space = Workspace(cache=folder, data="", seed=found.seed, limit=found.limit)
    path = result_path(folder, found.checkpoint, found.data.name, result_stem(found.protocol, found.settings, space))
    write_result(path, found, arrays)
    return Measured(path=path, result=found)
