"""Pairs of results: which may be compared, the values that both kept of the images, and the paired test on them.

Two results may be compared when they differ in the checkpoint alone; for all others there is the reason why not.
N images, R resamples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.results.board import group_of
from bench.results.index import Indexed, read_results, stamp
from bench.results.record import DataUsed, MetricRecord, Result, images_seen, read_arrays, short
from bench.statistics.intervals import averages_to, bootstrap_p_value
from bench.statistics.paired import PairedTest, compare_images, compare_resamples, paired_p_value
from engine.files import digest
from engine.printing import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A result and its file. identity: changes with the files; "" where it is not known."""

    path: Path  # of the JSON file
    result: Result
    identity: str = ""

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> array of the `.npz` file, read once. ValueError where it cannot be read."""
        return read_arrays(self.path)

    def forget_arrays(self) -> None:
        """Free their memory; they are read again when asked for."""
        self.__dict__.pop("arrays", None)

    @cached_property
    def conditions_digest(self) -> str:
        """Equal where results differ in checkpoint and seed alone."""
        return digest(conditions(self.result))


@dataclass(frozen=True, kw_only=True)
class Match:
    """The results of two checkpoints that may be compared."""

    group: str  # image set, protocol and changed settings
    first: tuple[Measured, ...]  # one for every seed that both have
    second: tuple[Measured, ...]  # the same for the other checkpoint

    @property
    def identities(self) -> list[list[str]]:
        """Identities of the results of each side."""
        return [[each.identity for each in side] for side in (self.first, self.second)]


def read_measured(out: Path) -> tuple[list[Measured], list[str]]:
    """All results in a folder, and a line for each file that could not be read."""
    found, problems = read_results(out)
    measured = [
        Measured(path=path, result=entry.result, identity=_identity(out, path, entry)) for path, entry in found.items()
    ]
    return separated(measured, problems)


def separated(measured: Sequence[Measured], problems: Sequence[str]) -> tuple[list[Measured], list[str]]:
    """Results of files that were overwritten later, by others of the same names and sizes, as those of a set of its
    own, `NAME-CONTENTS8`; and a line on them. The newest result has the plain name."""
    newest: dict[str, DataUsed] = {}
    for each in sorted(measured, key=lambda each: each.result.date):
        if each.result.data.contents and each.result.status == "ok":
            newest[each.result.data.name] = each.result.data
    found, told = [], dict.fromkeys(problems)
    for each in measured:
        data = each.result.data
        if data.name in newest and (splits := newest[data.name].differ_from(data)):
            name = f"{data.name}-{digest(dict(data.contents))[:8]}"
            each = replace(each, result=replace(each.result, data=replace(data, name=name)))
            told[f"{data.name}: files of {' and '.join(splits)} were overwritten; results from before are {name}"] = (
                None
            )
        found.append(each)
    return found, list(told)


def _identity(out: Path, path: Path, entry: Indexed) -> str:
    # Of the file and its arrays, which are written before it but may be lost after it.
    arrays = stamp(f"{str(path).removesuffix('.json')}.npz")
    return digest([str(path).removeprefix(str(out)), entry.stamp, arrays])[:24]


def labelled(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Label -> results of a checkpoint. The label is `name`, or `name (digest8)` where two checkpoints share a name."""
    by_checkpoint: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for each in measured:
        by_checkpoint[each.result.checkpoint.name, each.result.checkpoint.digest].append(each)
    names = [name for name, _ in by_checkpoint]
    return {
        name if names.count(name) == 1 else f"{name} ({digest[:8]})": found
        for (name, digest), found in sorted(by_checkpoint.items(), key=lambda item: item[0])
    }


def label_of(name: str, by_label: Mapping[str, Sequence[Measured]], out: Path) -> str:
    """The label that `name`, `name (digest8)` or `name-digest8` stands for. ValueError if none or several fit."""
    fits = []
    for label, results in by_label.items():
        used = results[0].result.checkpoint
        if name in (label, used.name, f"{used.name} ({used.digest[:8]})", used.unique_name):
            fits.append(label)
    if len(fits) > 1:
        raise ValueError(
            f"{name!r} is the name of {len(fits)} checkpoints in {out}: give {' or '.join(map(repr, fits))}"
        )
    if not fits:
        raise ValueError(f"{out} has no results of a checkpoint {name!r}{did_you_mean(name, list(by_label))}")
    return fits[0]


def matched(
    first: Sequence[Measured], second: Sequence[Measured], labels: tuple[str, str]
) -> tuple[list[Match], list[str]]:
    """Pairs of results that differ in the checkpoint alone, and the reasons why others may not be compared."""
    matches, reasons = [], []
    sides = [_by_place(first), _by_place(second)]
    for place in sorted(sides[0] | sides[1]):
        left, right = (_by_conditions(side.get(place, ())) for side in sides)
        if not left or not right:
            reasons.append(f"{place}: no result of {labels[bool(left)]}")
            continue
        shared = [key for key in left if key in right]
        if not shared:
            reasons.append(f"{place}: {_difference(left, right)}")
        for key in shared:
            group = group_of(next(iter(left[key].values())).result)
            if seeds := sorted(left[key].keys() & right[key].keys()):
                one, other = (tuple(side[key][seed] for seed in seeds) for side in (left, right))
                matches.append(Match(group=group, first=one, second=other))
            else:
                both = (" and ".join(map(str, sorted(side[key]))) for side in (left, right))
                reasons.append(f"{group}: no seed in common ({' against '.join(both)})")
    return matches, reasons


def difference(match: Match, metric: str) -> PairedTest:
    """The paired test of a metric. ValueError says why there is none."""
    if _is_resampled(match, metric):
        metrics = _mean_value(match.first, metric), _mean_value(match.second, metric)
        return compare_resamples(metrics, *_resampled(match, metric))
    first, second = match.first[0].result, match.second[0].result
    seed = digest([first.checkpoint.digest, second.checkpoint.digest, match.group, metric])
    one, another, scale = _scaled(match, metric)
    return compare_images(one, another, seed=int(seed[:16], 16), scale=scale)


def _mean_value(side: Sequence[Measured], metric: str) -> float:
    return float(np.mean([_record(each, metric).value for each in side]))


def p_value(match: Match, metric: str) -> float:
    """The p of `difference` alone."""
    if _is_resampled(match, metric):
        (first, second), images = _resampled(match, metric)
        return bootstrap_p_value(first - second, images)
    one, another, _ = _scaled(match, metric)
    return paired_p_value(one, another, seed=0)


def paired_values(match: Match, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Values (N,) of both on the images that both could read, mean over seeds. ValueError says why there are none."""
    first, second = (_mean([_per_image(each, metric) for each in side]) for side in (match.first, match.second))
    if first.shape != second.shape:
        raise ValueError(f"{metric}: {len(first)} images against {len(second)}; make both again with --rerun")
    seen = ~np.isnan(first + second)
    if seen.all():
        return first, second
    if not seen.any():
        raise ValueError(f"{metric}: no image that both could read")
    return first[seen], second[seen]


def array_of(measured: Measured, metric: str) -> np.ndarray:
    """The array of a metric that has one. ValueError where the file lacks it."""
    name = measured.result.metrics[metric].array
    if name not in measured.arrays:
        raise ValueError(f"{measured.path}: no array {name!r} beside it; make the result again with --rerun")
    return measured.arrays[name]


def _per_image(measured: Measured, metric: str) -> np.ndarray:
    record = measured.result.metrics.get(metric)
    if record is None or record.array is None or record.array_over != "images":
        raise ValueError(f"{metric}: kept as a number alone, not for each image")
    values = array_of(measured, metric)
    if not averages_to(values, record.value, record.unit):
        raise ValueError(f"{metric}: not the mean of its values for the images, so that a paired test does not apply")
    return values.astype(np.float64)


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    return values[0] if len(values) == 1 else np.stack(values).mean(0)


def conditions(result: Result) -> dict[str, Any]:
    """Everything that a number depends on, but for checkpoint and seed."""
    return {
        "protocol version": result.protocol.version,
        **{f"{split} images": fingerprint[:8] for split, fingerprint in result.data.fingerprints.items()},
        **{f"{result.task}.{name}": value for name, value in result.settings.items()},
        "limit": result.limit,
        "precision": result.precision,
        "decode": result.decode,
    }


def _by_place(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    # `digits/knn@dino` -> results that are ok, of any seed and any settings.
    found: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        if each.result.status == "ok":
            found[f"{each.result.data.name}/{each.result.protocol.name}"].append(each)
    return found


def _by_conditions(measured: Sequence[Measured]) -> dict[str, dict[int, Measured]]:
    found: dict[str, dict[int, Measured]] = defaultdict(dict)
    for each in measured:
        found[each.conditions_digest][each.result.seed] = each
    return found


def _difference(left: Mapping[str, Mapping[int, Measured]], right: Mapping[str, Mapping[int, Measured]]) -> str:
    # What differs between the two most similar results.
    sides = [[conditions(next(iter(seeds.values())).result) for seeds in side.values()] for side in (left, right)]
    candidates: list[list[str]] = []
    for one in sides[0]:
        for other in sides[1]:
            keys = [key for key in one | other if one.get(key) != other.get(key)]
            candidates.append([f"{key} {_said(one.get(key))} against {_said(other.get(key))}" for key in keys])
    fewest = min(candidates, key=len)
    return ", ".join(fewest)


def _said(value: Any) -> str:
    return "none" if value is None else short(value)


def _is_resampled(match: Match, metric: str) -> bool:
    records = [_record(each, metric) for each in (*match.first, *match.second)]
    return all(record.array and record.array_over == "resamples" for record in records)


def _record(measured: Measured, metric: str) -> MetricRecord:
    return measured.result.metrics[metric]


def _scaled(match: Match, metric: str) -> tuple[np.ndarray, np.ndarray, float]:
    # Values (N,) of both, from -1 to 1, and what 1 is in the metric's unit.
    first, second = paired_values(match, metric)
    if _record(match.first[0], metric).unit == "%":
        return first, second, 100.0
    largest = float(max(np.abs(first).max(), np.abs(second).max())) or 1.0
    return first / largest, second / largest, largest


def _resampled(match: Match, metric: str) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    # Values (R,) of both, mean over seeds, and the number of images.
    images = images_seen(match.first[0].result.data, match.first[0].result.limit)
    if images < 2:
        raise ValueError(f"{metric}: one image is no sample; evaluate on more")
    sides = [np.stack([array_of(each, metric) for each in side]) for side in (match.first, match.second)]
    if sides[0].shape != sides[1].shape:
        raise ValueError(f"{metric}: {sides[0].shape[1]} resamples against {sides[1].shape[1]}; use --rerun for both")
    return (sides[0].mean(0), sides[1].mean(0)), images
