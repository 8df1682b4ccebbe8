"""Segmentation by nearest neighbours among labelled patches: Hummingbird's and CAPI's evaluations. Nothing is trained.

Hummingbird keeps patches of augmented training images with the share of each class, and a patch of a validation image
gets the shares of its 30 neighbours, weighted. CAPI lets the neighbours vote on each pixel of a patch, and training
images that are held out choose their number and the distance. The two numbers are not comparable: docs/protocols.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, mask_classes, scene_image
from downstream.frozen import neighbours as steps
from downstream.frozen.patches import (
    Distance,
    PatchFile,
    SquashedTask,
    comparing,
    labels_in_file,
    moments,
    nearest_patches,
    patch_labels,
    patches_of,
    squashed_areas,
)
from downstream.frozen.segmentation import areas_of, nearest
from downstream.frozen.task import FrozenTask, UsableScenes, own_share, whole_patches
from downstream.metrics.scores import LABELLED, PREDICTED, RIGHT, scores, weighted_scores
from engine.neighbours import search_bytes, unit_rows
from engine.resampling import resampled, resamples_of
from engine.rows import ChosenRows
from engine.seeding import AUGMENT, START, stream_seeds
from engine.settings import FactorRange, NonNegativeInt, OneOrMoreDifferent, PositiveFloat, PositiveInt, ProperFraction
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.work import Part, Scale, Work

# hbird/utils/transforms.py:29; the last number is a slip for 0.225 in all that this code has published.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.255)
JITTER = 0.1  # of brightness, contrast, saturation and hue, at most
RATIO = (3 / 4, 4 / 3)  # width by height of a memory image's crop
TRIES = 10  # crops that are drawn before the whole image is taken


@dataclass(frozen=True, kw_only=True)
class Hummingbird(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 12.0  # an image of each split at five times the pixels of 224 x 224, and a search
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "dense_knn"

    side: PositiveInt = 512  # of the squares that images are made to in pixels, up to a multiple of the patch
    memory: NonNegativeInt = 1024000  # patches that are kept, shared evenly by all images; 0: all of them
    epochs: PositiveInt = 1  # augmented views of each training image
    area: FactorRange = (0.5, 2.0)  # of a view's crop, as a share of the image's
    k: PositiveInt = 30  # neighbours of a patch
    beta: PositiveFloat = 0.02  # temperature of their weights
    matched: bool = True  # take predicted classes for those that they overlap most, by Hungarian assignment

    def kept_of(self, spec: FrozenSpec, images: int) -> int:
        """Patches that are kept of each view of so many training images."""
        everything = (whole_patches(self.side, spec) // spec.patch_size) ** 2
        kept = self.memory // (images * self.epochs) if self.memory else everything
        if not kept:
            raise ValueError(
                f"a memory of {self.memory} patches has room for none of each of {images * self.epochs} views; "
                f"--set {self.KEY}.memory={images * self.epochs}"
            )
        return min(kept, everything)

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        kept = self.kept_of(spec, images["train"])
        memory = kept * images["train"] * self.epochs
        if memory < self.k:
            raise ValueError(f"k={self.k} neighbours among {memory} patches; raise memory or lower k")
        return {
            "image size": whole_patches(self.side, spec),
            "patches of each view": kept,
            "patches in memory": memory,
            "forward passes": images["train"] * self.epochs + images["val"],
        }

    def cost(self, scale: Scale) -> Work:
        sizes, spec = self.summary(scale.spec, scale.images), scale.spec
        flops, val = float(forward_flops(spec, sizes["image size"])), scale.images["val"]
        queries, memory = val * (sizes["image size"] // spec.patch_size) ** 2, sizes["patches in memory"]
        name = f"square{sizes['image size']}"
        parts = (
            Part(kind="features", count=scale.images["train"] * self.epochs, flops=flops, of=f"memory {name}"),
            Part(kind="features", count=val, flops=flops, of=f"val {name}"),
            Part(kind="comparisons", count=float(queries) * memory, flops=2.0 * spec.width),
            Part(kind="closing", count=resamples_of(val)),
        )
        size = 4.0 * spec.width + spec.patch_size**2
        needed = search_bytes(memory, queries, spec.width, self.k) + frozen_bytes(spec, 1, sizes["image size"])
        return Work(parts=parts, memory=needed, disk=size * (memory + queries))

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
        return {self.view(export.spec): ((-1, True),)}

    def view(self, spec: FrozenSpec) -> str:
        """Name of how validation images are prepared."""
        return f"square{whole_patches(self.side, spec)}_bilinear_hummingbird"

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = self.opened(space)
        memory, queries = self.remembered(export, train, space), self.asked(export, val, space)
        similarities, indices = nearest_patches(memory.features, queries.features, self.k, space, unit_rows)
        grid = whole_patches(self.side, export.spec) // export.spec.patch_size
        none = np.zeros((0, 0), np.uint8)
        _, classes, ignored = labels_in_file(val.scenes, none)

        def predicted(place: int) -> tuple[np.ndarray, np.ndarray]:
            """Classes of the pixels of one validation image, and their labels: (S, S)."""
            rows = slice(place * queries.per_image, (place + 1) * queries.per_image)
            pixels = memory.pixels[indices[rows]]
            pixels = np.where(pixels == ignored, 0, pixels)  # unlabelled pixels are class 0 in a memory
            shares = steps.attended_labels(similarities[rows], pixels, classes, self.beta)
            labels = steps.image_of_patches(queries.pixels[rows], (grid, grid))
            maps = torch.from_numpy(shares).view(grid, grid, classes)
            return steps.enlarged_labels(maps, (labels.shape[0], labels.shape[1])), labels

        own, world = own_share(np.arange(len(val.places)), space).tolist(), space.world
        counts = torch.zeros(classes, classes, dtype=torch.int64)

        def count() -> None:
            for place in own:
                counts.add_(torch.from_numpy(steps.confusion(*predicted(place), classes, [ignored])))

        world.on_all_ranks(count)
        world.add_up(counts)
        mapping = steps.matched_classes(counts.numpy()) if self.matched else np.arange(classes)
        areas = torch.zeros(len(val.scenes), classes, 3, dtype=torch.int64)

        def measure() -> None:
            for place in own:
                shown, labels = predicted(place)
                areas[val.places[place]] = torch.from_numpy(areas_of(mapping[shown], labels, classes, [ignored]))

        world.on_all_ranks(measure)
        world.add_up(areas)
        facts = {
            "train": train.facts,
            "val": val.facts,
            "patches": len(memory.features),
            "classes": classes,
            "matched": np.flatnonzero(mapping != np.arange(classes)).tolist(),
        }
        return outcome_of(areas.numpy(), facts, memory.forwards + queries.forwards, absent=0.0)

    def remembered(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> PatchFile:
        """The memory: of each view of a training image its rarest patches, or all."""
        spec, seed = export.spec, space.seed
        side, count = whole_patches(self.side, spec), self.kept_of(spec, len(train.places))
        scenes = train.scenes
        _, classes, ignored = labels_in_file(scenes, np.zeros((0, 0), np.uint8))

        def prepared(backbone: Backbone, index: int, place: int) -> tuple[Tensor, np.ndarray]:
            random = np.random.RandomState(stream_seeds(AUGMENT, seed, place))
            return self.augmented(scenes, index, side, random)

        def rarest(pixels: np.ndarray, place: int) -> np.ndarray:
            uniform = np.random.RandomState(stream_seeds(START, seed, place)).random_sample(len(pixels))
            return steps.rare_patches(np.where(pixels == ignored, 0, pixels), uniform, classes, count)

        views = train._replace(places=np.tile(train.places, self.epochs))
        area = "-".join(map(str, self.area))
        name = f"memory{side}_area{area}_views{self.epochs}_kept{count}_seed{seed}"
        return patches_of(
            export,
            views,
            name,
            prepared,
            space,
            per_image=count,
            patch=spec.patch_size,
            chosen=rarest if self.memory else None,
        )

    def augmented(
        self, scenes: SceneSet, index: int, side: int, random: np.random.RandomState
    ) -> tuple[Tensor, np.ndarray]:
        """A view of a training image; its colours are changed before it is normalised, then cropped."""
        image = scene_image(scenes, index)
        labels = labels_in_file(scenes, mask_classes(scenes, index, image.size[::-1]))[0]
        for adjust in (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation):
            if random.rand() < 0.5:
                image = adjust(image, random.uniform(1 - JITTER, 1 + JITTER))
        if random.rand() < 0.5:
            image = vision.adjust_hue(image, random.uniform(-JITTER, JITTER))
        top, left, height, width = drawn_crop(labels.shape[0], labels.shape[1], self.area, random)
        pixels = hummingbird_pixels(image)[:, top : top + height, left : left + width]
        pixels = vision.resize(pixels, [side, side], vision.InterpolationMode.BILINEAR, antialias=True)
        return pixels, nearest(labels[top : top + height, left : left + width], (side, side))

    def asked(self, export: FrozenExport, val: UsableScenes, space: Workspace) -> PatchFile:
        """All patches of the validation images."""
        side, patch, scenes = whole_patches(self.side, export.spec), export.spec.patch_size, val.scenes

        def prepared(backbone: Backbone, index: int, place: int) -> tuple[Tensor, np.ndarray]:
            image = scene_image(scenes, index)
            labels = labels_in_file(scenes, mask_classes(scenes, index, image.size[::-1]))[0]
            square = image.resize((side, side), Image.Resampling.BILINEAR)
            return hummingbird_pixels(square), nearest(labels, (side, side))

        count = (side // patch) ** 2
        return patches_of(export, val, self.view(export.spec), prepared, space, per_image=count, patch=patch)


def hummingbird_pixels(image: Image.Image) -> Tensor:
    """(3, H, W) float32, normalised as the source does, whatever the network's own statistics."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (vision.pil_to_tensor(image).float() / 255 - mean) / std


def drawn_crop(
    height: int, width: int, area: tuple[float, float], random: np.random.RandomState
) -> tuple[int, int, int, int]:
    """Top, left, height and width of torchvision's RandomResizedCrop, whose area may be larger than the image's: such
    crops are drawn again, and in the end the whole image is taken, cut to the nearest ratio."""
    for _ in range(TRIES):
        size, ratio = height * width * random.uniform(*area), np.exp(random.uniform(*np.log(RATIO)))
        across, down = round(float(np.sqrt(size * ratio))), round(float(np.sqrt(size / ratio)))
        if 0 < across <= width and 0 < down <= height:
            return random.randint(0, height - down + 1), random.randint(0, width - across + 1), down, across
    down = min(height, round(width / RATIO[0]))
    across = min(width, round(height * RATIO[1]))
    return (height - down) // 2, (width - across) // 2, down, across


@dataclass(frozen=True, kw_only=True)
class Capi(SquashedTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # an image of each split at 224 x 224, and three searches
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "dense_knn"

    side: PositiveInt = 224  # of the squares that images are squashed to in pixels, up to a multiple of the patch
    k: OneOrMoreDifferent[PositiveInt] = (1, 3, 10, 30)  # numbers of neighbours to choose from
    distances: OneOrMoreDifferent[Distance] = ("cosine", "L2")  # distances to choose from
    holdout: ProperFraction = 0.1  # share of the training images that choose

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        side = whole_patches(self.side, spec)
        return {
            "image size": side,
            "patches of an image": (side // spec.patch_size) ** 2,
            "images that choose": int(self.holdout * images["train"]),
            "forward passes": images["train"] + images["val"],
        }

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        spec, (parts, patches) = scale.spec, self.patch_work(scale)
        train, val = (patches * scale.images[split] for split in ("train", "val"))
        held = self.holdout * train
        pairs = len(self.distances) * held * (train - held) + val * train
        parts += [
            Part(kind="comparisons", count=float(pairs), flops=2.0 * spec.width),
            Part(kind="closing", count=resamples_of(scale.images["val"])),
        ]
        needed = search_bytes(train, val, spec.width, max(self.k)) + frozen_bytes(spec, 1, self.side)
        return Work(parts=tuple(parts), memory=needed, disk=(4.0 * spec.width + spec.patch_size**2) * (train + val))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = self.opened(space)
        memory, queries = (self.squashed(export, images, space) for images in (train, val))
        learnt, held = self.divided(memory, len(train.places), space.seed)
        _, classes, ignored = labels_in_file(val.scenes, np.zeros((0, 0), np.uint8))
        labelled = patch_labels(memory.pixels) != ignored
        mean, spread = moments(memory.features, learnt)
        tried: list[dict[str, Any]] = []
        for distance in self.distances:
            bank, asked = ChosenRows(memory.features, learnt[labelled[learnt]]), ChosenRows(memory.features, held)
            found = self.neighbours(bank, asked, max(self.k), distance, (mean, spread), space)
            for k in self.k:
                areas = voted_areas(
                    memory.pixels, found[:, :k], memory.pixels, held, memory.per_image, classes, ignored
                )
                tried.append({"k": k, "distance": distance, "mIoU": scores(areas)["mIoU"]})
        tried.sort(key=lambda each: (self.k.index(each["k"]), self.distances.index(each["distance"])))
        best = max(tried, key=lambda each: each["mIoU"])  # the first of equals
        bank, asked = (
            ChosenRows(memory.features, np.flatnonzero(labelled)),
            ChosenRows(queries.features, np.arange(len(queries.features))),
        )
        found = self.neighbours(bank, asked, best["k"], best["distance"], (mean, spread), space)
        areas = np.zeros((len(val.scenes), classes + 1, 3), np.int64)
        areas[val.places] = voted_areas(
            memory.pixels, found, queries.pixels, asked.chosen, queries.per_image, classes, ignored
        )
        facts = {
            "train": train.facts,
            "val": val.facts,
            "patches": len(bank),
            "k": best["k"],
            "distance": best["distance"],
            "tried": tried,
        }
        return outcome_of(areas, facts, memory.forwards + queries.forwards, absent=float("nan"))

    def neighbours(
        self,
        bank: ChosenRows,
        asked: ChosenRows,
        k: int,
        distance: Distance,
        standard: tuple[np.ndarray, np.ndarray],
        space: Workspace,
    ) -> np.ndarray:
        """Rows of the file (Q, k) of the neighbours, the nearest first."""
        _, indices = nearest_patches(bank, asked, k, space, comparing(asked, *standard, distance))
        return bank.chosen[indices]


def voted_areas(
    pixels: np.ndarray,
    neighbours: np.ndarray,
    asked_pixels: np.ndarray,
    rows: np.ndarray,
    per_image: int,
    classes: int,
    ignored: int,
) -> np.ndarray:
    """Areas (n, K+1, 3) of images whose patches are asked about. pixels: labels of the memory, of which neighbours
    (Q, k) are rows. asked_pixels: labels of a file whose rows (Q,) are asked about, image by image."""
    images = len(rows) // per_image
    areas = np.zeros((images, classes + 1, 3), np.int64)
    for image in range(images):
        part = slice(image * per_image, (image + 1) * per_image)
        voted = steps.voted_pixels(pixels[neighbours[part]])
        areas[image] = squashed_areas(voted, asked_pixels[rows[part]], classes, ignored)
    return areas


def outcome_of(areas: np.ndarray, facts: Mapping[str, Any], forwards: int, absent: float) -> Outcome:
    """absent: IoU of a class that occurs neither in labels nor in predictions; NaN: none."""

    def score(weights: np.ndarray) -> dict[str, np.ndarray]:
        if np.isnan(absent):
            return {name: values for name, values in weighted_scores([areas], weights).items() if name != "mAcc"}
        count, *rest = areas.shape
        totals = (weights @ areas.reshape(count, -1).astype(np.float64)).reshape(-1, *rest)
        right, shown, labelled = (totals[..., column] for column in (RIGHT, PREDICTED, LABELLED))
        iou = right / np.maximum(shown + labelled - right, 1)
        return {"mIoU": 100 * iou.mean(1), "aAcc": 100 * right.sum(1) / labelled.sum(1)}

    drawn, whole = resampled(score, len(areas)), score(np.ones((1, len(areas))))
    return Outcome(
        metrics={name: Metric(value=float(whole[name][0]), resampled=drawn[name]) for name in whole},
        arrays={"areas": areas},
        facts=dict(facts),
        cost={"forwards": forwards},
    )


HBIRD = (
    "open-hummingbird-eval 2.0 (vpariza/open-hummingbird-eval 5e79da2) with an exact search; its quirks are kept: the "
    "standard deviation 0.255 of blue, predicted classes matched to classes, absent classes that count as 0, 151 "
    "classes of ADE20K of which the unlabelled one counts as 0"
)
MEMORIES = {"": 1_024_000, "_small": 102_400, "_large": 10_240_000}
PROTOCOLS = {
    "dense_knn@smoke": Protocol(
        task=Hummingbird(side=64, memory=2048, k=10),
        version=1,
        source="ours: seconds on tiny-ade20k:; not to be compared with published numbers",
    ),
    **{
        f"dense_knn@hummingbird{name}": Protocol(task=Hummingbird(memory=size), version=1, source=HBIRD)
        for name, size in MEMORIES.items()
    },
    "dense_knn@capi": Protocol(
        task=Capi(),
        version=1,
        source="CAPI (facebookresearch/capi 98b4fa1) eval_segmentation.py, its k-NN in float32; images, labels and "
        "selection as there",
    ),
    "dense_knn@capi_smoke": Protocol(
        task=replace(Capi(), side=64, k=(1, 5)),
        version=1,
        source="ours: CAPI's evaluation in seconds on tiny-ade20k:; not to be compared with published numbers",
    ),
}
DENSE = ("dense_knn@hummingbird", "dense_knn@capi")
SUITES = {
    "smoke": ("dense_knn@smoke", "dense_knn@capi_smoke"),
    "dense": DENSE,
    "full": ("dense_knn@hummingbird",),
    "everything": DENSE,
}
