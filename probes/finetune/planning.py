"""The work of fine-tuning, counted and rehearsed."""

import time
from collections.abc import Iterator

from checkpoints.flops import forward_flops, training_bytes, training_flops
from checkpoints.spec import ViTSpec
from engine.work import Kind, Part, Scale, Work
from probes.finetune.model_selection import ModelSelection
from probes.finetune.trainer import Training
from probes.finetune.training_groups import MixedGroup

UPDATES = 4  # rehearsed, of which the first, slower one does not count
OPERATIONS = 3e11  # of an update, at most, unless two images have more: seconds on a slow CPU


def work_of_finetuning(
    scale: Scale, size: int | None, trained: int, updates: int, judged: int, micro_batch: int
) -> Work:
    """Images trained on and judged, over all epochs; size: their side in pixels. A state has weights and moments."""
    spec = scale.spec
    parts = (
        Part(kind="start", count=1),
        Part(kind="training", count=trained, flops=training_flops(spec, size)),
        Part(kind="updates", count=updates),
        Part(kind="evaluation", count=judged, flops=forward_flops(spec, size)),
    )
    memory = training_bytes(spec, micro_batch, size)
    return Work(parts=parts, memory=memory, disk=2 * 12 * training_bytes(spec, 0) / 16)


def rehearsed_images(spec: ViTSpec, size: int | None, largest: int) -> int:
    """Images of a rehearsed update: an even number up to `largest` that takes seconds."""
    fitting = int(OPERATIONS / max(training_flops(spec, size), 1))
    return max(2, min(largest, fitting) // 2 * 2)


def rehearsed_training(
    training: Training, batches: Iterator[MixedGroup], selection: ModelSelection
) -> dict[Kind, float]:
    """Seconds of an image forward and back, of a step of the optimiser, and of an evaluated image."""
    training.network.train()
    whole, steps = [], []
    for _ in range(UPDATES):
        started = time.perf_counter()
        training.update(batches)
        whole.append(time.perf_counter() - started)
        started = time.perf_counter()
        training.optimizer.step()
        steps.append(time.perf_counter() - started)
    started = time.perf_counter()
    training.run_evaluation(selection)
    judged = (time.perf_counter() - started) / len(selection.val.image_set)
    step = min(steps[1:])
    images = len(training.config.groups) * training.config.group
    each = max(sorted(whole[1:])[len(whole) // 2 - 1] - step, 0.0) / images
    return {"training": each, "updates": step, "evaluation": judged}
