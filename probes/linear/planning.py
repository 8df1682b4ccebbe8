"""The work of linear probes, counted and rehearsed.

B images of a batch, D width of a readout, C classes.
"""

import time
from collections.abc import Callable, Mapping

import torch

from checkpoints.flops import frozen_bytes
from engine.work import Kind, Part, Scale, Work
from probes.features.passes import FLOAT, feature_bytes, feature_pass
from probes.linear.batches import BLOCK, EpochPlan
from probes.linear.heads import Heads

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
    heads: Heads, widths: Mapping[str, int], classes: int, batch: int, device: str
) -> dict[Kind, float]:
    """Seconds of a step of all heads and of classifying one image, on noise. widths: of each readout."""
    inputs = {name: torch.randn(batch, size, device=device) for name, size in widths.items()}
    labels = torch.randint(classes, (batch,), device=device)
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
