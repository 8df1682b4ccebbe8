"""Locality: does the box of a scene that is most like an image of a class lie where that class is?

ExtreMA section 4 and figure 3: a query image ranks 25 crops of another image of its category, 5 scales at 5 random
places, by the instance representations; the first is the prediction. The paper shows pictures. For a number, scenes are
mosaics of validation images, so that it is known where the category is; each validation image is looked for once.
N validation images, M mosaics of T tiles, K boxes of each, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.neighbours import unit_rows
from engine.settings import Fraction, OneOrMoreDifferent, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.work import Scale, Work
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.features.extract import FeatureSet, extract, forward_bytes, transform_of
from probes.features.fallbacks import PooledTask
from probes.features.kinds import FeatureKind, feature_bytes, feature_pass
from probes.mosaics import Mosaics, candidate_boxes, centre_tiles, tile_numbers, tile_overlaps
from probes.scores import accuracy, cost, spread_out
from probes.splits import check_labels, open_splits


class Search(NamedTuple):
    """What is looked for where. sought (N,): place among the tiles of each validation image, mosaic by mosaic.
    queries (N,): the training image that looks for it."""

    mosaics: Mosaics
    sought: np.ndarray
    queries: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Locality(PooledTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 2.0

    tiles: PositiveInt = 4  # validation images in a mosaic, a square number
    # sides of the candidate boxes, as shares of the mosaic's; the paper has five, and does not state them
    scales: OneOrMoreDifferent[Fraction] = (0.2, 0.35, 0.5, 0.65, 0.8)
    locations: PositiveInt = 5  # random places of a box of each scale

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles < 2 or round(self.tiles**0.5) ** 2 != self.tiles:
            raise ValueError(f"tiles={self.tiles}: a mosaic is square, so give 4, 9 or 16")

    @property
    def boxes(self) -> int:
        """K, candidates in a mosaic."""
        return len(self.scales) * self.locations

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[FeatureKind, ...]]:
        return {}  # of a few training images alone

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        mosaics, queries = -(-images["val"] // self.tiles), min(images.values())
        summary = {"image size": spec.image_size, "forward passes": mosaics * self.boxes + queries}
        return summary | {"mosaics": mosaics, "boxes in each": self.boxes}

    def cost(self, scale: Scale) -> Work:
        spec, sizes = scale.spec, self.summary(scale.spec, scale.images)
        crops = sizes["mosaics"] * self.boxes
        parts = (
            feature_pass(spec, crops, f"boxes of {self.tiles} tiles"),
            feature_pass(spec, sizes["forward passes"] - crops, "queries of train"),
        )
        held = feature_bytes(spec, sizes["forward passes"])
        return Work(parts=parts, memory=max(held, forward_bytes(scale)), disk=held)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = open_splits(space)
        check_labels(train.labels, val.labels, train)
        transform = transform_of(export, space, self)
        search = self.search(train, val, transform, space.seed)
        distinct, which = np.unique(search.queries, return_inverse=True)
        asked = train.subset(distinct, f"locality-seed{space.seed}")
        queries = extract(export, asked, [self.kind], space, transform)
        crops = search.mosaics.image_set(f"mosaics-{self.tiles}-seed{space.seed}")
        whole = replace(transform, crop=1.0)  # the crops have the network's size
        gallery = extract(export, crops, [self.kind], space, whole)
        similar = similarities(
            self.placed(gallery, len(crops)), self.placed(queries, len(asked))[which], search, self.boxes
        )
        return self.outcome(similar, search, val, queries, gallery)

    def search(self, train: ImageSet, val: ImageSet, transform: EvalTransform, seed: int) -> Search:
        """Mosaics of the validation images, and a training image of the class of each."""
        tiles = tile_numbers(val.labels, self.tiles)
        height, width = transform.window
        across = round(self.tiles**0.5)
        size = (across * width, across * height)
        boxes = candidate_boxes(len(tiles), size, (width, height), self.scales, self.locations, seed)
        mosaics = Mosaics(source=val, transform=transform, tiles=tiles, boxes=boxes)
        _, sought = np.unique(tiles.ravel(), return_index=True)  # where a tile repeats an image, its first place
        return Search(mosaics, sought, queries_of(train.labels, val.labels, seed))

    def placed(self, features: FeatureSet, images: int) -> np.ndarray:
        """Unit vectors (images, D) of a set, NaN where an image was skipped."""
        rows = np.full((images, features[self.kind].shape[1]), np.nan, np.float32)
        rows[features.indices] = unit_rows(features[self.kind])
        return rows

    def outcome(
        self, similar: np.ndarray, search: Search, val: ImageSet, queries: FeatureSet, gallery: FeatureSet
    ) -> Outcome:
        """similar (N, K): of each query to the boxes of its mosaic."""
        read = np.flatnonzero(~np.isnan(similar).any(axis=1))
        if not len(read):
            raise ValueError(f"{val.url}: no mosaic has all its images; see what is unreadable with bench data check")
        right, overlaps = self.judged(search, val.labels)
        best = similar[read].argmax(axis=1)
        iou = np.take_along_axis(overlaps[read], best[:, None], axis=1)[:, 0]
        mean_iou = Metric(value=100 * float(iou.mean()), per_image=spread_out(iou, read, len(val)))
        chance = {"top1": 100 * float(right[read].mean()), "iou": 100 * float(overlaps[read].mean())}
        bound = {
            "top1": 100 * float(right[read].any(axis=1).mean()),
            "iou": 100 * float(overlaps[read].max(axis=1).mean()),
        }
        return Outcome(
            metrics={"top1": accuracy(right[read, best], read, len(val)), "iou": mean_iou},
            arrays={"box": spread_out(best, read, len(val))},
            facts={"train": queries.facts, "val": gallery.facts, "chance": chance, "at_most": bound},
            cost=cost(queries, gallery),
        )

    def judged(self, search: Search, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each validation image and box of its mosaic: is the box's centre on a tile of the image's class
        (N, K) bool; the box's intersection over union with the image's own tile (N, K)."""
        mosaics = search.mosaics
        mosaic, tile = np.divmod(search.sought, self.tiles)
        centres = centre_tiles(mosaics.boxes, mosaics.tile, mosaics.across)[mosaic]  # (N, K)
        classes = labels[mosaics.tiles[mosaic]]  # (N, T)
        overlaps = tile_overlaps(mosaics.boxes, mosaics.tile, mosaics.across)[mosaic]  # (N, K, T)
        of_tile = np.take_along_axis(overlaps, tile[:, None, None], axis=2)[..., 0]
        return np.take_along_axis(classes, centres, axis=1) == labels[:, None], of_tile


def similarities(gallery: np.ndarray, queries: np.ndarray, search: Search, boxes: int) -> np.ndarray:
    """Crops (M K, D), queries (N, D), unit vectors -> cosines (N, K) of each query and the boxes of its mosaic."""
    tiles = search.mosaics.tiles.shape[1]
    crops = gallery.reshape(-1, boxes, gallery.shape[1])
    return np.stack([crops[place // tiles] @ query for place, query in zip(search.sought, queries, strict=True)])


def queries_of(trained: np.ndarray, evaluated: np.ndarray, seed: int) -> np.ndarray:
    """Labels of both splits -> a random training image of its class for each validation image; a class's training
    images come again only when all of them have been taken."""
    shuffled = np.random.RandomState([seed, 1]).permutation(len(trained))
    queries = np.empty(len(evaluated), np.int64)
    for label in np.unique(evaluated):
        own, places = shuffled[trained[shuffled] == label], np.flatnonzero(evaluated == label)
        queries[places] = own[np.arange(len(places)) % len(own)]
    return queries


EXTREMA_LOCALITY = Locality()
PROTOCOLS = {
    "locality@extrema": Protocol(
        task=EXTREMA_LOCALITY,
        version=1,
        source="ExtreMA section 4 and figure 3 (25 boxes, 5 scales x 5 random places, another image of the category as "
        "the query, instance representation, nearest box); no code released and no number given: mosaics, which say "
        "where the category is, the sides of the boxes and cosine are ours",
    ),
}

SUITES = {
    "smoke": ("locality@extrema",),
    "full": ("locality@extrema",),
    "everything": ("locality@extrema",),
}
