"""The work of linear probes, counted and rehearsed."""

import time
from collections.abc import Callable

import torch

from checkpoints.flops import frozen_bytes
from engine.tasks import Workspace
from engine.work import Kind, Part, Scale, Work
from imagesets.sets import ImageSet
from probes.features.extract import forward_batch
from probes.features.planning import FLOAT, feature_bytes, feature_pass
from probes.linear.batches import BLOCK
from probes.linear.settings import LinearSettings

SECONDS = 3.0  # of a rehearsal, about
STEPS = 20  # of a rehearsal, at most


def work_of_heads(task: LinearSettings, scale: Scale) -> Work:
    """All heads, trained on the training images and judged by those held out, or else by those of validation.

    A step costs two products with the features, one for the logits and one for the gradient.
    """
    spec, train, val, classes = scale.spec, scale.images["train"], scale.images["val"], scale.classes
    plan, held = task.divided_images(train)
    widths = [width for width in task.widths(spec.width).values() for _ in task.rates]
    seen = min(plan.rows, plan.count * plan.size)
    product = 2.0 * sum(widths) * classes
    passes = (
        (feature_pass(spec, task.epochs * seen, "augmented", "crops"), feature_pass(spec, held, "held out"))
        if task.augment
        else (feature_pass(spec, train, "train"),)
    )
    parts = (
        *passes,
        feature_pass(spec, val, "val"),
        Part(kind="head steps", count=task.epochs * plan.count, flops=2 * product * plan.size),
        Part(kind="head images", count=task.epochs * (held or val) + val, flops=product),
    )
    kept = feature_bytes(spec, val + (held if task.augment else train), len(task.kinds))
    weights = 3 * FLOAT * sum(widths) * classes  # with momentum and gradient
    passing = frozen_bytes(spec, scale.batch_size or forward_batch(scale.device))
    memory = passing + weights + FLOAT * plan.size * (sum(widths) / len(widths) + 3 * classes)
    return Work(parts=parts, memory=memory, disk=kept + 2 * weights)


def rehearsed_heads(task: LinearSettings, width: int, train: ImageSet, space: Workspace) -> dict[Kind, float]:
    """Seconds of a step of all heads and of classifying one image, on noise. width: of the network."""
    batch, classes = min(task.batch, len(train)), len(train.classes)
    heads = task.heads(width, classes, batch, space)
    inputs = {name: torch.randn(batch, size, device=space.device) for name, size in task.widths(width).items()}
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
