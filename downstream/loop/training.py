"""The plan of a training, which contains everything that determines its result, and the groups of its optimiser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet
from engine.optimisers import layer_groups
from engine.tasks import Workspace
from engine.training.schedules import Schedule, TrainProgress, micro_batch_size, share_of
from imagesets.sets import training_folder

VERSION = 2  # of a training's state on disk; raise it when the same settings would train differently
TRUNK = "backbone.vit.trunk."  # prefix of an export's parameter names in a dense model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training of an export: `epochs` of `steps_per_epoch` optimiser steps.

    steps_per_epoch is 1 if the source counts in steps.
    """

    task: str  # name of a folder in the cache
    export: FrozenExport
    settings: Mapping[str, Any]  # JSON: everything that the numbers depend on besides export, images and workspace
    train: SceneSet  # training scenes
    val: SceneSet  # validation scenes
    batch: int  # images per optimiser step
    max_micro_batch: int  # largest number of images in a forward pass, unless --batch-size is given
    schedule: Schedule  # schedule of the learning rates
    epochs: int
    steps_per_epoch: int = 1
    judge_every: int  # optimiser steps between evaluations
    # Makes the training dataset, the validation dataset and the metric, objects of the mm libraries.
    build_data: Callable[[], tuple[Any, Any, Any]]
    build_model: Callable[[bool], nn.Module]  # makes the model; True: batch norms over all processes
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]  # makes its optimiser
    label: str  # label of the progress bar
    best: str = ""  # metric that selects the reported evaluation; "" for the last one, see EvaluationHook

    @property
    def start(self) -> TrainProgress:
        """The progress before the first optimiser step."""
        return TrainProgress(step=0, steps_per_epoch=self.steps_per_epoch, epochs=self.epochs)

    def micro_batch_size(self, space: Workspace) -> int:
        """Images per process in a forward pass."""
        return micro_batch_size(share_of(self.batch, space.world.size), space.batch_size or self.max_micro_batch)

    def accumulation(self, space: Workspace) -> int:
        """Iterations (forward and backward passes) per optimiser step."""
        return self.batch // (self.micro_batch_size(space) * space.world.size)

    def key(self, space: Workspace) -> dict[str, Any]:
        """Everything that the result of the training depends on, bit for bit."""
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
        """The training's folder, named by a digest of its key. All processes must call this together."""
        return space.world.on_rank0(
            lambda: training_folder(space.cache / self.task, self.key(space), [self.train, self.val])
        )


def batch_norm_warnings(batch: Mapping[str, Any]) -> list[str]:
    """A warning if batch norms cover fewer images than in the sources, which synchronise them over the whole batch.

    batch: facts of a TrainedModel.
    """
    over, images = batch["batch_norm_over"], batch["images"]
    if over in (None, images):
        return []
    return [
        f"batch norm covers {over} images, but all {images} of a step in the recipe: start "
        f"{images // batch['at_once']} processes with a GPU each, or give --batch-size {images} if memory allows"
    ]


def optimizer_groups(
    model: nn.Module, depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Optimiser groups of the trainable parameters, with keys params, names, lr and weight_decay.

    With L blocks, the rate of a layer is rate * decay^(L + 1 - layer); necks and heads are layer L + 1.
    decay_tokens: whether weight decay applies to pos_embed and cls_token. The mm codebases exempt them by their bare
    names, which never match after the prefix "backbone.", so they do decay them (iBOT, BEiT and CAE segmentation;
    mmseg: layer_decay_optimizer_constructor.py).
    """
    model_names: dict[str, str] = {}  # name in the export, or "head." and the name -> name in the model
    parameters: list[tuple[str, nn.Parameter]] = []
    for model_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = model_name.removeprefix(TRUNK) if model_name.startswith(TRUNK) else f"head.{model_name}"
            model_names[name] = model_name
            parameters.append((name, parameter))
    return [
        {
            "params": group["params"],
            "names": [model_names[name] for name in group["names"]],
            "lr": rate * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in layer_groups(parameters, depth, decay, weight_decay, decay_tokens)
    ]


def adamw_by_layer(model: nn.Module, depth: int, task: Any) -> torch.optim.AdamW:
    """AdamW over the groups of `optimizer_groups`, with the task's settings lr, layer_decay, weight_decay and
    decay_tokens. depth: blocks of the network in `model`."""
    groups = optimizer_groups(model, depth, task.layer_decay, task.lr, task.weight_decay, task.decay_tokens)
    return torch.optim.AdamW([{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups])
