"""Metrics and intervals of a record's results, computed again from the arrays of the results.

Every result that `bench run` writes passes, so a reported line means an edited or damaged file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isclose
from pathlib import Path

import numpy as np

from bench.results.record import MetricRecord, Result, images_seen
from bench.results.store import StoredResult
from bench.statistics import intervals
from downstream.metrics.scores import RIGHT, weighted_ap, weighted_scores
from engine.errors import in_one_line
from engine.tasks import Score, resampled

NEAR = partial(isclose, rel_tol=1e-6, abs_tol=1e-6)  # the same number from another processor or library version
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, IndexError)  # raised by odd values
AREAS = re.compile(r"areas(_\d+)?")


def differences(folder: Path, results: Sequence[StoredResult]) -> Iterator[str]:
    """A line for each number that the arrays do not give, which begins with the file's path in the record `folder`."""
    for stored in results:
        place, result = stored.path.relative_to(folder), stored.result
        try:
            arrays = stored.arrays if stored.path.with_suffix(".npz").exists() else {}
            for name, metric in result.metrics.items():
                if difference := _difference(result, metric, arrays):
                    yield f"{place}: {name} {difference}"
            if not result.protocol.plugin:  # whose arrays of these names may mean anything
                yield from (f"{place}: {line}" for line in _dense_differences(result, arrays))
        except MALFORMED as error:
            yield f"{place}: its parts do not fit together ({type(error).__name__}: {in_one_line(error)})"
        stored.forget_arrays()


def _difference(result: Result, metric: MetricRecord, arrays: Mapping[str, np.ndarray]) -> str:
    """How a metric differs from what its array gives; "" if it does not, or has no array."""
    interval = None
    if metric.array:
        if metric.array not in arrays:
            return f"lacks its array {metric.array}"
        values, images = arrays[metric.array], images_seen(result.data, result.limit)
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            return "has an array that is no row of numbers"
        if metric.array_over == "resamples":
            interval = intervals.of_resampled(values, images)[0] if (~np.isnan(values)).any() else None
        else:
            if len(values) != images:
                return f"has values for {len(values)} images, expected {images}"
            if not intervals.averages_to(values, metric.value, metric.unit):
                return "is not the mean of its values for the images"
            interval = intervals.of_mean(values, metric.unit)[0]
    if (interval is None) != (metric.interval is None):
        return "has an interval, but its values give none" if metric.interval else "lacks the interval of its values"
    if interval and not all(map(NEAR, interval, metric.interval or ())):
        return f"has another interval than its values give, [{interval[0]:.4f}, {interval[1]:.4f}]"
    return ""


def _dense_differences(result: Result, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Check dense metrics, and their values on resamples, against the areas or detections of the images."""
    images = images_seen(result.data, result.limit)
    areas = [values for name, values in arrays.items() if AREAS.fullmatch(name)]
    score: Score
    if areas:
        score, rows = partial(weighted_scores, areas), set(map(len, areas))
    elif "box_hits" in arrays:
        score, rows = partial(weighted_ap, arrays), {len(arrays["classes"]), len(arrays["objects"])}
    else:
        return
    if rows != {images}:
        yield f"its areas or detections cover {min(rows)} images, expected {images}"
        return
    if any((values < 0).any() or (values.min(-1) < values[..., RIGHT]).any() for values in areas):
        yield "areas: more pixels are correct than predicted or labelled"
    whole = score(np.ones((1, images)))
    lengths = [len(values) for name, values in arrays.items() if name.endswith("_resampled")]
    drawn = resampled(score, images, most=max(lengths, default=1))
    for name in whole.keys() & result.metrics.keys():
        if not NEAR(float(whole[name][0]), result.metrics[name].value):
            yield f"{name} is not what the areas or detections give, {float(whole[name][0]):.4f}"
        stored = arrays.get(f"{name}_resampled")
        if stored is not None and (
            stored.shape != drawn[name].shape or not np.allclose(stored, drawn[name], 1e-6, 1e-6, equal_nan=True)
        ):
            yield f"{name}_resampled is not what the areas or detections give"
