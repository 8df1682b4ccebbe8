"""Pretrainings that take a second: the smoke recipe of any method on a few digits, for a few updates."""

import io
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from written import write_tar

from engine.distributed import World
from engine.extensions import load_extension
from imagesets.sets import ImageSet, open_set
from pretrain.loop.images import BatchPlan, MicroBatches, batch_plan
from pretrain.loop.trainer import Run, Trainer, build
from pretrain.loop.updates import Updates
from pretrain.method import Method, Step, TrainProgress
from pretrain.recipe import Recipe

IMAGES, BATCH, EPOCHS = 24, 8, 2
LR = 1e-3


def small_recipe(name: str, key: str = "smoke", **changes: Any) -> Recipe:
    """A smoke recipe of six updates, with a learning rate at which differences are visible."""
    recipe = load_extension("methods", name).RECIPES[key]
    return replace(recipe, **{"batch": BATCH, "epochs": EPOCHS, "lr": LR, "lr_batch": 0, **changes})


@cache
def digits(count: int = IMAGES) -> ImageSet:
    return open_set("digits:", "train").limited(count)


def in_shards(
    folder: Path, shards: int = 6, images: ImageSet | None = None, split: str = "train", shuffled: bool = True
) -> str:
    """Write digits, or `images`, as webdataset shards of equal size, in random or their own order: the URL."""
    images = images or digits()
    folder.mkdir(exist_ok=True)
    order = np.random.RandomState(0).permutation(len(images)) if shuffled else np.arange(len(images))
    for shard, indices in enumerate(np.array_split(order, shards)):
        files = []
        for index in indices:
            pixels, label = io.BytesIO(), str(images.labels[index]).encode()
            images.image(int(index)).save(pixels, "PNG")
            files += [(f"{index:04}.png", pixels.getvalue()), (f"{index:04}.cls", label)]
        write_tar(folder / f"{split}-{shard}.tar", files)
    return f"wds:{folder}"


def trainer(name: str, out: Path, *, images: ImageSet | None = None, world: World | None = None, **settings: Any):
    """A trainer of the method `name`; settings are those of Run, and changes of the recipe under `recipe`."""
    recipe = small_recipe(name, **settings.pop("recipe", {}))
    run = Run(out=out, **{"workers": 0, **settings})
    return Trainer(name, load_extension("methods", name), recipe, images or digits(), run, world or World())


def updates(name: str, recipe: Recipe, **settings: Any) -> Updates:
    """Updates of a newly initialized method in torch's default precision."""
    return Updates(build(load_extension("methods", name), recipe, seed=0), recipe, **settings)


def plan(parts: int = 1) -> BatchPlan:
    """The plan of a training on all images, with `parts` micro-batches in a batch."""
    return batch_plan(IMAGES, BATCH, 1, BATCH // parts, seed=0)


def batches(method: Method, plan: BatchPlan, step: int = 0) -> list[Mapping[str, Tensor]]:
    """The views of one update in torch's default precision; the images do not depend on the number of micro-batches."""
    micro_batches = MicroBatches(
        image_set=digits(),
        views=method.views(),
        plan=plan,
        rank=0,
        steps=range(step, step + 1),
        labelled=method.needs_labels,
    )
    return [
        {name: as_default(values) for name, values in micro_batches[index].views.items()}
        for index in range(plan.micro_batches)
    ]


def as_default(values: Tensor) -> Tensor:
    return values.to(torch.get_default_dtype()) if values.is_floating_point() else values


def progress(plan: BatchPlan, step: int = 0) -> TrainProgress:
    return TrainProgress(
        step=step, steps_per_epoch=plan.steps_per_epoch, epochs=EPOCHS, micro_batches=plan.micro_batches
    )


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def forward_pass(method: Method, views: Mapping[str, Tensor], progress: TrainProgress) -> Step:
    """What the trainer does for each micro-batch before the backward pass."""
    method.before_forward(progress)
    return method(views)
