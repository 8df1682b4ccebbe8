"""What every probe says of its hits: accuracies with values for all validation images, and what the run spent."""

import numpy as np

from engine.tasks import Metric
from probes.features.extract import FeatureSet


def percent(correct: np.ndarray) -> float:
    """Share of True in an array of bool, in percent."""
    return 100.0 * int(correct.sum()) / len(correct)


def spread_out(correct: np.ndarray, indices: np.ndarray, images: int) -> np.ndarray:
    """Correctness of the read images, at their places among all -> (images,) float32; NaN for skipped ones."""
    values = np.full(images, np.nan, np.float32)
    values[indices] = correct
    return values


def accuracy(correct: np.ndarray, indices: np.ndarray, images: int, chosen_on_val: bool = False) -> Metric:
    """Accuracy over the read images (V,) bool, which lie at `indices` (V,) among all `images`."""
    values = spread_out(correct, indices, images)
    return Metric(value=percent(correct), per_image=values, chosen_on_val=chosen_on_val)


def prediction_arrays(
    predicted: np.ndarray, confidence: np.ndarray, indices: np.ndarray, images: int
) -> dict[str, np.ndarray]:
    """Of the first metric, for all `images`: the class that was predicted (images,) int32, -1 for a skipped image, and
    how sure the probe was of it (images,) float16, from 0 to 1. Both are of the read images (V,), at `indices` (V,)."""
    classes = np.full(images, -1, np.int32)
    classes[indices] = predicted
    return {"predicted": classes, "confidence": spread_out(confidence, indices, images).astype(np.float16)}


def cost(*sets: FeatureSet) -> dict[str, float]:
    """What this very run spent: nothing where the features were on disk already."""
    forwards, seconds = sum(one.forwards for one in sets), sum(one.seconds for one in sets)
    return {"forwards": forwards, "extraction_seconds": round(seconds, 3)}
