"""Segmentation by one linear layer on the frozen patches of the last block, without mmsegmentation: DINOv3's protocol.

A batch norm and a 1x1 convolution are trained for 40,000 steps on crops of 512 pixels; mIoU is computed in sliding
windows. DINOv3 reports the best of eight evaluations on the validation images. Here held-out training images choose
among the eight; NAME_paper chooses as the source does.

Use segmentation_linear@dinov3 to compare with DINOv3's numbers, for Pascal VOC, Cityscapes and masks of your own, and
where mmsegmentation cannot be installed. To compare with iBOT's, use ade_linear@ibot (upernet_ade20k, by mmseg), whose
linear layer reads four blocks and is trained for 160,000 steps. To compare with CAPI's, use segmentation_linear@capi:
logistic regressions on one pass over the images, without training on crops. These three numbers are not comparable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, scene_image, scene_mask, warn_of_masks
from downstream.frozen.capi import CapiLogistic
from downstream.frozen.heads import HeadTask
from downstream.frozen.task import (
    Random,
    backbone_of,
    best_choice,
    class_areas,
    normalise,
    pad_to_patches,
    patch_maps,
    resampled_metrics,
    resize_nearest,
    round_up_to_patch,
)
from downstream.metrics.previews import preview_arrays, preview_indices, preview_masks, thumbnail
from downstream.metrics.scores import constant_scores, scene_mious, scores, weighted_scores, worst_and_median
from engine.errors import option
from engine.seeding import stream_seeds
from engine.settings import (
    BelowOne,
    FactorRange,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMoreDifferent,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    ReadIf,
)
from engine.sweeps import edge_warnings
from engine.tasks import Head, Outcome, Predicts, Protocol, SelectOn, Workspace, as_reported, smoke_protocol
from engine.training.schedules import FallingOneCycle
from engine.work import Part, Scale

HOLDOUT_STREAM = 7  # stream of random numbers (stream_seeds) that draws the held-out training images
ASPECT_RATIO = 4 / 3  # width by height of an image, as plans assume
# Augmentation: dinov3 eval/segmentation/transforms.py.
MAX_REDRAWS = 10  # times that a crop is drawn again
MAX_CLASS_SHARE = 0.75  # share of a crop's labelled pixels that one class must stay below, or it is drawn again
MAX_BRIGHTNESS_SHIFT = 32.0  # of pixels from 0 to 255
COLOUR_FACTORS = (0.5, 1.5)  # range of the factors on contrast and saturation
MAX_HUE_SHIFT = 0.5  # of the circle of hues; mmseg's is 18 of OpenCV's 180, a tenth
# Other settings and quirks are those of the protocols' sources; the code is our own.
# B images, H x W pixels, D width, K classes, h x w patches. Image tensors are float32 and normalised unless noted.

Window = tuple[slice, slice]  # rows and columns of an image


class SegmentationHead(nn.Module):
    """Batch norm and a 1x1 convolution: patches (B, D, h, w) -> logits (B, K, h, w). Names are the source's."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.batchnorm_layer = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, patches: Tensor, keep: Tensor | None = None) -> Tensor:
        """keep: (B, D), 1 for the channels of an image that dropout keeps; None for no dropout."""
        if keep is not None:
            patches = patches * (keep.to(patches) / (1 - self.dropout))[..., None, None]
        return self.conv(self.batchnorm_layer(patches))


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of logits (B, K, h, w), enlarged to the size of the labels (B, H, W).

    It is the mean over all pixels, to which ignored pixels contribute 0: crops with many of them weigh less
    (loss.py:256).
    """
    enlarged = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(enlarged, labels.long(), ignore_index=IGNORED, reduction="sum") / labels.numel()


def resized_size(height: int, width: int, short: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side is resized to `short`; the longer side is rounded."""
    long = int(short * max(height, width) / min(height, width) + 0.5)
    return (short, long) if height < width else (long, short)


def resize_bilinear(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize to (height, width), bilinear with antialiasing."""
    return image.resize(size[::-1], Image.Resampling.BILINEAR)


def training_crop(
    image: Image.Image,
    labels: np.ndarray,
    crop: int,
    short: int,
    ratios: tuple[float, float],
    random: Random,
    flip: float = 0.5,
    max_class_share: float = MAX_CLASS_SHARE,
) -> tuple[Tensor, Tensor]:
    """A random crop with random colours (transforms.py:391-448).

    Args:
        labels: (H, W) uint8, IGNORED for unlabelled pixels.
        crop: side of the crop in pixels.
        short: shorter side in pixels that the image is resized to, times a random factor.
        ratios: range of that factor.
        flip: probability of a mirror image.
        max_class_share: share of the labelled pixels that one class must stay below, or the crop is drawn again.

    Returns:
        Pixels (3, h, w) uint8 and labels (h, w) uint8; h and w are `crop`, or less if the resized image is smaller.
    """
    low, high = ratios
    height, width = labels.shape
    size = resized_size(height, width, int(short * (random.random_sample() * (high - low) + low)))
    pixels = np.asarray(resize_bilinear(image, size))
    labels = resize_nearest(labels, size)
    rows, columns = _random_window(labels, crop, random)
    for _ in range(MAX_REDRAWS):
        if _has_variety(labels[rows, columns], max_class_share):
            break
        rows, columns = _random_window(labels, crop, random)
    pixels, labels = pixels[rows, columns], labels[rows, columns]
    if random.rand() < flip:
        pixels, labels = pixels[:, ::-1], labels[:, ::-1]
    distorted = _photometric_distortion(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), random)
    return distorted, torch.from_numpy(labels.copy())


def _random_window(labels: np.ndarray, crop: int, random: Random) -> Window:
    max_top, max_left = (max(side - crop, 0) for side in labels.shape)
    top, left = random.randint(0, max_top + 1), random.randint(0, max_left + 1)
    return slice(top, top + crop), slice(left, left + crop)


def _has_variety(labels: np.ndarray, max_class_share: float) -> bool:
    """Whether labels (h, w) hold more than one class, each with less than `max_class_share` of the labelled pixels."""
    counts = np.bincount(labels[labels != IGNORED])
    return np.count_nonzero(counts) > 1 and counts.max() / counts.sum() < max_class_share


def _photometric_distortion(pixels: Tensor, random: Random) -> Tensor:
    """mmseg's photometric distortion of RGB (3, H, W) uint8: each of four changes with probability 1/2.

    Contrast changes either before or after saturation and hue. Nothing is drawn for a change that does not happen.
    """

    def change_contrast(pixels: Tensor) -> Tensor:
        return (pixels.float() * random.uniform(*COLOUR_FACTORS)).clip(0, 255).byte() if random.randint(2) else pixels

    if random.randint(2):
        shift = random.uniform(-MAX_BRIGHTNESS_SHIFT, MAX_BRIGHTNESS_SHIFT)
        pixels = (pixels.float() + shift).clip(0, 255).byte()
    contrast_first = random.randint(2)
    if contrast_first:
        pixels = change_contrast(pixels)
    if random.randint(2):
        pixels = vision.adjust_saturation(pixels, random.uniform(*COLOUR_FACTORS))
    if random.randint(2):
        pixels = vision.adjust_hue(pixels, random.uniform(-MAX_HUE_SHIFT, MAX_HUE_SHIFT))
    return pixels if contrast_first else change_contrast(pixels)


def pad_crop(image: Tensor, labels: Tensor, crop: int) -> tuple[Tensor, Tensor]:
    """Pad an image (3, h, w) with zeros and labels (h, w) with IGNORED, at the right and bottom, to crop x crop."""
    edges = (0, crop - labels.shape[1], 0, crop - labels.shape[0])
    return F.pad(image, edges), F.pad(labels, edges, value=IGNORED)


def sliding_windows(size: tuple[int, int], crop: int, stride: int) -> list[Window]:
    """The windows of an image of `size` (H, W), row by row; the last ones are shifted back inside.

    An image that is smaller than the window in both directions is cut into squares of its shorter side, as in the
    source (inference.py:93-149).
    """
    crop = min(size) if max(size) < crop else crop

    def starts(side: int) -> list[int]:
        count = max(side - crop + stride - 1, 0) // stride + 1
        return [max(min(number * stride, side - crop), 0) for number in range(count)]

    height, width = size
    return [
        (slice(top, min(top + crop, height)), slice(left, min(left + crop, width)))
        for top in starts(height)
        for left in starts(width)
    ]


def merge_windows(logits: Tensor, windows: Sequence[Window], size: tuple[int, int]) -> Tensor:
    """Mean logits (1, K, H, W) of an image from those of its W windows (W, K, h, w), each resized to its window."""
    total = logits.new_zeros(1, logits.shape[1], *size)
    count = logits.new_zeros(1, 1, *size)
    for window_logits, (rows, columns) in zip(logits.split(1), windows, strict=True):
        shape = rows.stop - rows.start, columns.stop - columns.start
        total[..., rows, columns] += F.interpolate(window_logits, size=shape, mode="bilinear", align_corners=False)
        count[..., rows, columns] += 1
    return total / count


def evaluation_sizes(height: int, width: int, short: int, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Height and width of an image at each ratio times the shorter side `short`.

    At ratios below 1 the shorter side is rounded up to a multiple of 32, as in the source's test-time augmentation.
    """
    sizes = []
    for ratio in ratios:
        side = int(short * ratio)
        sizes.append(resized_size(height, width, side if ratio >= 1 else math.ceil(side / 32) * 32))
    return sizes


def mean_probabilities(logits: Sequence[Tensor], flipped: Sequence[bool], size: tuple[int, int]) -> Tensor:
    """Mean class probabilities (K, *size) of several views of one image.

    logits: of each view, (1, K, H, W) in its own size. flipped: whether it shows the mirror image.
    """

    def probabilities(view: Tensor, is_flipped: bool) -> Tensor:
        enlarged = F.interpolate(view, size=size, mode="bilinear", align_corners=False).softmax(dim=1)
        return enlarged.flip(-1) if is_flipped else enlarged

    total = reduce(torch.add, map(probabilities, logits, flipped))
    return (total / len(logits))[0]


@dataclass(frozen=True, kw_only=True)
class SegmentationLinear(HeadTask):
    """Settings of one training."""

    COST: ClassVar[float] = 180.0  # 40,000 steps of 16 crops are 32 passes, at five times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"
    EVALUATION_ONLY: ClassVar[tuple[str, ...]] = ("stride", "scales", "flip")

    lr: OneOrMoreDifferent[PositiveFloat] = (1e-3,)  # learning rates to try: one head each, all on the same features
    steps: PositiveInt = 40000  # steps of the optimizer
    warmup: NonNegativeInt = 1500  # steps over which the rate rises
    batch: PositiveInt = 16  # crops in a step
    weight_decay: NonNegativeFloat = 1e-3  # of all parameters, including the batch norm's
    beta2: BelowOne = 0.999  # second beta of AdamW
    clip: NonNegativeFloat = 0.0  # largest norm of the gradients; 0: no limit
    dropout: BelowOne = 0.1  # share of the channels that are dropped, drawn for each image
    # side of training crops and evaluation windows in pixels, rounded up to a multiple of the patch
    crop_size: PositiveInt = 512
    stride: PositiveInt = 341  # pixels from one evaluation window to the next
    short: PositiveInt = 512  # shorter side of images in pixels; of training images times a random factor
    ratios: FactorRange = (0.5, 2.0)  # range of that factor
    scales: OneOrMoreDifferent[PositiveFloat] = (1.0,)  # scales of evaluated images, whose probabilities are averaged
    flip: bool = False  # also evaluate mirror images
    kept: PositiveInt = 8  # snapshots of each head, at even intervals of the training; the best is reported
    select: SelectOn = "holdout"  # images that select snapshot and rate: held-out training images, or val
    # share of the training images that is held out to select
    holdout: Annotated[ProperFraction, ReadIf("select", "holdout")] = 0.1

    def selecting(self, select: SelectOn) -> "SegmentationLinear":
        return replace(self, select=select) if self.chooses else self

    @property
    def chooses(self) -> bool:
        """Whether there is more than one head to choose from."""
        return len(self.lr) * self.kept > 1

    def schedule(self) -> FallingOneCycle:
        return FallingOneCycle(warmup=self.warmup, start=1e-6, delayed=True)

    def input_size(self, spec: FrozenSpec) -> tuple[int, int]:
        side = round_up_to_patch(self.crop_size, spec)
        return side, side

    def read_crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        image, side = scene_image(scenes, index), self.input_size(export.spec)[0]
        labels = scene_mask(scenes, index, image.size[::-1])
        pixels, labels = training_crop(image, labels, side, self.short, self.ratios, random)
        return pad_crop(normalise(pixels, export.mean, export.std), labels, side)

    def build_head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        return SegmentationHead(spec.width, classes, self.dropout)

    def head_inputs(self, backbone: Backbone, images: Tensor) -> Tensor:
        return patch_maps(backbone, images, [(-1, True)])[0]

    def loss(self, head: nn.Module, features: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        keep = torch.from_numpy(random.random_sample(features.shape[:2]) >= self.dropout)
        return segmentation_loss(head(features, keep.to(features.device)), targets)

    def holdout_size(self, train: int) -> int:
        """How many of the training images choose among heads; 0 if the validation images do, or nothing is chosen."""
        return max(1, round(self.holdout * train)) if self.select == "holdout" and self.chooses else 0

    def evaluation_parts(self, scale: Scale) -> list[Part]:
        side, images = self.input_size(scale.spec)[0], scale.images["val"] + self.holdout_size(scale.images["train"])
        windows = len(sliding_windows((self.short, round(ASPECT_RATIO * self.short)), side, self.stride))
        flops = (1 + self.flip) * windows * sum(ratio**2 for ratio in self.scales) * forward_flops(scale.spec, side)
        return [Part(kind="evaluation", count=images, flops=float(flops))]

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.load_scenes(export, space)
        mask_warnings = warn_of_masks(space, train.used, val.used)
        count, held_out = len(train.indices), self.holdout_size(len(train.indices))
        if held_out >= count:
            raise ValueError(
                f"{train.scenes.url}: {count} training images, none to hold out; {option('select', 'val')}"
            )
        order = np.random.RandomState(stream_seeds(HOLDOUT_STREAM, space.seed)).permutation(count)
        learnt = train.subset(order[held_out:])
        snapshots, backbone = self.train_heads(export, learnt, val, space), backbone_of(export, space)

        best, tried, chosen_on_val = 0, [], self.chooses and not held_out
        if self.chooses:
            choosing = train.subset(order[:held_out]) if held_out else val
            results = self.evaluate(backbone, snapshots, choosing, space)
            for number, head in enumerate(snapshots):
                miou = scores(np.stack([areas[number] for areas, _ in results.values()]))["mIoU"]
                tried.append({"lr": head.lr, "step": head.step, "mIoU": miou})
            best = best_choice([entry["mIoU"] for entry in tried], space)
        chosen = snapshots[best]
        if not chosen_on_val:
            results, best = self.evaluate(backbone, [chosen], val, space), 0

        areas = np.zeros((len(val.scenes), len(val.scenes.classes), 3), np.int64)
        previews = [np.full((1, 1), IGNORED, np.uint8) for _ in areas]
        for index, (areas_of_heads, previews_of_heads) in results.items():
            areas[index] = areas_of_heads[best]
            if index in preview_indices(len(areas)):
                previews[index] = previews_of_heads[best]
        ranked = worst_and_median(scene_mious(areas))
        if chosen_on_val:  # of the other heads' masks only those of the evenly spaced scenes were kept
            positions = np.flatnonzero(np.isin(val.indices, ranked))
            results, best = self.evaluate(backbone, [chosen], val.subset(positions), space), 0
        masks = preview_arrays(ranked, [results[index][1][best] for index in ranked], "ranked")
        constant, floor = constant_scores(areas)
        facts: dict[str, Any] = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.scenes.notes, *val.scenes.notes])),
            "masks": mask_warnings,
            "steps": chosen.step,
            "learning_rate": chosen.lr,
            "tried": tried,
            "selection": {
                "on": "validation images" if chosen_on_val else "training images held out" if held_out else "nothing",
                "images": held_out,
                "training images": len(learnt.indices),
            },
            "floor": {"prediction": f"{val.scenes.classes[constant]} everywhere", "metrics": floor},
        }
        beside = [head for head in tried if head["step"] == chosen.step]
        if warnings := edge_warnings(beside, {"lr": chosen.lr}, "mIoU"):
            facts["warnings"] = warnings
        metrics = resampled_metrics(partial(weighted_scores, [areas]), len(areas))
        return Outcome(
            metrics={name: replace(metric, chosen_on_val=chosen_on_val) for name, metric in metrics.items()},
            arrays={"areas": areas, **preview_masks(previews), **masks},
            facts=facts,
            head=Head(tensors=chosen.state, classes=val.scenes.classes, facts={"layers": [export.spec.depth - 1]})
            if space.keep_heads
            else None,
        )

    @property
    def predicts(self) -> Predicts:
        return "mask"

    def evaluate_scene(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Areas (heads, K, 3), and a preview of each head's mask if the scene gets one; of a single head, always."""
        labels, predictions = self.predict(backbone, heads, scenes, index)
        areas = [class_areas(prediction.numpy(), labels, len(scenes.classes)) for prediction in predictions]
        has_preview = len(heads) == 1 or index in preview_indices(len(scenes))
        return np.stack(areas), [thumbnail(prediction) for prediction in predictions] if has_preview else []

    def predict(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> tuple[np.ndarray, list[Tensor]]:
        """The labels (H, W) of a scene, and the classes (H, W) that each head predicts, on the CPU."""
        image = scene_image(scenes, index)
        labels = scene_mask(scenes, index, image.size[::-1])
        return labels, self.predicted_classes(backbone, heads, image)

    def predict_image(self, backbone: Backbone, head: nn.Module, image: Image.Image) -> np.ndarray:
        return self.predicted_classes(backbone, [head], image)[0].numpy().astype(np.uint8)

    @torch.no_grad()
    def predicted_classes(self, backbone: Backbone, heads: Sequence[nn.Module], image: Image.Image) -> list[Tensor]:
        """The classes (H, W) that each head predicts in an image, on the CPU."""
        side, patch = self.input_size(backbone.spec)[0], backbone.spec.patch_size
        logits: list[list[Tensor]] = [[] for _ in heads]  # of each head and view
        flipped = []
        for flip in (False, True) if self.flip else (False,):
            for size in evaluation_sizes(image.height, image.width, self.short, self.scales):
                pixels = torch.from_numpy(np.asarray(resize_bilinear(image, size)).copy()).permute(2, 0, 1)
                view = backbone.prepare(pixels[None])
                view = view.flip(-1) if flip else view
                windows = sliding_windows(size, side, self.stride)
                crops = [pad_to_patches(view[..., rows, columns], patch) for rows, columns in windows]
                features = torch.cat([self.head_inputs(backbone, crop) for crop in crops])
                flipped.append(flip)
                for head, head_logits in zip(heads, logits, strict=True):
                    head_logits.append(merge_windows(head(features), windows, size))
        shape = (image.height, image.width)
        return [mean_probabilities(views, flipped, shape).argmax(0).cpu() for views in logits]


@dataclass(frozen=True, kw_only=True)
class OnCityscapes(SegmentationLinear):
    """DINOv3's settings on Cityscapes."""

    LAYOUT: ClassVar[str] = "cityscapes"


SOURCE = (
    "DINOv3 (facebookresearch/dinov3 6876159) eval/segmentation/configs/config-ade20k-linear-training.yaml; a tenth of "
    "the training images chooses among eight heads, where the source takes the best on val"
)
SMOKE = SegmentationLinear(
    lr=(3e-3, 1e-2), steps=60, warmup=5, batch=4, crop_size=48, stride=32, short=64, ratios=(0.75, 1.5), kept=2
)
DINOV3 = SegmentationLinear()
PROTOCOLS = {
    "segmentation_linear@smoke": smoke_protocol(SMOKE, "seconds on tiny-ade20k:"),
    **as_reported(
        {"segmentation_linear@dinov3": Protocol(task=DINOV3, version=1, source=f"{SOURCE}; on VOC 2012 ours")}
    ),
    "segmentation_linear_cityscapes@dinov3": Protocol(
        task=OnCityscapes(), version=1, source=f"{SOURCE}; its settings of ADE20K on Cityscapes are ours"
    ),
    "segmentation_linear@capi": Protocol(
        task=CapiLogistic(),
        version=1,
        source="CAPI (facebookresearch/capi 98b4fa1) eval_segmentation.py, logistic regression on patches; L-BFGS of "
        "scipy in float64, which goes on longer than cuML's",
    ),
    "segmentation_linear@capi_smoke": smoke_protocol(
        CapiLogistic(side=64, strengths=(1e-3, 1e-1), iterations=100), "CAPI's logistic regression in seconds"
    ),
}
DENSE = ("segmentation_linear@dinov3", "segmentation_linear_cityscapes@dinov3", "segmentation_linear@capi")
SUITES = {
    "smoke": ("segmentation_linear@smoke", "segmentation_linear@capi_smoke"),
    "dense": DENSE,
    "full": DENSE,
    "today": ("segmentation_linear@dinov3", "segmentation_linear@capi"),
    "everything": DENSE,
}
