"""What a table's checkpoints take for what, and how sure they are: from the predictions that results keep.

`predicted` and `confidence` are of each validation image, under the first metric (probes/scores.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.report_page.figures import calibration_figure
from bench.statistics.matching import Measured
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
