"""The difference of two checkpoints in one metric, by the test that what was kept of the images allows."""

import numpy as np

from bench.results.record import MetricRecord, validation_images
from bench.statistics import paired, resampled
from bench.statistics.matching import Match, Measured, array_of, paired_values
from bench.statistics.paired import Paired
from engine.files import digest


def difference(match: Match, metric: str) -> Paired:
    """Both numbers, their difference with its interval, and p. ValueError says why there is none."""
    if _is_resampled(match, metric):
        sides = (match.first, match.second)
        metrics = tuple(float(np.mean([_record(each, metric).value for each in side])) for side in sides)
        return resampled.paired(metrics, *_resampled(match, metric))
    first, second = match.first[0].result, match.second[0].result
    seed = digest([first.checkpoint.digest, second.checkpoint.digest, match.group, metric])
    one, another, scale = _scaled(match, metric)
    return paired.paired(one, another, seed=int(seed[:16], 16), scale=scale)


def p_value(match: Match, metric: str) -> float:
    """The p of `difference` alone."""
    if _is_resampled(match, metric):
        (first, second), images = _resampled(match, metric)
        return resampled.p_value(first - second, images)
    one, another, _ = _scaled(match, metric)
    return paired.p_value(one, another, seed=0)


def _is_resampled(match: Match, metric: str) -> bool:
    records = [_record(each, metric) for each in (*match.first, *match.second)]
    return all(record.array and record.array_over == "resamples" for record in records)


def _record(measured: Measured, metric: str) -> MetricRecord:
    return measured.result.metrics[metric]


def _scaled(match: Match, metric: str) -> tuple[np.ndarray, np.ndarray, float]:
    # Values (N,) of both, at most 1 in size, and what 1 is in the metric's unit.
    first, second = paired_values(match, metric)
    if _record(match.first[0], metric).unit == "%":
        return first, second, 100.0
    largest = float(max(np.abs(first).max(), np.abs(second).max())) or 1.0
    return first / largest, second / largest, largest


def _resampled(match: Match, metric: str) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Values (R,) of both, mean over seeds, and the number of images."""
    images = validation_images(match.first[0].result.data, match.first[0].result.limit)
    if images < 2:
        raise ValueError(f"{metric}: one image is no sample; evaluate on more")
    sides = [np.stack([_values(each, metric) for each in side]) for side in (match.first, match.second)]
    if sides[0].shape != sides[1].shape:
        raise ValueError(f"{metric}: {sides[0].shape[1]} resamples against {sides[1].shape[1]}; use --rerun for both")
    return (sides[0].mean(0), sides[1].mean(0)), images


def _values(measured: Measured, metric: str) -> np.ndarray:
    return array_of(measured, metric)
