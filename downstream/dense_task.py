"""Base of tasks that train mmsegmentation's and mmdetection's models: cost, timing, departures from a recipe.

FLOPs are counted on models on the "meta" device. Times are measured on a few real scenes, with a few steps of the
task's own model. If a step of the recipe takes too long, a smaller one is timed, and its seconds are scaled by FLOPs.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import torch

from checkpoints.export import ViTExport
from checkpoints.flops import frozen_bytes, training_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec, OwnSpec, own_network
from checkpoints.spec import SIZES, Preparation
from checkpoints.vit import ViT, skip_init
from downstream.data.scenes import TINY, SceneSet, check_layout, open_both
from downstream.loop.training import Plan, batch_norm_warnings
from downstream.metrics.scores import closing_seconds
from downstream.models.operators import quiet_libraries
from engine.precision import autocast
from engine.tasks import Score, Task, Workspace, resamples_of
from engine.training.states import State, save_interval, save_state
from engine.work import NETWORK_SLOWDOWN, Kind, Part, Scale, Work, count_flops, product_rate, seconds_of

if TYPE_CHECKING:
    from downstream.loop.running import TrainedModel

FORWARD_BACKWARD = 3.0  # FLOPs of a forward and backward pass, in forward passes
TIMED_CALLS = 8  # approximate number of timed calls, including an evaluation
MAX_TIMED_STATE = 16e6  # bytes of a state that is saved for timing
Flops = Mapping[Literal["training", "evaluation"], float]  # of a model on one image


@dataclass(frozen=True, kw_only=True)
class Source:
    """The set that a recipe's settings were chosen for."""

    name: str
    classes: int
    images: int  # training images
    settings: tuple[str, ...]  # settings that depend on the number of images, their sizes or the classes


class Lengths(NamedTuple):
    """How much a task trains.

    trainings: their number. steps: optimiser steps of each training. images_read: training images that each training
    reads. evaluations: passes over the validation images, of all trainings together.
    """

    trainings: int
    steps: int
    images_read: int
    evaluations: int


class DenseTask(Task):
    """Base of tasks that train dense models. Annotations without values are settings that all subclasses define."""

    KEY: ClassVar[str]  # name of the task's file, and of its folder in the cache
    MAX_MICRO_BATCH: ClassVar[int] = 8  # images in a forward pass, unless --batch-size is given
    SOURCE: ClassVar[Source]  # the set that the recipes are for

    batch: int
    size: str
    branch: str

    @property
    def frozen(self) -> bool:
        """Whether the network is frozen, and only a head is trained."""
        return False

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The plan of the training on a set's scenes, or of the first of several trainings."""
        raise NotImplementedError

    def lengths(self, images: int) -> Lengths:
        """How much the task trains on a set of `images` training images."""
        raise NotImplementedError

    def side(self, spec: FrozenSpec) -> int:
        """Approximate side of training images in pixels."""
        raise NotImplementedError

    def score(self, images: int, classes: int) -> Score:
        """The score of made-up predictions for `images` validation images, to time resamples."""
        raise NotImplementedError

    def model_flops(self, spec: FrozenSpec, classes: int) -> Flops:
        """FLOPs of the model on one image; in training, of the forward and backward pass."""
        raise NotImplementedError

    def smaller(self, share: float) -> Self:
        """The same training on images whose sides are scaled by about `share`, for timing."""
        raise NotImplementedError

    def check_images(self, space: Workspace) -> None:
        check_layout(space.data, self.LAYOUT)
        if space.skip_bad:
            raise ValueError(
                f"{space.data}: dense tasks cannot skip scenes, run them without --skip-bad; `bench data check "
                f"{space.data}` names the files to replace"
            )
        if space.decode != "exact":
            raise ValueError(
                f"{space.data}: dense tasks read images with OpenCV, as their sources do; run them without --decode "
                f"{space.decode}"
            )

    def run_training(self, plan: Plan, space: Workspace) -> "TrainedModel":
        """Train and evaluate, or read the result if the same training was finished before."""
        with quiet_libraries():
            from downstream.loop.running import run_plan

        return run_plan(plan, space)

    def cost(self, scale: Scale) -> Work:
        self.summary(scale.spec, scale.images)  # raises ValueError for settings that do not fit
        flops = self.model_flops(scale.spec, scale.classes)
        trainings, steps, images_read, evaluations = self.lengths(scale.images["train"])
        val_images = scale.images["val"]
        parts = (
            Part(kind="libraries", count=1, of="mmengine"),
            Part(kind="start", count=trainings),
            Part(kind="training", count=trainings * images_read, flops=flops["training"]),
            Part(kind="updates", count=trainings * steps),
            Part(kind="states", count=trainings * (steps // save_interval(steps))),
            Part(kind="evaluation", count=evaluations * val_images, flops=flops["evaluation"]),
            Part(kind="closing", count=resamples_of(val_images)),
        )
        micro_batch = min(scale.batch_size or self.MAX_MICRO_BATCH, self.batch)
        memory = (frozen_bytes if self.frozen else training_bytes)(scale.spec, micro_batch, self.side(scale.spec))
        # Two states of each training, which hold all but the gradients: 12 of 16 bytes per parameter.
        disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
        return Work(parts=parts, iterations=trainings * steps, memory=memory, disk=disk)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Measured on steps of the recipe if they are short enough, otherwise on smaller images in smaller batches."""
        self.check_network(export.spec)
        times: dict[Kind, float] = {"libraries": loading_seconds()}  # before anything else that loads the libraries
        self.check_images(space)
        train, val = open_both(space)
        plan, classes = self.plan(export, train, val, space.seed), len(val.classes)
        times["closing"] = closing_seconds(self.score(len(val), classes), len(val))
        call_seconds = seconds / TIMED_CALLS
        affordable = call_seconds * product_rate(space.device) / NETWORK_SLOWDOWN  # FLOPs of a call
        flops, timed_task = self.model_flops(export.spec, classes), self
        micro_batch = min(space.batch_size or plan.max_micro_batch, plan.batch)
        if micro_batch * flops["training"] > affordable:
            micro_batch = min(micro_batch, 2)  # a batch norm over one pixel needs two images
            share = (affordable / (micro_batch * flops["training"])) ** 0.5
            timed_task = self.smaller(share) if share < 1 else self
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_read, val_read = (
                seconds_of(partial(images.__getitem__, 0), call_seconds, 4) for images in plan.build_data()[:2]
            )
            started = time.perf_counter()
            model = TimedModel(timed_task.plan(export, train, val, space.seed), micro_batch, space)
            times["start"] = time.perf_counter() - started
            step_seconds = seconds_of(model.step, seconds / 3) / micro_batch
            flop_seconds = step_seconds / timed_task.model_flops(export.spec, classes)["training"]
            times["training"] = train_read + flop_seconds * flops["training"]
            # Smaller crops may leave the size of validation images unchanged, so their time follows from the FLOPs.
            predict_seconds = flop_seconds * flops["evaluation"]
            if timed_task is self:
                predict_seconds = seconds_of(model.evaluate, call_seconds)
            times["evaluation"] = val_read + predict_seconds
            times["updates"] = seconds_of(model.optimizer.step, call_seconds)
            times["states"] = model.state_seconds()
        return times

    def recipe_warnings(self, export: FrozenExport, train: SceneSet, batch: Mapping[str, Any]) -> list[str]:
        """How a training differs from its recipe, one line for each difference. batch: facts of its TrainedModel."""
        lines, size = batch_norm_warnings(batch), SIZES.get((export.spec.width, export.spec.depth), "another size")
        if self.size and size != self.size:
            lines.append(f"the recipe is for ViT-{self.size}, this network is {size}")
        branch = str(export.facts.get("branch", ""))
        if self.branch and branch and branch != self.branch:
            lines.append(f"the recipe is for the {self.branch} branch, this is the {branch} one")
        return lines + self.crop_warnings(export.spec) + self.source_warnings(train)

    def crop_warnings(self, spec: FrozenSpec) -> list[str]:
        """A warning if the side of crops differs from the setting."""
        return []

    def source_warnings(self, train: SceneSet) -> list[str]:
        """A warning that names the settings that were chosen for SOURCE, if the scenes are of another set."""
        source = self.SOURCE
        if len(train.classes) == source.classes or train.url.startswith(TINY):
            return []
        settings = []
        for name in source.settings:
            value = getattr(self, name)
            settings.append(f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
        return [
            f"{' '.join(settings)} were chosen for {source.name}, with {source.images} training images and "
            f"{source.classes} classes; this set has {len(train)} and {len(train.classes)}"
        ]


def untrained_export(spec: FrozenSpec, image_size: int | None = None) -> FrozenExport:
    """An export of this architecture with zero weights, to build models from: drawing weights would take seconds.

    spec: of an export, or of a user's own network, which is returned as its function makes it.
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
    model: Any, image: tuple[int, int], run_model: Callable[[Any, torch.Tensor], object]
) -> tuple[float, float]:
    """FLOPs of the backbone, and of neck and heads, on one image.

    Args:
        model: moved to the device "meta", and not usable afterwards.
        image: height and width in pixels.
        run_model: calls the whole model, which is its first argument, with images (1, 3, H, W).
    """
    with torch.device("meta"), torch.no_grad():
        model.to("meta").eval()
        images = torch.zeros(1, 3, *image)
        backbone_flops = count_flops(lambda: model.backbone(images))[1]
        return backbone_flops, count_flops(lambda: run_model(model, images))[1] - backbone_flops


@cache
def loading_seconds() -> float:
    """Seconds that a process needs to import the models and their libraries; about 0 if they are imported already."""
    started = time.perf_counter()
    with quiet_libraries():
        for module in ("downstream.models.segmentors", "downstream.models.detectors"):
            import_module(module)
    return time.perf_counter() - started


class TimedModel:
    """The model of a training on the device, with its optimiser and a batch of real scenes."""

    def __init__(self, plan: Plan, batch_size: int, space: Workspace) -> None:
        from mmengine.dataset import pseudo_collate

        self.space = space
        self.model: Any = plan.build_model(False).to(space.device)
        self.optimizer = plan.build_optimizer(self.model)
        train_images, val_images, self.metric = plan.build_data()
        self.metric.dataset_meta = val_images.metainfo
        self.batch = pseudo_collate([train_images[index % len(train_images)] for index in range(batch_size)])
        self.val_batch = pseudo_collate([val_images[0]])
        self.model.train()

    def step(self) -> float:
        """Forward and backward pass; returns the loss of the batch."""
        with autocast(self.space.device, self.space.precision):
            losses = self.model(**self.model.data_preprocessor(self.batch, True), mode="loss")
        loss, _ = self.model.parse_losses(losses)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()

    def evaluate(self) -> None:
        """Predict one image, and store the statistics for its score."""
        self.model.eval()
        with torch.no_grad(), autocast(self.space.device, self.space.precision):
            samples = [sample.to_dict() for sample in self.model.val_step(self.val_batch)]
        self.metric.process(self.val_batch, samples)

    def state_seconds(self) -> float:
        """Seconds for saving weights and optimiser, extrapolated from a part of the state if it is large."""
        size = 12.0 * sum(parameter.numel() for parameter in self.model.parameters())  # bytes, with two moments
        part = torch.zeros(int(min(size, MAX_TIMED_STATE)) // 4)
        started = time.perf_counter()
        save_state(self.space.cache / "timed", 1, State(tensors={"part": part}))
        return (time.perf_counter() - started) * max(1.0, size / MAX_TIMED_STATE)
