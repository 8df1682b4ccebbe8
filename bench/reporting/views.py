"""What a report shows of a table besides its numbers, from what results keep of each image: the hardest images and
accuracy by class, confusions and confidence (probes/scores.py), nearest training images of k-NN, and learning curves.

Each part is a dictionary, which beside.html draws.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.reporting.contents import ReportContents, ReportTable
from bench.reporting.figures import Style, board_styles, calibration_figure, in_unit, lines_figure, styles_of, svg_of
from bench.reporting.scenes import OpenSplit, image_opener, scene_view, thumbnail_url
from bench.results.record import Result
from bench.results.store import StoredResult
from bench.statistics.matching import array_of
from downstream.data.scenes import layout_of
from imagesets.sets import ImageSet

BEST = 8  # checkpoints of a table that are looked at, and the floor
MATRIX_CLASSES = 20  # classes up to which the whole confusion matrix is shown
CONFUSIONS = 12  # that are listed
BINS = 15  # of confidence, equally wide
HARDEST = 12  # images, and classes at either end

Predictions = tuple[np.ndarray, np.ndarray]  # predicted classes (N,), -1 where an image was skipped; confidences (N,)


def views_of(
    report: ReportContents, measured: Sequence[StoredResult], cache: Path, pictures: bool = True
) -> dict[str, dict[str, Any]]:
    """Anchor of a table -> what can be seen beside it. pictures: also what needs the images themselves. cache: where
    tiny sets are drawn."""
    first_seeds: dict[tuple[str, str], StoredResult] = {}
    for one in measured:
        if one.result.status == "ok":
            first_seeds.setdefault((one.result.group, one.result.checkpoint.digest), one)
    digests = {checkpoint["name"]: str(checkpoint["digest"]) for checkpoint in report.checkpoints}
    styles = board_styles(report)
    open_split, views = image_opener() if pictures else None, {}
    for table in report.tables:
        by_name = {name: first_seeds[table.group, digests[name]] for name in best_and_floors(table)}
        view = view_of(by_name, table.metrics, open_split, cache, styles)
        if any(view.values()):
            views[table.anchor] = view
        for one in by_name.values():
            one.forget_arrays()
    return views


def best_and_floors(table: ReportTable) -> list[str]:
    """Names of the best BEST checkpoints of a table, the best first, and of the floors."""
    rows = [row for row in table.rows if row.kind != "published"]
    return [row.name for place, row in enumerate(rows) if place < BEST or row.kind == "floor"]


def view_of(
    measured: Mapping[str, StoredResult],
    metrics: Sequence[str],
    open_split: OpenSplit | None,
    cache: Path,
    styles: Mapping[str, Style] | None = None,
) -> dict[str, Any]:
    """What the named results of one table, the best first, show: images, mistakes, neighbours, scenes, and learning, an
    SVG. None or empty where nothing is kept. open_split: None where no image may be opened."""
    view: dict[str, Any] = {"images": None, "mistakes": None, "neighbours": [], "scenes": None, "learning": ""}
    if not measured:
        return view
    # The best is a network, also where raw pixels lead.
    measured = dict(sorted(measured.items(), key=lambda item: item[1].result.checkpoint.is_floor))
    first = next(iter(measured.values())).result
    styles = styles or styles_of(measured)
    view["learning"] = learning_figure(measured, metrics[0], styles)
    if open_split is None:
        return view
    if layout_of(first.data.url):
        return view | {"scenes": scene_view(measured, cache)}
    images = open_split(first, "val")
    if images is None or images.has_several_labels:  # what an image was taken for is one class
        return view
    predictions = {name: kept for name, one in measured.items() if (kept := predictions_of(one, images))}
    by_image = (image_view(measured, metric, predictions, images) for metric in metrics)
    floors = [name for name in list(measured)[1:] if measured[name].result.checkpoint.is_floor]
    return (
        view
        | {
            "images": next(filter(None, by_image), None),  # of the first metric that is kept for each image
            "mistakes": mistakes_of(measured, predictions, images, styles),
            "neighbours": neighbours_of(
                {name: measured[name] for name in [*list(measured)[:1], *floors[:1]]}, open_split
            ),
        }
    )


def predictions_of(measured: StoredResult, images: ImageSet) -> Predictions | None:
    """None where predictions are not kept, or are of other images."""
    if not {"predicted", "confidence"} <= set(measured.result.arrays):
        return None
    predicted, confidence = measured.arrays["predicted"], measured.arrays["confidence"].astype(np.float64)
    return (predicted, confidence) if len(predicted) == len(confidence) == len(images) else None


def mistakes_of(
    measured: Mapping[str, StoredResult],
    predictions: Mapping[str, Predictions],
    images: ImageSet,
    styles: Mapping[str, Style] | None = None,
) -> dict[str, Any] | None:
    """What the best checkpoint with predictions takes for what, and the calibration of all; None where there are none.

    name: of that checkpoint. fitted: which of a task's fits predicted, such as "1shot of split 0". classes, matrix:
    images by label (rows) and prediction, empty for more than MATRIX_CLASSES. calibration: SVG. errors: name ->
    expected calibration error in percent.
    """
    if not predictions or any(predicted.max() >= len(images.classes) for predicted, _ in predictions.values()):
        return None
    name, (predicted, _) = next(iter(predictions.items()))
    matrix = confusion(images.labels, predicted, len(images.classes))
    bins = {name: reliability(images.labels, *kept) for name, kept in predictions.items()}
    whole = len(images.classes) <= MATRIX_CLASSES
    return {
        "name": name,
        "fitted": str(measured[name].result.facts.get("predictions", "")),
        "classes": images.classes if whole else (),
        "matrix": matrix.tolist() if whole else [],
        "confused": most_confused(matrix, images.classes),
        "calibration": svg_of(
            calibration_figure({name: rows[:, :2].tolist() for name, rows in bins.items()}, styles),
            "accuracy against confidence",
        ),
        "errors": {name: calibration_error(rows) for name, rows in bins.items()},
    }


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(K, K) images by label and prediction; skipped ones are left out."""
    read = predicted >= 0
    counts = np.bincount(labels[read] * classes + predicted[read], minlength=classes * classes)
    return counts.reshape(classes, classes)


def most_confused(matrix: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The most frequent confusions of a (K, K) matrix: images, of all of a class, that were taken for another."""
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [divmod(int(place), len(classes)) for place in order]
    return [
        {"label": classes[a], "taken_for": classes[b], "images": int(wrong[a, b]), "of": int(matrix[a].sum())}
        for a, b in pairs
        if wrong[a, b]
    ]


def reliability(labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Mean confidence, share of right images and their number (bins, 3), of the bins of confidence that hold any
    (Guo et al. 2017, "On Calibration of Modern Neural Networks", Eq. 1 and figure 1)."""
    read = predicted >= 0
    right, sure = (predicted == labels)[read], confidence[read]
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = [places == number for number in range(BINS)]
    return np.array([(sure[inside].mean(), right[inside].mean(), inside.sum()) for inside in bins if inside.any()])


def calibration_error(bins: np.ndarray) -> float:
    """Mean distance of confidence and accuracy over the images, in percent (Guo et al. 2017, Eq. 3)."""
    return float(100 * (np.abs(bins[:, 0] - bins[:, 1]) * bins[:, 2]).sum() / bins[:, 2].sum())


def neighbours_of(measured: Mapping[str, StoredResult], open_split: OpenSplit) -> list[dict[str, Any]]:
    """Some validation images with their nearest training images by the named results of one table, the nearest first.

    Empty where no neighbours are kept, or the images are not on this machine.
    """
    arrays = {"neighbours_of", "neighbours", "similarities"}
    kept = {name: one for name, one in measured.items() if arrays <= set(one.result.arrays)}
    if not kept:
        return []
    first = next(iter(kept.values()))
    train, val = open_split(first.result, "train"), open_split(first.result, "val")
    if train is None or val is None:
        return []
    queries = first.arrays["neighbours_of"]
    kept = {name: one for name, one in kept.items() if np.array_equal(one.arrays["neighbours_of"], queries)}
    picture = functools.cache(lambda index: thumbnail_url(train, index))

    def neighbours(one: StoredResult, place: int, label: int) -> list[dict[str, Any]]:
        near, similarities = (one.arrays[name][place].tolist() for name in ("neighbours", "similarities"))
        return [
            {
                "picture": picture(index),
                "label": train.classes[train.labels[index]],
                "right": bool(train.labels[index] == label),
                "similarity": similarity,  # cosine
            }
            for index, similarity in zip(near, similarities, strict=True)
        ]

    return [
        {
            "picture": thumbnail_url(val, index),
            "label": val.classes[val.labels[index]],
            "by_checkpoint": {name: neighbours(one, place, val.labels[index]) for name, one in kept.items()},
        }
        for place, index in enumerate(queries.tolist())
    ]


def image_view(
    measured: Mapping[str, StoredResult], metric: str, predictions: Mapping[str, Predictions], images: ImageSet
) -> dict[str, Any] | None:
    """The hardest images of a table, and accuracy by class; None where a metric is not kept for each image.

    names: the checkpoints, whose first seed was read. classes: those on which the first is worst, then those on which
    it is best, of all_classes.
    """
    right: dict[str, np.ndarray] = {}
    for name, one in measured.items():
        record = one.result.metrics.get(metric)
        if record is not None and record.array is not None and record.array_over == "images" and record.unit == "%":
            values = array_of(one, metric).astype(np.float64)
            if len(values) == len(images):
                right[name] = values
    if not right or not images.classes:
        return None
    by_checkpoint = np.stack(list(right.values()))  # (checkpoints, images), NaN where an image was skipped
    best = predictions.get(next(iter(right)))
    return {
        "metric": metric,
        "names": list(right),
        "hardest": hardest_images(images, by_checkpoint, best[0] if best else None),
        "classes": accuracy_by_class(images, by_checkpoint),
        "all_classes": len(np.unique(images.labels)),
    }


def hardest_images(images: ImageSet, right: np.ndarray, predicted: np.ndarray | None) -> list[dict[str, Any]]:
    """The images that the fewest checkpoints get right, spread over the set; those that all get right are left out.

    right (checkpoints, images): of a mean over splits its shares. predicted: of the best checkpoint.
    """
    share = np.nanmean(right, axis=0) if len(right) > 1 else right[0]
    candidates = np.flatnonzero(share < 1)
    ordered = candidates[np.argsort(share[candidates], kind="stable")]
    level = ordered[share[ordered] == share[ordered[0]]] if len(ordered) else ordered
    if len(level) > HARDEST:  # equally hard: evenly over them, not the first classes alone
        ordered = level[np.arange(HARDEST) * len(level) // HARDEST]
    hardest = []
    for index in ordered[:HARDEST].tolist():
        label = images.labels[index]
        taken_for = label if predicted is None or predicted[index] < 0 else predicted[index]
        if picture := thumbnail_url(images, index):
            hardest.append(
                {
                    "picture": picture,
                    "label": images.classes[label],
                    "path": images.path(index),
                    "right": float(np.nansum(right[:, index])),
                    "of": int((~np.isnan(right[:, index])).sum()),
                    "taken_for": "" if taken_for == label else images.classes[taken_for],
                }
            )
    return hardest


def accuracy_by_class(images: ImageSet, right: np.ndarray) -> list[dict[str, Any]]:
    """Accuracy (in percent, by checkpoint) on the images of a class; right (checkpoints, images)."""
    classes: list[dict[str, Any]] = []
    for label in np.unique(images.labels).tolist():
        of_class = right[:, images.labels == label]
        if not np.isnan(of_class).all():
            accuracies = [float(100 * value) for value in np.nanmean(of_class, axis=1)]
            classes.append({"name": images.classes[label], "images": of_class.shape[1], "accuracies": accuracies})
    classes.sort(key=lambda entry: (entry["accuracies"][0], entry["name"]))
    return classes if len(classes) <= 2 * HARDEST else [*classes[:HARDEST], *classes[-HARDEST:]]


def learning_figure(measured: Mapping[str, StoredResult], metric: str, styles: Mapping[str, Style]) -> str:
    """SVG of what the probes' trainings reached; "" where that was not kept."""
    curves = {name: learning_curve(one.result, metric) for name, one in measured.items()}
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return ""
    first = next(iter(measured.values())).result
    unit = first.metrics[metric].unit if metric in first.metrics else ""
    along = "step" if layout_of(first.data.url) else "epoch"
    return svg_of(lines_figure(curves, along, in_unit(metric, unit), styles), "learning curves of the probes")


def learning_curve(result: Result, metric: str) -> list[tuple[float, float]]:
    """Epoch or step, and what a probe's training reached there on the images that it was watched on; empty where that
    was not kept, or is not what our tasks keep."""
    for read in (_curve_of_heads, _curve_of_epochs, _curve_of_scenes):
        with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # facts may hold any JSON
            if points := read(result.facts, metric):
                return points
    return []


def _curve_of_heads(facts: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    return [(epoch + 1, float(value)) for epoch, value in enumerate(facts["chosen_history"])]


def _curve_of_epochs(facts: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    watched = "holdout" if "holdout" in facts["history"][0] else "val"
    return [(float(entry["epoch"]), float(entry[watched])) for entry in facts["history"]]


def _curve_of_scenes(facts: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    return sorted((float(step), float(metrics[metric])) for step, metrics in facts["evaluations"][0].items())
