"""Semantic correspondence: keypoints of one image are matched to another by the most similar patch. SPair-71k, Probe3D.

Nothing is trained. A keypoint is correct if its match is nearer to the true place than a tenth of the longer side of
the target's box (PCK@0.1). PCK by point weighs all keypoints of a class equally, and all classes; PCK by image weighs
all pairs equally. The viewpoints of a pair's images differ by 0, 1 or 2, which is the pair's difficulty.

Intervals resample images instead of pairs, because pairs share images. In simulations with all pairs of 25 images they
had the right width where scores vary between images, and were 1.8 times too wide where scores vary only between pairs.
Intervals from resampled pairs would have a fifth to a half of the right width where scores vary between images.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet, scene_image, scene_pair
from downstream.frozen.task import (
    IMAGENET,
    FrozenTask,
    backbone_of,
    check_features,
    evaluation_work,
    map_across_processes,
    normalise,
    pad_centred,
    patch_maps,
    resampled_metrics,
    round_up_to_patch,
)
from engine.errors import option
from engine.progress import with_progress
from engine.settings import PositiveFloat, PositiveInt
from engine.tasks import Outcome, Protocol, Workspace, smoke_protocol
from engine.work import Scale, Work

# N images, P pairs, K keypoints of a pair or an image, D width, h x w patches.

SEED = 20  # with which the source shuffles pairs
VIEWS = (0, 1, 2)  # differences of viewpoint
SUBSETS = (*(f"view{view}" for view in VIEWS), "all")  # of the pairs, each drawn by itself
IMAGES_PER_CLASS = 30  # approximate number of SPair's test images of a class, for counting memory
WHITE = 255


def pad_to_square(image: Image.Image, side: int) -> Image.Image:
    """An image padded with white at the right or bottom to a square, and resized to `side` pixels, bicubic."""
    canvas = Image.new("RGB", (max(image.size),) * 2, (WHITE,) * 3)
    canvas.paste(image, (0, 0))
    return canvas.resize((side, side), Image.Resampling.BICUBIC)


def scale_keypoints(points: Sequence[Sequence[float] | None], longest: int, side: int) -> Tensor:
    """Keypoints in the square of `side` pixels: x, y and visibility (K, 3) int64.

    points: x and y in the image, None for a keypoint that is not visible. longest: the image's longer side in pixels.
    Coordinates are truncated, not rounded.
    """
    scaled = torch.tensor([[*point, 1] if point else [0, 0, 0] for point in points], dtype=torch.float32).reshape(-1, 3)
    scaled[:, :2] *= side / longest
    return scaled.long()


def match_keypoints(source: Tensor, target: Tensor, points: Tensor, side: int) -> Tensor:
    """Column and row (K, 2) int64 of the patch of `target` that is most similar to the source at each keypoint.

    source, target: features (D, h, w). points: x and y (K, 2) in the square of `side` pixels.
    """
    source, target = F.normalize(source, dim=0), F.normalize(target, dim=0)
    coordinates = 2 * points.to(source) / side - 1
    descriptors = F.grid_sample(source[None], coordinates[None, None], mode="bilinear", align_corners=True)[0, :, 0].T
    best = (descriptors @ target.flatten(1)).argmax(1)
    return torch.stack([best % target.shape[2], best // target.shape[2]], dim=1)


def keypoint_errors(
    source: Tensor, target: Tensor, matches: Tensor, grid: tuple[int, int], side: int, scale: float
) -> Tensor:
    """Distances (K, K) from the match of each keypoint of the source to each keypoint of the target.

    Args:
        source, target: keypoints (K, 3) of `scale_keypoints`.
        matches: (K, 2) of `match_keypoints`; the place of a patch is its upper left corner.
        grid: rows and columns of patches.
        side: of the square in pixels.
        scale: unit of the result, as a share of `side`.

    Returns:
        Distances in units of `scale`; infinite if one of the two keypoints is not visible.
    """
    places = matches / torch.tensor(grid[::-1])
    distances = (places[:, None] - target[None, :, :2] / side).norm(dim=2) / scale
    visible = (source[:, None, 2] > 0) & (target[None, :, 2] > 0)
    return distances.masked_fill(~visible, float("inf"))


def threshold_scale(box: Sequence[float], size: Sequence[int]) -> float:
    """The longer side of an object's box (x1, y1, x2, y2) in units of the longer side of the image (width, height)."""
    return max(box[2] - box[0], box[3] - box[1]) / max(size)


def pck(errors: Sequence[np.ndarray], threshold: float) -> Mapping[str, float]:
    """Percent of correct keypoints of some pairs, averaged by "image" (each pair equally) and by "point".

    errors: of the keypoints (K,) of each pair. threshold: correct keypoints have a smaller error.
    """
    shares = [np.mean(of_pair < threshold) for of_pair in errors if len(of_pair)]
    return {"image": 100 * float(np.mean(shares)), "point": 100 * float(np.mean(np.concatenate(errors) < threshold))}


class SelectedPairs(NamedTuple):
    """The pairs that are evaluated, class by class."""

    numbers: np.ndarray  # (P,) indices of the pairs in the listing
    ends: np.ndarray  # (P, 2) indices of the source and the target image
    classes: np.ndarray  # (P,) indices of their classes
    in_subset: np.ndarray  # (P, 4) bool, whether a pair belongs to each of SUBSETS


class ImagePatches(NamedTuple):
    """Features of an image's patches, and the size of the image."""

    patches: Tensor  # (D, h, w)
    size: tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, kw_only=True)
class Correspondence(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # some 450 images at 13 times the pixels of 224 x 224
    is_random: ClassVar[bool] = False
    LAYOUT: ClassVar[str] = "spair"
    KEY: ClassVar[str] = "correspondence"

    side: PositiveInt = 800  # side in pixels of the squares that images are resized to, then padded to whole patches
    pairs: PositiveInt = 200  # drawn of each class for each difference of viewpoint, and for all together
    threshold: PositiveFloat = 0.1  # error below which a keypoint is correct, by the longer side of the target's box
    final_norm: bool = False  # apply the network's final norm to the last block

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        side = round_up_to_patch(self.side, scale.spec)
        maps = 4.0 * scale.spec.width * (side // scale.spec.patch_size) ** 2 * IMAGES_PER_CLASS
        return evaluation_work(scale, side, 0.0, maps)

    def select_pairs(self, scenes: SceneSet, usable: np.ndarray) -> SelectedPairs:
        """Draw the evaluated pairs from those whose two images are among the `usable` indices (n,).

        For each class and difference of viewpoint the pairs, sorted by file name, are shuffled with random.seed(20),
        and the first ones are taken. The source shuffles them in the order of its file system.
        """
        listing = scenes.image_pairs
        numbers = np.flatnonzero(np.isin(listing.ends, usable).all(1))
        if not len(numbers):
            raise ValueError(f"{scenes.url}: no pair of {scenes.split} is left; raise {option('limit')}")
        views = np.array([scene_pair(scenes, number, {}).viewpoint_variation for number in numbers.tolist()])
        class_names = np.array(listing.image_classes)[listing.ends[numbers, 0]]
        in_subset = np.zeros((len(numbers), len(SUBSETS)), bool)
        for class_name in np.unique(class_names):
            for column, view in enumerate((*VIEWS, None)):
                candidates = np.flatnonzero((class_names == class_name) & (view is None or views == view)).tolist()
                random.Random(SEED).shuffle(candidates)
                in_subset[candidates[: self.pairs], column] = True
        classes = np.searchsorted(listing.classes, class_names)
        order = np.argsort(classes, kind="stable")
        order = order[in_subset[order].any(1)]
        return SelectedPairs(numbers[order], listing.ends[numbers[order]], classes[order], in_subset[order])

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        _, val = self.load_scenes(export, space)
        scenes, backbone = val.scenes, backbone_of(export, space)
        pairs = self.select_pairs(scenes, val.indices)
        match_class = partial(self.match_class, backbone, scenes, pairs)
        labels, progress = np.unique(pairs.classes), f"matching keypoints of {scenes.url}"
        by_class = map_across_processes(labels, match_class, space, progress, "classes")
        errors = [of_pair for of_class in by_class.values() for of_pair in of_class]
        counts = np.array([[np.count_nonzero(of_pair < self.threshold), len(of_pair)] for of_pair in errors])
        if not counts[:, 1].any():
            raise ValueError(f"{scenes.url}: no pair of {scenes.split} has a keypoint that both images show")

        class_facts: dict[str, dict[str, Any]] = {}
        for label in labels.tolist():
            by_subset = class_facts[scenes.classes[label]] = {}
            for subset, is_in in zip(SUBSETS, pairs.in_subset.T, strict=True):
                rows = np.flatnonzero(is_in & (pairs.classes == label))
                if counts[rows, 1].any():
                    by_subset[subset] = pck([errors[row] for row in rows], self.threshold)
        facts = {
            "val": val.facts,
            "notes": list(scenes.notes),
            "pairs": len(counts),
            "keypoints": int(counts[:, 1].sum()),
            "classes": class_facts,
        }
        return Outcome(
            metrics=resampled_metrics(partial(weighted_pck, pairs, counts), len(scenes)),
            arrays={"counts": counts, "ends": pairs.ends, "classes": pairs.classes, "rows": pairs.in_subset},
            facts=facts,
        )

    def match_class(self, backbone: Backbone, scenes: SceneSet, pairs: SelectedPairs, label: int) -> list[np.ndarray]:
        """Errors (K,) of each pair of a class, whose images go through the network once."""
        of_class = pairs.classes == label
        indices = np.unique(pairs.ends[of_class]).tolist()
        patches, name = {}, scenes.classes[label]
        for index in with_progress(indices, f"patches of {name}", "images"):
            patches[index] = self.read_patches(backbone, scenes, index)
        numbers = with_progress(pairs.numbers[of_class].tolist(), f"keypoints of {name}", "pairs")
        return [self.match_pair(scenes, number, patches)[1] for number in numbers]

    def read_patches(self, backbone: Backbone, scenes: SceneSet, index: int) -> ImagePatches:
        """The patches of an image, padded to a square."""
        image = scene_image(scenes, index)
        pixels = vision.pil_to_tensor(pad_to_square(image, self.side))
        padded = pad_centred(normalise(pixels, *IMAGENET)[None], backbone.spec.patch_size)
        patches = patch_maps(backbone, padded, [(-1, self.final_norm)])[0][0]
        check_features(patches, scenes.image_path(index))
        return ImagePatches(patches, image.size)

    def match_pair(
        self, scenes: SceneSet, number: int, patches: Mapping[int, ImagePatches]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Match the K keypoints of a pair's source to its target.

        patches: of both images, by index.

        Returns:
            x and y (K, 2) of the matches as shares of the target's longer side; their distances (K,) from the true
            places in units of the longer side of the target's box.
        """
        source_index, target_index = scenes.image_pairs.ends[number].tolist()
        source, source_size = patches[source_index]
        target, target_size = patches[target_index]
        pair = scene_pair(scenes, number, {source_index: source_size, target_index: target_size})
        source_points = scale_keypoints(pair.src_kps, max(source_size), self.side)
        target_points = scale_keypoints(pair.trg_kps, max(target_size), self.side)
        matches = match_keypoints(source, target, source_points[:, :2].to(source.device), self.side).cpu()
        grid, scale = (target.shape[1], target.shape[2]), threshold_scale(pair.trg_bndbox, target_size)
        errors = keypoint_errors(source_points, target_points, matches, grid, self.side, scale).diagonal()
        return (matches / torch.tensor(grid[::-1])).numpy(), errors.numpy()


def weighted_pck(pairs: SelectedPairs, counts: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Metric -> (R,) percent. A pair counts as often as its two images' weights multiplied.

    counts: correct keypoints and all keypoints (P, 2) of each pair. weights: (R, N), how often each image counts.
    """
    pair_weights = weights[:, pairs.ends[:, 0]] * weights[:, pairs.ends[:, 1]]  # (R, P)
    of_class = pairs.classes[:, None] == np.unique(pairs.classes)  # (P, classes)

    def by_point(is_in: np.ndarray) -> np.ndarray:
        """Mean over the classes that have keypoints in a subset (P,) of the pairs."""
        correct, known = (pair_weights @ (of_class * (is_in * column)[:, None]) for column in counts.T)
        recall = np.divide(correct, known, out=np.full(correct.shape, np.nan), where=known > 0)
        return 100 * np.ma.masked_invalid(recall).mean(axis=1).filled(np.nan)

    *in_view, in_all = pairs.in_subset.T
    image_weights = np.where(in_all & (counts[:, 1] > 0), pair_weights, 0.0)
    shares, total = counts[:, 0] / np.maximum(counts[:, 1], 1), image_weights.sum(1)
    by_image = 100 * np.divide(image_weights @ shares, total, out=np.full(len(total), np.nan), where=total > 0)
    by_view = {
        f"PCK_point_{subset}": by_point(is_in)
        for subset, is_in in zip(SUBSETS[:-1], in_view, strict=True)
        if is_in.any()
    }
    return {"PCK_point": by_point(in_all), "PCK_image": by_image, **by_view}


SOURCE = (
    "Probe3D (mbanani/probe3d a1f1464) evaluate_spair_correspondence.py, configs/spair_correspondence.yaml: the last "
    "block without the final norm, a patch's place is its upper left corner; pairs are drawn from the sorted names of "
    "their files, in the source from the order of its file system"
)
PROTOCOLS = {
    "correspondence@smoke": smoke_protocol(Correspondence(side=128, pairs=10, threshold=0.2), "seconds on tiny-spair:"),
    "correspondence@probe3d": Protocol(task=Correspondence(), version=1, source=SOURCE),
}
DENSE = ("correspondence@probe3d",)
SUITES = {"smoke": ("correspondence@smoke",), "dense": DENSE, "full": DENSE, "everything": DENSE}
