"""Correspondence: keypoints of one image are found in another by the most similar patch. SPair-71k, as in Probe3D.

Nothing is trained. A keypoint is found where it lies less than a tenth of the target's box away (PCK@0.1). By point all
keypoints of a class weigh equally, and the classes do; by image all pairs do. A pair's difficulty is how much the
viewpoint differs: 0, 1 or 2.

Intervals resample images and not pairs, because pairs share images. In simulations of all pairs of 25 images they had
the right width where scores vary between images, and were 1.8 times too wide where they vary between pairs alone.
Resampled pairs would give a fifth to a half of the right width where scores vary between images.
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
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, scene_image, scene_pair
from downstream.frozen.task import (
    IMAGENET,
    FrozenTask,
    backbone_of,
    centre_padded,
    check_features,
    normalised,
    patch_maps,
    resampled_metrics,
    resamples,
    shared_out,
    whole_patches,
    work_of_images,
)
from downstream.metrics.scores import closing_seconds
from engine.settings import PositiveFloat, PositiveInt
from engine.tasks import Outcome, Protocol, Workspace, smoke_protocol
from engine.work import Kind, Scale, Work, seconds_of

SEED = 20  # of the pairs that are drawn
# K keypoints, D width, h x w patches.

VIEWS = (0, 1, 2)  # differences of viewpoint
ROWS = (*(f"view{view}" for view in VIEWS), "all")
IMAGES_OF_A_CLASS = 30  # of SPair's test images, about, by which memory is counted
WHITE = 255


def squared(image: Image.Image, side: int) -> Image.Image:
    """An image, white to its right or below it up to a square, resized to `side`: bicubic."""
    canvas = Image.new("RGB", (max(image.size),) * 2, (WHITE,) * 3)
    canvas.paste(image, (0, 0))
    return canvas.resize((side, side), Image.Resampling.BICUBIC)


def scaled_keypoints(points: Sequence[Sequence[float] | None], longest: int, side: int) -> Tensor:
    """Keypoints (x, y) of an image, None where not visible -> (K, 3) int64: whole pixels x and y of the square of
    `side`, cut and not rounded, and whether it is visible."""
    known = torch.tensor([[*point, 1] if point else [0, 0, 0] for point in points], dtype=torch.float32).reshape(-1, 3)
    known[:, :2] *= side / longest
    return known.long()


def best_places(source: Tensor, target: Tensor, points: Tensor, side: int) -> Tensor:
    """The most similar patch of `target` for each keypoint of `source`: column and row (K, 2) int64.

    source, target: features (D, h, w). points: (K, 2) pixels x and y of the square of `side`.
    """
    source, target = F.normalize(source, dim=0), F.normalize(target, dim=0)
    places = 2 * points.to(source) / side - 1
    described = F.grid_sample(source[None], places[None, None], mode="bilinear", align_corners=True)[0, :, 0].T
    best = (described @ target.flatten(1)).argmax(1)
    return torch.stack([best % target.shape[2], best // target.shape[2]], dim=1)


def errors_of(source: Tensor, target: Tensor, best: Tensor, shape: tuple[int, int], side: int, scale: float) -> Tensor:
    """Distances (K, K) between where each keypoint of the source is found and each keypoint of the target, in units of
    the length `scale`, a share of the square's side; inf where one of the two is not visible.

    source, target: keypoints (K, 3). best: (K, 2) of `best_places`; its place is the patch's upper left corner.
    """
    found = best / torch.tensor(shape[::-1])
    distances = (found[:, None] - target[None, :, :2] / side).norm(dim=2) / scale
    visible = (source[:, None, 2] > 0) & (target[None, :, 2] > 0)
    return distances.masked_fill(~visible, float("inf"))


def threshold_scale(box: Sequence[float], size: Sequence[int]) -> float:
    """The longer side of the object's box (x1, y1, x2, y2) in units of the image's longer side."""
    return max(box[2] - box[0], box[3] - box[1]) / max(size)


def pck(errors: Sequence[np.ndarray], threshold: float) -> Mapping[str, float]:
    """Percent of correct keypoints of pairs: errors of each pair's (K,). By point all keypoints weigh equally, by image
    all pairs. A keypoint is correct below the threshold."""
    shares = [np.mean(own < threshold) for own in errors if len(own)]
    return {"image": 100 * float(np.mean(shares)), "point": 100 * float(np.mean(np.concatenate(errors) < threshold))}


class DrawnPairs(NamedTuple):
    """The pairs that are evaluated, class after class. numbers: (P,) in the listing. ends: (P, 2) source and target
    image. classes: (P,). rows: (P, 4) whether a pair is drawn for each of ROWS."""

    numbers: np.ndarray
    ends: np.ndarray
    classes: np.ndarray
    rows: np.ndarray


class ImagePatches(NamedTuple):
    """Patches (D, h, w) of an image, and its width and height in pixels."""

    patches: Tensor
    size: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Correspondence(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0  # some 450 images at 13 times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "spair"
    KEY: ClassVar[str] = "correspondence"

    side: PositiveInt = 800  # of the squares that images are made to in pixels, padded to a multiple of the patch
    pairs: PositiveInt = 200  # of each class that are drawn for each difference of viewpoint, and for all of them
    threshold: PositiveFloat = 0.1  # of the longer side of the target's box, below which a keypoint is found
    final_norm: bool = False  # the network's final norm follows the last block

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        side = whole_patches(self.side, spec)
        patches = (side // spec.patch_size) ** 2
        return {"image size": side, "patches of an image": patches, "pairs of a class": self.pairs}

    def cost(self, scale: Scale) -> Work:
        patches = self.summary(scale.spec, scale.images)["patches of an image"]
        maps = 4.0 * scale.spec.width * patches * IMAGES_OF_A_CLASS
        return work_of_images(scale, whole_patches(self.side, scale.spec), 0.0, maps, resamples(scale))

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of an image, with the pair that it makes, and of one resample of the images."""
        _, val = self.opened(export, space)
        drawn, backbone = self.drawn(val.scenes, val.places), backbone_of(export, space)
        pair, number = DrawnPairs(*(values[:1] for values in drawn)), int(drawn.classes[0])
        of_pair = seconds_of(lambda: self.errors_of_class(backbone, val.scenes, pair, number), seconds)
        score = partial(averaged, drawn, np.ones((len(drawn.numbers), 2), np.int64))
        return {"evaluation": of_pair / 2, "closing": closing_seconds(score, len(val.scenes))}

    def drawn(self, scenes: SceneSet, usable: np.ndarray) -> DrawnPairs:
        """The evaluated pairs, of those whose images are usable (n,). For each class and difference of viewpoint the
        pairs, sorted by the names of their files, are shuffled with random.seed(20), and the first are taken. The
        source shuffles them in the order of its file system."""
        listing = scenes.image_pairs
        numbers = np.flatnonzero(np.isin(listing.ends, usable).all(1))
        if not len(numbers):
            raise ValueError(f"{scenes.url}: no pair of {scenes.split} is left; raise --limit")
        views = np.array([scene_pair(scenes, number, {}).viewpoint_variation for number in numbers.tolist()])
        titles = np.array(listing.class_of)[listing.ends[numbers, 0]]
        rows = np.zeros((len(numbers), len(VIEWS) + 1), bool)
        for title in np.unique(titles):
            for column, view in enumerate((*VIEWS, None)):
                places = np.flatnonzero((titles == title) & (view is None or views == view)).tolist()
                random.Random(SEED).shuffle(places)
                rows[places[: self.pairs], column] = True
        classes = np.searchsorted(listing.classes, titles)
        kept = np.argsort(classes, kind="stable")
        kept = kept[rows[kept].any(1)]
        return DrawnPairs(numbers[kept], listing.ends[numbers[kept]], classes[kept], rows[kept])

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        _, val = self.opened(export, space)
        scenes, backbone = val.scenes, backbone_of(export, space)
        drawn = self.drawn(scenes, val.places)
        numbers, errors_of = np.unique(drawn.classes), partial(self.errors_of_class, backbone, scenes, drawn)
        of_classes = shared_out(numbers, errors_of, space, f"matching keypoints of {scenes.url}", "classes")
        errors = [own for of_class in of_classes.values() for own in of_class]
        counts = np.array([[np.count_nonzero(own < self.threshold), len(own)] for own in errors])
        if not counts[:, 1].any():
            raise ValueError(f"{scenes.url}: no pair of {scenes.split} has a keypoint that both images show")
        facts = {
            "val": val.facts,
            "notes": list(scenes.notes),
            "pairs": len(counts),
            "keypoints": int(counts[:, 1].sum()),
            "classes": {
                scenes.classes[number]: {
                    row: pck([errors[place] for place in np.flatnonzero(own)], self.threshold)
                    for row, column in zip(ROWS, drawn.rows.T, strict=True)
                    if counts[own := column & (drawn.classes == number), 1].any()
                }
                for number in numbers.tolist()
            },
        }
        return Outcome(
            metrics=resampled_metrics(partial(averaged, drawn, counts), len(scenes)),
            arrays={"counts": counts, "ends": drawn.ends, "classes": drawn.classes, "rows": drawn.rows},
            facts=facts,
            random=False,
        )

    def errors_of_class(
        self, backbone: Backbone, scenes: SceneSet, drawn: DrawnPairs, number: int
    ) -> Sequence[np.ndarray]:
        """Errors (K,) of the keypoints of a class's pairs, each of whose images goes through the network once."""
        own = drawn.classes == number
        patches = {index: self.patches_of(backbone, scenes, index) for index in np.unique(drawn.ends[own]).tolist()}
        return [self.matched(scenes, pair, patches)[1] for pair in drawn.numbers[own].tolist()]

    def patches_of(self, backbone: Backbone, scenes: SceneSet, index: int) -> ImagePatches:
        image = scene_image(scenes, index)
        pixels = vision.pil_to_tensor(squared(image, self.side))
        view = centre_padded(normalised(pixels, *IMAGENET)[None], backbone.spec.patch_size)
        patches = patch_maps(backbone, view, [(-1, self.final_norm)])[0][0]
        check_features(patches, scenes.image_path(index))
        return ImagePatches(patches, image.size)

    def matched(
        self, scenes: SceneSet, number: int, patches: Mapping[int, ImagePatches]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where the keypoints of a pair's source are found in its target: x and y (K, 2) as shares of the longer side;
        and how far that is from where they are (K,), in units of the target's box."""
        ends = scenes.image_pairs.ends[number].tolist()
        (source, source_size), (target, target_size) = (patches[index] for index in ends)
        pair = scene_pair(scenes, number, dict(zip(ends, (source_size, target_size), strict=True)))
        known = scaled_keypoints(pair.src_kps, max(source_size), self.side)
        truth = scaled_keypoints(pair.trg_kps, max(target_size), self.side)
        best = best_places(source, target, known[:, :2].to(source.device), self.side).cpu()
        grid, scale = (target.shape[1], target.shape[2]), threshold_scale(pair.trg_bndbox, target_size)
        errors = errors_of(known, truth, best, grid, self.side, scale).diagonal()
        return (best / torch.tensor(grid[::-1])).numpy(), errors.numpy()


def averaged(drawn: DrawnPairs, counts: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Keypoints found and all (P, 2) of pairs, weights (R, N) of images -> metric -> (R,) percent. A pair counts as
    often as its two images together."""
    of_pairs = weights[:, drawn.ends[:, 0]] * weights[:, drawn.ends[:, 1]]
    of_class = drawn.classes[:, None] == np.unique(drawn.classes)  # (P, K)

    def by_point(row: np.ndarray) -> np.ndarray:
        found, known = (of_pairs @ (of_class * (row * column)[:, None]) for column in counts.T)
        recall = np.divide(found, known, out=np.full(found.shape, np.nan), where=known > 0)
        return 100 * np.ma.masked_invalid(recall).mean(axis=1).filled(np.nan)  # classes without pairs are left out

    *by_view, whole = drawn.rows.T
    known = np.where(whole & (counts[:, 1] > 0), of_pairs, 0.0)
    shares, total = counts[:, 0] / np.maximum(counts[:, 1], 1), known.sum(1)
    by_image = 100 * np.divide(known @ shares, total, out=np.full(len(total), np.nan), where=total > 0)
    views = {f"PCK_point_{name}": by_point(row) for name, row in zip(ROWS[:-1], by_view, strict=True) if row.any()}
    return {"PCK_point": by_point(whole), "PCK_image": by_image, **views}


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
