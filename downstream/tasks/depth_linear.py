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
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, scene_depth, scene_image
from downstream.frozen.heads import HeadTask
from downstream.frozen.task import Layer, Random, UsableScenes, backbone_of, centre_padded, patch_maps, whole_patches
from engine.printing import say
from engine.settings import BelowOne, FactorRange, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Workspace, smoke_protocol
from engine.training.schedules import FallingOneCycle
from engine.work import Part, Scale

# dinov2 hub/depthers.py:110-127: blocks of "four" by depth, else the last of each quarter. These are the exceptions.
FOUR = {24: (4, 11, 17, 23)}
Bins = Literal["linear", "log", "chmv2_mixlog"]
Weights = Literal["linear", "softmax", "sigmoid", "chmv2_mixlog"]
FLOOR = 0.1  # added to each bin's weight by the rule "linear"
EPSILON = 1e-3  # metres, added before a logarithm
STRIDES = (1, 2, 4, 6)  # of the gradient losses
NYU_SIZE = (480, 640)  # height and width that the two crops are given for
NYU_CROP = (45, 472, 43, 608)  # first and last row and column of training images: what is inside the white border
EIGEN_CROP = (45, 471, 41, 601)  # the same of what evaluations count (Eigen et al. 2014)
TURN = 2.5  # degrees, at most, that a training image is rotated by
GAMMA, BRIGHTNESS, TINT = (0.9, 1.1), (0.75, 1.25), (0.9, 1.1)
ROOM, SAMPLED = 1.0, 20  # metres that some depth in a set of rooms exceeds; maps that are looked at
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
# Settings and quirks are those of the sources of the protocols below, written anew. B images, H x W pixels, D width, n
# bins, h x w patches. Depths are metres, 0 where nothing was measured.


class DepthHead(nn.Module):
    """Maps (B, D, h, w) of one or several layers -> depths (B, 1, uh, uw) by a 1x1 convolution. Names are the source's.

    upsample: u, bilinear enlargement of the maps before the convolution. norm: a batch norm before it.
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

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        if self.upsample > 1:
            maps = [F.interpolate(one_map, scale_factor=self.upsample, mode="bilinear") for one_map in maps]
        return depths_of(self.conv_depth(self.batchnorm_layer(torch.cat(list(maps), dim=1))), *self.depths)


def depths_of(logits: Tensor, least: float, most: float, bins: Bins = "linear", weights: Weights = "linear") -> Tensor:
    """Logits (B, n, h, w) -> metres (B, 1, h, w): the weighted mean of n depths from `least` to `most`.

    n = 1 is no choice among bins: relu(logit) + least.
    """
    if logits.shape[1] == 1:
        return logits.relu() + least
    share = {
        "linear": lambda: logits.relu() + FLOOR,
        "softmax": lambda: logits.softmax(dim=1),
        "sigmoid": lambda: logits.sigmoid(),
        "chmv2_mixlog": lambda: logits.relu() + 1e-8,
    }[weights]()
    share = share / share.sum(dim=1, keepdim=True)
    centres = bin_centres(logits.shape[1], least, most, bins).to(logits)
    return torch.einsum("bnhw,n->bhw", share, centres)[:, None]


def bin_centres(count: int, least: float, most: float, bins: Bins) -> Tensor:
    """Depths (n,) float64 of the bins."""
    even = torch.linspace(least, most, count, dtype=torch.float64)
    even_in_log = torch.linspace(float(np.log(least)), float(np.log(most)), count, dtype=torch.float64).exp()
    if bins == "chmv2_mixlog":  # from even in the logarithm to even, over an eighth of the range
        near, far = (bin_centres(count, least, most / 8, kind) for kind in ("log", "linear"))
        return 8 * torch.lerp(near, far, torch.linspace(0, 1, count, dtype=torch.float64))
    return even if bins == "linear" else even_in_log


def scale_invariant_loss(predicted: Tensor, truth: Tensor, valid: Tensor, with_variance: bool) -> Tensor:
    """SigLoss of metres (B, 1, H, W). with_variance: the source leaves it out in its first 100 calls."""
    error = (predicted[valid] + EPSILON).log() - (truth[valid] + EPSILON).log()
    squared = 0.15 * error.mean() ** 2 + (error.var() if with_variance else 0.0)
    return squared.abs().sqrt()


def gradient_loss(
    predicted: Tensor, truth: Tensor, valid: Tensor, log: bool, axes: tuple[int, int] = (-2, -1)
) -> Tensor:
    """Differences of errors two places apart, at four strides, over the valid pixels of each.

    log: of logarithms. axes: those that are gone along. DINOv2 goes along the first two of (B, 1, H, W), images of the
    batch, so that its loss is 0 for two images.
    """
    error = (predicted + EPSILON).log() - (truth + EPSILON).log() if log else predicted - truth
    error, total = error * valid, torch.zeros((), dtype=predicted.dtype, device=predicted.device)
    for stride in STRIDES:
        part, counts = error, valid
        for axis in axes:
            part, counts = _strided(part, axis, stride), _strided(counts, axis, stride)
        for axis in axes:
            length = part.shape[axis] - 2
            if length < 1:
                continue
            difference = (part.narrow(axis, 2, length) - part.narrow(axis, 0, length)).abs()
            both = counts.narrow(axis, 2, length) & counts.narrow(axis, 0, length)
            total = total + (difference * both).sum() / counts.sum()
    return total


def _strided(values: Tensor, axis: int, stride: int) -> Tensor:
    return values.index_select(axis, torch.arange(0, values.shape[axis], stride, device=values.device))


def window_of(window: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns of a crop that is given for NYU_SIZE, in an image of `size`."""
    scales = [new / old for new, old in zip(size, NYU_SIZE, strict=True)]
    top, bottom, left, right = (int(edge * scale) for edge, scale in zip(window, np.repeat(scales, 2), strict=True))
    return slice(top, bottom), slice(left, right)


def drawn_changes(size: tuple[int, int], crop: tuple[int, int], random: Random, rotate: bool) -> dict[str, Any]:
    """What `training_image` does to an image of `size`: angle in degrees, flip, corner of the crop, colours."""
    angle = random.uniform(-TURN, TURN) if rotate and random.rand() < 0.5 else None
    flip = random.rand() < 0.5
    top, left = (random.randint(0, max(side - length, 0) + 1) for side, length in zip(size, crop, strict=True))
    colours = None
    if random.rand() < 0.5:
        colours = (random.uniform(*GAMMA), random.uniform(*BRIGHTNESS), [random.uniform(*TINT) for _ in range(3)])
    return {"angle": angle, "flip": flip, "corner": (top, left), "colours": colours}


def training_image(
    pixels: Tensor,
    depth: Tensor,
    crop: tuple[int, int],
    angle: float | None,
    flip: bool,
    corner: tuple[int, int],
    colours: tuple[float, float, Sequence[float]] | None,
) -> tuple[Tensor, Tensor]:
    """(3, H, W) uint8 and metres (H, W), without border -> (3, *crop) float32 from 0 to 1, and metres (*crop).

    A rotated image is darker at the border than interpolation makes it, as torchvision multiplies by the mask of what
    is inside twice. The gamma acts on values from 0 to 255 (transforms.py:306-360).
    """
    image, depth = pixels.float() / 255, depth[None]
    if angle is not None:
        image = vision.rotate(image, angle, vision.InterpolationMode.BILINEAR, fill=[0.0])
        depth = vision.rotate(depth, angle, vision.InterpolationMode.NEAREST, fill=[0.0])
    if flip:
        image, depth = image.flip(-1), depth.flip(-1)
    place = (..., slice(corner[0], corner[0] + crop[0]), slice(corner[1], corner[1] + crop[1]))
    image, depth = image[place], depth[place]
    if colours is not None:
        gamma, brightness, tint = colours
        image = (image * 255) ** gamma * brightness * torch.tensor(tint, dtype=torch.float64).view(3, 1, 1)
        image = image.clip(0, 255).float() / 255
    edges = (0, crop[1] - depth.shape[-1], 0, crop[0] - depth.shape[-2])
    return F.pad(image, edges), F.pad(depth, edges)[0]


def counted_pixels(truth: Tensor, depths: tuple[float, float], eigen: bool) -> Tensor:
    """Mask (H, W), 1 for pixels of metres (H, W) that an evaluation counts. eigen: inside of Eigen's crop alone."""
    valid = (truth > depths[0]) & (truth < depths[1])
    if eigen:
        inside = torch.zeros_like(valid)
        inside[window_of(EIGEN_CROP, (truth.shape[0], truth.shape[1]))] = True
        valid &= inside
    return valid


def final_depth(
    predicted: Tensor, mirrored: Tensor | None, truth: Tensor, valid: Tensor, depths: tuple[float, float], align: bool
) -> Tensor:
    """Predictions (1, 1, h, w), of the image and of its mirror image, -> metres (H, W) to compare with the truth.

    align: by the scale and shift that fit the valid pixels best.
    """
    if mirrored is not None:
        predicted = (predicted + mirrored.flip(-1)) / 2
    depth = F.interpolate(predicted, size=truth.shape, mode="bilinear", align_corners=False)[0, 0]
    if align:
        columns = torch.stack([depth[valid], torch.ones_like(depth[valid])], dim=1)
        scale, shift = torch.linalg.lstsq(columns, truth[valid][:, None]).solution[:, 0]
        depth = scale * depth + shift
    return depth.clamp(*depths)


def depth_metrics(predicted: Tensor, truth: Tensor) -> Mapping[str, float]:
    """Errors of one image from its valid pixels (P,) in metres; NaN where there are none."""
    if not len(truth):
        return dict.fromkeys(METRICS, float("nan"))
    ratio = torch.maximum(predicted / truth, truth / predicted)
    error, logs = predicted - truth, predicted.log() - truth.log()
    metrics = {
        "rmse": error.square().mean().sqrt(),
        "abs_rel": (error.abs() / truth).mean(),
        "log10": logs.abs().mean() / float(np.log(10)),
        **{f"delta{power}": (ratio < 1.25**power).double().mean() for power in (1, 2, 3)},
        "silog": 100 * (logs.square().mean() - logs.mean().square()).clamp_min(0).sqrt(),
        "rmse_log": logs.square().mean().sqrt(),
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
    AFTER_TRAINING: ClassVar[tuple[str, ...]] = ("flip", "eigen")

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
        inside = window_of(NYU_CROP, (depth.shape[0], depth.shape[1]))
        pixels, depth = pixels[:, *inside], depth[inside]
        changes = drawn_changes((depth.shape[0], depth.shape[1]), self.crop_size, random, self.rotate)
        image, depth = training_image(pixels, depth, self.crop_size, **changes)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (export.mean, export.std))
        return (image - mean) / std, depth

    def head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        width = spec.width * (1 + self.class_token) * len(self.read_layers(spec))
        return DepthHead(width, self.bins, self.depths, self.batch_norm, self.upsample)

    def maps(self, backbone: Backbone, images: Tensor) -> Tensor:
        padded = centre_padded(images, backbone.spec.patch_size)
        layers = self.read_layers(backbone.spec)
        return torch.cat(patch_maps(backbone, padded, layers, self.class_token), dim=1)

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        truth = targets[:, None]
        predicted = F.interpolate(head([maps]), size=targets.shape[1:], mode="bilinear", align_corners=False)
        valid = (truth > 0) & (truth <= (self.depths[1] if self.limit_truth else float("inf")))
        if not valid.any():
            raise ValueError(f"step {step}: no pixel of the crops has a depth; take larger crops, or a larger batch")
        loss = scale_invariant_loss(predicted, truth, valid, with_variance=step >= self.loss_warmup)
        if self.gradient_weight:
            loss = loss + self.gradient_weight * gradient_loss(predicted, truth, valid, log=True, axes=(0, 1))
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

    def evaluation(self, scale: Scale) -> list[Part]:
        flops = (1 + self.flip) * forward_flops(scale.spec, whole_patches(max(NYU_SIZE), scale.spec))
        return [Part(kind="evaluation", count=scale.images["val"], flops=float(flops))]

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.opened(export, space)
        space.world.on_rank0(lambda: say(*unit_warnings(val), errors=True))
        (chosen,) = self.train_heads(export, train, val, space)[-1:]
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
        return depth_metrics(final[valid].double(), truth[valid].double())

    @torch.no_grad()
    def predicted(
        self, backbone: Backbone, head: nn.Module, scenes: SceneSet, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of a scene metres (H, W) that are predicted and measured, and which pixels are counted."""
        pixels, truth = pixels_of(scenes, index)
        image = backbone.prepare(pixels[None])
        shown = head([self.maps(backbone, image)]).cpu()
        mirrored = head([self.maps(backbone, image.flip(-1))]).cpu() if self.flip else None
        valid = counted_pixels(truth, self.depths, self.eigen)
        return final_depth(shown, mirrored, truth, valid, self.depths, align=False), truth, valid


def pixels_of(scenes: SceneSet, index: int) -> tuple[Tensor, Tensor]:
    """Pixels (3, H, W) uint8 of a scene, and metres (H, W)."""
    image = scene_image(scenes, index)
    depth = scene_depth(scenes, index, image.size[::-1])
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), torch.from_numpy(depth)


def unit_warnings(images: UsableScenes) -> list[str]:
    """A warning where a few depth maps of a split, evenly spread, all end nearer than the walls of a room."""
    few = images.places[np.unique(np.arange(SAMPLED) * len(images.places) // SAMPLED)].tolist()
    farthest = max(float(pixels_of(images.scenes, place)[1].max()) for place in few)
    if farthest >= ROOM:
        return []
    return [
        f"{images.scenes.url}: {len(few)} depth maps of {images.scenes.split} end at {farthest:g} m; if they show "
        f"rooms, they are in another unit: save {images.scenes.depth_maps.per_metre:g} for each metre"
    ]


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
