"""The work of logistic regressions, counted and rehearsed.

n rows, D width, C classes.
"""

import time
from collections.abc import Callable, Sequence

import torch

from checkpoints.flops import frozen_bytes
from engine.work import Kind, Part, Scale, Work
from probes.features.planning import feature_bytes, feature_pass
from probes.lowshot.blocks import BLOCK_ROWS
from probes.lowshot.fitting import IN_MEMORY
from probes.lowshot.logistic import BLOCK, HISTORY

# A fit in float32 takes tens of steps, another ten in float64 (docs/log.md); each has two products.
STEPS = 60
ROWS = 2000  # of the larger of two rehearsed fits, at most
SPREAD = 3.0  # standard deviation around the class means that the rehearsed features have, in units of theirs

Minimise = Callable[[torch.Tensor, torch.Tensor], object]  # of features (n, D) and labels (n,)


def work_of_fits(scale: Scale, counts: Sequence[int], lambdas: int, small: int, chunk: int) -> Work:
    """`lambdas` fits to each of `counts` images. Up to `small` training images all are extracted."""
    spec, train, val = scale.spec, scale.images["train"], scale.images["val"]
    read = train if train <= small else min(train, sum(counts))
    product = 2.0 * min(max(counts, default=1), spec.width) * scale.classes
    parts = (
        feature_pass(spec, read, "train" if read == train else "few of train"),
        feature_pass(spec, val, "val"),
        Part(kind="fits", count=lambdas * len(counts)),
        Part(kind="fit rows", count=lambdas * sum(counts), flops=2 * STEPS * product),
    )
    held = feature_bytes(spec, read + val)
    fits = max(fit_bytes(count, spec.width, scale.classes) for count in [*counts, 1])
    return Work(parts=parts, memory=max(fits, frozen_bytes(spec, chunk)), disk=held)


def fit_bytes(count: int, width: int, classes: int) -> float:
    """Memory of a fit to `count` rows, in memory or in blocks (probes/lowshot/blocks.py), beyond libraries."""
    if count * max(width, classes) <= IN_MEMORY:
        return 16.0 * count * (width + classes)
    weights = 8.0 * width * classes * (2 * HISTORY + 8)
    return weights + 12.0 * width * BLOCK_ROWS + 24.0 * width**2 + 40.0 * BLOCK["cpu"] + 16.0 * count


def rehearsed_fits(minimise: Minimise, width: int, classes: int, largest: int) -> dict[Kind, float]:
    """Seconds of a fit and of each of its rows, from two fits to features around class means.

    largest: rows of the largest subset that will be fitted.
    """
    most = max(min(largest, ROWS), 2 * classes)
    counts = (max(most // 4, classes), most)
    minimise(*features_around_means(counts[0], width, classes))  # the first one is slower
    seconds = []
    for count in counts:
        rows = features_around_means(count, width, classes)
        started = time.perf_counter()
        minimise(*rows)
        seconds.append(time.perf_counter() - started)
    each = max(seconds[1] - seconds[0], 0.0) / (counts[1] - counts[0])
    return {"fits": max(seconds[0] - counts[0] * each, 0.0), "fit rows": each}


def features_around_means(count: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit features (n, D), and labels (n,) of all classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    means = torch.randn(classes, width, generator=generator)
    features = means[labels] + SPREAD * torch.randn(count, width, generator=generator)
    return torch.nn.functional.normalize(features), labels
