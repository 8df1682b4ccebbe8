"""Base of tasks that train mmsegmentation's and mmdetection's models: cost, departures from a recipe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from checkpoints.export import ViTExport
from checkpoints.flops import frozen_bytes, training_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec, OwnSpec, own_network
from checkpoints.spec import SIZES, Preparation
from checkpoints.vit import ViT, skip_init
from downstream.data.scenes import TINY, SceneSet, check_workspace
from downstream.loop.training import Plan, batch_norm_warnings
from downstream.models.operators import quiet_libraries, require_libraries
from engine.errors import option
from engine.tasks import Task, Workspace
from engine.work import Part, Scale, Work, count_flops

if TYPE_CHECKING:
    from downstream.loop.running import TrainedModel

FORWARD_BACKWARD = 3.0  # FLOPs of a forward and backward pass, in forward passes
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

    def model_flops(self, spec: FrozenSpec, classes: int) -> Flops:
        """FLOPs of the model on one image; in training, of the forward and backward pass."""
        raise NotImplementedError

    def check_images(self, space: Workspace) -> None:
        require_libraries()
        check_workspace(space, self.LAYOUT)
        if space.skip_bad:
            raise ValueError(
                f"{space.data}: dense tasks cannot skip scenes, run them without {option('skip_bad', True)}; "
                f"`bench data check {space.data}` names the files to replace"
            )

    def run_training(self, plan: Plan, space: Workspace) -> "TrainedModel":
        """Train and evaluate, or read the result if the same training was finished before."""
        with quiet_libraries():
            from downstream.loop.running import run_plan

        return run_plan(plan, space)

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        flops = self.model_flops(scale.spec, scale.classes)
        trainings, steps, images_read, evaluations = self.lengths(scale.images["train"])
        parts = (
            Part(kind="start", count=trainings),
            Part(kind="training", count=trainings * images_read, flops=flops["training"]),
            Part(kind="updates", count=trainings * steps),
            Part(kind="evaluation", count=evaluations * scale.images["val"], flops=flops["evaluation"]),
        )
        micro_batch = min(scale.batch_size or self.MAX_MICRO_BATCH, self.batch)
        memory = (frozen_bytes if self.frozen else training_bytes)(scale.spec, micro_batch, self.side(scale.spec))
        # Two states of each training, which hold all but the gradients: 12 of 16 bytes per parameter.
        disk = 2 * trainings * 12 * training_bytes(scale.spec, 0) / 16
        return Work(parts=parts, iterations=trainings * steps, memory=memory, disk=disk)

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
