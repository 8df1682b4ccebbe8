"""Base of tasks that train mmsegmentation's and mmdetection's models: cost, timing, departures from a recipe.

Work is counted on models without memory, and timed on a few real scenes: the very model of a task makes a few steps.
Where a step of its recipe takes too long for that, a smaller one is made, and seconds grow by its operations.
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
from downstream.loop.training import Plan, norm_warnings
from downstream.metrics.scores import closing_seconds
from downstream.models.operators import quiet_libraries
from engine.precision import autocast
from engine.tasks import Score, Task, Workspace, resamples_of
from engine.training.states import State, save_interval, save_state
from engine.work import SLOWER, Kind, Part, Scale, Work, count_flops, product_rate, seconds_of

if TYPE_CHECKING:
    from downstream.loop.running import TrainedModel

BACK = 3.0  # passes forward that one forward and back costs
CALLS = 8  # of a timed step, about, with an evaluation
STATE_BYTES = 16e6  # of the state that is saved for timing, at most
Flops = Mapping[Literal["training", "evaluation"], float]  # of a model on one image


@dataclass(frozen=True, kw_only=True)
class Source:
    """The set that a recipe's settings were chosen for."""

    name: str
    classes: int
    images: int  # for training
    settings: tuple[str, ...]  # those that depend on the number of images, their sizes or the classes


class Lengths(NamedTuple):
    """How much a task trains. steps: of each training. read: images in these. evaluations: of all trainings."""

    trainings: int
    steps: int
    read: int
    evaluations: int


class DenseTask(Task):
    """Base of these tasks. The bare annotations are settings that all of them define."""

    KEY: ClassVar[str]  # name of its file, and of its folder in the cache
    LARGEST: ClassVar[int] = 8  # images in a forward pass, unless --batch-size is given
    SOURCE: ClassVar[Source]  # of its recipes

    batch: int
    size: str
    branch: str

    @property
    def frozen(self) -> bool:
        """Whether the network is, under a head that is trained."""
        return False

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The training on a set's scenes, or the first of several."""
        raise NotImplementedError

    def lengths(self, images: int) -> Lengths:
        """Of trainings on so many images."""
        raise NotImplementedError

    def side(self, spec: FrozenSpec) -> int:
        """Of training images in pixels, about."""
        raise NotImplementedError

    def score(self, images: int, classes: int) -> Score:
        """A score of made-up predictions for so many validation images, for timing resamples."""
        raise NotImplementedError

    def model_flops(self, spec: FrozenSpec, classes: int) -> Flops:
        """FLOPs of the model on one image, forward and back in training."""
        raise NotImplementedError

    def smaller(self, share: float) -> Self:
        """The same training on images of `share` of the side, about, for timing."""
        raise NotImplementedError

    def check_images(self, space: Workspace) -> None:
        check_layout(space.data, self.LAYOUT)
        if space.skip_bad:
            raise ValueError(
                f"{space.data}: dense tasks leave out no scene, run them without --skip-bad; `bench data check "
                f"{space.data}` names the files to replace"
            )
        if space.decode != "exact":
            raise ValueError(
                f"{space.data}: dense tasks read images by OpenCV, as their sources do; run them without --decode "
                f"{space.decode}"
            )

    def trained(self, plan: Plan, space: Workspace) -> "TrainedModel":
        """Train and evaluate, or read the result of the same training."""
        with quiet_libraries():
            from downstream.loop.running import run_plan

        return run_plan(plan, space)

    def cost(self, scale: Scale) -> Work:
        self.summary(scale.spec, scale.images)  # refuses what does not fit
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
        at_once = min(scale.batch_size or self.LARGEST, self.batch)
        memory = (frozen_bytes if self.frozen else training_bytes)(scale.spec, at_once, self.side(scale.spec))
        disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
        return Work(parts=parts, iterations=trainings * steps, memory=memory, disk=disk)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """On steps of the recipe where they are short enough, else on smaller images, fewer at once."""
        self.check_network(export.spec)
        times: dict[Kind, float] = {"libraries": loading_seconds()}  # before anything else that loads the libraries
        self.check_images(space)
        train, val = open_both(space)
        plan, classes = self.plan(export, train, val, space.seed), len(val.classes)
        times["closing"] = closing_seconds(self.score(len(val), classes), len(val))
        affordable = seconds / CALLS * product_rate(space.device) / SLOWER  # FLOPs of a call
        flops, timed = self.model_flops(export.spec, classes), self
        at_once = min(space.batch_size or plan.largest, plan.batch)
        if at_once * flops["training"] > affordable:
            at_once = min(at_once, 2)  # a batch norm over one pixel needs two images
            share = (affordable / (at_once * flops["training"])) ** 0.5
            timed = self.smaller(share) if share < 1 else self
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = [seconds_of(partial(images.__getitem__, 0), seconds / CALLS, 4) for images in plan.objects()[:2]]
            started = time.perf_counter()
            model = TimedModel(timed.plan(export, train, val, space.seed), at_once, space)
            times["start"] = time.perf_counter() - started
            step = seconds_of(model.step, seconds / 3) / at_once
            rate = step / timed.model_flops(export.spec, classes)["training"]  # seconds of an operation
            times["training"] = read[0] + rate * flops["training"]
            # Validation images may keep their size where smaller crops are trained: operations alone grow alike then.
            whole = seconds_of(model.evaluate, seconds / CALLS) if timed is self else rate * flops["evaluation"]
            times["evaluation"] = read[1] + whole
            times["updates"] = seconds_of(model.optimiser.step, seconds / CALLS)
            times["states"] = model.state_seconds()
        return times

    def departures(self, export: FrozenExport, train: SceneSet, batch: Mapping[str, Any]) -> list[str]:
        """How a training differs from its recipe, a line each. batch: facts of its TrainedModel."""
        lines, size = norm_warnings(batch), SIZES.get((export.spec.width, export.spec.depth), "another size")
        if self.size and size != self.size:
            lines.append(f"the recipe is for ViT-{self.size}, this network is {size}")
        branch = str(export.facts.get("branch", ""))
        if self.branch and branch and branch != self.branch:
            lines.append(f"the recipe is for the {self.branch} branch, this is the {branch} one")
        return lines + self.cropped_otherwise(export.spec) + self.chosen_elsewhere(train)

    def cropped_otherwise(self, spec: FrozenSpec) -> list[str]:
        """A warning where images are cropped at another side than the setting's."""
        return []

    def chosen_elsewhere(self, train: SceneSet) -> list[str]:
        """A warning that names the settings that were chosen for SOURCE, where the scenes are others."""
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
    model: Any, image: tuple[int, int], heads: Callable[[Any, torch.Tensor], object]
) -> tuple[float, float]:
    """FLOPs of the backbone and of the heads on one image of so many pixels (H, W). The model is moved to the device
    "meta" and cannot be used afterwards. heads: the whole model, from the images (1, 3, H, W)."""
    with torch.device("meta"), torch.no_grad():
        model.to("meta").eval()
        images = torch.zeros(1, 3, *image)
        backbone = count_flops(lambda: model.backbone(images))[1]
        return backbone, count_flops(lambda: heads(model, images))[1] - backbone


@cache
def loading_seconds() -> float:
    """Seconds in which a process imports the models and their libraries, once; little where that happened before."""
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

    def evaluate(self) -> None:
        """Predict one image, and keep what its score needs."""
        self.model.eval()
        with torch.no_grad(), autocast(self.space.device, self.space.precision):
            samples = [sample.to_dict() for sample in self.model.val_step(self.val_batch)]
        self.metric.process(self.val_batch, samples)

    def state_seconds(self) -> float:
        """Seconds in which a state of weights and optimiser is saved, from a part of it where that is large."""
        size = 12.0 * sum(parameter.numel() for parameter in self.model.parameters())  # with two moments
        part = torch.zeros(int(min(size, STATE_BYTES)) // 4)
        started = time.perf_counter()
        save_state(self.space.cache / "timed", 1, State(tensors={"part": part}))
        return (time.perf_counter() - started) * max(1.0, size / STATE_BYTES)
