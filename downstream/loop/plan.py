"""The plan of one training on scenes: what is trained on what, for how long, and everything that its bits depend on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet
from engine.machine import own_cores
from engine.tasks import Workspace
from engine.training.schedules import Schedule, TrainProgress, micro_batch_size, share_of
from imagesets.sets import kept_folder

if TYPE_CHECKING:
    from torch import nn

    from downstream.loop.hooks import LibraryMetric

VERSION = 2  # of a training's state on disk; raise it when the same settings would train otherwise
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


def loader_processes(space: Workspace, images: int) -> int:
    """Processes that read training images."""
    if space.workers is not None:
        return space.workers
    return min(LOADERS, own_cores()) if images >= MIN_IMAGES else 0
