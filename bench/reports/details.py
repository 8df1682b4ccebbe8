"""The details below a table of a report, made from what results store for each image.

The hardest images and accuracy by class, nearest training images of k-NN, and scenes.
Each part is a dictionary, which details.html renders.

In shapes, C is the number of checkpoints, N of validation images, and K of classes.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.reports.contents import ReportContents, ReportTable
from bench.reports.scenes import OpenSplit, image_opener, scene_details, thumbnail_url
from bench.results.record import CheckpointUsed
from bench.results.store import StoredResult
from bench.statistics.matching import array_of
from downstream.data.scenes import layout_of
from imagesets.sets import ImageSet

MAX_CHECKPOINTS = 8  # of a table, the best ones, whose arrays are read; and all raw pixels
HARDEST = 12  # images, and classes at either end

# Parts of the details of a table, each None or empty if its arrays were not stored.
NO_DETAILS: dict[str, Any] = {"images": None, "neighbours": [], "scenes": None}


def details_by_table(report: ReportContents, cache: Path, pictures: bool = True) -> dict[str, dict[str, Any]]:
    """Anchor of a table -> its details; tables without any are left out.

    pictures: False for none, as all details open images. cache: folder in which tiny scene sets are generated.
    """
    first_seeds: dict[tuple[str, str], StoredResult] = {}  # (group, digest of the checkpoint) -> its first result
    for stored in report.board.results:
        if stored.result.status == "ok":
            first_seeds.setdefault((stored.result.group, stored.result.checkpoint.digest), stored)
    open_split, details = image_opener(), {}
    for table in report.tables if pictures else ():
        by_name = {
            table.board.names[used]: first_seeds[table.group, used.digest]
            for used in best_and_raw_pixels(table)
            if (table.group, used.digest) in first_seeds  # raw pixels beside networks at a chosen size have none
        }
        details_of_table = details_of(by_name, table.metrics, open_split, cache)
        if any(details_of_table.values()):
            details[table.anchor] = details_of_table
        for stored in by_name.values():
            stored.forget_arrays()
    return details


def best_and_raw_pixels(table: ReportTable) -> list[CheckpointUsed]:
    """The MAX_CHECKPOINTS best trained networks of a table, the best first, and all raw pixels."""
    return [*table.networks[:MAX_CHECKPOINTS], *(used for used in table.cells if used.is_raw_pixels)]


def details_of(
    results: Mapping[str, StoredResult], metrics: Sequence[str], open_split: OpenSplit, cache: Path
) -> dict[str, Any]:
    """The details of one table, by the keys of NO_DETAILS.

    results: name of checkpoint -> its result, the best network first.
    """
    if not results:
        return dict(NO_DETAILS)
    first = next(iter(results.values())).result
    if layout_of(first.data.url):
        return NO_DETAILS | {"scenes": scene_details(results, cache)}
    images = open_split(first, "val")
    if images is None or images.has_several_labels:  # accuracy by class needs one class per image
        return dict(NO_DETAILS)
    details_by_metric = (image_details(results, metric, images) for metric in metrics)
    raw_pixels = [name for name in list(results)[1:] if results[name].result.checkpoint.is_raw_pixels]
    best_and_pixels = {name: results[name] for name in [*list(results)[:1], *raw_pixels[:1]]}
    return NO_DETAILS | {
        "images": next(filter(None, details_by_metric), None),  # of the first metric with values for each image
        "neighbours": neighbours_of(best_and_pixels, open_split),
    }


def predictions_of(stored: StoredResult, images: ImageSet) -> np.ndarray | None:
    """The stored predicted classes (N,) of a result, -1 for a skipped image; None if there are none, or of other
    images."""
    if "predicted" not in stored.result.arrays:
        return None
    predicted = stored.arrays["predicted"]
    return predicted if len(predicted) == len(images) else None


def neighbours_of(results: Mapping[str, StoredResult], open_split: OpenSplit) -> list[dict[str, Any]]:
    """Some validation images, each with its nearest training images according to each result, the nearest first.

    Empty if no neighbours are stored, or the images are not on this machine.
    """
    arrays = {"neighbours_of", "neighbours", "similarities"}
    with_neighbours = {name: stored for name, stored in results.items() if arrays <= set(stored.result.arrays)}
    if not with_neighbours:
        return []
    first = next(iter(with_neighbours.values()))
    train, val = open_split(first.result, "train"), open_split(first.result, "val")
    if train is None or val is None:
        return []
    queries = first.arrays["neighbours_of"]  # indices of validation images
    same_queries = {
        name: stored
        for name, stored in with_neighbours.items()
        if np.array_equal(stored.arrays["neighbours_of"], queries)
    }
    train_thumbnail = functools.cache(lambda index: thumbnail_url(train, index))

    def neighbours(stored: StoredResult, row: int, label: int) -> list[dict[str, Any]]:
        indices, similarities = (stored.arrays[name][row].tolist() for name in ("neighbours", "similarities"))
        return [
            {
                "picture": train_thumbnail(index),
                "label": train.classes[train.labels[index]],
                "same_class": bool(train.labels[index] == label),
                "similarity": similarity,  # cosine
            }
            for index, similarity in zip(indices, similarities, strict=True)
        ]

    return [
        {
            "picture": thumbnail_url(val, index),
            "label": val.classes[val.labels[index]],
            "by_checkpoint": {
                name: neighbours(stored, row, val.labels[index]) for name, stored in same_queries.items()
            },
        }
        for row, index in enumerate(queries.tolist())
    ]


def image_details(results: Mapping[str, StoredResult], metric: str, images: ImageSet) -> dict[str, Any] | None:
    """The hardest images of a table, and accuracy by class; None if the metric is not stored for each image.

    Returns:
        metric. names: of the checkpoints. hardest: `hardest_images`. fitted: which of a task's fits predicted, such as
        "1shot of split 0". classes: `accuracy_by_class`. all_classes: number of classes.
    """
    scores: dict[str, np.ndarray] = {}  # name -> 1 for each image that is classified correctly, else 0; (N,)
    for name, stored in results.items():
        record = stored.result.metrics.get(metric)
        if record is not None and record.array is not None and record.array_over == "images" and record.unit == "%":
            values = array_of(stored, metric).astype(np.float64)
            if len(values) == len(images):
                scores[name] = values
    if not scores or not images.classes:
        return None
    scores_by_checkpoint = np.stack(list(scores.values()))  # (C, N)
    best = results[next(iter(scores))]
    return {
        "metric": metric,
        "names": list(scores),
        "hardest": hardest_images(images, scores_by_checkpoint, predictions_of(best, images)),
        "fitted": str(best.result.facts.get("predictions", "")),
        "classes": accuracy_by_class(images, scores_by_checkpoint),
        "all_classes": len(np.unique(images.labels)),
    }


def hardest_images(images: ImageSet, scores: np.ndarray, predicted: np.ndarray | None) -> list[dict[str, Any]]:
    """The HARDEST images that the fewest checkpoints classify correctly; images that all get right are left out.

    If more images are equally hard, they are chosen at even distances, not from the first classes alone.

    Args:
        images: the validation images.
        scores: (C, N), 1 if a checkpoint is right, a share for a mean over splits, NaN for a skipped image.
        predicted: classes (N,) that the best checkpoint predicts, -1 for a skipped image; None if not stored.
    """
    share = np.nanmean(scores, axis=0) if len(scores) > 1 else scores[0]
    candidates = np.flatnonzero(share < 1)
    ordered = candidates[np.argsort(share[candidates], kind="stable")]
    equally_hard = ordered[share[ordered] == share[ordered[0]]] if len(ordered) else ordered
    if len(equally_hard) > HARDEST:
        ordered = equally_hard[np.arange(HARDEST) * len(equally_hard) // HARDEST]
    hardest = []
    for index in ordered[:HARDEST].tolist():
        label = images.labels[index]
        prediction = label if predicted is None or predicted[index] < 0 else predicted[index]
        if picture := thumbnail_url(images, index):
            hardest.append(
                {
                    "picture": picture,
                    "label": images.classes[label],
                    "path": images.path(index),
                    "right": float(np.nansum(scores[:, index])),
                    "of": int((~np.isnan(scores[:, index])).sum()),
                    "predicted": "" if prediction == label else images.classes[prediction],
                }
            )
    return hardest


def accuracy_by_class(images: ImageSet, scores: np.ndarray) -> list[dict[str, Any]]:
    """Accuracy of each checkpoint on the images of a class, in percent, the class that is hardest for the first first.

    Of more than 2 * HARDEST classes, those at either end. scores: (C, N), as for `hardest_images`.
    """
    classes: list[dict[str, Any]] = []
    for label in np.unique(images.labels).tolist():
        scores_of_class = scores[:, images.labels == label]
        if not np.isnan(scores_of_class).all():
            accuracies = [float(100 * value) for value in np.nanmean(scores_of_class, axis=1)]
            classes.append(
                {"name": images.classes[label], "images": scores_of_class.shape[1], "accuracies": accuracies}
            )
    classes.sort(key=lambda entry: (entry["accuracies"][0], entry["name"]))
    return classes if len(classes) <= 2 * HARDEST else [*classes[:HARDEST], *classes[-HARDEST:]]
