"""Segmentation by one linear layer on the frozen patches of the last block, without mmsegmentation: DINOv3's protocol.

Batch norm and a 1x1 convolution are trained on crops of 512 pixels for 40,000 steps; mIoU in sliding windows. DINOv3
reports the best of eight evaluations on the validation images; here held-out training images choose, and NAME_paper
does as the source.

Which one to take: this one beside DINOv3's numbers, for Pascal VOC, Cityscapes and masks of one's own, and where
mmsegmentation cannot be installed. ade_linear@ibot (upernet_ade20k, by mmseg) beside iBOT's: its linear layer reads
four blocks and is trained for 160,000 steps. segmentation_linear@capi beside CAPI's: logistic regressions on one pass
over the images, no training on crops. The three numbers are not comparable.
"""

import math
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, scene_image, scene_mask
from downstream.frozen.heads import HeadTask
from downstream.frozen.patches import READ, CapiTask, Choice, PatchRows, file_labels
from downstream.frozen.task import (
    Random,
    areas_of,
    backbone_of,
    check_classes,
    nearest,
    normalised,
    patch_maps,
    resampled_metrics,
    resamples,
    to_whole_patches,
    whole_patches,
)
from downstream.metrics.previews import preview_indices, preview_masks, thumbnail
from downstream.metrics.scores import constant_scores, scores, weighted_scores
from engine.rows import row_slices
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
    check_up_to,
)
from engine.tasks import Outcome, Protocol, SelectOn, Workspace, smoke_protocol
from engine.training.schedules import FallingOneCycle
from engine.work import Kind, Part, Scale, Work

TIMED_ROWS = 2000  # that a plan fits
HELD_OUT = 7  # of stream_seeds: which training images choose
# logspace(-6, 5, 8)
STRENGTHS = (
    1e-06,
    3.72759372031494e-05,
    0.00138949549437314,
    0.0517947467923121,
    1.93069772888325,
    71.9685673001151,
    2682.69579527973,
    100000.0,
)
LANDSCAPE = 4 / 3  # width by height of an image, as plans assume
REDRAWN = 10  # times, at most, that a crop is drawn again
MOST_OF_ONE = 0.75  # of a crop's labelled pixels, above which it is drawn again
BRIGHTNESS = 32.0  # added, at most
FACTORS = (0.5, 1.5)  # of contrast and saturation
HUE = 0.5  # turns of the circle of hues, at most: mmseg's 18 of 180 are a tenth of it
ROWS_LOGITS = 1 << 22  # logits that a logistic regression holds at once
# Settings and quirks are those of the sources of the protocols below, written anew. B images, H x W pixels, C crop, D
# width, K classes, h x w patches. Images are float, normalised, unless said.


class SegmentationHead(nn.Module):
    """Batch norm and a 1x1 convolution on patches (B, D, h, w) -> logits (B, K, h, w). Names are the source's."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.batchnorm_layer = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, patches: Tensor, keep: Tensor | None = None) -> Tensor:
        """keep: (B, D), 1 for channels that dropout leaves in an image; None: all, as they are."""
        if keep is not None:
            patches = patches * (keep.to(patches) / (1 - self.dropout))[..., None, None]
        return self.conv(self.batchnorm_layer(patches))


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of logits (B, K, h, w), enlarged to labels (B, H, W), over all pixels: ignored ones count as 0, so
    that crops with many of them weigh less (loss.py:256)."""
    enlarged = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(enlarged, labels.long(), ignore_index=IGNORED, reduction="sum") / labels.numel()


def resized_sides(height: int, width: int, short: int) -> tuple[int, int]:
    """Height and width with the shorter side `short`; the other one is rounded."""
    long = int(short * max(height, width) / min(height, width) + 0.5)
    return (short, long) if height < width else (long, short)


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """To (height, width), bilinear with antialias."""
    return image.resize(size[::-1], Image.Resampling.BILINEAR)


def training_crop(
    image: Image.Image,
    labels: np.ndarray,
    crop: int,
    scale: int,
    ratios: tuple[float, float],
    random: Random,
    flip: float = 0.5,
    most_of_one: float = MOST_OF_ONE,
) -> tuple[Tensor, Tensor]:
    """A random crop in random colours: pixels (3, h, w) uint8, h and w up to `crop`, and labels (h, w) uint8.

    scale: shorter side in pixels, times a random factor. labels: (H, W) uint8, IGNORED where there is no class. flip:
    chance of a mirror image. most_of_one: share of the labelled pixels above which a crop is drawn again.
    Nothing is drawn for a colour change that is off (transforms.py:391-448).
    """
    low, high = ratios
    height, width = labels.shape
    size = resized_sides(height, width, int(scale * (random.random_sample() * (high - low) + low)))
    pixels = np.asarray(resized(image, size))
    labels = nearest(labels, size)
    rows, columns = _drawn_window(labels, crop, random)
    for _ in range(REDRAWN):
        if _is_varied(labels[rows, columns], most_of_one):
            break
        rows, columns = _drawn_window(labels, crop, random)
    pixels, labels = pixels[rows, columns], labels[rows, columns]
    if random.rand() < flip:
        pixels, labels = pixels[:, ::-1], labels[:, ::-1]
    coloured = _recoloured(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), random)
    return coloured, torch.from_numpy(labels.copy())


def _drawn_window(labels: np.ndarray, crop: int, random: Random) -> tuple[slice, slice]:
    tops, lefts = (max(side - crop, 0) for side in labels.shape)
    top, left = random.randint(0, tops + 1), random.randint(0, lefts + 1)
    return slice(top, top + crop), slice(left, left + crop)


def _is_varied(labels: np.ndarray, most_of_one: float) -> bool:
    """Whether more than one class occurs and none has so large a share of the labelled pixels."""
    counts = np.bincount(labels[labels != IGNORED])
    return np.count_nonzero(counts) > 1 and counts.max() / counts.sum() < most_of_one


def _recoloured(pixels: Tensor, random: Random) -> Tensor:
    """mmseg's photometric distortion on RGB (3, H, W) uint8, each step with a chance of one half."""

    def contrast(pixels: Tensor) -> Tensor:
        return (pixels.float() * random.uniform(*FACTORS)).clip(0, 255).byte() if random.randint(2) else pixels

    if random.randint(2):
        pixels = (pixels.float() + random.uniform(-BRIGHTNESS, BRIGHTNESS)).clip(0, 255).byte()
    contrast_first = random.randint(2)
    pixels = contrast(pixels) if contrast_first else pixels
    if random.randint(2):
        pixels = vision.adjust_saturation(pixels, random.uniform(*FACTORS))
    if random.randint(2):
        pixels = vision.adjust_hue(pixels, random.uniform(-HUE, HUE))
    return pixels if contrast_first else contrast(pixels)


def padded(image: Tensor, labels: Tensor, crop: int) -> tuple[Tensor, Tensor]:
    """Normalised image (3, h, w) and labels (h, w) with zeros and IGNORED at the right and bottom, crop x crop."""
    edges = (0, crop - labels.shape[1], 0, crop - labels.shape[0])
    return F.pad(image, edges), F.pad(labels, edges, value=IGNORED)


def sliding_windows(size: tuple[int, int], crop: int, stride: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the windows of an image (H, W), row by row, the last ones shifted back inside.

    An image smaller than the window in both directions is cut into squares of its shorter side, as in the source
    (inference.py:93-149).
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


def joined_logits(logits: Tensor, windows: Sequence[tuple[slice, slice]], size: tuple[int, int]) -> Tensor:
    """Logits (W, K, h, w) of all windows of an image, each resized to its window -> their mean (1, K, H, W)."""
    total = logits.new_zeros(1, logits.shape[1], *size)
    count = logits.new_zeros(1, 1, *size)
    for own, (rows, columns) in zip(logits.split(1), windows, strict=True):
        shape = rows.stop - rows.start, columns.stop - columns.start
        total[..., rows, columns] += F.interpolate(own, size=shape, mode="bilinear", align_corners=False)
        count[..., rows, columns] += 1
    return total / count


def evaluation_sides(height: int, width: int, short: int, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Height and width of an image at each ratio of the scale `short`; smaller ones are rounded up to multiples of 32
    (inference with test-time augmentation)."""
    sides = []
    for ratio in ratios:
        side = int(short * ratio)
        sides.append(resized_sides(height, width, side if ratio >= 1 else math.ceil(side / 32) * 32))
    return sides


def class_probabilities(logits: Sequence[Tensor], flipped: Sequence[bool], size: tuple[int, int]) -> Tensor:
    """Mean probabilities (K, *size) of the logits (1, K, H, W) of one image at several scales, some mirrored."""
    total: Tensor | float = 0.0
    for values, mirrored in zip(logits, flipped, strict=True):
        shares = F.interpolate(values, size=size, mode="bilinear", align_corners=False).softmax(dim=1)
        total = total + (shares.flip(-1) if mirrored else shares)
    return (total / len(logits))[0]  # type: ignore[index]


@dataclass(frozen=True, kw_only=True)
class SegmentationLinear(HeadTask):
    """Settings of one training."""

    COST: ClassVar[float] = 180.0  # 40,000 steps of 16 crops are 32 passes, at five times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"
    AFTER_TRAINING: ClassVar[tuple[str, ...]] = ("stride", "scales", "flip")

    lr: OneOrMoreDifferent[PositiveFloat] = (1e-3,)  # learning rates to try: a head each, all on the same features
    steps: PositiveInt = 40000  # of the optimizer
    warmup: NonNegativeInt = 1500  # steps over which the rate rises
    batch: PositiveInt = 16  # crops in a step
    weight_decay: NonNegativeFloat = 1e-3  # of all weights, batch norm's too
    beta2: BelowOne = 0.999  # second beta of AdamW
    clip: NonNegativeFloat = 0.0  # largest norm of the gradients; 0: no limit
    dropout: BelowOne = 0.1  # share of the channels that are left out, image by image
    # side of training crops and evaluation windows in pixels, up to the next multiple of the patch
    crop_size: PositiveInt = 512
    stride: PositiveInt = 341  # pixels from one evaluation window to the next
    short: PositiveInt = 512  # shorter side of evaluated images in pixels, and of training images times a factor
    ratios: FactorRange = (0.5, 2.0)  # range of that random factor
    scales: OneOrMoreDifferent[PositiveFloat] = (1.0,)  # of evaluated images: probabilities are averaged
    flip: bool = False  # evaluate mirror images too
    kept: PositiveInt = 8  # times that heads are kept during the training, evenly; the best of them is reported
    select: SelectOn = "holdout"  # images that choose among kept heads and rates: training images held out, or val
    holdout: ProperFraction = 0.1  # share of the training images that choose

    def __post_init__(self) -> None:
        super().__post_init__()
        check_up_to(self, "kept", "steps")

    def selecting(self, select: SelectOn) -> "SegmentationLinear":
        return replace(self, select=select) if self.chooses else self

    @property
    def chooses(self) -> bool:
        """Whether there is more than one head to choose from."""
        return len(self.lr) * self.kept > 1

    def schedule(self) -> FallingOneCycle:
        return FallingOneCycle(warmup=self.warmup, start=1e-6, delayed=True)

    def crop_side(self, spec: FrozenSpec) -> tuple[int, int]:
        side = whole_patches(self.crop_size, spec)
        return side, side

    def crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        image, side = scene_image(scenes, index), self.crop_side(export.spec)[0]
        labels = scene_mask(scenes, index, image.size[::-1])
        pixels, labels = training_crop(image, labels, side, self.short, self.ratios, random)
        return padded(normalised(pixels, export.mean, export.std), labels, side)

    def head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        return SegmentationHead(spec.width, classes, self.dropout)

    def maps(self, backbone: Backbone, images: Tensor) -> Tensor:
        return patch_maps(backbone, images, [(-1, True)])[0]

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        keep = torch.from_numpy(random.random_sample(maps.shape[:2]) >= self.dropout)
        return segmentation_loss(head(maps, keep.to(maps.device)), targets)

    def held_out(self, train: int) -> int:
        """How many of the training images choose among heads: none where validation images do, or nothing is chosen."""
        return max(1, round(self.holdout * train)) if self.select == "holdout" and self.chooses else 0

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        held = self.held_out(images["train"])
        return {
            "crop": self.crop_side(spec)[0],
            "steps": self.steps,
            "batch": self.batch,
            "epochs": f"{self.steps * self.batch / max(images['train'] - held, 1):.1f}",
            "heads to choose from": len(self.lr) * self.kept,
            "images that choose": held or ("validation" if self.chooses else 0),
        }

    def evaluation(self, scale: Scale) -> list[Part]:
        side, images = self.crop_side(scale.spec)[0], scale.images["val"] + self.held_out(scale.images["train"])
        windows = len(sliding_windows((self.short, round(LANDSCAPE * self.short)), side, self.stride))
        flops = (1 + self.flip) * windows * sum(scale**2 for scale in self.scales) * forward_flops(scale.spec, side)
        return [Part(kind="evaluation", count=images, flops=float(flops)), resamples(scale)]

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.opened(export, space)
        check_classes(space, train, val)
        count, held = len(train.places), self.held_out(len(train.places))
        if held >= count:
            raise ValueError(f"{train.scenes.url}: {count} training images, none to hold out; --select val")
        order = np.random.RandomState(stream_seeds(HELD_OUT, space.seed)).permutation(count)
        learnt = train.subset(order[held:])
        heads, backbone = self.train_heads(export, learnt, val, space), backbone_of(export, space)
        best, tried, by_val = len(heads) - 1, [], self.chooses and not held
        if self.chooses:
            judged = self.evaluated(backbone, heads, train.subset(order[:held]) if held else val, space)
            tried = [
                {
                    "lr": head.lr,
                    "step": head.step,
                    "mIoU": scores(np.stack([areas[n] for areas, _ in judged.values()]))["mIoU"],
                }
                for n, head in enumerate(heads)
            ]
            best = max(range(len(heads)), key=lambda n: tried[n]["mIoU"])
        chosen = heads[best]
        if not by_val:
            judged, best = self.evaluated(backbone, [chosen], val, space), 0
        areas = np.zeros((len(val.scenes), len(val.scenes.classes), 3), np.int64)
        places = preview_indices(len(areas)).tolist()
        masks = [np.full((1, 1), IGNORED, np.uint8) for _ in areas]
        for index, (of_heads, small) in judged.items():
            areas[index] = of_heads[best]
            masks[index] = small[best] if small else masks[index]
        constant, floor = constant_scores(areas)
        facts = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.scenes.notes, *val.scenes.notes])),
            "steps": chosen.step,
            "learning_rate": chosen.lr,
            "tried": tried,
            "selection": {
                "on": "validation images" if by_val else "training images held out" if held else "nothing",
                "images": held,
                "training images": len(learnt.places),
            },
            "floor": {"prediction": f"{val.scenes.classes[constant]} everywhere", "metrics": floor},
        }
        return Outcome(
            metrics={
                name: replace(metric, chosen_on_val=by_val)
                for name, metric in resampled_metrics(partial(weighted_scores, [areas]), len(areas)).items()
            },
            arrays={"areas": areas, **(preview_masks(masks) if places else {})},
            facts=facts,
        )

    def judged(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Areas (heads, K, 3), and the heads' small masks if the scene gets a preview."""
        labels, predictions = self.predicted(backbone, heads, scenes, index)
        areas = [areas_of(prediction.numpy(), labels, len(scenes.classes)) for prediction in predictions]
        shown = index in preview_indices(len(scenes))
        return np.stack(areas), [thumbnail(prediction) for prediction in predictions] if shown else []

    @torch.no_grad()
    def predicted(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> tuple[np.ndarray, list[Tensor]]:
        """Labels (H, W) of a scene, and the classes (H, W) that each head predicts."""
        image = scene_image(scenes, index)
        labels = scene_mask(scenes, index, image.size[::-1])
        side, patch = self.crop_side(backbone.spec)[0], backbone.spec.patch_size
        logits: list[list[Tensor]] = [[] for _ in heads]
        flipped = []
        for flip in (False, True) if self.flip else (False,):
            for size in evaluation_sides(image.height, image.width, self.short, self.scales):
                pixels = torch.from_numpy(np.asarray(resized(image, size)).copy()).permute(2, 0, 1)
                view = backbone.prepare(pixels[None])
                view = view.flip(-1) if flip else view
                windows = sliding_windows(size, side, self.stride)
                cut = [to_whole_patches(view[..., rows, columns], patch) for rows, columns in windows]
                maps = torch.cat([self.maps(backbone, window) for window in cut])
                flipped.append(flip)
                for own, head in zip(logits, heads, strict=True):
                    own.append(joined_logits(head(maps), windows, size))
        shape = (labels.shape[0], labels.shape[1])
        return labels, [class_probabilities(own, flipped, shape).argmax(0).cpu() for own in logits]


@dataclass(frozen=True, kw_only=True)
class OnCityscapes(SegmentationLinear):
    """The same on Cityscapes' scenes."""

    LAYOUT: ClassVar[str] = "cityscapes"


@dataclass(frozen=True, kw_only=True)
class PatchLogistic(CapiTask):
    """Settings of CAPI's logistic regression on standardised patches, each labelled with its most frequent class."""

    COST: ClassVar[float] = 20.0  # an image of each split at 224 x 224, and nine fits
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"

    side: PositiveInt = 224  # of the squares that images are squashed to in pixels, up to a multiple of the patch
    strengths: OneOrMoreDifferent[PositiveFloat] = STRENGTHS  # C of  C sum CE + |W|^2 / 2  to choose from
    iterations: PositiveInt = 1000  # of L-BFGS, at most
    holdout: ProperFraction = 0.1  # share of the training images that choose

    @property
    def choices(self) -> list[Choice]:
        return [{"C": strength} for strength in self.strengths]

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        width, fits = scale.spec.width, float(len(self.strengths) + 1)
        train, val = (self.patches(scale.spec) * scale.images[split] for split in ("train", "val"))
        parts = [
            *(self.pass_of(scale, split) for split in scale.images),
            Part(kind="fits", count=fits),
            Part(kind="fit rows", count=fits * train, flops=4.0 * width * scale.classes * self.iterations),
        ]
        return self.work(scale, parts, train + val, 4.0 * width * train)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """And of a row in a fit, from random features, at the middle one of the strengths."""
        random, strength = np.random.RandomState(0), sorted(self.strengths)[len(self.strengths) // 2]
        classes = file_labels(self.opened(export, space)[0].scenes)[1]
        labels = torch.arange(TIMED_ROWS) % classes
        means = random.standard_normal((classes, export.spec.width))[labels]
        noisy = torch.from_numpy(means + random.standard_normal(means.shape)).float()
        features, labels = noisy.to(space.device), labels.to(space.device)
        started = time.perf_counter()
        logistic_weights(features, labels, classes, strength, self.iterations)
        row = (time.perf_counter() - started) / TIMED_ROWS
        return super().benchmark(export, space, seconds) | {"fits": 0.0, "fit rows": row}

    def predicted(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        own = range(space.world.rank, len(choices), space.world.size)

        def predictions() -> dict[int, np.ndarray]:
            if not own:
                return {}
            values, labels = np.unique(memory.file.labels[memory.rows], return_inverse=True)
            features = torch.from_numpy(memory.standardised()).to(space.device)
            truth, classes = torch.from_numpy(labels).to(space.device), len(values)
            fits = {n: logistic_weights(features, truth, classes, choices[n]["C"], self.iterations) for n in own}
            predicted = {number: np.empty((len(queries.rows), 1), np.uint8) for number in own}
            for part in row_slices(len(queries.rows), READ):
                standardised = queries.standardised(part)
                for number, (weights, biases) in fits.items():
                    predicted[number][part, 0] = values[(standardised @ weights.T + biases).argmax(1)]
            return predicted

        predicted = ChainMap(*space.world.gather_results(predictions))
        yield from ((choice, predicted[number]) for number, choice in enumerate(choices))


def logistic_weights(
    features: Tensor, labels: Tensor, classes: int, strength: float, iterations: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (K, D) and biases (K,) of least  C sum CE + |W|^2 / 2,  biases free, by L-BFGS in float64.

    features: (M, D). labels: (M,), below K. strength: C. Rows are read in parts, so that logits stay small.
    """
    width, rows = features.shape[1], ROWS_LOGITS // classes
    onto = features.device

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(flat).to(onto).view(classes, width + 1)
        loss, gradient = 0.0, torch.zeros_like(weights)
        for start in range(0, len(features), rows):
            part, truth = features[start : start + rows].double(), labels[start : start + rows]
            logits = part @ weights[:, :-1].T + weights[:, -1]
            logs = logits.log_softmax(dim=1)
            loss -= float(logs.gather(1, truth[:, None]).sum())
            error = logs.exp()
            error[torch.arange(len(truth), device=onto), truth] -= 1
            gradient[:, :-1] += error.T @ part
            gradient[:, -1] += error.sum(0)
        # Divided by C M, so that the solver's tolerances mean the same at every C.
        scale = 1.0 / (strength * len(features))
        loss = loss / len(features) + scale * float(weights[:, :-1].square().sum()) / 2
        gradient = gradient / len(features)
        gradient[:, :-1] += scale * weights[:, :-1]
        return loss, gradient.flatten().cpu().numpy()

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    solution = minimize(objective, np.zeros(classes * (width + 1)), jac=True, method="L-BFGS-B", options=options)
    weights = solution.x.reshape(classes, width + 1)
    return weights[:, :-1], weights[:, -1]


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
    "segmentation_linear@dinov3": Protocol(task=DINOV3, version=1, source=f"{SOURCE}; on VOC 2012 ours"),
    "segmentation_linear@dinov3_paper": Protocol(
        task=replace(DINOV3, select="val"), version=1, source=SOURCE.partition(";")[0] + "; the best of eight on val"
    ),
    "segmentation_linear_cityscapes@dinov3": Protocol(
        task=OnCityscapes(), version=1, source=f"{SOURCE}; its settings of ADE20K on Cityscapes are ours"
    ),
    "segmentation_linear@capi": Protocol(
        task=PatchLogistic(),
        version=1,
        source="CAPI (facebookresearch/capi 98b4fa1) eval_segmentation.py, logistic regression on patches; L-BFGS of "
        "scipy in float64, which goes on longer than cuML's",
    ),
    "segmentation_linear@capi_smoke": smoke_protocol(
        PatchLogistic(side=64, strengths=(1e-3, 1e-1), iterations=100), "CAPI's logistic regression in seconds"
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
