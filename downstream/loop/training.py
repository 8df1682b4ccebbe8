"""The plan of one training on scenes, its optimiser groups, and how it is run: shared by all dense tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet, drawn_first, open_scenes, parse_scene_url, serves
from downstream.models.operators import quiet_libraries
from engine.machine import own_cores
from engine.optimisers import layer_groups
from engine.printing import say
from engine.tasks import Workspace
from engine.training.schedules import Schedule, TrainProgress, micro_batch_size, share_of
from imagesets.sets import SPLITS, kept_folder

if TYPE_CHECKING:
    from torch import nn

    from downstream.loop.hooks import LibraryMetric
    from downstream.loop.running import TrainedModel

VERSION = 2  # of a training's state on disk; raise it when the same settings would train otherwise
TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model
LOADERS = 8  # processes that read images, at most
MIN_IMAGES = 500  # training images below which starting such processes takes longer than they save


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training of an export.

    epochs of steps_per_epoch optimiser steps; 1 epoch where the source counts in steps.
    """

    task: str  # name of a folder in the cache
    export: FrozenExport
    settings: Mapping[str, Any]  # JSON: everything that the numbers depend on besides export, images and workspace
    train: SceneSet  # training scenes
    val: SceneSet  # validation scenes
    batch: int  # images of an optimiser step
    largest: int  # images in a forward pass, unless --batch-size is given
    schedule: Schedule  # of the learning rates
    epochs: int
    steps_per_epoch: int
    judge_every: int  # optimiser steps between evaluations
    best: str  # see KeepEvaluations
    # Makes training images, validation images and metric, objects of the mm libraries.
    objects: Callable[[], tuple[Any, Any, "LibraryMetric"]]
    build: Callable[[bool], "nn.Module"]  # makes the model; True: batch norms over all processes
    optimise: Callable[["nn.Module"], torch.optim.Optimizer]  # makes its optimiser
    label: str  # of the progress bar

    @property
    def start(self) -> TrainProgress:
        """The progress before the first optimiser step."""
        return TrainProgress(step=0, steps_per_epoch=self.steps_per_epoch, epochs=self.epochs)

    def micro_batch_size(self, space: Workspace) -> int:
        """Images of one process in a forward pass."""
        return micro_batch_size(share_of(self.batch, space.world.size), space.batch_size or self.largest)

    def accumulation(self, space: Workspace) -> int:
        """Iterations that make an optimiser step."""
        return self.batch // (self.micro_batch_size(space) * space.world.size)

    def key(self, space: Workspace) -> dict[str, Any]:
        """Everything that the bits of the training depend on."""
        return {
            "version": VERSION,
            "settings": dict(self.settings),
            "export": self.export.digest,
            "images": [self.train.fingerprint, self.val.fingerprint],
            "at_once": [self.micro_batch_size(space), space.world.size],
            "machine": [space.device, space.precision],
            "seed": space.seed,
        }

    def folder(self, space: Workspace) -> Path:
        """The training's own folder, named by a digest of its key. All processes call it."""
        return space.world.on_rank0(
            lambda: kept_folder(space.cache / self.task, self.key(space), [self.train, self.val])
        )


def run_plan(plan: Plan, space: Workspace) -> "TrainedModel":
    """Train and evaluate, or read the result of the same training."""
    with quiet_libraries():
        from downstream.loop.running import TrainingSetup, train

    world, size, folder = space.world, plan.micro_batch_size(space), plan.folder(space)
    synchronised = world.size > 1 and torch.device(space.device).type == "cuda"
    with quiet_libraries():
        model = plan.build(synchronised)
    batch_norms = any(isinstance(module, torch.nn.BatchNorm2d | torch.nn.SyncBatchNorm) for module in model.modules())
    batch = {
        "images": plan.batch,
        "at_once": size,
        "accumulated": plan.accumulation(space),
        "processes": world.size,
        "batch_norm_over": size * (world.size if synchronised else 1) if batch_norms else None,
    }
    if world.is_rank0:
        for line in norm_warnings(batch):
            say(f"{plan.label}: {line}", errors=True)
    setup = TrainingSetup(model, plan.optimise(model), *plan.objects())
    return replace(train(setup, plan, space, folder), batch=batch)


def open_both(space: Workspace, layout: str) -> tuple[SceneSet, SceneSet]:
    """Training and validation scenes of the workspace's set, which must be in `layout`.

    Every process reads the annotations itself: COCO's take seconds to parse, and would be gigabytes to send.
    """
    check_space(space, layout)
    drawn_first([space.data], space.cache, space.world)
    opener = partial(open_scenes, cache=space.cache)
    train, val = space.world.on_all_ranks(lambda: [space.images(split, opener) for split in SPLITS])
    return train, val


def check_space(space: Workspace, layout: str) -> None:
    """ValueError for a set of another layout, and for options that dense tasks do not support."""
    parse_scene_url(space.data)
    if not serves(space.data, layout):
        raise ValueError(f"{space.data}: this task needs {layout}:ROOT or tiny-{layout}:")
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


def loader_processes(space: Workspace, images: int) -> int:
    """Processes that read training images."""
    if space.workers is not None:
        return space.workers
    return min(LOADERS, own_cores()) if images >= MIN_IMAGES else 0


def norm_warnings(batch: Mapping[str, Any]) -> list[str]:
    """A warning where batch norms cover fewer images than in the sources, which synchronise them over the whole batch.

    batch: facts of a TrainedModel.
    """
    over, images = batch["batch_norm_over"], batch["images"]
    if over in (None, images):
        return []
    return [
        f"batch norm is over {over} images, in the recipe over all {images} of a step: start "
        f"{images // batch['at_once']} processes with a GPU each, or give --batch-size {images} if memory allows"
    ]


def optimizer_groups(
    model: "nn.Module", depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Parameters that train -> optimiser groups with keys params, names, lr and weight_decay.

    Of L blocks the rate is decay^(L + 1 - layer), necks and heads are layer L + 1. decay_tokens: the mm codebases
    exempt pos_embed and cls_token by their bare names, which never match behind "backbone.", so that they do decay
    them (iBOT, BEiT and CAE segmentation; mmseg: layer_decay_optimizer_constructor.py).
    """
    own = {
        name.removeprefix(TRUNK) if name.startswith(TRUNK) else f"head.{name}": name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    parameters = [(ours, model.get_parameter(name)) for ours, name in own.items()]
    return [
        {
            "params": group["params"],
            "names": [own[ours] for ours in group["names"]],
            "lr": rate * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in layer_groups(parameters, depth, decay, weight_decay, decay_tokens)
    ]


def adamw_by_layer(
    model: "nn.Module", depth: int, *, lr: float, layer_decay: float, weight_decay: float, decay_tokens: bool
) -> torch.optim.AdamW:
    """AdamW over what trains of a model around a network of `depth` blocks, see `optimizer_groups`."""
    groups = optimizer_groups(model, depth, layer_decay, lr, weight_decay, decay_tokens)
    return torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups])
