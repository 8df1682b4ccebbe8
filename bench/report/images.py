"""Which validation images a table's checkpoints get wrong: the hardest ones as small pictures, accuracy by class.

Read off the correctness of each image that results keep, and off the image set itself, where it is on this machine and
still the one that was measured.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.statistics.matching import Measured, array_of
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, open_set

SHOWN = 12  # images, and classes at either end
SIDE = 96  # pixels of the longer side of a small picture


@dataclass(frozen=True, kw_only=True)
class HardImage:
    """One validation image that many checkpoints get wrong."""

    picture: str  # a data: URL
    label: str  # its class
    path: str
    right: int  # checkpoints that get it right
    of: int  # checkpoints


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


def image_view(
    measured: Mapping[str, Measured], metric: str, opened: Callable[[str], ImageSet | None]
) -> ImageView | None:
    """What the named results of one table, the best first, say of its images. None where no correctness is kept, or
    the images are not on this machine.

    opened: URL -> its validation images, or None; see `on_this_machine`.
    """
    kept = {name: each for name, each in measured.items() if _per_image(each, metric)}
    if not kept:
        return None
    first = next(iter(kept.values())).result
    images = opened(first.data.url)
    if images is None or images.fingerprint != first.data.fingerprints.get("val"):
        return None
    images = images if first.limit is None else images.limited(first.limit)
    right = {name: array_of(each, metric).astype(np.float64) for name, each in kept.items()}
    right = {name: values for name, values in right.items() if len(values) == len(images)}
    if not right or not images.classes:
        return None
    table = np.stack(list(right.values()))  # (checkpoints, images), NaN where an image was skipped
    return ImageView(
        metric=metric,
        names=tuple(right),
        hardest=tuple(_hardest(images, table)),
        classes=tuple(_by_class(images, table)),
        all_classes=len(np.unique(images.labels)),
    )


def on_this_machine() -> Callable[[str], ImageSet | None]:
    """A function that opens validation images by URL, each once; None where they cannot be opened here."""
    found: dict[str, ImageSet | None] = {}

    def opened(url: str) -> ImageSet | None:
        if url not in found:
            try:
                found[url] = open_set(url, "val")
            except (ValueError, OSError):  # moved, unmounted, or no image set
                found[url] = None
        return found[url]

    return opened


def _per_image(measured: Measured, metric: str) -> bool:
    record = measured.result.metrics.get(metric)
    return record is not None and record.array is not None and record.array_over == "images" and record.unit == "%"


def _hardest(images: ImageSet, right: np.ndarray) -> list[HardImage]:
    """The images that the fewest checkpoints get right, spread over the set; those that all get right are none."""
    share = np.nanmean(right, axis=0) if len(right) > 1 else right[0]
    candidates = np.flatnonzero(share < 1)
    ordered = candidates[np.argsort(share[candidates], kind="stable")]
    level = ordered[share[ordered] == share[ordered[0]]] if len(ordered) else ordered
    if len(level) > SHOWN:  # equally hard: evenly over them, not the first classes alone
        ordered = level[np.arange(SHOWN) * len(level) // SHOWN]
    found = []
    for index in ordered[:SHOWN].tolist():
        try:
            picture = small_picture(images, index)
        except (UnreadableImage, OSError):
            continue
        label = images.classes[images.labels[index]]
        scores = right[:, index]
        found.append(
            HardImage(
                picture=picture,
                label=label,
                path=images.path(index),
                right=int(np.nansum(scores)),
                of=int((~np.isnan(scores)).sum()),
            )
        )
    return found


def small_picture(images: ImageSet, index: int) -> str:
    """An image of a set as a data: URL of a small JPEG."""
    image = images.image(index)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
