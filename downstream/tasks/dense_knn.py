"""Segmentation by nearest neighbours among labelled patches: Hummingbird's and CAPI's evaluations. Nothing is trained.

Hummingbird keeps patches of augmented training images with the share of each class, and a patch of a validation image
gets the shares of its 30 neighbours, weighted. CAPI lets the neighbours vote on each pixel of a patch, and training
images that are held out choose their number and the distance. The two numbers are not comparable: docs/protocols.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.frozen.patches import (
    CapiTask,
    Choice,
    Distance,
    PatchFile,
    PatchRows,
    SquareTask,
    comparing,
    file_labels,
    labelled_image,
    most_frequent,
    nearest_patches,
    patches_of,
)
from downstream.frozen.task import UsableScenes, nearest, normalised_pixels, shared_out, whole_patches
from downstream.metrics.scores import LABELLED, PREDICTED, RIGHT
from engine.neighbours import search_bytes, search_seconds, unit_rows
from engine.rows import row_slices
from engine.seeding import AUGMENT, START, stream_seeds
from engine.settings import FactorRange, NonNegativeInt, OneOrMoreDifferent, PositiveFloat, PositiveInt, ProperFraction
from engine.tasks import Protocol, Workspace, smoke_protocol
from engine.work import Kind, Part, Scale, Work
from imagesets.random_crops import OwnDraws, RandomResizedCrop

# hbird/utils/transforms.py:29; the last number is a slip for 0.225 in all that this code has published.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.255)
JITTER = 0.1  # of brightness, contrast, saturation and hue, at most
VOTED = 4096  # patches whose neighbours' pixels are read at once
TOGETHER = 1 << 22  # labels of neighbours that are counted at once
# M patches of a memory, Q patches that are asked about, K classes, P pixels of a patch.


def image_of_patches(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Labels of patches (L, P) -> those of the image (H, W): the inverse of `patch_pixels`."""
    side = round(pixels.shape[1] ** 0.5)
    return pixels.reshape(*grid, side, side).swapaxes(1, 2).reshape(grid[0] * side, grid[1] * side)


def class_shares(pixels: np.ndarray, classes: int) -> np.ndarray:
    """Labels (M, P), all below K -> share of each class among a patch's pixels (M, K) float32."""
    places = pixels.astype(np.int64) + classes * np.arange(len(pixels))[:, None]
    counts = np.bincount(places.ravel(), minlength=classes * len(pixels)).reshape(len(pixels), classes)
    return (counts / pixels.shape[1]).astype(np.float32)


def rare_patches(pixels: np.ndarray, uniform: np.ndarray, classes: int, count: int) -> np.ndarray:
    """Which `count` patches of an image go into a memory: those with the lowest scores, in that order.

    pixels: labels (L, P). uniform: (L,) random numbers from 0 to 1. A patch's score is that times the sum, over its
    classes, of how many patches of the image have the class (hbird_eval.py:452-520).
    """
    present = class_shares(pixels, classes) > 0
    return np.argsort(present @ present.sum(0) * uniform, kind="stable")[:count]


def attended_labels(similarities: np.ndarray, neighbour_pixels: np.ndarray, classes: int, beta: float) -> np.ndarray:
    """Shares of classes (Q, K) float32: the neighbours' own, weighted by softmax(cosine / beta).

    similarities (Q, k): cosines. neighbour_pixels (Q, k, P): labels of their pixels.
    """
    weights = torch.from_numpy(similarities / np.float32(beta)).softmax(dim=1).numpy()
    label_shares = np.empty((len(weights), classes), np.float32)
    step = max(1, TOGETHER // (weights.shape[1] * max(classes, neighbour_pixels.shape[2])))
    for part in row_slices(len(weights), step):
        shares = class_shares(neighbour_pixels[part].reshape(-1, neighbour_pixels.shape[2]), classes)
        label_shares[part] = np.einsum("qk,qkc->qc", weights[part], shares.reshape(*weights[part].shape, classes))
    return label_shares


def enlarged_labels(shares: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Shares of classes on the grid (h, w, K) -> the largest one's class at each pixel (H, W)."""
    maps = F.interpolate(shares.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False)
    return maps[0].argmax(0).numpy()


def voted_pixels(neighbour_pixels: np.ndarray) -> np.ndarray:
    """Labels (Q, k, P) of neighbours -> those of the patches (Q, P), each pixel by a vote of the k at its own place."""
    labels = np.empty((len(neighbour_pixels), neighbour_pixels.shape[2]), neighbour_pixels.dtype)
    for part in row_slices(len(labels), max(1, TOGETHER // max(1, neighbour_pixels[:1].size))):
        labels[part] = most_frequent(neighbour_pixels[part], axis=1)
    return labels


def confusion(predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int]) -> np.ndarray:
    """(K, K) pixels: rows are labels, columns predictions; none of the `ignored` labels."""
    known = ~np.isin(labels, ignored)
    places = classes * labels[known].astype(np.int64) + predicted[known]
    return np.bincount(places, minlength=classes * classes).reshape(classes, classes)


def matched_classes(counts: np.ndarray) -> np.ndarray:
    """(K,) the class that each predicted class is taken for, so that the sum of IoUs is largest (eval_metrics.py:143).

    counts: (K, K) confusion.
    """
    union = counts.sum(0)[None] + counts.sum(1)[:, None] - counts
    iou = np.divide(counts, union, out=np.zeros(counts.shape), where=union > 0)
    rows, columns = linear_sum_assignment(iou, maximize=True)
    return rows[np.argsort(columns)]


class SearchTask(SquareTask):
    """Base of both: what a search costs."""

    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "dense_knn"

    def work_of_search(self, scale: Scale, passes: list[Part], memory: float, pairs: float, k: int) -> Work:
        """Work of passes through the network, and of a search among `memory` patches with so many pairs in all."""
        queries, width = self.patches(scale.spec) * scale.images["val"], scale.spec.width
        search = Part(kind="comparisons", count=float(pairs), flops=2.0 * width)
        return self.work(scale, [*passes, search], memory + queries, search_bytes(int(memory), queries, width, k))

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        timed = super().benchmark(export, space, seconds)
        return timed | search_seconds("faiss", space.device, export.spec.width)


@dataclass(frozen=True, kw_only=True)
class Hummingbird(SearchTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 12.0  # an image of each split at five times the pixels of 224 x 224, and a search

    side: PositiveInt = 512  # of the squares that images are made to in pixels, up to a multiple of the patch
    memory: NonNegativeInt = 1024000  # patches that are kept, shared evenly by all images; 0: all of them
    epochs: PositiveInt = 1  # augmented views of each training image
    area: FactorRange = (0.5, 2.0)  # of a view's crop, as a share of the image's
    k: PositiveInt = 30  # neighbours of a patch
    beta: PositiveFloat = 0.02  # temperature of their weights
    matched: bool = True  # take predicted classes for those that they overlap most, by Hungarian assignment

    def kept_of(self, spec: FrozenSpec, images: int) -> int:
        """Patches that are kept of each view of so many training images."""
        kept = self.memory // (images * self.epochs) if self.memory else self.patches(spec)
        if not kept:
            raise ValueError(
                f"a memory of {self.memory} patches has room for none of each of {images * self.epochs} views; "
                f"--set {self.KEY}.memory={images * self.epochs}"
            )
        return min(kept, self.patches(spec))

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
        memory = self.summary(scale.spec, scale.images)["patches in memory"]
        kept = self.memory_view(scale.spec, scale.images["train"])
        passes = [self.pass_of(scale, "train", kept, self.epochs), self.pass_of(scale, "val")]
        pairs = self.patches(scale.spec) * scale.images["val"] * memory
        return self.work_of_search(scale, passes, memory, pairs, self.k)

    def view(self, spec: FrozenSpec) -> str:
        return f"square{whole_patches(self.side, spec)}_bilinear_hummingbird"

    def memory_view(self, spec: FrozenSpec, images: int) -> str:
        """Name of how so many training images are prepared, and which of their patches are kept."""
        area, kept = "-".join(map(str, self.area)), self.kept_of(spec, images)
        return f"memory{whole_patches(self.side, spec)}_area{area}_views{self.epochs}_kept{kept}"

    def square(self, export: FrozenExport, images: UsableScenes, place: int) -> tuple[Tensor, Tensor]:
        size = (whole_patches(self.side, export.spec),) * 2
        image, labels = labelled_image(images.scenes, int(images.places[place]))
        pixels = normalised_pixels(image.resize(size, Image.Resampling.BILINEAR), MEAN, STD)
        return pixels, torch.from_numpy(nearest(labels, size))

    def augmented(self, side: int, seed: int, images: UsableScenes, place: int) -> tuple[Tensor, Tensor]:
        """A view of a training image; its colours are changed before it is normalised, then cropped."""
        random = np.random.RandomState(stream_seeds(AUGMENT, seed, place))
        image, labels = labelled_image(images.scenes, int(images.places[place]))
        for adjust in (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation):
            if random.rand() < 0.5:
                image = adjust(image, random.uniform(1 - JITTER, 1 + JITTER))
        if random.rand() < 0.5:
            image = vision.adjust_hue(image, random.uniform(-JITTER, JITTER))
        rule = RandomResizedCrop(size=side, scale=self.area, interpolation="bilinear", draws=OwnDraws(random))
        left, top, right, bottom = rule.window(*image.size)
        crop = normalised_pixels(image, MEAN, STD)[:, top:bottom, left:right]
        pixels = vision.resize(crop, [side, side], vision.InterpolationMode.BILINEAR, antialias=True)
        return pixels, torch.from_numpy(nearest(labels[top:bottom, left:right], (side, side)))

    def remembered(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> PatchFile:
        """Of each view of a training image its rarest patches, or all."""
        spec, seed, images = export.spec, space.seed, len(train.places)
        count, (_, classes, ignored) = self.kept_of(spec, images), file_labels(train.scenes)

        def rarest(pixels: np.ndarray, place: int) -> np.ndarray:
            uniform = np.random.RandomState(stream_seeds(START, seed, place)).random_sample(len(pixels))
            return rare_patches(np.where(pixels == ignored, 0, pixels), uniform, classes, count)

        views = train._replace(places=np.tile(train.places, self.epochs))
        name = f"{self.memory_view(spec, images)}_seed{seed}"
        square = partial(self.augmented, whole_patches(self.side, spec), seed, views)
        chosen = rarest if self.memory else None
        return patches_of(export, views, name, square, space, count, chosen)

    def measured(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> tuple[np.ndarray, Mapping[str, Any]]:
        similarities, indices = nearest_patches(memory.features, queries.features, self.k, space, unit_rows)
        images, grid, classes = len(queries) // queries.per_image, round(queries.per_image**0.5), queries.classes
        ignored = queries.ignored

        def counted(place: int) -> np.ndarray:
            """Pixels (K, K) of one validation image by label and predicted class."""
            rows = slice(place * queries.per_image, (place + 1) * queries.per_image)
            pixels = memory.pixels[indices[rows]]
            pixels = np.where(pixels == ignored, 0, pixels)  # unlabelled pixels are class 0 in a memory
            shares = attended_labels(similarities[rows], pixels, classes, self.beta)
            labels = image_of_patches(queries.pixels[rows], (grid, grid))
            maps = torch.from_numpy(shares).view(grid, grid, classes)
            predicted = enlarged_labels(maps, (labels.shape[0], labels.shape[1]))
            return confusion(predicted, labels, classes, [ignored]).astype(np.int32)

        counts = np.stack([*shared_out(np.arange(images), counted, space, "labelling patches").values()])
        mapping = matched_classes(counts.sum(0)) if self.matched else np.arange(classes)
        each, shown = np.arange(classes), np.argsort(mapping)  # the predicted class that is taken for each class
        areas = np.stack([counts[:, each, shown], counts.sum(1)[:, shown], counts.sum(2)], axis=2)
        return areas, {"classes": classes, "matched": np.flatnonzero(mapping != each).tolist()}

    def scored(self, areas: np.ndarray, weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """A class that occurs neither in labels nor in predictions counts as 0."""
        count, *rest = areas.shape
        totals = (weights @ areas.reshape(count, -1).astype(np.float64)).reshape(-1, *rest)
        right, shown, labelled = (totals[..., column] for column in (RIGHT, PREDICTED, LABELLED))
        iou = right / np.maximum(shown + labelled - right, 1)
        return {"mIoU": 100 * iou.mean(1), "aAcc": 100 * right.sum(1) / labelled.sum(1)}


@dataclass(frozen=True, kw_only=True)
class OnCityscapes(Hummingbird):
    """The same on Cityscapes' scenes."""

    LAYOUT: ClassVar[str] = "cityscapes"


@dataclass(frozen=True, kw_only=True)
class Capi(CapiTask, SearchTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # an image of each split at 224 x 224, and three searches

    side: PositiveInt = 224  # of the squares that images are squashed to in pixels, up to a multiple of the patch
    k: OneOrMoreDifferent[PositiveInt] = (1, 3, 10, 30)  # numbers of neighbours to choose from
    distances: OneOrMoreDifferent[Distance] = ("cosine", "L2")  # distances to choose from
    holdout: ProperFraction = 0.1  # share of the training images that choose

    @property
    def choices(self) -> list[Choice]:
        return [{"k": k, "distance": distance} for k, distance in product(self.k, self.distances)]

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        train, val = (self.patches(scale.spec) * scale.images[split] for split in ("train", "val"))
        held = self.holdout * train
        pairs = len(self.distances) * held * (train - held) + val * train
        passes = [self.pass_of(scale, split) for split in scale.images]
        return self.work_of_search(scale, passes, train, pairs, max(self.k))

    def predicted(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        pixels = memory.file.pixels
        for distance in dict.fromkeys(choice["distance"] for choice in choices):
            own = [choice for choice in choices if choice["distance"] == distance]
            prepare, most = comparing(memory, queries, distance), max(choice["k"] for choice in own)
            _, nearest_rows = nearest_patches(memory.features, queries.features, most, space, prepare)
            for choice in own:
                neighbours = memory.rows[nearest_rows[:, : choice["k"]]]
                parts = row_slices(len(queries.rows), VOTED)
                yield choice, np.concatenate([voted_pixels(pixels[neighbours[part]]) for part in parts])


HBIRD = (
    "open-hummingbird-eval 2.0 (vpariza/open-hummingbird-eval 5e79da2) with an exact search; its quirks are kept: the "
    "standard deviation 0.255 of blue, predicted classes matched to classes, absent classes that count as 0, 151 "
    "classes of ADE20K of which the unlabelled one counts as 0"
)
MEMORIES = {"": 1_024_000, "_small": 102_400, "_large": 10_240_000}
PROTOCOLS = {
    "dense_knn@smoke": smoke_protocol(Hummingbird(side=64, memory=2048, k=10), "seconds on tiny-ade20k:"),
    **{
        f"dense_knn@hummingbird{name}": Protocol(task=Hummingbird(memory=size), version=1, source=HBIRD)
        for name, size in MEMORIES.items()
    },
    "dense_knn_cityscapes@hummingbird": Protocol(task=OnCityscapes(), version=1, source=HBIRD),
    "dense_knn@capi": Protocol(
        task=Capi(),
        version=1,
        source="CAPI (facebookresearch/capi 98b4fa1) eval_segmentation.py, its k-NN in float32; images, labels and "
        "selection as there",
    ),
    "dense_knn@capi_smoke": smoke_protocol(
        replace(Capi(), side=64, k=(1, 5)), "CAPI's evaluation in seconds on tiny-ade20k:"
    ),
}
DENSE = ("dense_knn@hummingbird", "dense_knn_cityscapes@hummingbird", "dense_knn@capi")
SUITES = {
    "smoke": ("dense_knn@smoke", "dense_knn@capi_smoke"),
    "dense": DENSE,
    "full": DENSE,
    "today": DENSE,
    "everything": DENSE,
}
