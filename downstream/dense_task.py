"""What tasks share that train mmsegmentation's and mmdetection's models: work, its timing, departures from a recipe.

Work is counted on models without memory, and timed on a few real scenes: the very model of a task makes a few steps on
the very scenes. Where a step of its recipe takes too long for that, it is made at a smaller size, and the seconds of
backbone and heads grow by the operations of each.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch

from checkpoints.export import ViTExport
from checkpoints.flops import frozen_bytes, training_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec, OwnSpec, own_network
from checkpoints.spec import SIZES, Preparation
from checkpoints.vit import ViT, skip_init
from downstream.data.scenes import TINY, SceneSet, check_layout, open_both
from downstream.models.operators import quiet_libraries
from downstream.training import Plan, Training, norm_warnings
from engine.precision import autocast
from engine.resampling import BLOCK, Score, resampled, resamples_of
from engine.tasks import Task, Workspace
from engine.training.states import State, save_interval, save_state
from engine.work import SLOWER, Kind, Part, Scale, Work, count_flops, product_rate, seconds_of

MODELS = ("downstream.models.segmentors", "downstream.models.detectors")
BACK = 3.0  # passes forward that one forward and back costs
CALLS = 8  # of a timed step, about, with those of its backbone and of an evaluation
STATE_BYTES = 16e6  # of the state that is saved for timing, at most
SMALLEST = 64  # pixels of an image's or crop's side in a timed step, at least


@dataclass(frozen=True, kw_only=True)
class Source:
    """The set that a recipe's settings were chosen for."""

    name: str
    classes: int
    images: int  # for training
    settings: tuple[str, ...]  # those that depend on the number of images, their sizes or the classes


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


class DenseTask(Task):
    """Base of these tasks. Annotated without a comment: settings that all of them have."""

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

    def score(self, images: int, classes: int) -> Score:
        """What resamples of so many validation images compute, of predictions that are made up."""
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

    def both(self, space: Workspace) -> tuple[SceneSet, SceneSet]:
        """Training and validation scenes. ValueError for a set or options that these tasks do not take."""
        self.check_images(space)
        return open_both(space)

    def work(
        self, scale: Scale, *, trained: int, updates: int, evaluations: int, side: int, trainings: int = 1
    ) -> Work:
        """trained, updates: of each training; evaluations: of all. side: of a training image in pixels."""
        flops, val = self.model_flops(scale.spec, scale.classes), scale.images["val"]
        parts = (
            Part(kind="libraries", count=1, of="mmengine"),
            Part(kind="start", count=trainings),
            Part(kind="training", count=trainings * trained, flops=flops["training"].total),
            Part(kind="updates", count=trainings * updates),
            Part(kind="states", count=trainings * (updates // save_interval(updates))),
            Part(kind="evaluation", count=evaluations * val, flops=flops["evaluation"].total),
            Part(kind="closing", count=resamples_of(val)),
        )
        at_once = min(scale.batch_size or self.LARGEST, self.batch)
        memory = (frozen_bytes if self.frozen else training_bytes)(scale.spec, at_once, side)
        disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
        return Work(parts=parts, iterations=trainings * updates, memory=memory, disk=disk)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """On steps of the recipe where they are short enough, else on smaller images, fewer at once."""
        self.check_network(export.spec)
        times: dict[Kind, float] = {"libraries": loading_seconds()}  # before anything else that loads the libraries
        train, val = self.both(space)
        plan, classes = self.plan(export, train, val, space.seed), len(val.classes)
        score = self.score(len(val), classes)
        of_block = seconds_of(lambda: resampled(score, len(val), BLOCK), 0.0)
        times["closing"] = of_block / min(BLOCK, resamples_of(len(val)))
        affordable = seconds / CALLS * product_rate(space.device) / SLOWER  # FLOPs of a call
        flops, timed_task = self.model_flops(export.spec, classes), self
        at_once = min(space.batch_size or plan.largest, plan.batch)
        if at_once * flops["training"].total > affordable:
            at_once = min(at_once, 2)  # a batch norm over one pixel needs two images
            share = (affordable / (at_once * flops["training"].total)) ** 0.5
            timed_task = self.smaller(share) if share < 1 else self
        timed_flops = timed_task.model_flops(export.spec, classes)
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mmengine.dataset import pseudo_collate

            train_images, val_images, _ = plan.objects()
            times["training"] = seconds_of(partial(train_images.__getitem__, 0), seconds / CALLS, 4)  # to read one
            times["evaluation"] = seconds_of(partial(val_images.__getitem__, 0), seconds / CALLS, 4)
            started = time.perf_counter()
            timed = Training(timed_task.plan(export, train, val, space.seed), space)
            batch = pseudo_collate([timed.train_images[index % len(timed.train_images)] for index in range(at_once)])
            val_batch = pseudo_collate([timed.val_images[0]])
            times["start"] = time.perf_counter() - started

            def step() -> float:
                timed.optimiser.zero_grad()
                loss = timed.loss_of(batch)
                loss.backward()
                return loss.item()

            def through_backbone() -> float:
                with autocast(space.device, space.precision):
                    maps = timed.model.backbone(timed.model.data_preprocessor(batch, True)["inputs"])
                total = sum(features.float().sum() for features in maps)
                if total.requires_grad:
                    total.backward()
                return total.item()

            timed.model.train()
            of_step = seconds_of(step, seconds / 3) / at_once
            backbone = min(seconds_of(through_backbone, seconds / CALLS) / at_once, of_step)
            training = Parts(backbone, of_step - backbone)
            times["training"] += training.scaled(timed_flops["training"], flops["training"]).total
            times["updates"] = seconds_of(timed.optimiser.step, seconds / CALLS)
            times["states"] = state_seconds(timed, space)
            # Of an evaluation the heads also choose boxes, draw masks and score them.
            evaluation = training.scaled(timed_flops["training"], timed_flops["evaluation"])
            if timed_flops["evaluation"].total < affordable:
                timed.model.eval()
                whole = seconds_of(lambda: timed.predict(val_batch), seconds / CALLS)
                backbone = min(evaluation.backbone, whole)
                evaluation = Parts(backbone, whole - backbone)
            times["evaluation"] += evaluation.scaled(timed_flops["evaluation"], flops["evaluation"]).total
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


@cache
def loading_seconds() -> float:
    """Seconds in which a process imports the models and their libraries, once; little where that happened before."""
    started = time.perf_counter()
    with quiet_libraries():
        for module in MODELS:
            import_module(module)
    return time.perf_counter() - started


def state_seconds(training: Training, space: Workspace) -> float:
    """Seconds in which a state of weights and optimiser is saved, from a part of it where that is large."""
    tensors = [*training.model.state_dict().values()]
    tensors += [value for state in training.optimiser.state.values() for value in state.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    part = torch.zeros(int(min(size, STATE_BYTES)) // 4)
    started = time.perf_counter()
    save_state(space.cache / "timed", 1, State(tensors={"part": part}))
    return (time.perf_counter() - started) * max(1.0, size / STATE_BYTES)
