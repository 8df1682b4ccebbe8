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
from engine.work import SLOWER, Kind, Part, Scale, Work, count_flops, product_rate, seconds_of

if TYPE_CHECKING:
    from downstream.loop.running import TrainedModel

FORWARD_BACKWARD = 3.0  # cost of a forward and backward pass, in forward passes
CALLS = 8  # approximate number of timed calls, including an evaluation
STATE_BYTES = 16e6  # largest state that is saved for timing
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

    trainings: their number. steps: optimiser steps of each training. read: images read in these steps.
    evaluations: passes over the validation images, of all trainings together.
    """

    trainings: int
    steps: int
    read: int
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
        """A score of made-up predictions for `images` validation images, for timing resamples."""
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
        flops, val = self.model_flops(scale.spec, scale.classes), scale.images["val"]
        trainings, steps, read, evaluations = self.lengths(scale.images["train"])
        parts = (
            Part(kind="libraries", count=1, of="mmengine"),
            Part(kind="start", count=trainings),
            Part(kind="training", count=trainings * read, flops=flops["training"]),
            Part(kind="updates", count=trainings * steps),
            Part(kind="states", count=trainings * (steps // save_interval(steps))),
            Part(kind="evaluation", count=evaluations * val, flops=flops["evaluation"]),
            Part(kind="closing", count=resamples_of(val)),
        )
        at_once = min(scale.batch_size or self.MAX_MICRO_BATCH, self.batch)
        memory = (frozen_bytes if self.frozen else training_bytes)(scale.spec, at_once, self.side(scale.spec))
        disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
        return Work(parts=parts, iterations=trainings * steps, memory=memory, disk=disk)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Measured on steps of the recipe if they are short enough, else on smaller images in smaller batches."""
        self.check_network(export.spec)
        times: dict[Kind, float] = {"libraries": loading_seconds()}  # before anything else that loads the libraries
        self.check_images(space)
        train, val = open_both(space)
        plan, classes = self.plan(export, train, val, space.seed), len(val.classes)
        times["closing"] = closing_seconds(self.score(len(val), classes), len(val))
        affordable = seconds / CALLS * product_rate(space.device) / SLOWER  # FLOPs of a call
        flops, timed = self.model_flops(export.spec, classes), self
        at_once = min(space.batch_size or plan.max_micro_batch, plan.batch)
        if at_once * flops["training"] > affordable:
            at_once = min(at_once, 2)  # a batch norm over one pixel needs two images
            share = (affordable / (at_once * flops["training"])) ** 0.5
            timed = self.smaller(share) if share < 1 else self
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = [seconds_of(partial(images.__getitem__, 0), seconds / CALLS, 4) for images in plan.build_data()[:2]]
            started = time.perf_counter()
            model = TimedModel(timed.plan(export, train, val, space.seed), at_once, space)
            times["start"] = time.perf_counter() - started
            step = seconds_of(model.step, seconds / 3) / at_once
            rate = step / timed.model_flops(export.spec, classes)["training"]  # seconds of an operation
            times["training"] = read[0] + rate * flops["training"]
            # Validation images may keep their size when crops are made smaller, so their seconds follow from the FLOPs.
            predicting = seconds_of(model.evaluate, seconds / CALLS) if timed is self else rate * flops["evaluation"]
            times["evaluation"] = read[1] + predicting
            times["updates"] = seconds_of(model.optimiser.step, seconds / CALLS)
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
        values = (getattr(self, name) for name in source.settings)
        texts = (",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)
        settings = " ".join(f"{name}={text}" for name, text in zip(source.settings, texts, strict=True))
        return [
            f"{settings} were chosen for {source.name}, with {source.images} training images and {source.classes} "
            f"classes; this set has {len(train)} and {len(train.classes)}"
        ]


def untrained_export(spec: FrozenSpec, image_size: int | None = None) -> FrozenExport:
    """An export of this architecture with zero weights, for building models: drawing weights would take seconds.

    A user's own network is returned unchanged, from its function.
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
    model: Any, image: tuple[int, int], heads: Callable[[Any, torch.Tensor], object]
) -> tuple[float, float]:
    """FLOPs of the backbone and of the heads on one image.

    Args:
        model: moved to the device "meta", and not usable afterwards.
        image: height and width in pixels.
        heads: calls the whole model, backbone and heads, with images (1, 3, H, W).
    """
    with torch.device("meta"), torch.no_grad():
        model.to("meta").eval()
        images = torch.zeros(1, 3, *image)
        backbone = count_flops(lambda: model.backbone(images))[1]
        return backbone, count_flops(lambda: heads(model, images))[1] - backbone


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

    def __init__(self, plan: Plan, at_once: int, space: Workspace) -> None:
        from mmengine.dataset import pseudo_collate

        self.space, self.images = space, at_once
        self.model: Any = plan.build_model(False).to(space.device)
        self.optimiser = plan.build_optimizer(self.model)
        train_images, val_images, self.metric = plan.build_data()
        self.metric.dataset_meta = val_images.metainfo
        self.batch = pseudo_collate([train_images[index % len(train_images)] for index in range(at_once)])
        self.val_batch = pseudo_collate([val_images[0]])
        self.model.train()

    def step(self) -> float:
        """Forward and backward pass; returns the loss of the batch."""
        with autocast(self.space.device, self.space.precision):
            losses = self.model(**self.model.data_preprocessor(self.batch, True), mode="loss")
        loss, _ = self.model.parse_losses(losses)
        self.optimiser.zero_grad()
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
        size = 12.0 * sum(parameter.numel() for parameter in self.model.parameters())  # with two moments
        part = torch.zeros(int(min(size, STATE_BYTES)) // 4)
        started = time.perf_counter()
        save_state(self.space.cache / "timed", 1, State(tensors={"part": part}))
        return (time.perf_counter() - started) * max(1.0, size / STATE_BYTES)
