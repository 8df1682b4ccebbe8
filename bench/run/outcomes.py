"""What a task returned, checked, and as the result that is written to a file: metrics with intervals, arrays, facts."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import isfinite

import numpy as np

from bench.results.record import MetricRecord, Result, images_seen, number_text
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.prepare import Job
from bench.statistics import intervals
from engine.errors import in_one_line
from engine.machine import hardware, versions
from engine.tasks import Metric, Outcome, Workspace


def checked(outcome: Outcome) -> Outcome:
    """The outcome itself. ValueError, naming the problem and the metric or array, if it cannot be a result."""
    if not isinstance(outcome, Outcome):
        raise ValueError(f"the task's run() returned {type(outcome).__name__}; return an engine.tasks.Outcome")
    if not outcome.metrics:
        raise ValueError("the task returned no metrics")
    units = 'for "%" fractions from 0 to 1, for any other unit in that unit'
    requirements: Sequence[tuple[str, Callable[[Metric], bool]]] = (
        ("that are not an engine.tasks.Metric", lambda metric: isinstance(metric, Metric)),
        ("whose value is not one number", lambda metric: np.ndim(metric.value) == 0),
        (
            "whose per_image or resampled values are not a vector",
            lambda metric: all(v is None or np.ndim(v) == 1 for v in (metric.per_image, metric.resampled)),
        ),
        ("that are not finite", lambda metric: isfinite(metric.value)),
        ("whose deviation_of is not a metric", lambda metric: metric.deviation_of in (None, *outcome.metrics)),
        (
            f"that are not the mean of their values per image ({units})",
            lambda metric: (
                metric.per_image is None
                or intervals.averages_to(np.asarray(metric.per_image), metric.value, metric.unit)
            ),
        ),
    )
    for problem, is_met in requirements:
        if invalid := [name for name, metric in outcome.metrics.items() if not is_met(metric)]:
            raise ValueError(f"metrics {problem}: {', '.join(invalid)}")
    if objects := [name for name, values in arrays_of(outcome).items() if values.dtype == object]:
        raise ValueError(f"arrays that hold objects, not numbers: {', '.join(objects)}")
    try:
        json.dumps(dict(outcome.facts), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"facts that are not JSON: {error}") from error
    return outcome


def arrays_of(outcome: Outcome) -> dict[str, np.ndarray]:
    """All arrays for the `.npz` file by name. ValueError if two have the same name."""
    arrays = dict(outcome.arrays)
    for name, metric in outcome.metrics.items():
        array, values = _array_of(name, metric)
        if array in arrays:
            raise ValueError(f"two arrays named {array}: that of the metric {name}, and another array")
        if array and values is not None:
            arrays[array] = values
    return {name: np.asarray(values) for name, values in arrays.items()}


def _array_of(name: str, metric: Metric) -> tuple[str | None, np.ndarray | None]:
    """Name and values of a metric's array over images or resamples; None if it has none.

    Values on resamples are random draws, so single precision is enough for them.
    """
    if metric.resampled is not None:
        return f"{name}_resampled", np.asarray(metric.resampled, np.float32)
    return (None, None) if metric.per_image is None else (name, np.asarray(metric.per_image))


def metric_records(outcome: Outcome, images: int) -> tuple[dict[str, MetricRecord], str]:
    """The metrics as recorded in a result file, with intervals over `images` validation images, and their method."""
    records, methods = {}, set()
    for name, metric in outcome.metrics.items():
        interval, method = None, ""
        array, values = _array_of(name, metric)
        if metric.resampled is not None and values is not None:
            interval, method = intervals.of_resampled(values, metric.resampled_units or images)
        elif values is not None:
            interval, method = intervals.of_mean(values, metric.unit)
        if interval:
            methods.add(method)
        records[name] = MetricRecord(
            value=float(metric.value),
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
            interval=interval,
            chosen_on_val=metric.chosen_on_val,
            deviation_of=metric.deviation_of,
            array=array,
            array_over="images" if metric.resampled is None else "resamples",
            resampled_units=metric.resampled_units,
        )
    return records, "; ".join(sorted(methods))


def result_of(
    job: Job, checkpoint: LoadedCheckpoint, space: Workspace, outcome: Outcome | Exception, seconds: float
) -> Result:
    """The result of a job, as it is written to its file; for an exception a failed result."""
    error = outcome if isinstance(outcome, Exception) else None
    outcome = Outcome(metrics={}) if isinstance(outcome, Exception) else outcome
    metrics, interval_method = metric_records(outcome, images_seen(job.data, job.limit))
    forwards, extraction_seconds = outcome.cost.get("forwards", 0), outcome.cost.get("extraction_seconds", 0)
    return Result(
        status="failed" if error else "ok",
        message=in_one_line(error) if error else "",
        task=job.chosen.key,
        protocol=job.protocol,
        metrics=metrics,
        interval_method=interval_method,
        checkpoint=checkpoint.used,
        data=job.data,
        seed=job.seed,
        random=job.chosen.task.is_random,
        limit=job.limit,
        image_size=job.image_size,
        precision=space.precision,
        decode=space.decode,
        skip_bad=space.skip_bad,
        settings=job.settings,
        facts=dict(outcome.facts),
        arrays=tuple(outcome.arrays),
        device=space.device,
        compiled=space.compiled and not job.chosen.task.LAYOUT,
        processes=space.world.size,
        seconds=round(seconds, 3),
        cost=dict(outcome.cost),
        images_per_second=round(forwards / extraction_seconds, 1) if forwards and extraction_seconds else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware=hardware(),
    )


MAIN_METRICS = 3  # metrics in a line of output


def result_line(result: Result) -> str:
    """A result in one line: `top1 76.1, top5 92.8, 12.3 s`, or why it failed."""
    if result.status == "failed":
        return f"FAILED after {result.seconds:.1f} s: {result.message}"
    metrics = list(result.metrics.items())
    constant = result.facts.get("floor", {}).get("metrics", {})
    texts = [f"{name} {number_text(metric.value, metric.unit)}" for name, metric in metrics[:MAIN_METRICS]]
    if metrics[0][0] in constant:
        texts[0] += f" (floor {number_text(constant[metrics[0][0]], metrics[0][1].unit)})"
    omitted = f" and {len(metrics) - MAIN_METRICS} more" if len(metrics) > MAIN_METRICS else ""
    return f"{', '.join(texts)}{omitted}, {result.seconds:.1f} s"
