"""A task's outcome, checked, and in the form of a result file: metrics with their intervals, and arrays by name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from bench.results.record import MetricRecord
from bench.statistics import intervals
from engine.tasks import Metric, Outcome


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An outcome as a result file holds it."""

    metrics: Mapping[str, MetricRecord] = field(default_factory=dict)  # by name
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # all arrays of the `.npz` file, by name
    interval_method: str = ""  # all methods that the intervals are from


def checked(outcome: Outcome) -> Outcome:
    """The outcome itself. ValueError where it cannot be a result; it names what is wrong and the metric or array."""
    if not outcome.metrics:
        raise ValueError("the task returned no metrics")
    _refuse("metrics that are no engine.tasks.Metric", outcome, lambda metric: isinstance(metric, Metric))
    _refuse("metrics that are not finite", outcome, lambda metric: isfinite(metric.value))
    known = (None, *outcome.metrics)
    _refuse("deviations of no metric of the task", outcome, lambda metric: metric.deviation_of in known)
    why = 'of "%" shares from 0 to 1, of any other unit in that unit'
    _refuse(f"metrics that are not the mean of their values per image ({why})", outcome, _is_mean)
    if odd := [name for name, values in _arrays(outcome).items() if values.dtype == object]:
        raise ValueError(f"arrays that hold objects, not numbers: {', '.join(odd)}")
    try:
        json.dumps(dict(outcome.facts), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"facts that are not JSON: {error}") from error
    return outcome


def _refuse(what: str, outcome: Outcome, is_right: Callable[[Metric], bool]) -> None:
    if wrong := [name for name, metric in outcome.metrics.items() if not is_right(metric)]:
        raise ValueError(f"{what}: {', '.join(wrong)}")


def recorded(outcome: Outcome, images: int) -> Recorded:
    """A checked outcome on `images` validation images, as its result file holds it."""
    metrics, methods = {}, set()
    for name, metric in outcome.metrics.items():
        interval, method = _interval(metric, images)
        methods |= {method} if interval else set()
        metrics[name] = MetricRecord(
            value=float(metric.value),
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
            interval=interval,
            chosen_on_val=metric.chosen_on_val,
            deviation_of=metric.deviation_of,
            array=_array_name(name, metric),
            array_over="images" if metric.resampled is None else "resamples",
        )
    return Recorded(metrics=metrics, arrays=_arrays(outcome), interval_method="; ".join(sorted(methods)))


def _interval(metric: Metric, images: int) -> tuple[tuple[float, float] | None, str]:
    # The interval and its method; None without an array, and for a single image.
    if metric.per_image is not None:
        values = np.asarray(metric.per_image)
        return intervals.of_mean(values, metric.unit)
    if metric.resampled is None or images < 2:
        return None, ""
    return intervals.bootstrap_interval(np.asarray(metric.resampled), images), intervals.BOOTSTRAP_METHOD


def _is_mean(metric: Metric) -> bool:
    values = metric.per_image
    return values is None or intervals.averages_to(np.asarray(values), metric.value, metric.unit)


def _array_name(name: str, metric: Metric) -> str | None:
    if metric.per_image is not None:
        return name
    return f"{name}_resampled" if metric.resampled is not None else None


def _arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    """All arrays by name. ValueError where two have the same name."""
    found = dict(outcome.arrays)
    for name, metric in outcome.metrics.items():
        array = _array_name(name, metric)
        if array in found:
            raise ValueError(f"two arrays named {array}: that of the metric {name} and another one")
        values = metric.per_image if metric.resampled is None else metric.resampled
        if array and values is not None:
            found[array] = values
    return {name: np.asarray(values) for name, values in found.items()}
