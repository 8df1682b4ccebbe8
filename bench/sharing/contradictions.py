"""Contradictions in results: with their own arrays and facts, their path, their protocol and checkpoint as this tool
knows them, or other results on the same images.

Every result that `bench run` writes passes, so that a reported line means an edited or damaged file. docs/sharing.md
lists what cannot be found, such as numbers that were edited together with everything that they follow from.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import isclose, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from bench.cli.output import in_one_line
from bench.results.record import CheckpointUsed, Result, images_seen, result_path, result_stem
from bench.results.store import StoredResult
from bench.run.checkpoints import describe
from bench.run.suites import ChosenProtocol, catalogue
from bench.sharing.card import read_config
from bench.statistics import intervals
from checkpoints.export import ViTExport, settings_for_timm
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT, skip_init
from downstream.metrics.scores import LABELLED, RIGHT, weighted_ap, weighted_scores
from engine.tasks import Score, resampled, settings_of
from pretrain.loop.exporting import RUN

NEAR = partial(isclose, rel_tol=1e-6, abs_tol=1e-6)  # the same number from another processor or library version
MALFORMED = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    IndexError,
)  # raised by odd values
AREAS = re.compile(r"areas(_\d+)?")


def contradictions(folder: Path, results: Sequence[StoredResult]) -> Iterator[str]:
    """A line for each contradiction, which begins with the file. folder: of the record that holds the results."""
    protocols, cross_check = catalogue().protocols, CrossCheck()
    for stored in results:
        place, result = stored.path.relative_to(folder), stored.result
        try:
            arrays = stored.arrays if stored.path.with_suffix(".npz").exists() else {}
            protocol = protocols.get(result.protocol.name)
            for lines in (
                _of_path(place, result),
                _of_protocol(protocols, result),
                _of_metrics(result, arrays, protocol.task.WITHOUT_VALUES if protocol else ()),
                _of_facts(result),
                _of_dense_metrics(result, arrays),
                cross_check.differences(str(place), result, arrays),
            ):
                yield from (f"{place}: {line}" for line in lines)
        except MALFORMED as error:
            yield f"{place}: its parts do not fit together ({type(error).__name__}: {in_one_line(error)})"
        stored.forget_arrays()
    yield from cross_check.wrong_predictions()
    used: dict[str, list[CheckpointUsed]] = {}
    for stored in results:
        checkpoint = stored.result.checkpoint
        used.setdefault(f"checkpoints/{checkpoint.unique_name}", []).append(checkpoint)
    for name, checkpoints in used.items():
        if (folder / name / "config.json").is_file():
            yield from (f"{name}: {line}" for line in _of_checkpoint(folder / name, checkpoints))


def _of_path(place: Path, result: Result) -> Iterator[str]:
    """Check that the path names the result's checkpoint, image set, protocol, settings and seed."""
    space: Any = SimpleNamespace(**{name: getattr(result, name) for name in ("seed", "limit", "precision", "decode")})
    stem = result_stem(result.protocol, result.settings, space)
    expected = result_path(Path(), result.checkpoint, result.data.name, stem)
    # The digest in the path was taken before folders were removed from the settings.
    private = result.protocol.modified and "path-" in str(result.settings)
    if expected != place.with_name(place.name.replace(".failed.json", ".json")) and not private:
        yield f"its content belongs to {expected}"
    if place.name.endswith(".failed.json") and result.status != "failed":
        yield f"its name is that of a failed result, but its status is {result.status}"


def _of_protocol(protocols: Mapping[str, ChosenProtocol], result: Result) -> Iterator[str]:
    """Check that settings are those of the named protocol, except for the changes that the result lists."""
    used, settings = result.protocol, result.settings
    if used.modified != bool(used.changes):
        yield "protocol.modified and protocol.changes disagree"
    known = protocols.get(used.name)
    if not known or known.protocol.version != used.version:
        known = None
    elif (result.task, used.plugin) != (known.key, known.plugin):
        yield f"{used.name} is a protocol of {known.plugin or known.key}, not of {used.plugin or result.task}"
    own = settings_of(known.task, complete=True) if known else {}
    for name in {**settings, **used.changes}:
        if name in used.changes and settings.get(name, used.changes[name]) != used.changes[name]:
            yield f"setting {name} differs from protocol.changes"
        elif name not in used.changes and settings[name] != own.get(name, settings[name]):
            yield f"setting {name} is {settings[name]}, but {used.name} version {used.version} has {own[name]}"


def _of_metrics(result: Result, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()) -> Iterator[str]:
    """Check that every number follows from its array, and that every array belongs to the metric of its name.

    without: patterns of metrics that have no values of single images.
    """
    if (result.status == "ok") != bool(result.metrics) or (result.status == "ok") == bool(result.message):
        yield "it has both numbers and a message, or neither"
    named = {metric.array for metric in result.metrics.values() if metric.array}
    yield from (f"array {name}: missing" for name in sorted({*named, *result.arrays} - arrays.keys()))
    yield from (f"array {name}: belongs to no metric" for name in sorted(arrays.keys() - named - {*result.arrays}))
    methods, all_fit = set(), named <= arrays.keys()
    for name, metric in result.metrics.items():
        of = metric.deviation_of
        if not isfinite(metric.value):
            yield f"{name} is not a finite number"
        if of and (of not in result.metrics or metric.unit != result.metrics[of].unit or metric.value < 0):
            yield f"{name} cannot be a deviation of {of}"
        if of and not result.protocol.plugin and name != f"{of}_std":
            yield f"{name} is not the name of a deviation of {of}"
        if metric.array is None:
            needs_none = any(fnmatchcase(name, pattern) for pattern in without)
            if metric.interval or not (of or result.protocol.plugin or needs_none):
                yield f"{name} has no values that it could follow from"
        elif metric.array != (name if metric.array_over == "images" else f"{name}_resampled"):
            yield f"{name} refers to the array {metric.array} over {metric.array_over}, which is not its own"
        elif metric.array in arrays:
            interval, method, problem = _interval(result, name, arrays[metric.array])
            methods |= {method} if interval else set()
            if problem:
                all_fit = False
                yield problem
            elif interval and not metric.interval:
                yield f"{name} has no interval, but its values give one"
            elif metric.interval and not interval:
                yield f"{name} has an interval, but its values give none"
            elif interval and not all(map(NEAR, interval, metric.interval or ())):
                yield f"{name}: its values give another interval, [{interval[0]:.4f}, {interval[1]:.4f}]"
    if all_fit and result.interval_method != "; ".join(sorted(methods)):
        yield f"its intervals were not computed by {result.interval_method!a:.80}"


def _interval(result: Result, name: str, values: np.ndarray) -> tuple[tuple[float, float] | None, str, str]:
    """Interval and method by the values of a metric, and a problem with these values; "" if there is none."""
    metric, images = result.metrics[name], images_seen(result.data, result.limit)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        return None, "", f"{name}: its array is not a one-dimensional array of numbers"
    if metric.array_over == "resamples":
        return *(intervals.of_resampled(values, images) if (~np.isnan(values)).any() else (None, "")), ""
    if len(values) != images:
        return None, "", f"{name} has values for {len(values)} images, expected {images}"
    if np.isnan(values).any() and not (result.skipped or result.protocol.plugin):
        return None, "", f"{name} lacks the values of some images, although none was skipped"
    if not intervals.averages_to(values, metric.value, metric.unit):
        return None, "", f"{name} is not the mean of its values for the images"
    return *intervals.of_mean(values, metric.unit), ""


def _of_dense_metrics(result: Result, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Check dense metrics and their values on resamples against the areas or detections of the images."""
    images = images_seen(result.data, result.limit)
    areas = [values for name, values in arrays.items() if AREAS.fullmatch(name)]
    score: Score | None = None
    if areas and not result.protocol.plugin:
        score = partial(weighted_scores, areas)
    elif "box_hits" in arrays and not result.protocol.plugin:
        score = partial(weighted_ap, arrays)
    if score is None:
        return
    rows = [len(values) for values in (*areas, *([] if areas else [arrays["classes"], arrays["objects"]]))]
    if set(rows) != {images}:
        yield f"its areas or detections cover {rows[0]} images, expected {images}"
        return
    for values in areas:
        if (values < 0).any() or (values.min(-1) < values[..., RIGHT]).any():
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
    if len(areas) > 1 and "mIoU_std" in result.metrics:
        spread = float(np.std([weighted_scores([values], np.ones((1, images)))["mIoU"][0] for values in areas], ddof=1))
        if not NEAR(spread, result.metrics["mIoU_std"].value):
            yield f"mIoU_std is not the deviation of its trainings, {spread:.4f}"


def _of_facts(result: Result) -> Iterator[str]:
    """Check that facts which repeat metrics, images or settings agree with them."""
    if result.protocol.plugin or result.status != "ok":
        return
    facts, cost = result.facts, result.cost
    try:
        for name, value in _numbers_in(facts).items():
            if name in result.metrics and not NEAR(value, result.metrics[name].value):
                yield f"{name} is not the value in its facts, {value:.4f}"
        for split, fingerprint in result.data.fingerprints.items():
            own = facts[split] if isinstance(facts.get(split), Mapping) else {}
            expected = fingerprint, result.data.images[split]
            is_whole_set = result.limit is None and own.get("url") == result.data.url
            if is_whole_set and (own["fingerprint"], own["images"]) != expected:
                yield f"facts.{split} describes other images than data"
            if own.get("precision", result.precision) != result.precision:
                yield f"facts.{split} has another precision than the result"
        if result.skipped and not result.skip_bad:
            yield "images were skipped without skip_bad"
        if "top1" in result.metrics and "select" in result.settings:
            by_val = result.settings["select"] == "val"
            selection = facts.get("selection", result.settings["select"])
            if result.metrics["top1"].chosen_on_val != by_val or selection != result.settings["select"]:
                yield f"top1: not selected as its setting select={result.settings['select']} requires"
        if result.task == "knn":
            several = len(result.settings["temperature"]) > 1
            if any(metric.chosen_on_val != several for metric in result.metrics.values()):
                yield "chosen_on_val: a temperature is chosen on the validation images exactly if several were tried"
        if "chosen_on" in facts and result.metrics["mIoU"].chosen_on_val != bool(facts["chosen_on"]):
            yield "mIoU: its chosen_on_val contradicts chosen_on in its facts"
        forwards, seconds = cost.get("forwards", 0), cost.get("extraction_seconds", 0)
        if result.images_per_second != (round(forwards / seconds, 1) if forwards and seconds else None):
            yield "images_per_second does not follow from its cost"
    except MALFORMED as error:
        yield f"its facts do not fit its task ({type(error).__name__}: {error})"


def _numbers_in(facts: Mapping[str, Any]) -> dict[str, float]:
    """Metric -> its value, for metrics that a task's facts repeat."""
    numbers: dict[str, float] = {}
    if "reported_step" in facts:  # dense: the evaluations of each training
        reported = [
            evaluations[str(step)]
            for evaluations, step in zip(facts["evaluations"], facts["reported_step"], strict=True)
        ]
        numbers |= {name: float(np.mean([scores[name] for scores in reported])) for name in reported[0]}
        if len(reported) > 1:
            numbers["mIoU_std"] = float(np.std([scores["mIoU"] for scores in reported], ddof=1))
    fits: dict[str, list[float]] = {}
    for fit in facts.get("fits", ()):
        if "top1" in fit:  # low-shot: the metric's name has lambda only if there are several
            name = f"top1_{fit['subset']}"
            fits.setdefault(name, []).append(fit["top1"])
            fits.setdefault(f"{name}_lambda{fit['lambda']:g}", []).append(fit["top1"])
    for name, values in fits.items():
        numbers |= {name: float(np.mean(values)), f"{name}_std": float(np.std(values))}
    for entry in facts["history"] if "epoch" in facts and "history" in facts else ():  # fine-tuning
        if "val" in entry and entry["epoch"] == facts["epoch"]:
            numbers["top1"] = entry["val"]
        if "val" in entry and entry["epoch"] == facts["last_epoch"]:
            numbers["top1_last"] = entry["val"]
    for k, sweep in facts.get("per_temperature", {}).items():
        numbers[f"top1_{k}_bestT"] = max(entry["top1"] for entry in sweep)
    return numbers


class CrossCheck:
    """Compares results on the same images with each other: an image has one label in all of them."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[str, int]] = {}  # fingerprint -> result, number of images
        # Protocol, settings and versions -> result, descriptions of its metrics.
        self.metrics: dict[str, tuple[str, list[Any]]] = {}
        self.labels: dict[tuple[Any, ...], tuple[str, np.ndarray]] = {}  # (kind, images) -> result, its labels
        # Images -> result, predicted classes (N,), shares of fits that are right (N,).
        self.predictions: dict[tuple[Any, ...], list[tuple[str, np.ndarray, np.ndarray]]] = {}

    def differences(self, place: str, result: Result, arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Differences between a result and the results before it; stores the result for the next ones."""
        if result.status != "ok" or result.protocol.plugin:
            return
        images = result.data.fingerprints.get("val", place), result.limit
        for split, fingerprint in result.data.fingerprints.items():
            other, count = self.counts.setdefault(fingerprint, (place, result.data.images[split]))
            if count != result.data.images[split]:
                yield f"{split}: {result.data.images[split]} images, but {count} with the same fingerprint in {other}"
        metrics = [(name, replace(metric, value=0.0, interval=None)) for name, metric in result.metrics.items()]
        key = f"{result.protocol.name} {result.settings} {result.versions} {result.data.fingerprints} {result.limit}"
        other, expected = self.metrics.setdefault(key, (place, metrics))
        if metrics != expected and not result.skipped:
            yield f"its metrics are described differently in {other}"
        labels = [("areas", areas[..., LABELLED]) for name, areas in arrays.items() if AREAS.fullmatch(name)]
        labels += [("objects", arrays["objects"])] if "objects" in arrays else []
        for kind, values in labels:
            other, expected_values = self.labels.setdefault((kind, *images), (place, values))
            if not np.array_equal(values, expected_values):
                yield f"{kind}: the labels differ from those of {other}"
        top1 = next((metric.array for name, metric in result.metrics.items() if name.startswith("top1")), None)
        if top1 and "predicted" in arrays and arrays["predicted"].shape == arrays[top1].shape:
            shares = arrays[top1]
            top5 = arrays.get(top1.replace("top1", "top5"))
            if top5 is not None and (top5 < shares).any():
                yield f"{top1}: right for an image for which {top1.replace('top1', 'top5')} is wrong"
            self.predictions.setdefault(images, []).append((place, arrays["predicted"], shares))

    def wrong_predictions(self) -> Iterator[str]:
        """Predictions marked right or wrong although another result's right prediction implies the opposite."""
        for results in self.predictions.values():
            lengths = {len(predicted) for _, predicted, _ in results}
            if len(lengths) > 1:
                yield f"{results[0][0]}: other results on the same images have another number of predictions"
                continue
            labels, shown_by = np.full(lengths.pop(), -1), np.zeros(len(results[0][1]), int)
            for number, (_, predicted, shares) in enumerate(results):
                new = (shares == 1) & (labels < 0)
                labels[new], shown_by[new] = predicted[new], number
            for place, predicted, shares in results:
                right = (labels >= 0) & (shares == 1) & (predicted != labels)
                wrong = (labels >= 0) & (shares == 0) & (predicted == labels)
                if (right | wrong).any():
                    image = int(np.flatnonzero(right | wrong)[0])
                    yield f"{place}: image {image} has another class than in {results[shown_by[image]][0]}"


def _of_checkpoint(folder: Path, used: Sequence[CheckpointUsed]) -> Iterator[str]:
    """Check config.json for consistency, and against the results of the checkpoint and the settings of its training."""
    try:
        config = read_config(folder)
        own = dict(config["vit_export"])
        stored = own.pop("preparation")
        preparation = Preparation(**stored | {key: tuple(stored[key]) for key in ("mean", "std")})
        spec, digest = ViTSpec(**own.pop("spec")), own.pop("digest")
        export = ViTExport(spec=spec, preparation=preparation, tensors={}, facts=own)
        if changed := export.difference_for_timm(settings_for_timm(config)):
            yield f"config.json: {changed}"
        with torch.device("meta"), skip_init():
            parameters = sum(tensor.numel() for tensor in ViT(spec, initialise=False).state_dict().values())
        recorded = SimpleNamespace(digest=digest, spec=spec, facts=own, parameters=parameters)
        for checkpoint in used:
            expected = describe(recorded, checkpoint.name, checkpoint.source)  # type: ignore[arg-type]  # all that it reads of an export
            fields = ("digest", "method", "recipe", "branch", "architecture", "parameters", "plugin", "training_cost")
            differ = [name for name in fields if getattr(expected, name) != getattr(checkpoint, name)]
            if differ:
                yield f"config.json: {', '.join(differ)} not as in the results"
                break
        if (folder / RUN).is_file():
            training = msgspec.json.decode((folder / RUN).read_bytes())
            differ = [name for name in ("method", "recipe") if name in training and training[name] != own.get(name)]
            yield from (f"{RUN}: {name} is not that of config.json" for name in differ)
    except MALFORMED as error:
        yield f"not an export ({type(error).__name__}: {error})"
