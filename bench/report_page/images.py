"""Which validation images a table's checkpoints get wrong: the hardest ones as small pictures, accuracy by class.

Read off the correctness of each image that results keep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.report_page.mistakes import predictions_of
from bench.report_page.pictures import small_picture
from bench.statistics.matching import Measured, array_of
from imagesets.sets import ImageSet

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
