"""What a report shows of a table besides its numbers, from what results keep of each image: the hardest images and
accuracy by class, confusions and confidence (probes/scores.py), nearest training images of k-NN, and learning curves.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.reporting.contents import ReportContents, ShownTable
from bench.reporting.figures import calibration_figure, in_unit, lines_figure
from bench.reporting.scenes import Opened, SceneView, on_this_machine, scene_view, small_picture
from bench.results.board import group_of
from bench.results.record import Result
from bench.statistics.matching import Measured, array_of
from downstream.data.scenes import layout_of
from imagesets.sets import ImageSet

WHOLE = 20  # classes up to which the whole confusion matrix is shown
MOST = 12  # confusions that are listed otherwise
BINS = 10  # of confidence, equally wide


@dataclass(frozen=True, kw_only=True)
class Confused:
    """Images of one class that were taken for another."""

    label: str
    taken_for: str
    images: int
    of: int  # images of that class


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """What the best checkpoint of a table takes for what, and the calibration of several."""

    name: str  # of the best checkpoint
    fitted: str  # which of a task's fits predicted, such as "1shot of split 0"; "" where there is one
    classes: tuple[str, ...]  # of the matrix
    matrix: tuple[tuple[int, ...], ...]  # rows: labels, columns: predictions; () for more than WHOLE classes
    confused: tuple[Confused, ...]  # the most frequent first
    calibration: str  # SVG
    errors: Mapping[str, float]  # checkpoint -> expected calibration error in percent


def predictions_of(measured: Measured, images: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Predicted classes (N,), -1 where an image was skipped, and confidences (N,); None where they are not kept."""
    if not {"predicted", "confidence"} <= set(measured.result.arrays):
        return None
    found = measured.arrays["predicted"], measured.arrays["confidence"].astype(np.float64)
    return found if len(found[0]) == len(found[1]) == images else None


def mistakes_of(measured: Mapping[str, Measured], images: ImageSet) -> Mistakes | None:
    """Mistakes of the named results of one table, the best first; None where no predictions are kept."""
    kept = {name: found for name, each in measured.items() if (found := predictions_of(each, len(images)))}
    if not kept or any(predicted.max() >= len(images.classes) for predicted, _ in kept.values()):
        return None
    name, (predicted, _) = next(iter(kept.items()))
    matrix = confusion(images.labels, predicted, len(images.classes))
    bins = {each: reliability(images.labels, *found) for each, found in kept.items()}
    whole = len(images.classes) <= WHOLE
    return Mistakes(
        name=name,
        fitted=str(measured[name].result.facts.get("predictions", "")),
        classes=images.classes if whole else (),
        matrix=tuple(tuple(row) for row in matrix.tolist()) if whole else (),
        confused=tuple(most_confused(matrix, images.classes)),
        calibration=calibration_figure(
            {each: [(sure, right) for sure, right, _ in found.tolist()] for each, found in bins.items()}
        ),
        errors={each: calibration_error(found) for each, found in bins.items()},
    )


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(K, K) images by label and prediction; skipped ones are left out."""
    read = predicted >= 0
    counts = np.bincount(labels[read] * classes + predicted[read], minlength=classes * classes)
    return counts.reshape(classes, classes)


def most_confused(matrix: np.ndarray, classes: Sequence[str]) -> list[Confused]:
    """The MOST frequent confusions of a (K, K) matrix."""
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST]
    pairs = [divmod(int(place), len(classes)) for place in order]
    return [
        Confused(label=classes[a], taken_for=classes[b], images=int(wrong[a, b]), of=int(matrix[a].sum()))
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
    return np.array([(sure[own].mean(), right[own].mean(), own.sum()) for own in bins if own.any()])


def calibration_error(bins: np.ndarray) -> float:
    """Mean distance of confidence and accuracy over the images, in percent (Guo et al. 2017, Eq. 3)."""
    return float(100 * (np.abs(bins[:, 0] - bins[:, 1]) * bins[:, 2]).sum() / bins[:, 2].sum())


ARRAYS = ("neighbours_of", "neighbours", "similarities")


@dataclass(frozen=True, kw_only=True)
class SeenImage:
    """One image; right: whether its class is that of the image that was asked about."""

    picture: str  # a data: URL
    label: str
    right: bool
    similarity: float  # cosine


@dataclass(frozen=True, kw_only=True)
class QueryNeighbours:
    """A validation image, and its nearest training images by checkpoint, the nearest first."""

    picture: str
    label: str
    found: Mapping[str, tuple[SeenImage, ...]]


def neighbours_of(measured: Mapping[str, Measured], opened: Opened) -> tuple[QueryNeighbours, ...]:
    """Neighbours by the named results of one table. Empty where none are kept, or the images are not on this
    machine."""
    kept = {name: each for name, each in measured.items() if set(ARRAYS) <= set(each.result.arrays)}
    if not kept:
        return ()
    first = next(iter(kept.values()))
    sets = [opened(first.result, split) for split in ("train", "val")]
    train, val = sets
    if train is None or val is None:
        return ()
    asked = first.arrays["neighbours_of"]
    kept = {name: each for name, each in kept.items() if np.array_equal(each.arrays["neighbours_of"], asked)}
    picture = picture_maker(train)
    return tuple(
        QueryNeighbours(
            picture=small_picture(val, index),
            label=val.classes[val.labels[index]],
            found={name: _row(each, place, val.labels[index], train, picture) for name, each in kept.items()},
        )
        for place, index in enumerate(asked.tolist())
    )


def picture_maker(images: ImageSet) -> Callable[[int], str]:
    """A function that makes the picture of an image once."""
    made: dict[int, str] = {}

    def picture(index: int) -> str:
        return made.setdefault(index, made.get(index) or small_picture(images, index))

    return picture


def _row(
    measured: Measured, place: int, label: int, train: ImageSet, picture: Callable[[int], str]
) -> tuple[SeenImage, ...]:
    near, similarities = (measured.arrays[name][place].tolist() for name in ("neighbours", "similarities"))
    return tuple(
        SeenImage(
            picture=picture(index),
            label=train.classes[train.labels[index]],
            right=bool(train.labels[index] == label),
            similarity=similarity,
        )
        for index, similarity in zip(near, similarities, strict=True)
    )


SHOWN = 12  # images, and classes at either end


@dataclass(frozen=True, kw_only=True)
class HardImage:
    """One validation image that many checkpoints get wrong."""

    picture: str  # a data: URL
    label: str  # its class
    path: str
    right: float  # checkpoints that get it right; of a mean over splits their shares, added up
    of: int  # checkpoints
    taken_for: str  # what the best checkpoint takes it for; "" where that is not kept


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """Accuracy on the validation images of one class in percent, in the order of the checkpoints."""

    name: str
    images: int
    accuracies: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageView:
    """What can be seen of a table's images. names: the checkpoints, whose first seed was read."""

    metric: str
    names: tuple[str, ...]
    hardest: tuple[HardImage, ...]
    classes: tuple[ClassAccuracy, ...]  # those on which the first checkpoint is worst, then those on which it is best
    all_classes: int


def image_view(measured: Mapping[str, Measured], metric: str, images: ImageSet) -> ImageView | None:
    """What the named results of one table, the best first, say of its images; None where no correctness is kept."""
    kept = {name: each for name, each in measured.items() if _per_image(each, metric)}
    right = {name: array_of(each, metric).astype(np.float64) for name, each in kept.items()}
    right = {name: values for name, values in right.items() if len(values) == len(images)}
    if not right or not images.classes:
        return None
    table = np.stack(list(right.values()))  # (checkpoints, images), NaN where an image was skipped
    best = predictions_of(measured[next(iter(right))], len(images))
    return ImageView(
        metric=metric,
        names=tuple(right),
        hardest=tuple(_hardest(images, table, best[0] if best else None)),
        classes=tuple(_by_class(images, table)),
        all_classes=len(np.unique(images.labels)),
    )


def _per_image(measured: Measured, metric: str) -> bool:
    record = measured.result.metrics.get(metric)
    return record is not None and record.array is not None and record.array_over == "images" and record.unit == "%"


def _hardest(images: ImageSet, right: np.ndarray, predicted: np.ndarray | None) -> list[HardImage]:
    """The images that the fewest checkpoints get right, spread over the set; those that all get right are none."""
    share = np.nanmean(right, axis=0) if len(right) > 1 else right[0]
    candidates = np.flatnonzero(share < 1)
    ordered = candidates[np.argsort(share[candidates], kind="stable")]
    level = ordered[share[ordered] == share[ordered[0]]] if len(ordered) else ordered
    if len(level) > SHOWN:  # equally hard: evenly over them, not the first classes alone
        ordered = level[np.arange(SHOWN) * len(level) // SHOWN]
    found = []
    for index in ordered[:SHOWN].tolist():
        taken = images.labels[index] if predicted is None or predicted[index] < 0 else predicted[index]
        found.append(
            HardImage(
                picture=small_picture(images, index),
                label=images.classes[images.labels[index]],
                path=images.path(index),
                right=float(np.nansum(right[:, index])),
                of=int((~np.isnan(right[:, index])).sum()),
                taken_for="" if taken == images.labels[index] else images.classes[taken],
            )
        )
    return [image for image in found if image.picture]


def _by_class(images: ImageSet, right: np.ndarray) -> Sequence[ClassAccuracy]:
    found = []
    for label in np.unique(images.labels).tolist():
        own = right[:, images.labels == label]
        if np.isnan(own).all():
            continue
        accuracies = tuple(float(100 * value) for value in np.nanmean(own, axis=1))
        found.append(ClassAccuracy(name=images.classes[label], images=own.shape[1], accuracies=accuracies))
    found.sort(key=lambda each: (each.accuracies[0], each.name))
    return found if len(found) <= 2 * SHOWN else [*found[:SHOWN], *found[-SHOWN:]]


BEST = 8  # checkpoints of a table that are looked at, and the floor


@dataclass(frozen=True, kw_only=True)
class TableView:
    """Beside one table. Each of the first seed of its best checkpoints; None or empty where nothing is kept."""

    images: ImageView | None = None
    mistakes: Mistakes | None = None
    neighbours: tuple[QueryNeighbours, ...] = ()
    scenes: SceneView | None = None
    learning: str = ""  # SVG

    @property
    def is_empty(self) -> bool:
        return not (self.images or self.mistakes or self.neighbours or self.scenes or self.learning)


def views_of(
    report: ReportContents, measured: Sequence[Measured], cache: Path, pictures: bool = True
) -> dict[str, TableView]:
    """Anchor of a table -> what can be seen beside it. pictures: also what needs the images themselves. cache: where
    tiny sets are drawn."""
    by_place: dict[tuple[str, str], Measured] = {}
    for each in measured:
        if each.result.status == "ok":
            by_place.setdefault((group_of(each.result), each.result.checkpoint.digest), each)
    digests = {each["name"]: str(each["digest"]) for each in report.checkpoints}
    opened, found = on_this_machine(), {}
    for table in report.tables:
        own = {name: by_place[table.group, digests[name]] for name in looked_at(table)}
        view = view_of(own, table.metrics, opened if pictures else None, cache)
        if not view.is_empty:
            found[table.anchor] = view
        for each in own.values():
            each.forget_arrays()
    return found


def looked_at(table: ShownTable) -> list[str]:
    """Names of the best BEST checkpoints of a table, the best first, and of the floors."""
    rows = [row for row in table.rows if row.kind != "published"]
    return [row.name for place, row in enumerate(rows) if place < BEST or row.kind == "floor"]


def view_of(measured: Mapping[str, Measured], metrics: Sequence[str], opened: Opened | None, cache: Path) -> TableView:
    """What the named results of one table say; opened: None where no image may be opened."""
    metric = metrics[0]
    curves = {name: learning_curve(each.result, metric) for name, each in measured.items()}
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not measured:
        return TableView()
    first = next(iter(measured.values())).result
    unit = first.metrics[metric].unit if metric in first.metrics else ""
    along = "step" if layout_of(first.data.url) else "epoch"
    learning = lines_figure(curves, along, in_unit(metric, unit), "learning curves of the probes") if curves else ""
    if opened is None:
        return TableView(learning=learning)
    if layout_of(first.data.url):
        return TableView(scenes=scene_view(measured, cache), learning=learning)
    images = opened(first, "val")
    if images is None or images.has_several_labels:  # what an image was taken for is one class
        return TableView(learning=learning)
    by_image = (image_view(measured, each, images) for each in metrics)
    return TableView(
        images=next(filter(None, by_image), None),  # of the first metric that is kept for each image
        mistakes=mistakes_of(measured, images),
        neighbours=neighbours_of(_best_and_floor(measured), opened),
        learning=learning,
    )


def _best_and_floor(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    names = list(measured)
    floors = [name for name in names[1:] if measured[name].result.checkpoint.is_floor]
    return {name: measured[name] for name in [*names[:1], *floors[:1]]}


def learning_curve(result: Result, metric: str) -> list[tuple[float, float]]:
    """Epoch or step, and what a probe's training reached there on the images that it was watched on; empty where that
    was not kept, or is not what our tasks keep."""
    for read in (_of_heads, _of_epochs, partial(_of_scenes, metric=metric)):
        with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # facts may hold any JSON
            if points := read(result.facts):
                return points
    return []


def _of_heads(facts: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(epoch + 1, float(value)) for epoch, value in enumerate(facts["chosen_history"])]


def _of_epochs(facts: Mapping[str, Any]) -> list[tuple[float, float]]:
    watched = "holdout" if "holdout" in facts["history"][0] else "val"
    return [(float(entry["epoch"]), float(entry[watched])) for entry in facts["history"]]


def _of_scenes(facts: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    return sorted((float(step), float(metrics[metric])) for step, metrics in facts["evaluations"][0].items())
