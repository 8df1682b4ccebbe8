"""What tasks share that train mmsegmentation's and mmdetection's models: their timing, and departures from a recipe."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from checkpoints.frozen import FrozenExport, FrozenSpec
from checkpoints.spec import SIZES
from downstream.data.scenes import TINY, SceneSet, open_both
from downstream.loop.plan import Plan
from downstream.loop.training import check_space, norm_warnings
from downstream.models.operators import quiet_libraries
from downstream.planning import CALLS, Flops, Parts, TimedModel, loading_seconds
from engine.resampling import BLOCK, Score, resampled, resamples_of
from engine.tasks import Task, Workspace
from engine.work import SLOWER, Kind, product_rate, seconds_of


@dataclass(frozen=True, kw_only=True)
class Source:
    """The set that a recipe's settings were chosen for."""

    name: str
    classes: int
    images: int  # for training
    settings: tuple[str, ...]  # those that depend on the number of images, their sizes or the classes


class DenseTask(Task):
    """Base of these tasks. Annotated without a comment: settings that all of them have."""

    KEY: ClassVar[str]  # name of its file, and of its folder in the cache
    LARGEST: ClassVar[int] = 8  # images in a forward pass, unless --batch-size is given
    SOURCE: ClassVar[Source]  # of its recipes

    size: str
    branch: str

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The training on a set's scenes, or the first of several."""
        raise NotImplementedError

    def score(self, images: int, classes: int) -> Score:
        """What resamples of so many validation images compute, of predictions that are made up."""
        raise NotImplementedError

    def check_images(self, space: Workspace) -> None:
        check_space(space, self.LAYOUT)

    def model_flops(self, spec: FrozenSpec, classes: int) -> Flops:
        """FLOPs of the model on one image, forward and back in training."""
        raise NotImplementedError

    def smaller(self, share: float) -> Self:
        """The same training on images of `share` of the side, about, for timing."""
        raise NotImplementedError

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """On steps of the recipe where they are short enough, else on smaller images, fewer at once."""
        self.check_network(export.spec)
        times: dict[Kind, float] = {"libraries": loading_seconds()}  # before anything else that loads the libraries
        self.check_images(space)
        train, val = open_both(space)
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
            train_images, val_images, _ = plan.objects()
            times["training"] = seconds_of(partial(train_images.__getitem__, 0), seconds / CALLS, 4)  # to read one
            times["evaluation"] = seconds_of(partial(val_images.__getitem__, 0), seconds / CALLS, 4)
            started = time.perf_counter()
            timed = TimedModel(timed_task.plan(export, train, val, space.seed), at_once, space)
            times["start"] = time.perf_counter() - started
            step = seconds_of(timed.step, seconds / 3) / at_once
            backbone = min(seconds_of(timed.through_backbone, seconds / CALLS) / at_once, step)
            training = Parts(backbone, step - backbone)
            times["training"] += training.scaled(timed_flops["training"], flops["training"]).total
            times["updates"] = seconds_of(timed.optimiser.step, seconds / CALLS)
            times["states"] = timed.state_seconds()
            # Of an evaluation the heads also choose boxes, draw masks and score them.
            evaluation = training.scaled(timed_flops["training"], timed_flops["evaluation"])
            if timed_flops["evaluation"].total < affordable:
                whole = seconds_of(timed.evaluate, seconds / CALLS)
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
