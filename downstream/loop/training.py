"""How a plan of training on scenes is run, and its optimiser groups: shared by all dense tasks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from downstream.data.scenes import check_layout
from downstream.loop.plan import Plan
from downstream.models.operators import quiet_libraries
from engine.optimisers import layer_groups
from engine.printing import say
from engine.tasks import Workspace

if TYPE_CHECKING:
    from torch import nn

    from downstream.loop.running import TrainedModel

TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model


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


def check_space(space: Workspace, layout: str) -> None:
    """ValueError for a set of another layout, and for options that dense tasks do not support."""
    check_layout(space.data, layout)
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
