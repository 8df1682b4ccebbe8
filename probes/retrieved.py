"""Descriptors and scores of image retrieval, as DINO computes them: revisited Oxford and Paris, and copy detection.

From facebookresearch/dino utils.py:552-595, :708-800, eval_image_retrieval.py, eval_copy_detection.py.

N: images of the database. Q: queries. D: width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from engine.machine import run_on_core_threads
from engine.progress import Progress
from engine.tasks import Workspace
from imagesets.sets import ImageSet

# Level -> groups of images (easy, hard, junk) of a query that are positives, and groups that are ignored.
LEVELS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
KAPPAS = (1, 5, 10)  # values of k of the mean precision at k
GEM_POWER, GEM_EPS = 4.0, 1e-6  # generalised mean pooling of copy detection
SCALES = (1.0, 2**-0.5, 0.5)
MIN_VARIANCE = 1e-5  # of an axis of the whitening, as a share of the largest


class LevelScores(NamedTuple):
    """Scores of each query at one level; NaN for queries without positives."""

    average: np.ndarray  # average precision (Q,)
    at: np.ndarray  # precision at each k (Q, K)


def average_precision(ranks: np.ndarray, positives: int) -> float:
    """Area under the curve of precision by recall, by the trapezoidal rule.

    ranks: of the retrieved positives, from 0, ascending. positives: number of all positives.
    """
    nearer_positives = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, nearer_positives / np.maximum(ranks, 1))
    after = (nearer_positives + 1) / (ranks + 1)
    return float(((before + after) / (2 * max(positives, 1))).sum())


def level_scores(
    order: np.ndarray, truth: Sequence[Mapping[str, Any]], level: str, kappas: Sequence[int] = KAPPAS
) -> LevelScores:
    """Scores of a level of difficulty.

    order: (N, Q), indices of the database's images by descending similarity to each query. truth: for each query, the
    indices of its easy, hard and junk images. kappas: values of k of the precision at k.
    """
    positive_groups, ignored_groups = LEVELS[level]
    average, at = np.full(len(truth), np.nan), np.full((len(truth), len(kappas)), np.nan)
    for query, groups in enumerate(truth):
        positives = [image for name in positive_groups for image in groups[name]]
        ignored = [image for name in ignored_groups for image in groups[name]]
        if not positives:
            continue
        ranking = order[:, query]
        ranking = ranking[~np.isin(ranking, ignored)]
        ranks = np.flatnonzero(np.isin(ranking, positives))
        average[query] = average_precision(ranks, len(positives))
        depths = [min(kappa, int(ranks[-1]) + 1) for kappa in kappas]
        at[query] = [(ranks < depth).sum() / depth for depth in depths]
    return LevelScores(average, at)


def copy_descriptor(cls: Tensor, patches: Tensor) -> Tensor:
    """Class tokens (B, D), concatenated with the generalised mean of patches (B, L, D): (B, 2 D)."""
    pooled = patches.clamp_min(GEM_EPS).pow(GEM_POWER).mean(dim=1).pow(1 / GEM_POWER)
    return torch.cat([cls, pooled], dim=1)


def whiten(features: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Features (N, D), whitened by those of other images, `reference` (M, D).

    As in the source, the mean of `reference` is subtracted from the features, but its second moment, which gives axes
    and scales, is not centred.
    """
    reference = np.asarray(reference, np.float64)
    variances, axes = np.linalg.eigh(reference.T @ reference / len(reference))
    scales = np.maximum(variances, MIN_VARIANCE * variances.max()) ** -0.5
    return (np.asarray(features, np.float64) - reference.mean(axis=0)) @ (axes * scales)


def multiscale(encode: Callable[[Tensor], Tensor], images: Tensor, scales: Sequence[float] = SCALES) -> Tensor:
    """Mean of the features (B, D) of images (B, 3, H, W) at several scales, divided by the norm of the whole tensor.

    As in the source, it has unit length only if B is 1.
    """
    resized = [images if scale == 1 else F.interpolate(images, scale_factor=scale, mode="bilinear") for scale in scales]
    mean = torch.stack([encode(image_batch) for image_batch in resized]).mean(dim=0)
    return mean / mean.norm()


def describe_images(images: ImageSet, describe: Callable[[Image.Image], Tensor], space: Workspace) -> np.ndarray:
    """Descriptors (N, D) of all images in every process; the processes share the images.

    describe: an image -> its descriptor (D,). Raises ValueError for descriptors that are not finite.
    """
    own = range(space.world.rank, len(images), space.world.size)
    descriptors: dict[int, np.ndarray] = {}

    def describe_image(index: int) -> None:
        descriptors[index] = describe(images.image(index)).cpu().numpy()
        if not np.isfinite(descriptors[index]).all():
            raise ValueError(f"{images.path(index)}: its features are not finite; check the checkpoint")
        progress.advance(1)

    def describe_own() -> dict[int, np.ndarray]:
        run_on_core_threads(describe_image, own, space.workers if torch.device(space.device).type == "cpu" else 1)
        return descriptors

    with Progress(f"descriptors of {images.title}", len(own)) as progress:
        parts = space.world.gather_results(describe_own)
    all_descriptors = {index: row for part in parts for index, row in part.items()}
    return np.stack([all_descriptors[index] for index in range(len(images))])
