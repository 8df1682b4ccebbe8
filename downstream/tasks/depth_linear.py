"""Depth by one linear layer on frozen patches: root mean square error on NYU Depth v2, as in DINOv3 and DINOv2.

A 1x1 convolution chooses among 256 depths from 1 mm to 10 m. It is trained for 38,400 steps on crops of 416 x 544
pixels. The evaluation averages the predictions for an image and its mirror image, and counts the pixels inside Eigen's
crop. The last step is reported; nothing is selected.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, depth_warnings, open_both, scene_depth, scene_image
from downstream.frozen.heads import HeadTask
from downstream.frozen.task import Layer, Random, UsableScenes, backbone_of, pad_centred, patch_maps, round_up_to_patch
from engine.errors import option
from engine.printing import say
from engine.progress import with_progress
from engine.settings import BelowOne, FactorRange, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Head, Metric, Outcome, Predicts, Protocol, Workspace, smoke_protocol
from engine.training.schedules import FallingOneCycle
from engine.work import Part, Scale

# dinov2 hub/depthers.py:110-127: the blocks of layers="four" by depth of the network; for other depths, the last block
# of each quarter.
FOUR_BLOCKS = {24: (4, 11, 17, 23)}
# The source's other ways to space depths and to weight them are compared with its recordings; protocols use "linear".
Spacing = Literal["linear", "log", "chmv2_mixlog"]
Weighting = Literal["linear", "softmax", "sigmoid", "chmv2_mixlog"]
WEIGHT_FLOOR = 0.1  # added to the weight of each depth
EPSILON = 1e-3  # metres, added before a logarithm
GRADIENT_STRIDES = (1, 2, 4, 6)  # of the gradient loss
NYU_SIZE = (480, 640)  # height and width of the images that the two crops below are given for
NYU_CROP = (45, 472, 43, 608)  # top, bottom, left and right of training images: without the white border
EIGEN_CROP = (45, 471, 41, 601)  # the same of the pixels that evaluations count (Eigen et al. 2014)
MAX_ROTATION = 2.5  # degrees, of training images
GAMMA, BRIGHTNESS, TINT = (0.9, 1.1), (0.75, 1.25), (0.9, 1.1)  # ranges of colour changes
CHECKED_MAPS = 20  # depth maps whose unit is checked
METRICS = {  # name -> unit, and whether higher is better
    "rmse": ("m", False),
    "abs_rel": ("", False),
    "log10": ("", False),
    "delta1": ("%", True),
    "delta2": ("%", True),
    "delta3": ("%", True),
    "silog": ("", False),
    "rmse_log": ("", False),
    "sq_rel": ("m", False),
    "mae": ("m", False),
}
# Settings and quirks are those of the protocols' sources; the code is our own. B images, H x W pixels, D width, n bins,
# h x w patches. Depths are in metres, 0 where nothing was measured.


class DepthHead(nn.Module):
    """Features of one or several layers, (B, D, h, w) each -> depths (B, 1, uh, uw). Names are the source's.

    Args:
        width: channels of all layers together.
        bins: number of depths to choose from.
        depths: the least and the largest of them.
        norm: apply a batch norm before the 1x1 convolution.
        upsample: u, factor by which features are enlarged before it, bilinear.
    """

    def __init__(
        self, width: int, bins: int, depths: tuple[float, float], norm: bool = True, upsample: int = 1
    ) -> None:
        super().__init__()
        self.depths, self.upsample = depths, upsample
        self.batchnorm_layer = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv_depth = nn.Conv2d(width, bins, 1)
        nn.init.normal_(self.conv_depth.weight, std=0.01)
        nn.init.zeros_(self.conv_depth.bias)

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        if self.upsample > 1:
            layers = [F.interpolate(layer, scale_factor=self.upsample, mode="bilinear") for layer in layers]
        return logits_to_depth(self.conv_depth(self.batchnorm_layer(torch.cat(list(layers), dim=1))), *self.depths)


def logits_to_depth(
    logits: Tensor, least: float, most: float, spacing: Spacing = "linear", weighting: Weighting = "linear"
) -> Tensor:
    """Logits (B, n, h, w) -> depths (B, 1, h, w): the weighted mean of n depths from `least` to `most`.

    A single logit is no choice among bins but a depth: relu(logit) + least.
    """
    if logits.shape[1] == 1:
        return logits.relu() + least
    weights = {
        "linear": lambda: logits.relu() + WEIGHT_FLOOR,
        "softmax": lambda: logits.softmax(dim=1),
        "sigmoid": lambda: logits.sigmoid(),
        "chmv2_mixlog": lambda: logits.relu() + 1e-8,
    }[weighting]()
    weights = weights / weights.sum(dim=1, keepdim=True)
    depths = bin_depths(logits.shape[1], least, most, spacing).to(logits)
    return torch.einsum("bnhw,n->bhw", weights, depths)[:, None]


def bin_depths(bins: int, least: float, most: float, spacing: Spacing) -> Tensor:
    """Depths (n,) float64 to choose from: evenly spaced, evenly in the logarithm, or a mixture of both."""
    if spacing == "linear":
        return torch.linspace(least, most, bins, dtype=torch.float64)
    if spacing == "log":
        return torch.linspace(float(np.log(least)), float(np.log(most)), bins, dtype=torch.float64).exp()
    # From even in the logarithm to even, over an eighth of the range.
    log_depths, even_depths = (bin_depths(bins, least, most / 8, kind) for kind in ("log", "linear"))
    return 8 * torch.lerp(log_depths, even_depths, torch.linspace(0, 1, bins, dtype=torch.float64))


def scale_invariant_loss(predicted: Tensor, truth: Tensor, valid: Tensor, with_variance: bool) -> Tensor:
    """The source's SigLoss of depths (B, 1, H, W) over the pixels where valid (B, 1, H, W) is True.

    with_variance: False in the source's first 100 calls.
    """
    error = (predicted[valid] + EPSILON).log() - (truth[valid] + EPSILON).log()
    squared = 0.15 * error.mean() ** 2 + (error.var() if with_variance else 0.0)
    return squared.abs().sqrt()


def gradient_loss(predicted: Tensor, truth: Tensor, valid: Tensor, axes: tuple[int, int], log: bool = True) -> Tensor:
    """Absolute differences between errors two pixels apart, at several strides, averaged over the valid pixels.

    Args:
        predicted, truth: depths (B, 1, H, W).
        valid: (B, 1, H, W), True for pixels that count; both pixels of a difference must.
        axes: along which differences are taken. DINOv2 takes the first two, batch and channel, instead of height and
            width, so that its loss is 0 for two images.
        log: take errors of the logarithms of depths.
    """
    error = (predicted + EPSILON).log() - (truth + EPSILON).log() if log else predicted - truth
    error = error * valid
    total = torch.zeros((), dtype=predicted.dtype, device=predicted.device)
    for stride in GRADIENT_STRIDES:
        strided, counted = error, valid
        for axis in axes:
            positions = torch.arange(0, error.shape[axis], stride, device=error.device)
            strided, counted = strided.index_select(axis, positions), counted.index_select(axis, positions)
        for axis in axes:
            length = strided.shape[axis] - 2
            if length < 1:
                continue
            difference = (strided.narrow(axis, 2, length) - strided.narrow(axis, 0, length)).abs()
            both = counted.narrow(axis, 2, length) & counted.narrow(axis, 0, length)
            total = total + (difference * both).sum() / counted.sum()
    return total


def scale_crop(crop: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns of a crop (top, bottom, left, right) of NYU_SIZE in an image of `size` (height, width)."""
    scales = [new / old for new, old in zip(size, NYU_SIZE, strict=True)]
    top, bottom, left, right = (int(edge * scale) for edge, scale in zip(crop, np.repeat(scales, 2), strict=True))
    return slice(top, bottom), slice(left, right)


def draw_augmentation(size: tuple[int, int], crop: tuple[int, int], random: Random, rotate: bool) -> dict[str, Any]:
    """Random arguments of `augment` for an image of `size` (height, width)."""
    angle = random.uniform(-MAX_ROTATION, MAX_ROTATION) if rotate and random.rand() < 0.5 else None
    flip = random.rand() < 0.5
    top, left = (random.randint(0, max(side - length, 0) + 1) for side, length in zip(size, crop, strict=True))
    colours = None
    if random.rand() < 0.5:
        colours = (random.uniform(*GAMMA), random.uniform(*BRIGHTNESS), [random.uniform(*TINT) for _ in range(3)])
    return {"angle": angle, "flip": flip, "corner": (top, left), "colours": colours}


def augment(
    pixels: Tensor,
    depth: Tensor,
    crop: tuple[int, int],
    angle: float | None,
    flip: bool,
    corner: tuple[int, int],
    colours: tuple[float, float, Sequence[float]] | None,
) -> tuple[Tensor, Tensor]:
    """Rotate, flip, crop and recolour a training image (transforms.py:306-360).

    A rotated image is darker at its border than interpolation makes it, because torchvision multiplies twice by the
    mask of the inside. The gamma acts on values from 0 to 255.

    Args:
        pixels: (3, H, W) uint8, without the white border.
        depth: metres (H, W).
        crop: height and width of the crop; a smaller image is padded with zeros at the right and bottom.
        angle: of the rotation in degrees; None for none.
        flip: whether to mirror the image.
        corner: top and left of the crop.
        colours: gamma, brightness, and a factor on each channel; None for no change.

    Returns:
        Image (3, *crop) float32 from 0 to 1, and metres (*crop).
    """
    image, depth = pixels.float() / 255, depth[None]
    if angle is not None:
        image = vision.rotate(image, angle, vision.InterpolationMode.BILINEAR, fill=[0.0])
        depth = vision.rotate(depth, angle, vision.InterpolationMode.NEAREST, fill=[0.0])
    if flip:
        image, depth = image.flip(-1), depth.flip(-1)
    window = (..., slice(corner[0], corner[0] + crop[0]), slice(corner[1], corner[1] + crop[1]))
    image, depth = image[window], depth[window]
    if colours is not None:
        gamma, brightness, tint = colours
        image = (image * 255) ** gamma * brightness * torch.tensor(tint, dtype=torch.float64).view(3, 1, 1)
        image = image.clip(0, 255).float() / 255
    edges = (0, crop[1] - depth.shape[-1], 0, crop[0] - depth.shape[-2])
    return F.pad(image, edges), F.pad(depth, edges)[0]


def evaluation_mask(truth: Tensor, depths: tuple[float, float], eigen: bool) -> Tensor:
    """Mask (H, W), True for the pixels of measured depths (H, W) that count.

    depths: the open range they lie in. eigen: count only those inside Eigen's crop.
    """
    valid = (truth > depths[0]) & (truth < depths[1])
    if eigen:
        inside = torch.zeros_like(valid)
        inside[scale_crop(EIGEN_CROP, (truth.shape[0], truth.shape[1]))] = True
        valid &= inside
    return valid


def final_depth(
    predicted: Tensor,
    mirrored: Tensor | None,
    size: torch.Size,
    depths: tuple[float, float],
    align_to: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Depths (H, W) of `size`, clamped to the range `depths`, from predictions (1, 1, h, w).

    Args:
        mirrored: the prediction (1, 1, h, w) for the mirror image, to be averaged with the other; None for none.
        align_to: truth (H, W) and mask (H, W) of valid pixels, which scale and shift of the prediction are fitted to by
            least squares, an option of the source that no protocol uses; None for no alignment.
    """
    if mirrored is not None:
        predicted = (predicted + mirrored.flip(-1)) / 2
    depth = F.interpolate(predicted, size=size, mode="bilinear", align_corners=False)[0, 0]
    if align_to is not None:
        truth, valid = align_to
        columns = torch.stack([depth[valid], torch.ones_like(depth[valid])], dim=1)
        scale, shift = torch.linalg.lstsq(columns, truth[valid][:, None]).solution[:, 0]
        depth = scale * depth + shift
    return depth.clamp(*depths)


def depth_metrics(predicted: Tensor, truth: Tensor) -> Mapping[str, float]:
    """METRICS of one image from the depths (P,) of its valid pixels; NaN if there are none."""
    if not len(truth):
        return dict.fromkeys(METRICS, float("nan"))
    ratio = torch.maximum(predicted / truth, truth / predicted)
    error, log_error = predicted - truth, predicted.log() - truth.log()
    metrics = {
        "rmse": error.square().mean().sqrt(),
        "abs_rel": (error.abs() / truth).mean(),
        "log10": log_error.abs().mean() / float(np.log(10)),
        **{f"delta{power}": (ratio < 1.25**power).double().mean() for power in (1, 2, 3)},
        "silog": 100 * (log_error.square().mean() - log_error.mean().square()).clamp_min(0).sqrt(),
        "rmse_log": log_error.square().mean().sqrt(),
        "sq_rel": (error.square() / truth).mean(),
        "mae": error.abs().mean(),
    }
    return {name: metrics[name].item() for name in METRICS}


@dataclass(frozen=True, kw_only=True)
class DepthLinear(HeadTask):
    """Settings of one training."""

    COST: ClassVar[float] = 150.0  # 38,400 steps of 16 crops are 25 passes, at 4.5 times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "nyu"
    KEY: ClassVar[str] = "depth_linear"
    EVALUATION_ONLY: ClassVar[tuple[str, ...]] = ("flip", "eigen")

    lr: tuple[PositiveFloat] = (3e-4,)  # learning rate
    steps: PositiveInt = 38400  # steps of the optimizer
    warmup: NonNegativeInt = 12800  # steps over which the rate rises
    batch: PositiveInt = 16  # crops in a step
    weight_decay: NonNegativeFloat = 1e-4  # of all parameters, including the batch norm's
    beta2: BelowOne = 0.99  # second beta of AdamW; the schedule sets the first
    clip: NonNegativeFloat = 35.0  # largest norm of the gradients; 0: no limit
    crop_size: tuple[PositiveInt, PositiveInt] = (416, 544)  # height and width of training crops in pixels
    rotate: bool = True  # rotate half of the training images by up to 2.5 degrees
    layers: Literal["last", "four"] = "last"  # blocks to read: the last, or one in each quarter
    final_norm: bool = True  # apply the network's final norm to them
    class_token: bool = False  # concatenate the class token to each patch
    batch_norm: bool = True  # apply a batch norm before the linear layer
    upsample: PositiveInt = 1  # factor by which patch maps are enlarged before the linear layer, bilinear
    bins: PositiveInt = 256  # depths to choose from
    depths: FactorRange = (0.001, 10.0)  # the smallest and the largest of them in metres
    loss_warmup: NonNegativeInt = 100  # first steps, whose loss omits the variance of the errors
    gradient_weight: NonNegativeFloat = 0.0  # weight of DINOv2's gradient loss
    limit_truth: bool = False  # ignore pixels beyond the largest depth in training
    flip: bool = True  # also evaluate mirror images
    eigen: bool = True  # count only pixels inside Eigen's crop
    kept: PositiveInt = 1  # snapshots of the head, at even intervals of the training; the last is reported

    def check_network(self, spec: FrozenSpec) -> None:
        super().check_network(spec)
        if self.class_token and not getattr(spec, "class_token", spec.has_class_token):
            raise ValueError(f"{spec.label} has no class token beside its patches, which {self.KEY} reads here")
        if self.layers == "four" and spec.depth < 4:
            raise ValueError(f"{spec.label} has {spec.depth} blocks, and {self.KEY} reads four; layers=last")

    def check_images(self, space: Workspace) -> None:
        super().check_images(space)
        for scenes in open_both(space):
            space.world.on_rank0(partial(self.check_depths, scenes, space.skip_bad))

    def check_depths(self, scenes: SceneSet, skip_bad: bool) -> None:
        """ValueError unless a pixel of the scenes counts. Reads scenes until one has such a pixel."""
        for index in with_progress(range(len(scenes)), f"looking for depths of {scenes.split}", "images"):
            with suppress(*[ValueError] if skip_bad else []):
                if evaluation_mask(read_scene(scenes, index)[1], self.depths, self.eigen).any():
                    return
        low, high = self.depths
        raise ValueError(
            f"{scenes.url}: no pixel of {scenes.split} that counts has a depth from {low:g} to {high:g} m; is it in "
            f"another unit (?unit=cm), or the range too small ({option('settings', {f'{self.KEY}.depths': '...'})})?"
        )

    def unit_warnings(self, images: UsableScenes) -> list[str]:
        """Warnings if CHECKED_MAPS depth maps of a split, evenly spread, seem to be in another unit."""
        checked = images.indices[np.unique(np.arange(CHECKED_MAPS) * len(images.indices) // CHECKED_MAPS)].tolist()
        indices = with_progress(checked, "checking the unit of depths", "images")
        farthest = [float(read_scene(images.scenes, index)[1].max()) for index in indices]
        return depth_warnings(images.scenes, farthest, self.depths[1])

    def read_layers(self, spec: FrozenSpec) -> list[Layer]:
        """The layers that the head reads."""
        if self.layers == "last":
            return [(-1, self.final_norm)]
        blocks = FOUR_BLOCKS.get(spec.depth) or tuple(spec.depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
        return [(block, self.final_norm) for block in blocks]

    def channels(self, spec: FrozenSpec) -> int:
        """Channels of the features that the head reads."""
        return spec.width * (1 + self.class_token) * len(self.read_layers(spec))

    def schedule(self) -> FallingOneCycle:
        return FallingOneCycle(warmup=self.warmup, division=1000.0, momenta=(0.85, 0.95))

    def input_size(self, spec: FrozenSpec) -> tuple[int, int]:
        height, width = (round_up_to_patch(side, spec) for side in self.crop_size)
        return height, width

    def read_crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        pixels, depth = read_scene(scenes, index)
        inside = scale_crop(NYU_CROP, (depth.shape[0], depth.shape[1]))
        pixels, depth = pixels[:, *inside], depth[inside]
        changes = draw_augmentation((depth.shape[0], depth.shape[1]), self.crop_size, random, self.rotate)
        image, depth = augment(pixels, depth, self.crop_size, **changes)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (export.mean, export.std))
        return (image - mean) / std, depth

    def build_head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        return DepthHead(self.channels(spec), self.bins, self.depths, self.batch_norm, self.upsample)

    def head_inputs(self, backbone: Backbone, images: Tensor) -> Tensor:
        padded = pad_centred(images, backbone.spec.patch_size)
        return torch.cat(patch_maps(backbone, padded, self.read_layers(backbone.spec), self.class_token), dim=1)

    def loss(self, head: nn.Module, features: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        truth = targets[:, None]
        predicted = F.interpolate(head([features]), size=targets.shape[1:], mode="bilinear", align_corners=False)
        valid = (truth > 0) & (truth <= (self.depths[1] if self.limit_truth else float("inf")))
        if not valid.any():
            raise ValueError(f"step {step}: no pixel of the crops has a depth; take larger crops, or a larger batch")
        loss = scale_invariant_loss(predicted, truth, valid, with_variance=step >= self.loss_warmup)
        if self.gradient_weight:
            loss = loss + self.gradient_weight * gradient_loss(predicted, truth, valid, axes=(0, 1))
        return loss

    def evaluation_parts(self, scale: Scale) -> list[Part]:
        side = round_up_to_patch(max(scale.size or NYU_SIZE), scale.spec)
        flops = (1 + self.flip) * float(forward_flops(scale.spec, side))
        return [Part(kind="evaluation", count=scale.images["val"], flops=flops)]

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.load_scenes(export, space)
        scenes = val.scenes
        warnings = space.world.on_rank0(partial(self.unit_warnings, val))
        if space.world.is_rank0:
            say(*(f"{scenes.url}: {line}" for line in warnings), errors=True)
        last = self.train_heads(export, train, val, space)[-1]
        errors = np.full((len(scenes), len(METRICS)), np.nan)
        for index, values in self.evaluate(backbone_of(export, space), [last], val, space).items():
            errors[index] = list(values.values())
        if np.isnan(errors).all():
            raise ValueError(f"{scenes.url}: no pixel of {scenes.split} lies in the range and crop that are evaluated")
        metrics = {}
        for column, (name, (unit, higher)) in enumerate(METRICS.items()):
            scale = 100 if unit == "%" else 1
            value = scale * float(np.nanmean(errors[:, column]))
            metrics[name] = Metric(value=value, unit=unit, higher_is_better=higher, per_image=errors[:, column])
        facts = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.scenes.notes, *scenes.notes])),
            "steps": last.step,
            "layers": [block % export.spec.depth for block, _ in self.read_layers(export.spec)],
            "images without a counted pixel": int(np.isnan(errors[val.indices, 0]).sum()),
            **({"warnings": warnings} if warnings else {}),
        }
        head = Head(tensors=last.state, classes=(), facts={"layers": facts["layers"]}) if space.keep_heads else None
        return Outcome(metrics=metrics, arrays={"errors": errors}, facts=facts, head=head)

    @property
    def predicts(self) -> Predicts:
        return "depth"

    def evaluate_scene(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> Mapping[str, float]:
        """METRICS of the only head."""
        predicted, truth, valid = self.predict(backbone, heads[0], scenes, index)
        return depth_metrics(predicted[valid].double(), truth[valid].double())

    def predict(
        self, backbone: Backbone, head: nn.Module, scenes: SceneSet, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predicted and measured depths (H, W) of a scene, and a mask (H, W) that is True for pixels that count."""
        pixels, truth = read_scene(scenes, index)
        return self.predicted_depth(backbone, head, pixels), truth, evaluation_mask(truth, self.depths, self.eigen)

    def predict_image(self, backbone: Backbone, head: nn.Module, image: Image.Image) -> np.ndarray:
        return self.predicted_depth(backbone, head, pixels_of(image)).numpy()

    @torch.no_grad()
    def predicted_depth(self, backbone: Backbone, head: nn.Module, pixels: Tensor) -> Tensor:
        """Depths (H, W) of an image (3, H, W) uint8, on the CPU."""
        image = backbone.prepare(pixels[None])
        predicted = head([self.head_inputs(backbone, image)]).cpu()
        mirrored = head([self.head_inputs(backbone, image.flip(-1))]).cpu() if self.flip else None
        return final_depth(predicted, mirrored, pixels.shape[1:], self.depths)


def read_scene(scenes: SceneSet, index: int) -> tuple[Tensor, Tensor]:
    """Pixels (3, H, W) uint8 and measured depths (H, W) of a scene."""
    image = scene_image(scenes, index)
    depth = scene_depth(scenes, index, image.size[::-1])
    return pixels_of(image), torch.from_numpy(depth)


def pixels_of(image: Image.Image) -> Tensor:
    """An RGB image as (3, H, W) uint8."""
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


SOURCE = "DINOv3 (facebookresearch/dinov3 6876159) eval/depth/configs/config-nyu.yaml, the last step"
HEADS = (
    "DINOv2 (facebookresearch/dinov2 b8931f7) eval/depth and hub/depthers.py: layers, head and losses; as its training "
    "configuration is not public, steps, rates and images are those of depth_linear@dinov3"
)
LIN1 = DepthLinear(
    final_norm=False, class_token=True, batch_norm=False, upsample=4, gradient_weight=0.5, limit_truth=True
)
PROTOCOLS = {
    "depth_linear@smoke": smoke_protocol(
        DepthLinear(lr=(1e-2,), steps=60, warmup=10, batch=4, crop_size=(32, 40), bins=64, loss_warmup=5),
        "seconds on tiny-nyu:",
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
