"""Pairs of results: which of them may be compared, their values for the same images, and the paired test of these.

Two results may be compared if they differ only in checkpoint and seed; for others a reason is given. Each network sees
images of its own size, or both see those of one chosen size, or one sees those of a size that is the other's own.
Values are averaged over seeds. Shapes: N images, R resamples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.results.record import SIZE, MetricRecord, Result, images_seen, labels_of, short
from bench.results.store import StoredResult
from bench.statistics.intervals import averages_to, defined_images
from bench.statistics.paired import PairedTest, compare_images, compare_resamples
from engine.errors import option
from engine.printing import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Match:
    """The results of two checkpoints that may be compared."""

    group: str  # image set, protocol and changed settings
    first: tuple[StoredResult, ...]  # one for every seed, ascending
    second: tuple[StoredResult, ...]  # the same for the other checkpoint

    @property
    def sides(self) -> tuple[tuple[StoredResult, ...], tuple[StoredResult, ...]]:
        return self.first, self.second

    @property
    def identities(self) -> list[list[str]]:
        """The identities of the results of each checkpoint."""
        return [[stored.identity for stored in side] for side in self.sides]

    def with_common_seeds(self) -> "Match":
        """The results of the seeds that both have, with which both drew the same. ValueError if there is none."""
        seeds = [{stored.result.seed for stored in side} for side in self.sides]
        if not (common := seeds[0] & seeds[1]):
            texts = (" and ".join(map(str, sorted(own))) for own in seeds)
            raise ValueError(f"no seed in common ({' against '.join(texts)})")
        first, second = (tuple(stored for stored in side if stored.result.seed in common) for side in self.sides)
        return replace(self, first=first, second=second)


def results_by_label(results: Sequence[StoredResult]) -> dict[str, list[StoredResult]]:
    """Label of each checkpoint (`labels_of`) -> its results."""
    by_checkpoint: dict[tuple[str, str], list[StoredResult]] = defaultdict(list)
    for stored in results:
        by_checkpoint[stored.result.checkpoint.key].append(stored)
    return {label: by_checkpoint[key] for key, label in sorted(labels_of(by_checkpoint).items())}


def label_of(name: str, by_label: Mapping[str, Sequence[StoredResult]], out: Path) -> str:
    """The label of the checkpoint that is called `name`, by its name or a label with its digest.

    Accepts `name`, `name (digest8)` and `name-digest8`. ValueError if no or several checkpoints match.
    """
    labels = []
    for label, results in by_label.items():
        used = results[0].result.checkpoint
        if name in (label, used.name, f"{used.name} ({used.digest[:8]})", used.unique_name):
            labels.append(label)
    if len(labels) > 1:
        raise ValueError(
            f"{name!r} is the name of {len(labels)} checkpoints in {out}: give {' or '.join(map(repr, labels))}"
        )
    if not labels:
        raise ValueError(f"{out} has no results of a checkpoint {name!r}{did_you_mean(name, list(by_label))}")
    return labels[0]


def match_results(
    first: Sequence[StoredResult], second: Sequence[StoredResult], labels: tuple[str, str]
) -> tuple[list[Match], list[str]]:
    """Pairs of results that differ only in the checkpoint, and the reasons why others may not be compared."""
    matches, reasons = [], []
    sides = [_by_protocol(first), _by_protocol(second)]
    for protocol in sorted(sides[0] | sides[1]):
        left, right = (side.get(protocol, {}) for side in sides)
        if not left or not right:
            reasons.append(f"{protocol}: no result of {labels[bool(left)]}")
            continue
        pairs = [pair for pair in product(left.values(), right.values()) if is_comparable(*map(_any, pair))]
        pairs.sort(key=lambda pair: _any(pair[0]).chosen_size != _any(pair[1]).chosen_size)
        if not pairs:
            reasons.append(f"{protocol}: {_difference(left, right)}")
        for pair in pairs:
            group = max(map(_any, pair), key=lambda result: bool(result.chosen_size)).group
            one, other = (tuple(side[seed] for seed in sorted(side)) for side in pair)
            matches.append(Match(group=group, first=one, second=other))
    return matches, reasons


def paired_test(match: Match, metric: str) -> PairedTest:
    """The paired test of a metric. ValueError, with the reason, if none is possible."""
    if match.first == match.second:
        raise ValueError(f"{metric}: the same results on both sides; give those of two checkpoints")
    records = [stored.result.metrics.get(metric) for side in match.sides for stored in side]
    if not all(record and record.array for record in records):
        raise ValueError(f"{metric}: kept as a number alone, not for each image")
    meanings = dict.fromkeys(_meaning(record) for record in records if record)
    if len(meanings) > 1:
        raise ValueError(f"{metric}: {' against '.join(meanings)}")
    if records[0] and records[0].array_over == "resamples":
        numbers = [float(np.mean([s.result.metrics[metric].value for s in side])) for side in match.sides]
        return compare_resamples((numbers[0], numbers[1]), *_resampled(match, metric))
    first, second = paired_values(match, metric)
    if match.first[0].result.metrics[metric].unit == "%":
        return compare_images(first, second)
    largest = float(max(np.abs(first).max(), np.abs(second).max())) or 1.0
    return compare_images(first / largest, second / largest, scale=largest)


def paired_values(match: Match, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Values (N,) of both checkpoints, means over seeds, on the images that both could read.

    ValueError, with the reason, if there are none.
    """
    first, second = (np.mean([_per_image(stored, metric) for stored in side], axis=0) for side in match.sides)
    if first.shape != second.shape:
        raise ValueError(
            f"{metric}: {len(first)} images against {len(second)}; make both again with {option('rerun', True)}"
        )
    seen = ~np.isnan(first + second)
    if not seen.any():
        raise ValueError(f"{metric}: there is no image that both could read")
    return first[seen], second[seen]


def array_of(stored: StoredResult, metric: str) -> np.ndarray:
    """The array of a metric that has one. ValueError if it is missing from the `.npz` file."""
    name = stored.result.metrics[metric].array
    if name not in stored.arrays:
        raise ValueError(
            f"{stored.path}: its .npz file has no array {name!r}; make the result again with {option('rerun', True)}"
        )
    return stored.arrays[name]


def _per_image(stored: StoredResult, metric: str) -> np.ndarray:
    """Values (N,) of a metric in float64. ValueError if it is not their mean, or if they were not kept."""
    record, values = stored.result.metrics[metric], array_of(stored, metric)
    if not averages_to(values, record.value, record.unit):
        raise ValueError(f"{metric}: not the mean of its values for the images, so a paired test does not apply")
    return values.astype(np.float64)


def _meaning(record: MetricRecord) -> str:
    """Unit, direction and kind of values as text: only numbers that have the same can be subtracted."""
    better = {True: "higher is better", False: "lower is better", None: "neither is better"}
    kind = {"images": "values of images", "resamples": f"values on resamples of {record.resampled_units or 'images'}"}
    return f"{record.unit or 'no unit'}, {better[record.higher_is_better]}, {kind[record.array_over]}"


BySeed = dict[int, StoredResult]


def _by_protocol(results: Sequence[StoredResult]) -> dict[str, dict[str, BySeed]]:
    """Image set and protocol, `digits/knn@dino` -> digest of the conditions -> seed -> good result."""
    by_protocol: dict[str, dict[str, BySeed]] = defaultdict(lambda: defaultdict(dict))
    for stored in results:
        result = stored.result
        if result.status == "ok":
            by_protocol[f"{result.data.name}/{result.protocol.name}"][stored.conditions_digest][result.seed] = stored
    return by_protocol


def _any(side: BySeed) -> Result:
    """One of the results of all seeds."""
    return next(iter(side.values())).result


def is_comparable(one: Result, other: Result) -> bool:
    """Whether two results differ in nothing that matters but checkpoint and seed.

    Both networks see images of their own size, or of one size, chosen for both or the own one of either. Raw pixels
    have one size, and stand beside networks at any.
    """
    first, second = ({**result.conditions, SIZE: None} for result in (one, other))
    is_floor = one.checkpoint.is_raw_pixels or other.checkpoint.is_raw_pixels
    are_sizes_equal = one.chosen_size == other.chosen_size or one.image_size == other.image_size
    return first == second and (is_floor or are_sizes_equal)


def _difference(left: Mapping[str, BySeed], right: Mapping[str, BySeed]) -> str:
    """The conditions in which the two most similar results differ, as text."""
    sides = [[_any(seeds).conditions for seeds in side.values()] for side in (left, right)]
    candidates: list[list[str]] = []
    for one, other in product(*sides):
        keys = [key for key in one | other if one.get(key) != other.get(key)]
        candidates.append([f"{key} {_text(one.get(key))} against {_text(other.get(key))}" for key in keys])
    fewest = min(candidates, key=len)
    return ", ".join(fewest)


def _text(value: Any) -> str:
    return "none" if value is None else short(value)


def _resampled(match: Match, metric: str) -> tuple[list[np.ndarray], int]:
    """Values (R,) of both on resamples, means over seeds; and the number of images on which they are defined."""
    first = match.first[0].result
    images = first.metrics[metric].resampled_units or images_seen(first.data, first.limit)
    sides = [np.stack([array_of(stored, metric) for stored in side]).astype(np.float64) for side in match.sides]
    if sides[0].shape[1] != sides[1].shape[1]:
        raise ValueError(
            f"{metric}: {sides[0].shape[1]} resamples against {sides[1].shape[1]}; use {option('rerun', True)} for both"
        )
    values = [side.mean(0) for side in sides]
    if (defined := defined_images(values[0] - values[1], images)) < 2:
        text = f"{metric}: {defined} of {images} images have a value, and a test needs two"
        raise ValueError(f"{text}; evaluate on more images")
    return values, defined
