"""Segmentation by one linear layer on the frozen patches of the last block, without mmsegmentation: DINOv3's protocol.

Batch norm and a 1x1 convolution are trained on crops of 512 pixels for 40,000 steps; mIoU in sliding windows. DINOv3
reports the best of eight evaluations on the validation images; here held-out training images choose, and NAME_paper
does as the source. ade_linear@ibot (upernet_ade20k) is the linear layer of an earlier time: on four blocks, by mmseg.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, mask_classes, scene_image
from downstream.frozen import segmentation as steps
from downstream.frozen.neighbours import logistic_weights
from downstream.frozen.patches import (
    PatchFile,
    SquashedTask,
    labels_in_file,
    moments,
    patch_labels,
    squashed_areas,
    standardised_rows,
)
from downstream.frozen.segmentation import Random, SegmentationHead
from downstream.frozen.task import (
    HeadTask,
    KeptHead,
    UsableScenes,
    backbone_of,
    own_share,
    patch_maps,
    whole_patches,
)
from downstream.metrics.previews import preview_indices, preview_masks, thumbnail
from downstream.metrics.scores import constant_scores, scores, weighted_scores
from engine.progress import Progress
from engine.resampling import resampled, resamples_of
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
from engine.tasks import Metric, Outcome, Protocol, SelectOn, Workspace
from engine.training.schedules import FallingOneCycle
from engine.work import Kind, Part, Scale, Work

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

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: np.random.RandomState) -> Tensor:
        keep = torch.from_numpy(random.random_sample(maps.shape[:2]) >= self.dropout)
        return steps.segmentation_loss(head(maps, keep.to(maps.device)), targets)

    def divided(self, train: UsableScenes, seed: int) -> tuple[UsableScenes, UsableScenes | None]:
        """Training images, and those that choose among heads; None where validation images do, or nothing is chosen."""
        if self.select == "val" or not self.chooses:
            return train, None
        count = len(train.places)
        held = max(1, round(self.holdout * count))
        if held >= count:
            raise ValueError(f"{train.scenes.url}: {count} training images, none to hold out; --select val")
        order = np.random.RandomState(stream_seeds(HELD_OUT, seed)).permutation(count)
        return train.subset(order[held:]), train.subset(order[:held])

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        held = round(self.holdout * images["train"]) if self.select == "holdout" and self.chooses else 0
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
        held = round(self.holdout * scale.images["train"]) if self.select == "holdout" and self.chooses else 0
        windows = len(steps.sliding_windows((self.short, round(LANDSCAPE * self.short)), side, self.stride))
        flops = (1 + self.flip) * windows * sum(scale**2 for scale in self.scales) * forward_flops(scale.spec, side)
        parts = [
            *self.cost_of_training(scale),
            Part(kind="evaluation", count=val + held, flops=float(flops)),
            Part(kind="closing", count=resamples_of(val)),
        ]
        return Work(parts=tuple(parts), iterations=self.steps, memory=self.memory(scale))

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        return self.timed_training(export, space)

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = self.opened(space)
        learnt, choosing = self.divided(train, space.seed)
        heads, backbone = self.train_heads(export, learnt, space), backbone_of(export, space)
        classes = len(val.scenes.classes)
        chosen = heads[-1]
        tried: list[dict[str, Any]] = []
        evaluated: dict[int, np.ndarray] = {}
        if self.chooses:
            areas, shown = self.evaluated(backbone, heads, choosing or val, classes, space)
            tried = [
                {"lr": head.lr, "step": head.step, "mIoU": scores(own)["mIoU"]}
                for head, own in zip(heads, areas, strict=True)
            ]
            best = max(range(len(heads)), key=lambda place: tried[place]["mIoU"])
            chosen = heads[best]
            evaluated = {} if choosing else {0: areas[best]}
        if not evaluated:
            areas, shown = self.evaluated(backbone, [chosen], val, classes, space)
            best, evaluated = 0, {0: areas[0]}
        return self.outcome(evaluated[0], shown[best], chosen, tried, (train, val, learnt, choosing))

    def evaluated(
        self, backbone: Backbone, heads: Sequence[KeptHead], images: UsableScenes, classes: int, space: Workspace
    ) -> tuple[list[np.ndarray], list[dict[int, np.ndarray]]]:
        """Of each head areas (N, K, 3) of all scenes, zero for skipped ones, and small masks of the shown ones.

        Images go through the network once, however many heads there are.
        """
        spec, world = backbone.spec, space.world
        modules = [head.of(self.head(spec, classes), space.device) for head in heads]
        scenes, shown = images.scenes, set(preview_indices(len(images.scenes)).tolist())
        areas = np.zeros((len(heads), len(scenes), classes, 3), np.int64)
        masks: list[dict[int, np.ndarray]] = [{} for _ in heads]

        def work() -> None:
            own = own_share(images.places, space)
            with Progress(f"evaluating on {scenes.url} {scenes.split}", len(own), quiet=not world.is_rank0) as progress:
                for index in own.tolist():
                    labels, predictions = self.predicted(backbone, modules, scenes, index)
                    for number, prediction in enumerate(predictions):
                        areas[number, index] = steps.areas_of(prediction.numpy(), labels, classes)
                        if index in shown:
                            masks[number][index] = thumbnail(prediction)
                    progress.advance(1)

        world.on_all_ranks(work)
        total = torch.from_numpy(areas).to(space.device)
        world.add_up(total)
        gathered = zip(*world.gather_objects(masks), strict=True)
        return list(total.cpu().numpy()), [dict(ChainMap(*parts)) for parts in gathered]

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

    def outcome(
        self,
        areas: np.ndarray,
        shown: Mapping[int, np.ndarray],
        chosen: KeptHead,
        tried: Sequence[Mapping[str, Any]],
        images: tuple[UsableScenes, UsableScenes, UsableScenes, UsableScenes | None],
    ) -> Outcome:
        train, val, learnt, choosing = images
        count, by_val = len(val.scenes), self.chooses and choosing is None
        drawn = resampled(partial(weighted_scores, [areas]), count)
        constant, floor = constant_scores(areas)
        places = preview_indices(count).tolist()
        masks = [shown.get(place, np.full((1, 1), IGNORED, np.uint8)) for place in range(count)]
        facts = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.scenes.notes, *val.scenes.notes])),
            "steps": chosen.step,
            "learning_rate": chosen.lr,
            "tried": list(tried),
            "selection": {
                "on": "validation images" if by_val else "training images held out" if choosing else "nothing",
                "images": len(choosing.places) if choosing else 0,
                "training images": len(learnt.places),
            },
            "floor": {"prediction": f"{val.scenes.classes[constant]} everywhere", "metrics": floor},
        }
        return Outcome(
            metrics={
                name: Metric(value=value, resampled=drawn[name], chosen_on_val=by_val)
                for name, value in scores(areas).items()
            },
            arrays={"areas": areas, **(preview_masks(masks) if places else {})},
            facts=facts,
        )


@dataclass(frozen=True, kw_only=True)
class OnCityscapes(SegmentationLinear):
    """The same on Cityscapes' scenes."""

    LAYOUT: ClassVar[str] = "cityscapes"


@dataclass(frozen=True, kw_only=True)
class PatchLogistic(SquashedTask):
    """Settings of CAPI's logistic regression on standardised patches, each labelled with its most frequent class."""

    COST: ClassVar[float] = 20.0  # an image of each split at 224 x 224, and nine fits
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"

    side: PositiveInt = 224  # of the squares that images are squashed to in pixels, up to a multiple of the patch
    strengths: OneOrMoreDifferent[PositiveFloat] = STRENGTHS  # C of  C sum CE + |W|^2 / 2  to choose from
    iterations: PositiveInt = 1000  # of L-BFGS, at most
    holdout: ProperFraction = 0.1  # share of the training images that choose

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        return {
            "image size": whole_patches(self.side, spec),
            "fits": len(self.strengths) + 1,
            "images that choose": int(self.holdout * images["train"]),
            "forward passes": images["train"] + images["val"],
        }

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        spec, (parts, patches) = scale.spec, self.patch_work(scale)
        rows, val = patches * scale.images["train"], patches * scale.images["val"]
        parts += [
            Part(kind="fits", count=len(self.strengths) + 1),
            Part(kind="fit rows", count=float(len(self.strengths) + 1) * rows, flops=4.0 * spec.width * scale.classes),
            Part(kind="closing", count=resamples_of(scale.images["val"])),
        ]
        needed = 4.0 * spec.width * rows + frozen_bytes(spec, 1, whole_patches(self.side, spec))
        return Work(parts=tuple(parts), memory=needed, disk=(4.0 * spec.width + spec.patch_size**2) * (rows + val))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = self.opened(space)
        memory, queries = (self.squashed(export, images, space) for images in (train, val))
        learnt, held = self.divided(memory, len(train.places), space.seed)
        _, classes, ignored = labels_in_file(val.scenes, np.zeros((0, 0), np.uint8))
        labels = patch_labels(memory.pixels)
        mean, spread = moments(memory.features, learnt)

        def fitted(rows: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Values of the classes that occur (k,), weights (k, D) and biases (k,)."""
            rows = rows[labels[rows] != ignored]
            values, own = np.unique(labels[rows], return_inverse=True)
            features = torch.from_numpy(standardised_rows(memory.features[rows], mean, spread)).to(space.device)
            truth = torch.from_numpy(own).to(space.device)
            return values, *logistic_weights(features, truth, len(values), strength, self.iterations)

        def measured(file: PatchFile, rows: np.ndarray, fit: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
            """Areas (n, K+1, 3) of the images whose patches are given."""
            values, weights, biases = fit
            found = []
            for part in rows.reshape(-1, file.per_image):
                logits = standardised_rows(file.features[part], mean, spread) @ weights.T + biases
                shown = np.repeat(values[logits.argmax(1)][:, None], file.pixels.shape[1], axis=1)
                found.append(squashed_areas(shown, file.pixels[part], classes, ignored))
            return np.stack(found)

        def tried_here() -> dict[float, float]:
            own = self.strengths[space.world.rank :: space.world.size]
            return {each: scores(measured(memory, held, fitted(learnt, each)))["mIoU"] for each in own}

        found = dict(ChainMap(*space.world.gather_results(tried_here)))
        tried = [{"C": strength, "mIoU": found[strength]} for strength in self.strengths]
        best = max(tried, key=lambda each: each["mIoU"])  # the first of equals
        everything = np.arange(len(memory.features))
        fit = space.world.on_rank0(lambda: fitted(everything, best["C"]))
        areas = np.zeros((len(val.scenes), classes + 1, 3), np.int64)
        areas[val.places] = measured(queries, np.arange(len(queries.features)), fit)
        drawn = resampled(partial(weighted_scores, [areas]), len(areas))
        return Outcome(
            metrics={
                name: Metric(value=value, resampled=drawn[name])
                for name, value in scores(areas).items()
                if name != "mAcc"
            },
            arrays={"areas": areas},
            facts={"train": train.facts, "val": val.facts, "C": best["C"], "tried": tried},
            cost={"forwards": memory.forwards + queries.forwards},
        )


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
    "full": ("segmentation_linear@dinov3",),
    "everything": DENSE,
}
