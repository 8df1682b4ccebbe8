"""Depth by one linear layer on frozen patches: NYU Depth v2 as DINOv3 and DINOv2 evaluate it; root mean square error.

A 1x1 convolution chooses among 256 depths from 1 mm to 10 m, trained on crops of 416 x 544 pixels for 38,400 steps. The
evaluation averages an image and its mirror image, and counts what lies inside of Eigen's crop. Nothing is selected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, scene_depth, scene_image
from downstream.frozen import depth as steps
from downstream.frozen.depth import METRICS, DepthHead
from downstream.frozen.segmentation import Random
from downstream.frozen.task import (
    HeadTask,
    Layer,
    backbone_of,
    patch_maps,
    whole_patches,
)
from engine.settings import BelowOne, FactorRange, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.training.schedules import FallingOneCycle
from engine.work import Part, Scale, Work

# dinov2 hub/depthers.py:110-127: blocks of "four" by depth, else the last of each quarter. These are the exceptions.
FOUR = {24: (4, 11, 17, 23)}


@dataclass(frozen=True, kw_only=True)
class DepthLinear(HeadTask):
    """Settings of one training."""

    COST: ClassVar[float] = 150.0  # 38,400 steps of 16 crops are 25 passes, at 4.5 times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "nyu"
    KEY: ClassVar[str] = "depth_linear"

    lr: tuple[PositiveFloat] = (3e-4,)  # learning rate
    steps: PositiveInt = 38400  # of the optimizer
    warmup: NonNegativeInt = 12800  # steps over which the rate rises
    batch: PositiveInt = 16  # crops in a step
    weight_decay: NonNegativeFloat = 1e-4  # of all weights, batch norm's too
    beta2: BelowOne = 0.99  # second beta of AdamW; the schedule sets the first
    clip: NonNegativeFloat = 35.0  # largest norm of the gradients; 0: no limit
    crop_size: tuple[PositiveInt, PositiveInt] = (416, 544)  # height and width of training crops in pixels
    rotate: bool = True  # rotate half of the training images by up to 2.5 degrees
    layers: Literal["last", "four"] = "last"  # blocks that are read: the last one, or one in each quarter
    final_norm: bool = True  # the network's final norm follows the blocks
    class_token: bool = False  # concatenate the class token to each patch
    batch_norm: bool = True  # before the linear layer
    upsample: PositiveInt = 1  # enlargement of the patch maps before the linear layer, bilinear
    bins: PositiveInt = 256  # depths to choose from
    depths: FactorRange = (0.001, 10.0)  # the least and the most of them in metres
    loss_warmup: NonNegativeInt = 100  # steps whose loss leaves the variance of the errors out
    gradient_weight: NonNegativeFloat = 0.0  # of DINOv2's gradient loss
    limit_truth: bool = False  # train on no pixels that are further than the last depth
    flip: bool = True  # evaluate mirror images too
    eigen: bool = True  # count what lies inside of Eigen's crop alone
    kept: PositiveInt = 1  # times that heads are kept during the training, evenly; the last is reported

    def after_training(self) -> tuple[str, ...]:
        return ("flip", "eigen")

    def check_network(self, spec: FrozenSpec) -> None:
        super().check_network(spec)
        if self.class_token and not getattr(spec, "class_token", spec.has_class_token):
            raise ValueError(f"{spec.label} has no class token beside its patches, which {self.KEY} reads here")
        if self.layers == "four" and spec.depth < 4:
            raise ValueError(f"{spec.label} has {spec.depth} blocks, and {self.KEY} reads four; layers=last")

    def read_layers(self, spec: FrozenSpec) -> list[Layer]:
        """The layers that heads read."""
        blocks = FOUR.get(spec.depth) or tuple(spec.depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
        return [(block, self.final_norm) for block in (blocks if self.layers == "four" else (-1,))]

    def schedule(self) -> FallingOneCycle:
        return FallingOneCycle(warmup=self.warmup, division=1000.0, momenta=(0.85, 0.95))

    def crop_side(self, spec: FrozenSpec) -> tuple[int, int]:
        height, width = (whole_patches(side, spec) for side in self.crop_size)
        return height, width

    def crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        pixels, depth = pixels_of(scenes, index)
        inside = steps.window_of(steps.NYU_CROP, (depth.shape[0], depth.shape[1]))
        pixels, depth = pixels[:, *inside], depth[inside]
        changes = steps.drawn_changes((depth.shape[0], depth.shape[1]), self.crop_size, random, self.rotate)
        image, depth = steps.training_image(pixels, depth, self.crop_size, **changes)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (export.mean, export.std))
        return (image - mean) / std, depth

    def head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        width = spec.width * (1 + self.class_token) * len(self.read_layers(spec))
        return DepthHead(width, self.bins, self.depths, self.batch_norm, self.upsample)

    def maps(self, backbone: Backbone, images: Tensor) -> Tensor:
        padded = steps.centre_padded(images, backbone.spec.patch_size)
        layers = self.read_layers(backbone.spec)
        return torch.cat(patch_maps(backbone, padded, layers, self.class_token), dim=1)

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        truth = targets[:, None]
        predicted = F.interpolate(head([maps]), size=targets.shape[1:], mode="bilinear", align_corners=False)
        valid = (truth > 0) & (truth <= (self.depths[1] if self.limit_truth else float("inf")))
        if not valid.any():
            raise ValueError(f"step {step}: no pixel of the crops has a depth; take larger crops, or a larger batch")
        loss = steps.scale_invariant_loss(predicted, truth, valid, with_variance=step >= self.loss_warmup)
        if self.gradient_weight:
            loss = loss + self.gradient_weight * steps.gradient_loss(predicted, truth, valid, log=True, axes=(0, 1))
        return loss

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        return {
            "crop": "{} x {}".format(*self.crop_side(spec)),
            "steps": self.steps,
            "batch": self.batch,
            "epochs": f"{self.steps * self.batch / images['train']:.1f}",
            "channels": spec.width * (1 + self.class_token) * len(self.read_layers(spec)),
        }

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        flops = (1 + self.flip) * forward_flops(scale.spec, whole_patches(max(steps.NYU_SIZE), scale.spec))
        parts = [
            *self.cost_of_training(scale),
            Part(kind="evaluation", count=scale.images["val"], flops=float(flops)),
        ]
        return Work(parts=tuple(parts), iterations=self.steps, memory=self.memory(scale))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.opened(export, space)
        (chosen,) = self.train_heads(export, train, space)[-1:]
        scenes = val.scenes
        errors = np.full((len(scenes), len(METRICS)), np.nan)
        for index, values in self.evaluated(backbone_of(export, space), [chosen], val, space).items():
            errors[index] = list(values.values())
        if np.isnan(errors).all():
            raise ValueError(f"{scenes.url}: no pixel of {scenes.split} lies in the range and crop that are evaluated")
        metrics = {}
        for place, (name, (unit, higher)) in enumerate(METRICS.items()):
            scale = 100 if unit == "%" else 1
            value = scale * float(np.nanmean(errors[:, place]))
            metrics[name] = Metric(value=value, unit=unit, higher_is_better=higher, per_image=errors[:, place])
        facts = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.scenes.notes, *scenes.notes])),
            "steps": chosen.step,
            "layers": [block % export.spec.depth for block, _ in self.read_layers(export.spec)],
            "images without a counted pixel": int(np.isnan(errors[val.places, 0]).sum()),
        }
        return Outcome(metrics=metrics, arrays={"errors": errors}, facts=facts)

    def judged(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> Mapping[str, float]:
        """Errors by name."""
        final, truth, valid = self.predicted(backbone, heads[0], scenes, index)
        return steps.depth_metrics(final[valid].double(), truth[valid].double())

    @torch.no_grad()
    def predicted(
        self, backbone: Backbone, head: nn.Module, scenes: SceneSet, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of a scene metres (H, W) that are predicted and measured, and which pixels are counted."""
        pixels, truth = pixels_of(scenes, index)
        image = backbone.prepare(pixels[None])
        shown = head([self.maps(backbone, image)]).cpu()
        mirrored = head([self.maps(backbone, image.flip(-1))]).cpu() if self.flip else None
        valid = steps.counted_pixels(truth, self.depths, self.eigen)
        return steps.final_depth(shown, mirrored, truth, valid, self.depths, align=False), truth, valid


def pixels_of(scenes: SceneSet, index: int) -> tuple[Tensor, Tensor]:
    """Pixels (3, H, W) uint8 of a scene, and metres (H, W)."""
    image = scene_image(scenes, index)
    depth = scene_depth(scenes, index, image.size[::-1])
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), torch.from_numpy(depth)


SOURCE = "DINOv3 (facebookresearch/dinov3 6876159) eval/depth/configs/config-nyu.yaml, the last step"
HEADS = (
    "DINOv2 (facebookresearch/dinov2 b8931f7) eval/depth and hub/depthers.py: layers, head and losses; as its training "
    "configuration is not public, steps, rates and images are those of depth_linear@dinov3"
)
LIN1 = DepthLinear(
    final_norm=False, class_token=True, batch_norm=False, upsample=4, gradient_weight=0.5, limit_truth=True
)
PROTOCOLS = {
    "depth_linear@smoke": Protocol(
        task=DepthLinear(lr=(1e-2,), steps=60, warmup=10, batch=4, crop_size=(32, 40), bins=64, loss_warmup=5),
        version=1,
        source="ours: seconds on tiny-nyu:; not to be compared with published numbers",
    ),
    "depth_linear@dinov3": Protocol(task=DepthLinear(), version=1, source=SOURCE),
    "depth_linear@dinov2_lin1": Protocol(task=LIN1, version=1, source=HEADS),
    "depth_linear@dinov2_lin4": Protocol(task=replace(LIN1, layers="four"), version=1, source=HEADS),
}
DENSE = ("depth_linear@dinov3", "depth_linear@dinov2_lin1", "depth_linear@dinov2_lin4")
SUITES = {
    "smoke": ("depth_linear@smoke",),
    "dense": DENSE,
    "full": DENSE,
    "today": ("depth_linear@dinov3",),
    "everything": DENSE,
}
