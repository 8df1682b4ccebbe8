"""Scores of retrieved images, and descriptors: revisited Oxford and Paris, and copy detection, as DINO computes them.

facebookresearch/dino utils.py:552-595, :708-800, eval_image_retrieval.py, eval_copy_detection.py. N images of the
database, Q queries, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from engine.machine import run_on_core_threads
from engine.tasks import Workspace
from imagesets.sets import ImageSet

# Level -> what counts as right and what is left out, of an image's easy, hard and junk images.
LEVELS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
KAPPAS = (1, 5, 10)  # of the mean precision at k
GEM_POWER, GEM_LEAST = 4.0, 1e-6  # of the generalised mean of copy detection
SCALES = (1.0, 2**-0.5, 0.5)
LEAST_VARIANCE = 1e-5  # of a whitening's largest


class Ranking(NamedTuple):
    """Average precision of each query (Q,), NaN for one without positives, and precision at each k (Q, K)."""

    average: np.ndarray
    at: np.ndarray


def average_precision(ranks: np.ndarray, positives: int) -> float:
    """Area under precision by recall, in trapezoids. ranks: of the positives that were found, from 0, rising.
    positives: all that there are."""
    nearer_positives = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, nearer_positives / np.maximum(ranks, 1))
    return float(((before + (nearer_positives + 1) / (ranks + 1)) / (2 * max(positives, 1))).sum())


def level_scores(
    order: np.ndarray, truth: Sequence[Mapping[str, Sequence[int]]], level: str, kappas: Sequence[int] = KAPPAS
) -> Ranking:
    """Of a level. order (N, Q): the database by similarity to each query, the nearest first. truth: of each query its
    easy, hard and junk images, by their places in the database."""
    right, left_out = LEVELS[level]
    average, at = np.full(len(truth), np.nan), np.full((len(truth), len(kappas)), np.nan)
    for query, groups in enumerate(truth):
        positives = [image for name in right for image in groups[name]]
        if not positives:
            continue
        ranking = order[:, query]
        kept = ranking[~np.isin(ranking, [image for name in left_out for image in groups[name]])]
        ranks = np.flatnonzero(np.isin(kept, positives))
        average[query] = average_precision(ranks, len(positives))
        depths = [min(kappa, int(ranks[-1]) + 1) for kappa in kappas]
        at[query] = [(ranks < depth).sum() / depth for depth in depths]
    return Ranking(average, at)


def copy_descriptor(cls: Tensor, patches: Tensor) -> Tensor:
    """Class tokens (B, D) beside the generalised mean of patches (B, L, D) -> (B, 2 D)."""
    pooled = patches.clamp_min(GEM_LEAST).pow(GEM_POWER).mean(dim=1).pow(1 / GEM_POWER)
    return torch.cat([cls, pooled], dim=1)


def whitened(features: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Features (N, D) in the axes of other images' features (M, D), each divided by its deviation.

    The second moment of the others is not centred, and the features are, by the mean of the others.
    """
    others = np.asarray(others, np.float64)
    variances, axes = np.linalg.eigh(others.T @ others / len(others))
    scales = np.maximum(variances, LEAST_VARIANCE * variances.max()) ** -0.5
    return (np.asarray(features, np.float64) - others.mean(axis=0)) @ (axes * scales)


def multiscale(encode: Callable[[Tensor], Tensor], images: Tensor, scales: Sequence[float] = SCALES) -> Tensor:
    """Mean of the features (B, D) of images (B, 3, H, W) at several scales, divided by the norm of the whole tensor:
    of one image at a time a unit vector, as in the source."""
    resized = [images if scale == 1 else F.interpolate(images, scale_factor=scale, mode="bilinear") for scale in scales]
    mean = torch.stack([encode(scaled) for scaled in resized]).mean(dim=0)
    return mean / mean.norm()


def vectors_of(images: ImageSet, describe: Callable[[Image.Image], Tensor], space: Workspace) -> np.ndarray:
    """What `describe` says of each image, (D,) -> (N, D) in every process; one image at a time, shared by them."""
    own, rows = range(space.world.rank, len(images), space.world.size), {}

    def take(index: int) -> None:
        rows[index] = describe(images.image(index)).cpu().numpy()
        if not np.isfinite(rows[index]).all():
            raise ValueError(f"{images.path(index)}: its features are not finite; check the checkpoint")

    def compute() -> dict[int, np.ndarray]:
        run_on_core_threads(take, own, space.workers if torch.device(space.device).type == "cpu" else 1)
        return rows

    everywhere = {at: row for part in space.world.gather_results(compute) for at, row in part.items()}
    return np.stack([everywhere[at] for at in range(len(images))])
