"""How one job of a run ended: its result file, and the line about it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from bench.cli.messages import in_one_line, traceback_of
from bench.published.check import MeasuredNumbers
from bench.results.environment import hardware, versions
from bench.results.record import Result, images_seen, record
from bench.results.units import number_text
from bench.run.attempts import Attempt
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.outcomes import recorded
from bench.run.plan import Job
from checkpoints.frozen import FrozenExport
from engine.extensions import extensions, load_extension
from engine.printing import text_of
from engine.tasks import Workspace

MAIN_METRICS = 3  # metrics that a line of output shows


def record_attempt(job: Job, checkpoint: LoadedCheckpoint, space: Workspace, attempt: Attempt) -> Path:
    """Write the result file, or that of a failure; returns its path."""
    outcome = attempt.outcome
    found = recorded(outcome, images_seen(job.data, job.limit))
    result = Result(
        status="failed" if attempt.error else "ok",
        message=in_one_line(attempt.error) if attempt.error else "",
        task=job.chosen.key,
        protocol=job.protocol,
        metrics=found.metrics,
        interval_method=found.interval_method,
        checkpoint=checkpoint.used,
        data=job.data,
        seed=space.seed,
        random=outcome.random,
        limit=job.limit,
        precision=space.precision,
        decode=space.decode,
        skip_bad=space.skip_bad,
        settings=job.settings,
        facts=dict(outcome.facts),
        arrays=tuple(outcome.arrays),
        device=space.device,
        compiled=space.compiled and not job.chosen.task.LAYOUT,
        processes=space.world.size,
        seconds=round(attempt.seconds, 3),
        planned_seconds=None if attempt.planned is None else round(attempt.planned, 3),
        plan_ratio=None if attempt.ratio is None else round(attempt.ratio, 3),
        cost=dict(outcome.cost),
        images_per_second=_rate(outcome.cost),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware=hardware(),
    )
    log = text_of([*traceback_of(attempt.error), ""]) if attempt.error else ""
    return record(job.path, result, found.arrays, log)


def numbers_of(job: Job, export: FrozenExport, space: Workspace, attempt: Attempt) -> MeasuredNumbers:
    """What is compared with published numbers."""
    return MeasuredNumbers(
        digests=[digest for digest in (export.digest, str(export.facts.get("source_sha256") or "")) if digest],
        protocol=job.protocol,
        data=job.data,
        numbers=attempt.outcome.numbers,
        limit=job.limit,
        branch=branch_of(export),
    )


def branch_of(export: FrozenExport) -> str:
    """Which of the networks in its file an export holds; "" for its importer's first."""
    name, importer = str(export.facts.get("branch") or ""), str(export.facts.get("importer"))
    if not name or importer not in extensions("importers"):
        return ""
    return "" if name == next(iter(load_extension("importers", importer).BRANCHES)) else name


def _rate(cost: Mapping[str, float]) -> float | None:
    forwards, seconds = cost.get("forwards", 0), cost.get("extraction_seconds", 0)
    return round(forwards / seconds, 1) if forwards and seconds else None


def ending_of_attempt(attempt: Attempt) -> str:
    """`top1 76.1, top5 92.8, 12.3 s, planned 10.1 s (x 1.22)`"""
    if attempt.error is not None:
        return f"FAILED after {attempt.seconds:.1f} s: {in_one_line(attempt.error)}"
    metrics = list(attempt.outcome.metrics.items())
    floors = attempt.outcome.facts.get("floor", {}).get("metrics", {})
    texts = [f"{name} {number_text(metric.value, metric.unit)}" for name, metric in metrics[:MAIN_METRICS]]
    if metrics[0][0] in floors:
        texts[0] += f" (floor {number_text(floors[metrics[0][0]], metrics[0][1].unit)})"
    shown = ", ".join(texts)
    more = f" and {len(metrics) - MAIN_METRICS} more" if len(metrics) > MAIN_METRICS else ""
    plan_text = f", planned {attempt.planned:.1f} s (x {attempt.ratio:.2f})" if attempt.ratio else ""
    return f"{shown}{more}, {attempt.seconds:.1f} s{plan_text}"
