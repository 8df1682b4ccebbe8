"""The work of dense tasks, counted and rehearsed.

A rehearsal builds the very model and reads the very scenes, for a few steps and evaluated images
(downstream/loop/rehearsal.py). Where operations are too many for that, a plan goes by their number.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from checkpoints.export import ViTExport
from checkpoints.flops import frozen_bytes, training_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec, OwnSpec, own_network
from checkpoints.spec import Preparation
from checkpoints.vit import ViT, skip_init
from downstream.detection_settings import DetectionSettings
from downstream.loop.training import Plan
from downstream.models.operators import quiet_libraries
from engine.resampling import BLOCK, Score, resampled, resamples_of
from engine.tasks import Workspace
from engine.training.schedules import TrainProgress
from engine.training.states import save_interval
from engine.work import Kind, Part, Scale, Work, count_flops

if TYPE_CHECKING:
    from torch import nn

HEAVY = 2e12  # operations of a rehearsed step above which there is none: ten seconds on two cores
MODELS = ("downstream.models.segmentors", "downstream.models.detectors")
BACK = 3.0  # passes forward that one forward and back costs


def work_of_training(
    scale: Scale,
    *,
    trainings: int,
    trained: int,
    updates: int,
    evaluations: int,
    side: int,
    at_once: int,
    frozen: bool = False,
) -> Work:
    """trained, updates: of each training; evaluations: of all. side: of a training image in pixels."""
    val = scale.images["val"]
    parts = (
        Part(kind="libraries", count=1, of="mmengine"),
        Part(kind="start", count=trainings),
        Part(kind="training", count=trainings * trained, flops=scale.flops.get("training", 0.0)),
        Part(kind="states", count=trainings * (updates // save_interval(updates))),
        Part(kind="evaluation", count=evaluations * val, flops=scale.flops.get("evaluation", 0.0)),
        Part(kind="closing", count=resamples_of(val)),
    )
    memory = (frozen_bytes if frozen else training_bytes)(scale.spec, at_once, side)
    return Work(parts=parts, memory=memory, disk=2 * trainings * 12 * training_bytes(scale.spec, 0) / 16)


def untrained(spec: FrozenSpec, image_size: int | None = None) -> FrozenExport:
    """An export of this architecture whose weights are zero, for building models: drawing them would take seconds.

    A network of the user's own comes as it is, from its function.
    """
    if isinstance(spec, OwnSpec):
        return own_network(spec.reference)
    spec = replace(spec, image_size=image_size or spec.image_size)
    with torch.device("meta"), skip_init():
        tensors = ViT(spec, initialise=False).state_dict()
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    trunk = {name.removeprefix("trunk."): tensor for name, tensor in zeros.items() if name.startswith("trunk.")}
    extra = {name: tensor for name, tensor in zeros.items() if not name.startswith("trunk.")}
    return ViTExport(spec=spec, preparation=Preparation(), tensors=trunk, extra=extra)


def operations_on_meta(model: "nn.Module", work: Callable[["nn.Module"], object]) -> int:
    """FLOPs of `work` on the model, which is moved to the device "meta" and cannot be used afterwards."""
    with torch.device("meta"), torch.no_grad():
        return count_flops(lambda: work(model.to("meta").eval()))[1]


def windows(longer: int, shorter: int, crop: int, stride: int) -> int:
    """Evaluation windows of an image."""
    across, down = (max(0, -(-(side - crop) // stride)) + 1 for side in (longer, shorter))
    return across * down


def segmentation_operations(build: Callable[[], Any], crop: int, frozen: bool, looks: int) -> dict[Kind, float]:
    """FLOPs of mmseg's model on a training crop, forward and back, and on the `looks` windows of a validation image."""
    with quiet_libraries():
        model = build()
    image = torch.zeros(1, 3, crop, crop, device="meta")

    def whole(segmentor: Any) -> None:
        maps = segmentor.extract_feat(image)
        for head in (segmentor.decode_head, *([segmentor.auxiliary_head] if segmentor.with_auxiliary_head else [])):
            head(maps)

    backbone, forward = operations_on_meta(model, lambda each: each.backbone(image)), operations_on_meta(model, whole)
    trained = BACK * (forward - backbone) + (1.0 if frozen else BACK) * backbone
    return {"training": trained, "evaluation": float(looks * forward)}


def detection_operations(build: Callable[[], Any], settings: DetectionSettings) -> dict[Kind, float]:
    """FLOPs of mmdet's detector on images of 4 : 3, as most of COCO are, at the middle one of the training sizes."""
    with quiet_libraries():
        model = build()
    short = settings.long if settings.augment == "jitter" else sorted(settings.short)[len(settings.short) // 2]
    train = (short, min(settings.long, short if settings.augment == "jitter" else short * 4 // 3))
    shown = (min(settings.val), min(max(settings.val), min(settings.val) * 4 // 3))
    drawn = detector_operations(model, settings, train, settings.regions, settings.regions // 4)
    return {
        "training": BACK * drawn,
        "evaluation": detector_operations(model, settings, shown, settings.proposals[1], settings.detections),
    }


def detector_operations(
    model: Any, settings: DetectionSettings, size: tuple[int, int], boxes: int, masks: int
) -> float:
    """Of a forward pass with so many regions in each box head and mask head; sides up to the next multiple of 32."""
    image = torch.zeros(1, 3, *(-(-side // 32) * 32 for side in size), device="meta")

    def whole(detector: Any) -> None:
        detector.rpn_head(detector.extract_feat(image))
        heads = detector.roi_head
        for head in heads.bbox_head if settings.CASCADE else [heads.bbox_head]:
            head(torch.zeros(boxes, settings.channels, 7, 7, device="meta"))
        for head in heads.mask_head if settings.CASCADE else [heads.mask_head]:
            head(torch.zeros(masks, settings.channels, 14, 14, device="meta"))

    return float(operations_on_meta(model, whole))


@cache
def loading_seconds() -> float:
    """What a process takes to import the models and their libraries, once; little where that happened before."""
    started = time.perf_counter()
    with quiet_libraries():
        for module in MODELS:
            import_module(module)
    return time.perf_counter() - started


def closing_seconds(score: Score, images: int) -> float:
    """Seconds that one resample of the validation images takes."""
    started = time.perf_counter()
    resampled(score, images, BLOCK)
    return (time.perf_counter() - started) / min(BLOCK, resamples_of(images))


def drawn_areas(images: int, classes: int) -> np.ndarray:
    """Areas (N, K, 3) as an evaluation keeps them."""
    return np.random.RandomState(0).randint(1, 1000, (images, classes, 3))


def drawn_detections(images: int, most: int, classes: int) -> dict[str, np.ndarray]:
    """Detections as an evaluation keeps them: `most` of each image, a third of them right; seven objects as in COCO."""
    generator = np.random.RandomState(0)
    right = np.where(generator.random_sample((images, most)) < 1 / 3, 1023, 0).astype(np.uint16)
    none = np.zeros((images, most), np.uint16)
    return {
        "classes": generator.randint(0, classes, (images, most)),
        "scores": generator.random_sample((images, most)),
        "objects": generator.poisson(7 / classes, (images, classes)),
        **{
            f"{kind}_{name}": values for kind in ("box", "mask") for name, values in (("hits", right), ("passed", none))
        },
    }


def rehearsed_plan(plan: Plan, space: Workspace, score: Score, operations: float) -> dict[Kind, float]:
    """Seconds of one unit of each kind of work. score: of the resampled numbers. operations: of an image, forward and
    back."""
    found: dict[Kind, float] = {"libraries": loading_seconds()}
    found["closing"] = closing_seconds(score, len(plan.val))
    at_once = min(space.batch_size or plan.largest, plan.batch)
    if operations * at_once > HEAVY:
        return found
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from downstream.loop.rehearsal import Rehearsal
        from downstream.loop.running import RunnerConfig, TrainingSetup

        started = time.perf_counter()
        model = plan.build(False)
        objects = plan.objects()
        made = time.perf_counter() - started
        setup = TrainingSetup(model, plan.optimise(model), *objects)
        rehearsal = Rehearsal(
            setup=setup,
            config=RunnerConfig(
                folder=space.cache / "rehearsal",
                schedule=plan.schedule,
                start=TrainProgress(step=0, steps_per_epoch=1, epochs=1),
                batch=at_once,
                micro_batch_size=at_once,
                device=space.device,
                precision=space.precision,
            ),
        )
        setup.metric.dataset_meta = setup.val_images.metainfo
        units = rehearsal.units()
    return {**found, **units, "start": units["start"] + made}
