"""Segmentation by one linear layer on the frozen patches of the last block, without mmsegmentation: DINOv3's protocol.

Batch norm and a 1x1 convolution are trained on crops of 512 pixels for 40,000 steps; mIoU in sliding windows. DINOv3
reports the best of eight evaluations on the validation images; here held-out training images choose, and NAME_paper
does as the source.

Which one to take: this one beside DINOv3's numbers, for Pascal VOC, Cityscapes and masks of one's own, and where
mmsegmentation cannot be installed. ade_linear@ibot (upernet_ade20k, by mmseg) beside iBOT's: its linear layer reads
four blocks and is trained for 160,000 steps. segmentation_linear@capi beside CAPI's: logistic regressions on one pass
over the images, no training on crops. The three numbers are not comparable.
"""

import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, mask_classes, scene_image
from downstream.frozen import segmentation as steps
from downstream.frozen.neighbours import logistic_weights
from downstream.frozen.patches import READ, CapiTask, Choice, PatchRows, file_labels
from downstream.frozen.segmentation import Random, SegmentationHead
from downstream.frozen.task import (
    HeadTask,
    backbone_of,
    patch_maps,
    resampled_metrics,
    whole_patches,
)
from downstream.metrics.previews import preview_indices, preview_masks, thumbnail
from downstream.metrics.scores import constant_scores, scores, weighted_scores
from engine.resampling import resamples_of
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
from engine.tasks import Outcome, Protocol, SelectOn, Workspace
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


@dataclass(frozen=True, kw_only=True)
class SegmentationLinear(HeadTask):
    """Settings of one training."""

    COST: ClassVar[float] = 180.0  # 40,000 steps of 16 crops are 32 passes, at five times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"

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

    def after_training(self) -> tuple[str, ...]:
        return ("stride", "scales", "flip")

    def schedule(self) -> FallingOneCycle:
        return FallingOneCycle(warmup=self.warmup, start=1e-6, delayed=True)

    def crop_side(self, spec: FrozenSpec) -> tuple[int, int]:
        side = whole_patches(self.crop_size, spec)
        return side, side

    def crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        image, side = scene_image(scenes, index), self.crop_side(export.spec)[0]
        labels = mask_classes(scenes, index, image.size[::-1])
        pixels, labels = steps.training_crop(image, labels, side, self.short, self.ratios, random)
        return steps.padded(steps.normalised(pixels, export.mean, export.std), labels, side)

    def head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        return SegmentationHead(spec.width, classes, self.dropout)

    def maps(self, backbone: Backbone, images: Tensor) -> Tensor:
        return patch_maps(backbone, images, [(-1, True)])[0]

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        keep = torch.from_numpy(random.random_sample(maps.shape[:2]) >= self.dropout)
        return steps.segmentation_loss(head(maps, keep.to(maps.device)), targets)

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

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        side, val = self.crop_side(scale.spec)[0], scale.images["val"]
        held = self.held_out(scale.images["train"])
        windows = len(steps.sliding_windows((self.short, round(LANDSCAPE * self.short)), side, self.stride))
        flops = (1 + self.flip) * windows * sum(scale**2 for scale in self.scales) * forward_flops(scale.spec, side)
        parts = [
            *self.cost_of_training(scale),
            Part(kind="evaluation", count=val + held, flops=float(flops)),
            Part(kind="closing", count=resamples_of(val)),
        ]
        return Work(parts=tuple(parts), iterations=self.steps, memory=self.memory(scale))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.opened(export, space)
        count, held = len(train.places), self.held_out(len(train.places))
        if held >= count:
            raise ValueError(f"{train.scenes.url}: {count} training images, none to hold out; --select val")
        order = np.random.RandomState(stream_seeds(HELD_OUT, space.seed)).permutation(count)
        learnt = train.subset(order[held:])
        heads, backbone = self.train_heads(export, learnt, space), backbone_of(export, space)
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
        """Areas (heads, K, 3), and of a scene that is shown small masks."""
        labels, predictions = self.predicted(backbone, heads, scenes, index)
        areas = [steps.areas_of(prediction.numpy(), labels, len(scenes.classes)) for prediction in predictions]
        shown = index in preview_indices(len(scenes))
        return np.stack(areas), [thumbnail(prediction) for prediction in predictions] if shown else []

    @torch.no_grad()
    def predicted(
        self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int
    ) -> tuple[np.ndarray, list[Tensor]]:
        """Labels (H, W) of a scene, and the classes (H, W) that each head predicts."""
        image = scene_image(scenes, index)
        labels = mask_classes(scenes, index, image.size[::-1])
        side, patch = self.crop_side(backbone.spec)[0], backbone.spec.patch_size
        logits: list[list[Tensor]] = [[] for _ in heads]
        flipped = []
        for flip in (False, True) if self.flip else (False,):
            for size in steps.evaluation_sides(image.height, image.width, self.short, self.scales):
                pixels = torch.from_numpy(np.asarray(steps.resized(image, size)).copy()).permute(2, 0, 1)
                view = backbone.prepare(pixels[None])
                view = view.flip(-1) if flip else view
                windows = steps.sliding_windows(size, side, self.stride)
                cut = [steps.to_whole_patches(view[..., rows, columns], patch) for rows, columns in windows]
                maps = torch.cat([self.maps(backbone, window) for window in cut])
                flipped.append(flip)
                for own, head in zip(logits, heads, strict=True):
                    own.append(steps.joined_logits(head(maps), windows, size))
        shape = (labels.shape[0], labels.shape[1])
        return labels, [steps.class_probabilities(own, flipped, shape).argmax(0).cpu() for own in logits]


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
        network, disk = self.bytes_of(scale, train + val)
        parts = [
            *(self.pass_of(scale, split) for split in scale.images),
            Part(kind="fits", count=fits),
            Part(kind="fit rows", count=fits * train, flops=4.0 * width * scale.classes * self.iterations),
            Part(kind="closing", count=resamples_of(scale.images["val"])),
        ]
        return Work(parts=tuple(parts), memory=4.0 * width * train + network, disk=disk)

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


SOURCE = (
    "DINOv3 (facebookresearch/dinov3 6876159) eval/segmentation/configs/config-ade20k-linear-training.yaml; a tenth of "
    "the training images chooses among eight heads, where the source takes the best on val"
)
SMOKE = SegmentationLinear(
    lr=(3e-3, 1e-2), steps=60, warmup=5, batch=4, crop_size=48, stride=32, short=64, ratios=(0.75, 1.5), kept=2
)
DINOV3 = SegmentationLinear()
PROTOCOLS = {
    "segmentation_linear@smoke": Protocol(
        task=SMOKE, version=1, source="ours: seconds on tiny-ade20k:; not to be compared with published numbers"
    ),
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
    "segmentation_linear@capi_smoke": Protocol(
        task=PatchLogistic(side=64, strengths=(1e-3, 1e-1), iterations=100),
        version=1,
        source="ours: CAPI's logistic regression in seconds; not to be compared with published numbers",
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
