"""The work of dense tasks, counted on models without memory, and timed on a few real scenes.

The very model of a task makes a few steps on the very scenes. Where a step of its recipe takes too long for that, it is
made at a smaller size, and the seconds of backbone and heads grow by the operations of each.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from checkpoints.export import ViTExport
from checkpoints.flops import frozen_bytes, training_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec, OwnSpec, own_network
from checkpoints.spec import Preparation
from checkpoints.vit import ViT, skip_init
from downstream.models.operators import quiet_libraries
from engine.precision import autocast
from engine.resampling import resamples_of
from engine.tasks import Workspace
from engine.training.states import State, save_interval, save_state
from engine.work import Part, Scale, Work, count_flops

if TYPE_CHECKING:
    from downstream.loop.plan import Plan

MODELS = ("downstream.models.segmentors", "downstream.models.detectors")
BACK = 3.0  # passes forward that one forward and back costs
CALLS = 8  # of a timed step, about, with those of its backbone and of an evaluation
STATE_BYTES = 16e6  # of the state that is saved for timing, at most


class Parts(NamedTuple):
    """FLOPs, or seconds, of a model on one image."""

    backbone: float
    heads: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.backbone + self.heads

    def scaled(self, before: "Parts", after: "Parts") -> "Parts":
        """These seconds of a model of FLOPs `before` for one of FLOPs `after`, each part by its own rate."""
        return Parts(*(mine * new / old if old else mine for mine, old, new in zip(self, before, after, strict=True)))


Flops = Mapping[Literal["training", "evaluation"], Parts]


def work_of_training(
    scale: Scale,
    flops: Flops,
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
        Part(kind="training", count=trainings * trained, flops=flops["training"].total),
        Part(kind="updates", count=trainings * updates),
        Part(kind="states", count=trainings * (updates // save_interval(updates))),
        Part(kind="evaluation", count=evaluations * val, flops=flops["evaluation"].total),
        Part(kind="closing", count=resamples_of(val)),
    )
    memory = (frozen_bytes if frozen else training_bytes)(scale.spec, at_once, side)
    disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
    return Work(parts=parts, iterations=trainings * updates, memory=memory, disk=disk)


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


def flops_on_meta(
    model: Any, image: tuple[int, int], heads: Callable[[Any, torch.Tensor], object], passes: float = 1.0
) -> Parts:
    """FLOPs of `passes` through a model on one image of so many pixels (H, W). The model is moved to the device "meta"
    and cannot be used afterwards. heads: the whole model, from the images (1, 3, H, W)."""
    with torch.device("meta"), torch.no_grad():
        model.to("meta").eval()
        images = torch.zeros(1, 3, *image)
        backbone = count_flops(lambda: model.backbone(images))[1]
        whole = count_flops(lambda: heads(model, images))[1]
    return Parts(passes * backbone, passes * (whole - backbone))


def windows(longer: int, shorter: int, crop: int, stride: int) -> int:
    """Evaluation windows of an image."""
    across, down = (max(0, -(-(side - crop) // stride)) + 1 for side in (longer, shorter))
    return across * down


@cache
def loading_seconds() -> float:
    """Seconds in which a process imports the models and their libraries, once; little where that happened before."""
    started = time.perf_counter()
    with quiet_libraries():
        for module in MODELS:
            import_module(module)
    return time.perf_counter() - started


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


class TimedModel:
    """The model of a training on the device, with its optimiser and a batch of real scenes."""

    def __init__(self, plan: "Plan", at_once: int, space: Workspace) -> None:
        from mmengine.dataset import pseudo_collate

        self.space, self.images = space, at_once
        self.model: Any = plan.build(False).to(space.device)
        self.optimiser = plan.optimise(self.model)
        train_images, val_images, self.metric = plan.objects()
        self.metric.dataset_meta = val_images.metainfo
        self.batch = pseudo_collate([train_images[index % len(train_images)] for index in range(at_once)])
        self.val_batch = pseudo_collate([val_images[0]])
        self.model.train()

    def step(self) -> float:
        """The loss of the batch, forward and back."""
        with autocast(self.space.device, self.space.precision):
            losses = self.model(**self.model.data_preprocessor(self.batch, True), mode="loss")
        loss, _ = self.model.parse_losses(losses)
        self.optimiser.zero_grad()
        loss.backward()
        return loss.item()

    def through_backbone(self) -> float:
        """The sum of the backbone's maps, forward and, unless it is frozen, back."""
        with autocast(self.space.device, self.space.precision):
            maps = self.model.backbone(self.model.data_preprocessor(self.batch, True)["inputs"])
        total = sum(features.float().sum() for features in maps)
        if total.requires_grad:
            total.backward()
        return total.item()

    def evaluate(self) -> None:
        """Predict one image, and keep what its score needs."""
        self.model.eval()
        with torch.no_grad(), autocast(self.space.device, self.space.precision):
            samples = [sample.to_dict() for sample in self.model.val_step(self.val_batch)]
        self.metric.process(self.val_batch, samples)  # type: ignore[attr-defined]

    def state_seconds(self) -> float:
        """Seconds in which a state of weights and optimiser is saved, from a part of it where that is large."""
        tensors = [*self.model.state_dict().values()]
        tensors += [value for state in self.optimiser.state.values() for value in state.values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        part = torch.zeros(int(min(size, STATE_BYTES)) // 4)
        started = time.perf_counter()
        save_state(self.space.cache / "timed", 1, State(tensors={"part": part}))
        return (time.perf_counter() - started) * max(1.0, size / STATE_BYTES)
