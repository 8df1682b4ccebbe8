"""The work of dense tasks, counted and rehearsed.

A rehearsal builds the very model and reads the very scenes, for two steps and one evaluated image. Where its operations
would take too long, there is none, and a plan goes by their number.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from checkpoints.export import ViTExport
from checkpoints.flops import training_bytes
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from downstream.detection_settings import DetectionSettings
from downstream.loop.training import Place, Plan
from downstream.models.libraries import quiet_libraries
from engine.flops import counted
from engine.work import Kind, Part, Scale, Work

if TYPE_CHECKING:
    from torch import nn

HEAVY = 2e12  # operations of a rehearsed step above which there is none: ten seconds on two cores
STEPS = 3  # rehearsed, of which the first, slower one does not count
BACK = 3.0  # passes forward that one forward and back costs


def work_of_training(
    scale: Scale, trainings: int, trained: int, updates: int, evaluations: int, side: int, at_once: int
) -> Work:
    """trained, updates: of each training; evaluations: of all. side: of a training image in pixels."""
    val = scale.images["val"]
    parts = (
        Part(kind="start", count=trainings),
        Part(kind="training", count=trainings * trained, flops=scale.flops.get("training", 0.0)),
        Part(kind="updates", count=trainings * updates),
        Part(kind="evaluation", count=evaluations * val, flops=scale.flops.get("evaluation", 0.0)),
        Part(kind="closing", count=val),
    )
    memory = training_bytes(scale.spec, at_once, side)
    return Work(parts=parts, memory=memory, disk=2 * trainings * 12 * training_bytes(scale.spec, 0) / 16)


def untrained(spec: ViTSpec) -> ViTExport:
    """An export of this architecture with initial weights, to build models around."""
    vit = ViT(spec)
    trunk = dict(vit.trunk.state_dict())
    extra = {name: value for name, value in vit.state_dict().items() if not name.startswith("trunk.")}
    return ViTExport(spec=spec, preparation=Preparation(), tensors=trunk, extra=extra)


def operations(model: "nn.Module", work: Callable[["nn.Module"], object]) -> int:
    """Of `work` on the model, which then has no memory any more."""
    with torch.device("meta"), torch.no_grad():
        return counted(lambda: work(model.to("meta").eval()))[1]


def windows(longer: int, shorter: int, crop: int, stride: int) -> int:
    """Evaluation windows of an image."""
    across, down = (max(0, -(-(side - crop) // stride)) + 1 for side in (longer, shorter))
    return across * down


def segmentation_operations(build: Callable[[], Any], crop: int, frozen: bool, looks: int) -> dict[Kind, float]:
    """Of mmseg's model on a training crop, forward and back, and on the `looks` windows of a validation image."""
    with quiet_libraries():
        model = build()
    image = torch.zeros(1, 3, crop, crop, device="meta")

    def whole(segmentor: Any) -> None:
        maps = segmentor.extract_feat(image)
        for head in (segmentor.decode_head, *([segmentor.auxiliary_head] if segmentor.with_auxiliary_head else [])):
            head(maps)

    backbone, forward = operations(model, lambda each: each.backbone(image)), operations(model, whole)
    trained = BACK * (forward - backbone) + (1.0 if frozen else BACK) * backbone
    return {"training": trained, "evaluation": float(looks * forward)}


def detection_operations(build: Callable[[], Any], settings: DetectionSettings) -> dict[Kind, float]:
    """Of mmdet's detector on images of 4 : 3, as most of COCO are, at the middle one of the training sizes."""
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

    return float(operations(model, whole))


def rehearsed_plan(plan: Plan, place: Place, operations_of_image: float) -> dict[Kind, float]:
    """Seconds of making a model, of an image forward and back, of a step of the optimiser, of an evaluated image."""
    with quiet_libraries():
        from mmengine.dataset import pseudo_collate

        from downstream.loop.running import Precise
        from downstream.loop.stream import Stream

        started = time.perf_counter()
        model = plan.build(False).to(place.space.device).train()
        train_images, val_images, metric = plan.objects()
        found: dict[Kind, float] = {"start": time.perf_counter() - started}
    at_once = min(place.space.batch_size or place.largest, plan.batch)
    if operations_of_image * at_once > HEAVY:
        return found
    optimiser = plan.optimise(model)
    wrapper = Precise(place.space.device, place.space.precision, optimizer=optimiser)
    stream, seconds, steps = Stream(train_images, 0), [], []
    for step in range(STEPS):
        started = time.perf_counter()
        drawn = [stream[step * at_once + number] for number in range(at_once)]
        model.train_step(pseudo_collate(drawn), wrapper)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        optimiser.step()
        steps.append(time.perf_counter() - started)
    update = min(steps[1:])
    found |= {"training": max(min(seconds[1:]) - update, 0.0) / at_once, "updates": update}
    metric.dataset_meta = val_images.metainfo
    return found | {"evaluation": evaluated_seconds(model, val_images, metric, pseudo_collate)}


def evaluated_seconds(model: Any, val_images: Any, metric: Any, collate: Callable[[list], Any]) -> float:
    """Of one image, read and scored, after a first one."""
    model.eval()
    for index in (0, 1 % len(val_images)):
        started = time.perf_counter()
        batch = collate([val_images[index]])
        with torch.no_grad():
            metric.process(batch, [sample.to_dict() for sample in model.val_step(batch)])
        seconds = time.perf_counter() - started
    return seconds
