"""The work of linear probes, counted and rehearsed.

B images of a batch, D width of a readout, C classes.
"""

import time
from collections.abc import Callable

import torch

from engine.tasks import Workspace
from engine.work import Kind, Part, Scale, Work
from probes.features.passes import FLOAT, feature_bytes, feature_pass, frozen_bytes
from probes.linear.batches import BLOCK, EpochPlan
from probes.linear.heads import Head, Heads, HeadSettings
from probes.linear.settings import LinearSettings

SECONDS = 3.0  # of a rehearsal, about
STEPS = 20  # of a rehearsal, at most


def work_of_heads(
    scale: Scale, plan: EpochPlan, epochs: int, widths: list[int], kinds: int, held: int, augment: bool, chunk: int
) -> Work:
    """A head on each of `widths`, trained on the images of `plan`; held: images that choose, 0: those of validation.

    A step costs two products with the features, one for the logits and one for the gradient.
    """
    spec, val, classes = scale.spec, scale.images["val"], scale.classes
    seen = min(plan.rows, plan.count * plan.size)
    product = 2.0 * sum(widths) * classes
    passes = (
        (feature_pass(spec, epochs * seen, "augmented", "crops"), feature_pass(spec, held, "held out"))
        if augment
        else (feature_pass(spec, scale.images["train"], "train"),)
    )
    parts = (
        *passes,
        feature_pass(spec, val, "val"),
        Part(kind="head steps", count=epochs * plan.count, flops=2 * product * plan.size),
        Part(kind="head images", count=epochs * (held or val) + val, flops=product),
    )
    kept = feature_bytes(spec, val + (held if augment else scale.images["train"]), kinds)
    weights = 3 * FLOAT * sum(widths) * classes  # with momentum and gradient
    memory = frozen_bytes(spec, chunk) + weights + FLOAT * plan.size * (sum(widths) / len(widths) + 3 * classes)
    return Work(parts=parts, memory=memory, disk=kept + 2 * weights)


def rehearsed_heads(
    settings: LinearSettings, width: int, classes: int, batch: int, space: Workspace
) -> dict[Kind, float]:
    """Seconds of a step of all heads and of classifying one image, on noise. width: of one feature."""
    widths = {readout: width * len(kinds) for readout, kinds in settings.kinds_by_readout.items()}
    grid = [Head(readout=readout, lr=lr, weight_decay=decay) for readout, decay, lr in settings.grid]
    recipe = HeadSettings(
        optimizer=settings.optimizer, momentum=settings.momentum, entry=settings.entry, eps=settings.eps
    )
    heads = Heads(grid, widths, classes, recipe, batch=batch, device=space.device)
    inputs = {name: torch.randn(batch, size, device=space.device) for name, size in widths.items()}
    labels = torch.randint(classes, (batch,), device=space.device)
    step = median_seconds(lambda: heads.step(inputs, labels, 0.0).sum().item())
    few = {name: value[:BLOCK] for name, value in inputs.items()}
    judged = median_seconds(lambda: heads.hits(few, labels[:BLOCK]).sum().item())
    return {"head steps": step, "head images": judged / min(batch, BLOCK)}


def median_seconds(work: Callable[[], object]) -> float:
    """Of several calls after a first one, which is slower."""
    work()
    found: list[float] = []
    while len(found) < STEPS and sum(found) < SECONDS:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return sorted(found)[len(found) // 2]
