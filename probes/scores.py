"""Scores of probes: accuracies with a value for each validation image, class means, and average precision.

Average precision is that of Pascal VOC 2007, at eleven levels of recall (VOCdevkit, VOCevalcls.m, 2007): images are
ranked by score, and AP is the mean over recalls 0, 0.1, ..., 1 of the highest precision at that recall or above.
"Difficult" images are ignored. Recalls are compared as integers, 10 tp >= k P, because rounding of floating-point
numbers misses some levels.

N: images. n: images that were read; they have indices (n,) among all images. C: classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from engine.distributed import World
from engine.rows import are_equal
from engine.tasks import Metric, Outcome, resampled
from imagesets.sets import ImageSet
from probes.features.extract import FeatureSet
from probes.features.kinds import FeatureKind


def equal_features_warning(features: FeatureSet, kinds: Sequence[FeatureKind]) -> list[str]:
    """A warning about kinds whose features are equal for all images, as those of a collapsed network are."""
    equal = [kind.name for kind in kinds if are_equal(features[kind])]
    return [f"the features {', '.join(equal)} are the same for all images: nothing can be learnt"] if equal else []


class Hits(NamedTuple):
    """Predictions of a classifier for N images, compared with their labels.

    top1, top5: (N,) bool, whether the label is among the 1 or 5 classes with the highest scores.
    predicted: (N,) int64, class with the highest score. confidence: (N,) float32, its probability.
    nll: (N,) float32, negative log-likelihood of the label.
    """

    top1: np.ndarray
    top5: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray


def hits_of(logits: Tensor, labels: Tensor) -> Hits:
    """Hits of logits (B, C) for labels (B,), both on the same device."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    is_label = ranked == labels[:, None]
    confidence = logits.float().softmax(dim=1).amax(dim=1)
    nll = F.cross_entropy(logits.float(), labels, reduction="none")
    arrays = (is_label[:, 0], is_label.any(dim=1), ranked[:, 0], confidence, nll)
    return Hits(*(values.cpu().numpy() for values in arrays))


def concatenate_hits(parts: Sequence[Hits]) -> Hits:
    """Hits of consecutive parts of the images as those of all images."""
    return Hits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def gather_in_order(world: World, own: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Arrays (Q, ...) of all queries in every process, sorted by the first of them.

    own: returns the arrays (q, ...) of this process's queries; the first holds their positions among all queries.
    """
    arrays = [np.concatenate(parts) for parts in zip(*world.gather_results(own), strict=True)]
    order = np.argsort(arrays[0])
    return [values[order] for values in arrays]


def percent(correct: np.ndarray) -> float:
    """Percentage of True in an array of bool."""
    return 100.0 * int(correct.sum()) / len(correct)


def spread_out(correct: np.ndarray, indices: np.ndarray, images: int) -> np.ndarray:
    """Values (n,) of the images that were read, as values of all `images`: (images,) float32, NaN for skipped ones."""
    values = np.full(images, np.nan, np.float32)
    values[indices] = correct
    return values


def accuracy(correct: np.ndarray, indices: np.ndarray, images: int, chosen_on_val: bool = False) -> Metric:
    """Accuracy, from correctness (n,) bool of the images that were read."""
    values = spread_out(correct, indices, images)
    return Metric(value=percent(correct), per_image=values, chosen_on_val=chosen_on_val)


def nll_metric(nll: np.ndarray, indices: np.ndarray, images: int, chosen_on_val: bool = False) -> Metric:
    """Mean of `Hits.nll` (n,) of the images that were read."""
    values = spread_out(nll, indices, images)
    mean = float(np.nanmean(values, dtype=np.float64))
    return Metric(value=mean, unit="nats", higher_is_better=False, per_image=values, chosen_on_val=chosen_on_val)


def mean_metric(values: np.ndarray, indices: np.ndarray, images: int) -> Metric:
    """Mean in percent of values (n,) from 0 to 1, NaN for images that do not count."""
    return Metric(value=100 * float(np.nanmean(values)), per_image=spread_out(values, indices, images))


def prediction_arrays(
    predicted: np.ndarray, confidence: np.ndarray, indices: np.ndarray, images: int
) -> dict[str, np.ndarray]:
    """Arrays of a result, of all `images`, from predicted classes and confidences (n,) of the images that were read.

    predicted: (images,) int32, -1 for skipped images. confidence: (images,) float16 from 0 to 1, NaN for these.
    """
    classes = np.full(images, -1, np.int32)
    classes[indices] = predicted
    return {"predicted": classes, "confidence": spread_out(confidence, indices, images).astype(np.float16)}


def with_class_means(
    metrics: Mapping[str, Metric],
    val: ImageSet,
    repeated: Mapping[str, Sequence[np.ndarray]] | None = None,
    ddof: int = 0,
) -> dict[str, Metric]:
    """The metrics, preceded by mean per-class accuracies if papers report these for the image set.

    There is one for each top-1 accuracy, with per_class in its name in place of top1. repeated: name of a top-1
    accuracy -> correctness (N,) in each repetition, whose standard deviation is reported as well, with `ddof` as in
    np.std.
    """
    if val.reports != "mean per class":
        return dict(metrics)
    top1 = {
        name: metric for name, metric in metrics.items() if name.startswith("top1") and metric.per_image is not None
    }
    rates = {name: np.asarray(metric.per_image, np.float64) for name, metric in top1.items()}
    resampled_means = resampled(lambda weights: class_means(rates, val.labels, weights), len(val))
    class_metrics = {}
    for name, values in rates.items():
        class_name = name.replace("top1", "per_class")
        class_metrics[class_name] = Metric(
            value=class_mean(values, val.labels),
            resampled=resampled_means[name],
            chosen_on_val=top1[name].chosen_on_val,
        )
        if repetitions := (repeated or {}).get(name):
            spread = float(np.std([class_mean(correct, val.labels) for correct in repetitions], ddof=ddof))
            class_metrics[f"{class_name}_std"] = Metric(value=spread, higher_is_better=None, deviation_of=class_name)
    return class_metrics | dict(metrics)


def class_mean(values: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the accuracies of all classes of `labels` (N,), in percent. values: correctness (N,)."""
    return float(class_means({"": values}, labels, np.ones((1, len(labels))))[""][0])


def class_means(rates: Mapping[str, np.ndarray], labels: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> mean per-class accuracy (R,) in percent, on R resamples, over the classes that occur in each.

    rates: name -> correctness (N,) from 0 to 1, NaN for skipped images. labels: (N,). weights: (R, N), how often each
    resample contains an image.
    """
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    weights = weights[:, order]
    means = {}
    for name, values in rates.items():
        is_read = ~np.isnan(values[order])
        counts = np.add.reduceat(weights * is_read, starts, axis=1)  # (R, classes)
        correct = np.add.reduceat(weights * np.where(is_read, values[order], 0.0), starts, axis=1)
        accuracies = correct / np.maximum(counts, 1)  # counts are integers
        means[name] = 100.0 * accuracies.sum(axis=1) / np.maximum((counts > 0).sum(axis=1), 1)
    return means


def with_blocks(outcome: Outcome, by_block: Mapping[int, Outcome]) -> Outcome:
    """The outcome of the last block, with the main metric of each earlier block as NAME_blockN, and with all costs.

    by_block: number of the block, from 1 -> its outcome.
    """
    main = next(iter(outcome.metrics))
    metrics = {f"{main}_block{block}": other.metrics[main] for block, other in by_block.items()}
    spent = [outcome.cost, *(other.cost for other in by_block.values())]
    total = {name: sum(part.get(name, 0) for part in spent) for name in outcome.cost}
    return replace(outcome, metrics={**outcome.metrics, **metrics}, cost=total)


def cost(*sets: FeatureSet) -> dict[str, float]:
    """Forward passes and seconds that this run spent on features; 0 if they were on disk."""
    forwards, seconds = sum(features.forwards for features in sets), sum(features.seconds for features in sets)
    return {"forwards": forwards, "extraction_seconds": round(seconds, 3)}


RECALL_LEVELS = range(11)  # tenths


def average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Average precision (R,) of one class in percent, on R resamples; NaN where no image shows the class.

    scores: (N,); of equal scores the first image ranks higher. labels: (N,), 1 or 0, or -1 for images to ignore.
    weights: (R, N) integers, how often each resample contains an image.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[labels[order] >= 0]
    positives = np.flatnonzero(labels[order] == 1)  # only there does recall rise, and precision has its maxima there
    if not len(positives):
        return np.full(len(weights), np.nan)
    counts = weights[:, order]
    true_positives = np.cumsum(counts[:, positives], axis=1)  # (R, P)
    precision = true_positives / np.maximum(np.cumsum(counts, axis=1)[:, positives], 1)
    best_precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # at this recall or above
    total = true_positives[:, -1:]
    first_at_level = [(10 * true_positives >= level * total).argmax(axis=1) for level in RECALL_LEVELS]
    values = 100 * np.take_along_axis(best_precision, np.stack(first_at_level, axis=1), axis=1).mean(axis=1)
    return np.where(total[:, 0] > 0, values, np.nan)


def mean_average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean of `average_precision` (R,) over the classes that occur. scores, labels: (N, C). weights: (R, N)."""
    classes = range(labels.shape[1])
    values = np.stack([average_precision(scores[:, label], labels[:, label], weights) for label in classes])  # (C, R)
    occurs = ~np.isnan(values)
    return np.where(occurs, values, 0.0).sum(axis=0) / np.maximum(occurs.sum(axis=0), 1)
