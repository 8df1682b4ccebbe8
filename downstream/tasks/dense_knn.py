"""Segmentation by nearest neighbours among labelled patches: Hummingbird's and CAPI's evaluations. Nothing is trained.

Hummingbird stores patches of augmented training images with the share of each class among their pixels. A patch of a
validation image gets the weighted mean of its 30 neighbours' shares. CAPI (downstream/frozen/capi.py) lets the
neighbours vote on each pixel of a patch; held-out training images choose the number of neighbours and the distance. The
two numbers are not comparable: docs/protocols.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.frozen.capi import CapiKnn
from downstream.frozen.patches import (
    Evaluated,
    PatchFile,
    SquareTask,
    extract_patches,
    label_numbering,
    nearest_patches,
    read_labelled_image,
    unpatchify_labels,
)
from downstream.frozen.task import (
    UsableScenes,
    map_across_processes,
    normalised_tensor,
    resize_nearest,
    round_up_to_patch,
)
from downstream.metrics.scores import LABELLED, PREDICTED, RIGHT
from engine.errors import option
from engine.neighbours import unit_rows
from engine.rows import row_slices
from engine.seeding import AUGMENT, START, stream_seeds
from engine.settings import FactorRange, NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Protocol, Workspace, smoke_protocol
from engine.work import Part, Scale, Work
from imagesets.random_crops import GeneratorDraws, RandomResizedCrop

# hbird/utils/transforms.py:29; the last number is a slip for 0.225 in all that this code has published.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.255)
JITTER = 0.1  # largest change of brightness, contrast, saturation and hue
MAX_LABELS = 1 << 22  # labels of neighbours, or shares of classes, that are held at once
# M patches of a memory, Q queries, k neighbours, K classes, L patches of an image, P pixels of a patch, h x w patches.


def class_shares(pixels: np.ndarray, classes: int) -> np.ndarray:
    """Share of each class among the pixels of each patch, (M, K) float32, from labels (M, P) below K."""
    bins = pixels.astype(np.int64) + classes * np.arange(len(pixels))[:, None]
    counts = np.bincount(bins.ravel(), minlength=classes * len(pixels)).reshape(len(pixels), classes)
    return (counts / pixels.shape[1]).astype(np.float32)


def rare_patches(pixels: np.ndarray, uniform: np.ndarray, classes: int, count: int) -> np.ndarray:
    """Indices of the `count` patches of an image that a memory keeps: those with the lowest scores, in that order.

    The score of a patch is its random number times the sum, over the classes in it, of how many patches of the image
    hold the class (hbird_eval.py:452-520).

    Args:
        pixels: labels (L, P).
        uniform: random numbers (L,) from 0 to 1.
    """
    present = class_shares(pixels, classes) > 0  # (L, K)
    return np.argsort(present @ present.sum(0) * uniform, kind="stable")[:count]


def attend_labels(similarities: np.ndarray, neighbour_pixels: np.ndarray, classes: int, beta: float) -> np.ndarray:
    """Class shares (Q, K) float32 of the queries: means of their neighbours', weighted by softmax(cosine / beta).

    similarities: cosines (Q, k). neighbour_pixels: labels (Q, k, P) of the neighbours.
    """
    weights = torch.from_numpy(similarities / np.float32(beta)).softmax(dim=1).numpy()
    (queries, k), pixels = weights.shape, neighbour_pixels.shape[2]
    query_shares = np.empty((queries, classes), np.float32)
    for part in row_slices(queries, max(1, MAX_LABELS // (k * max(classes, pixels)))):
        shares = class_shares(neighbour_pixels[part].reshape(-1, pixels), classes).reshape(-1, k, classes)
        query_shares[part] = np.einsum("qk,qkc->qc", weights[part], shares)
    return query_shares


def upsample_labels(shares: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Class shares (h, w, K) of an image's patches, enlarged to `size` -> the class (H, W) with the largest share."""
    maps = F.interpolate(shares.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False)
    return maps[0].argmax(0).numpy()


def confusion_matrix(predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int]) -> np.ndarray:
    """Pixels (K, K) by label (row) and predicted class (column), without those whose label is in `ignored`."""
    known = ~np.isin(labels, ignored)
    bins = classes * labels[known].astype(np.int64) + predicted[known]
    return np.bincount(bins, minlength=classes * classes).reshape(classes, classes)


def match_classes(counts: np.ndarray) -> np.ndarray:
    """The class (K,) that each predicted class stands for: the assignment with the largest sum of IoUs.

    counts: (K, K) of `confusion_matrix`. Source: eval_metrics.py:143.
    """
    union = counts.sum(0)[None] + counts.sum(1)[:, None] - counts
    iou = np.divide(counts, union, out=np.zeros(counts.shape), where=union > 0)
    labels, predicted = linear_sum_assignment(iou, maximize=True)
    return labels[np.argsort(predicted)]


@dataclass(frozen=True, kw_only=True)
class Hummingbird(SquareTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 12.0  # an image of each split at five times the pixels of 224 x 224, and a search
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "dense_knn"

    side: PositiveInt = 512  # side in pixels of the squares that images are resized to, up to a multiple of the patch
    memory: NonNegativeInt = 1024000  # patches to keep, equally many of each view; 0: all patches
    epochs: PositiveInt = 1  # augmented views of each training image
    area: FactorRange = (0.5, 2.0)  # range of a view's area, as a share of the image's
    k: PositiveInt = 30  # neighbours of a patch
    beta: PositiveFloat = 0.02  # temperature of their weights
    matched: bool = True  # match predicted classes to labelled ones by Hungarian assignment on IoU

    def patches_per_view(self, spec: FrozenSpec, images: int) -> int:
        """Patches that the memory keeps of each view of `images` training images."""
        kept = self.memory // (images * self.epochs) if self.memory else self.patch_count(spec)
        if not kept:
            raise ValueError(
                f"a memory of {self.memory} patches has room for none of each of {images * self.epochs} views; "
                f"{option('settings', {f'{self.KEY}.memory': images * self.epochs})}"
            )
        return min(kept, self.patch_count(spec))

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        memory = self.patches_per_view(scale.spec, scale.images["train"]) * scale.images["train"] * self.epochs
        if memory < self.k:
            raise ValueError(f"k={self.k} neighbours among {memory} patches; raise memory or lower k")
        passes: list[Part] = [
            self.extraction_part(scale, "train", self.memory_name(scale.spec, scale.images["train"]), self.epochs),
            self.extraction_part(scale, "val"),
        ]
        pairs = self.patch_count(scale.spec) * scale.images["val"] * memory
        return self.search_work(scale, passes, memory, pairs, self.k)

    def transform_name(self, spec: FrozenSpec) -> str:
        return f"square{round_up_to_patch(self.side, spec)}_bilinear_hummingbird"

    def memory_name(self, spec: FrozenSpec, images: int) -> str:
        """Name of the preparation of `images` training images, and of the selection of their patches."""
        area, kept = "-".join(map(str, self.area)), self.patches_per_view(spec, images)
        return f"memory{round_up_to_patch(self.side, spec)}_area{area}_views{self.epochs}_kept{kept}"

    def read_square(self, export: FrozenExport, images: UsableScenes, position: int) -> tuple[Tensor, Tensor]:
        size = (round_up_to_patch(self.side, export.spec),) * 2
        image, labels = read_labelled_image(images.scenes, int(images.indices[position]))
        pixels = normalised_tensor(image.resize(size, Image.Resampling.BILINEAR), MEAN, STD)
        return pixels, torch.from_numpy(resize_nearest(labels, size))

    def read_view(self, side: int, seed: int, views: UsableScenes, position: int) -> tuple[Tensor, Tensor]:
        """An augmented view of a training image: colours are changed, then it is normalised, then cropped.

        Returns:
            Normalised pixels (3, side, side), and labels (side, side), numbered as in files.
        """
        random = np.random.RandomState(stream_seeds(AUGMENT, seed, position))
        image, labels = read_labelled_image(views.scenes, int(views.indices[position]))
        for adjust in (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation):
            if random.rand() < 0.5:
                image = adjust(image, random.uniform(1 - JITTER, 1 + JITTER))
        if random.rand() < 0.5:
            image = vision.adjust_hue(image, random.uniform(-JITTER, JITTER))
        random_crop = RandomResizedCrop(
            size=side, scale=self.area, interpolation="bilinear", draws=GeneratorDraws(random)
        )
        left, top, right, bottom = random_crop.window(*image.size)
        crop = normalised_tensor(image, MEAN, STD)[:, top:bottom, left:right]
        pixels = vision.resize(crop, [side, side], vision.InterpolationMode.BILINEAR, antialias=True)
        return pixels, torch.from_numpy(resize_nearest(labels[top:bottom, left:right], (side, side)))

    def extract_memory(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> PatchFile:
        """The rarest patches of each view of a training image, or all patches."""
        spec, seed, images = export.spec, space.seed, len(train.indices)
        count, (_, classes, ignored) = self.patches_per_view(spec, images), label_numbering(train.scenes)

        def select_rare(pixels: np.ndarray, position: int) -> np.ndarray:
            uniform = np.random.RandomState(stream_seeds(START, seed, position)).random_sample(len(pixels))
            return rare_patches(np.where(pixels == ignored, 0, pixels), uniform, classes, count)

        views = train._replace(indices=np.tile(train.indices, self.epochs))
        name = f"{self.memory_name(spec, images)}_seed{seed}"
        read = partial(self.read_view, round_up_to_patch(self.side, spec), seed, views)
        return extract_patches(export, views, name, read, space, count, select_rare if self.memory else None)

    def evaluate(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> Evaluated:
        similarities, neighbours = nearest_patches(memory.features, queries.features, self.k, space, unit_rows)
        images, grid = len(queries) // queries.per_image, round(queries.per_image**0.5)
        classes, ignored = queries.classes, queries.ignored

        def predict(position: int) -> np.ndarray:
            """Predicted classes (S, S) of a validation image, before they are matched."""
            rows = slice(position * queries.per_image, (position + 1) * queries.per_image)
            pixels = memory.pixels[neighbours[rows]]
            pixels = np.where(pixels == ignored, 0, pixels)  # unlabelled pixels are class 0 in a memory
            shares = attend_labels(similarities[rows], pixels, classes, self.beta)
            side = grid * round(queries.pixels.shape[1] ** 0.5)
            return upsample_labels(torch.from_numpy(shares).view(grid, grid, classes), (side, side))

        def confusion_of_image(position: int) -> np.ndarray:
            """Pixels (K, K) of a validation image by label and predicted class."""
            rows = slice(position * queries.per_image, (position + 1) * queries.per_image)
            labels = unpatchify_labels(queries.pixels[rows], (grid, grid))
            return confusion_matrix(predict(position), labels, classes, [ignored]).astype(np.int32)

        by_image = map_across_processes(np.arange(images), confusion_of_image, space, "labelling patches")
        counts = np.stack([*by_image.values()])  # (n, K, K)
        mapping = match_classes(counts.sum(0)) if self.matched else np.arange(classes)
        class_range, predicted_as = np.arange(classes), np.argsort(mapping)  # the predicted class that stands for each
        correct, predicted = counts[:, class_range, predicted_as], counts.sum(1)[:, predicted_as]
        areas = np.stack([correct, predicted, counts.sum(2)], axis=2)
        facts = {"classes": classes, "matched": np.flatnonzero(mapping != class_range).tolist()}
        return Evaluated(areas, facts, lambda position: mapping[predict(position)].astype(np.uint8))

    def weighted_metrics(self, areas: np.ndarray, weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """As SquareTask's, but a class that occurs neither in labels nor in predictions counts as 0."""
        count, *rest = areas.shape
        totals = (weights @ areas.reshape(count, -1).astype(np.float64)).reshape(-1, *rest)
        correct, predicted, labelled = (totals[..., column] for column in (RIGHT, PREDICTED, LABELLED))
        iou = correct / np.maximum(predicted + labelled - correct, 1)
        with np.errstate(invalid="ignore"):  # 0 / 0, where no pixel is labelled
            accuracy = correct.sum(1) / labelled.sum(1)
        return {"mIoU": 100 * np.where(np.isnan(accuracy), np.nan, iou.mean(1)), "aAcc": 100 * accuracy}


@dataclass(frozen=True, kw_only=True)
class OnCityscapes(Hummingbird):
    """Hummingbird on Cityscapes."""

    LAYOUT: ClassVar[str] = "cityscapes"


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
        task=CapiKnn(),
        version=1,
        source="CAPI (facebookresearch/capi 98b4fa1) eval_segmentation.py, its k-NN in float32; images, labels and "
        "selection as there",
    ),
    "dense_knn@capi_smoke": smoke_protocol(
        replace(CapiKnn(), side=64, k=(1, 5)), "CAPI's evaluation in seconds on tiny-ade20k:"
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
