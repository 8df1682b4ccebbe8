"""The difference of two checkpoints in one metric, by the test that what was kept of the images allows."""

import numpy as np

from bench.results.record import resampled_name, validation_images
from bench.statistics import paired, resampled
from bench.statistics.matching import Match, Measured, paired_values
from bench.statistics.paired import Paired
from engine.files import digest


def difference(match: Match, metric: str) -> Paired:
    """Both numbers, their difference with its interval, and p. ValueError says why there is none."""
    if _in_all(match, metric):
        sides = (match.first, match.second)
        metrics = tuple(float(np.mean([each.result.metrics[metric] for each in side])) for side in sides)
        return resampled.paired(metrics, *_resampled(match, metric))
    first, second = match.first[0].result, match.second[0].result
    seed = digest([first.checkpoint.digest, second.checkpoint.digest, match.group, metric])
    return paired.paired(*paired_values(match, metric), seed=int(seed[:16], 16))


def p_value(match: Match, metric: str) -> float:
    """The p of `difference` alone."""
    if _in_all(match, metric):
        (first, second), images = _resampled(match, metric)
        return resampled.p_value(first - second, images)
    return paired.p_value(*paired_values(match, metric), seed=0)


def _in_all(match: Match, metric: str) -> bool:
    return all(metric in each.result.resampled for each in (*match.first, *match.second))


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
    name = resampled_name(metric)
    if name not in measured.arrays:
        raise ValueError(f"{measured.path}: no array {name!r} beside it; make the result again with --rerun")
    return measured.arrays[name]
