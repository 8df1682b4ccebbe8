"""Scores of probes: accuracies with values for all validation images, average precision, and what the run spent.

Average precision is as Pascal VOC 2007 defines it, on eleven levels of recall, VOCdevkit's VOCevalcls.m (2007): images
are ranked by score; AP is the mean over recalls 0, 0.1, ..., 1 of the best precision at that recall or above. Images
that are not judged count neither way. Recalls are compared as whole numbers, 10 tp >= k P, where floating-point numbers
miss some of the levels. N images, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from engine.distributed import World
from engine.tasks import Metric, Outcome, resampled
from imagesets.sets import ImageSet
from probes.features.extract import FeatureSet


class Hits(NamedTuple):
    """What a classifier says of N images.

    top1, top5: whether their class is among the 1 or 5 that it ranks highest, (N,) bool.
    predicted: the class that it ranks highest, (N,) int64. confidence: that one's probability, (N,) float32.
    nll: minus the logarithm of their own class's probability, (N,) float32.
    """

    top1: np.ndarray
    top5: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray


def hits_of(logits: Tensor, labels: Tensor) -> Hits:
    """The hits of logits (B, C) for labels (B,), on one device."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    is_right, confidence = ranked == labels[:, None], logits.float().softmax(dim=1).amax(dim=1)
    nll = F.cross_entropy(logits.float(), labels, reduction="none")
    arrays = (is_right[:, 0], is_right.any(dim=1), ranked[:, 0], confidence, nll)
    return Hits(*(values.cpu().numpy() for values in arrays))


def joined_hits(parts: Sequence[Hits]) -> Hits:
    """Those of all images, from parts of them."""
    return Hits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def in_order(world: World, own: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Arrays (Q, ...) of all queries in every process, in the order of the first, the places of the queries.

    own: those of this process's queries (q, ...).
    """
    arrays = [np.concatenate(parts) for parts in zip(*world.gather_results(own), strict=True)]
    order = np.argsort(arrays[0])
    return [values[order] for values in arrays]


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


def log_likelihood(nll: np.ndarray, indices: np.ndarray, images: int, chosen_on_val: bool = False) -> Metric:
    """Mean of `Hits.nll` over the read images (V,), which lie at `indices` (V,) among all `images`."""
    values = spread_out(nll, indices, images)
    mean = float(np.nanmean(values, dtype=np.float64))
    return Metric(value=mean, unit="nats", higher_is_better=False, per_image=values, chosen_on_val=chosen_on_val)


def mean_share(values: np.ndarray, places: np.ndarray, images: int) -> Metric:
    """Of values (n,) from 0 to 1 at some places among the images, NaN for queries that do not count."""
    return Metric(value=100 * float(np.nanmean(values)), per_image=spread_out(values, places, images))


def prediction_arrays(
    predicted: np.ndarray, confidence: np.ndarray, indices: np.ndarray, images: int
) -> dict[str, np.ndarray]:
    """Of the first metric, for all `images`: the class that was predicted (images,) int32, -1 for a skipped image, and
    how sure the probe was of it (images,) float16, from 0 to 1. Both are of the read images (V,), at `indices` (V,)."""
    classes = np.full(images, -1, np.int32)
    classes[indices] = predicted
    return {"predicted": classes, "confidence": spread_out(confidence, indices, images).astype(np.float16)}


def with_class_means(
    metrics: Mapping[str, Metric], val: ImageSet, repeated: Mapping[str, Sequence[np.ndarray]] | None = None
) -> dict[str, Metric]:
    """The metrics of a probe on validation images; where the set's papers report mean per-class accuracy, that of each
    top-1 accuracy comes first, under its name with per_class in place of top1.

    repeated: top-1 accuracy -> correctness (N,) in each of several repetitions, whose deviation is reported as well.
    """
    if val.reports != "mean per class":
        return dict(metrics)
    top1 = {
        name: metric for name, metric in metrics.items() if name.startswith("top1") and metric.per_image is not None
    }
    rates = {name: np.asarray(metric.per_image, np.float64) for name, metric in top1.items()}
    on_resamples = resampled(lambda weights: class_means(rates, val.labels, weights), len(val))
    class_metrics = {}
    for name, values in rates.items():
        class_name = name.replace("top1", "per_class")
        value, chosen = class_mean(values, val.labels), top1[name].chosen_on_val
        class_metrics[class_name] = Metric(value=value, resampled=on_resamples[name], chosen_on_val=chosen)
        if repetitions := (repeated or {}).get(name):
            spread = float(np.std([class_mean(correct, val.labels) for correct in repetitions]))
            class_metrics[f"{class_name}_std"] = Metric(value=spread, higher_is_better=None, deviation_of=class_name)
    return class_metrics | dict(metrics)


def class_mean(values: np.ndarray, labels: np.ndarray) -> float:
    """Mean over the classes of `labels` (N,) of the accuracy in each, in percent, of correctness (N,)."""
    return float(class_means({"": values}, labels, np.ones((1, len(labels))))[""][0])


def class_means(rates: Mapping[str, np.ndarray], labels: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> (r,) means over the classes that occur of the weighted mean rate in each, in percent.

    rates: by name, correctness (N,) from 0 to 1, NaN for skipped images. labels: (N,). weights: (r, N), how often each
    image counts.
    """
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    ordered = weights[:, order]
    means = {}
    for name, values in rates.items():
        read = ~np.isnan(values[order])
        counts = np.add.reduceat(ordered * read, starts, axis=1)  # (r, classes)
        right = np.add.reduceat(ordered * np.where(read, values[order], 0.0), starts, axis=1)
        accuracies = right / np.maximum(counts, 1)  # counts are whole numbers
        means[name] = 100.0 * accuracies.sum(axis=1) / np.maximum((counts > 0).sum(axis=1), 1)
    return means


def with_blocks(outcome: Outcome, by_block: Mapping[int, Outcome]) -> Outcome:
    """The outcome of the last block, with the main metric of others as NAME_blockN, N from 1 on, and all costs."""
    main = next(iter(outcome.metrics))
    metrics = {f"{main}_block{block}": other.metrics[main] for block, other in by_block.items()}
    spent = [outcome.cost, *(other.cost for other in by_block.values())]
    total = {name: sum(part.get(name, 0) for part in spent) for name in outcome.cost}
    return replace(outcome, metrics={**outcome.metrics, **metrics}, cost=total)


def cost(*sets: FeatureSet) -> dict[str, float]:
    """What this very run spent: nothing where the features were on disk already."""
    forwards, seconds = sum(features.forwards for features in sets), sum(features.seconds for features in sets)
    return {"forwards": forwards, "extraction_seconds": round(seconds, 3)}


LEVELS = range(11)


def average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(r,) of one class in percent, NaN where no image shows it.

    scores: (N,), the largest first; of equals the first image. labels: (N,) 1, 0, or -1 for images that are not judged.
    weights: (r, N), how often each image counts, whole numbers.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[labels[order] >= 0]
    positive = np.flatnonzero(labels[order] == 1)  # precision is best, and recall rises, at these places alone
    if not len(positive):
        return np.full(len(weights), np.nan)
    counts = weights[:, order]
    true_positives = np.cumsum(counts[:, positive], axis=1)
    precision = true_positives / np.maximum(np.cumsum(counts, axis=1)[:, positive], 1)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # at that recall or above
    total = true_positives[:, -1:]
    places = np.stack([(10 * true_positives >= level * total).argmax(axis=1) for level in LEVELS], axis=1)  # (r, 11)
    values = 100 * np.take_along_axis(best, places, axis=1).mean(axis=1)
    return np.where(total[:, 0] > 0, values, np.nan)


def mean_average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(r,) mean over the classes that some image shows, of scores (N, C) and labels (N, C); the rest as above."""
    columns = range(labels.shape[1])
    values = np.stack([average_precision(scores[:, column], labels[:, column], weights) for column in columns])
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
