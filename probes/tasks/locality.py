"""Locality: the box of a scene whose features are most similar to a query image should contain the query's class.

ExtreMA section 4 and figure 3: a query image ranks 25 crops of another image of its category, at 5 scales and 5 random
positions each, by their instance representations; the first one is the prediction. The paper shows pictures and no
number. For a number, scenes are mosaics of validation images, in which the positions of classes are known. Each
validation image is searched for once, in its mosaic, by a training image of its class.

N: validation images. M: mosaics. T: tiles of a mosaic. K: boxes in a mosaic. D: width.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from checkpoints.frozen import FrozenExport
from engine.neighbours import unit_rows
from engine.settings import Fraction, OneOrMoreDifferent, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Shared, Workspace
from engine.work import Scale, Work
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.features.extract import FeatureSet, extract, feature_work, transform_of
from probes.features.kinds import feature_bytes
from probes.mosaics import Mosaics, candidate_boxes, centre_tiles, tile_numbers, tile_overlaps
from probes.pooled import PooledTask
from probes.scores import accuracy, cost, spread_out
from probes.splits import check_labels, open_splits


class Search(NamedTuple):
    """Which training image searches for which validation image.

    targets: (N,) for each validation image, its index among the tiles of all mosaics, flattened from (M, T). queries:
    (N,) the training image that searches for it.
    """

    mosaics: Mosaics
    targets: np.ndarray
    queries: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Locality(PooledTask):
    """Settings of a locality evaluation."""

    COST: ClassVar[float] = 2.0

    tiles: PositiveInt = 4  # validation images in a mosaic, a square number
    # Sides of the candidate boxes, as shares of the mosaic's. The paper has five scales and does not state them.
    scales: OneOrMoreDifferent[Fraction] = (0.2, 0.35, 0.5, 0.65, 0.8)
    locations: PositiveInt = 5  # random positions of a box at each scale

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles < 2 or round(self.tiles**0.5) ** 2 != self.tiles:
            raise ValueError(f"tiles={self.tiles}: a mosaic is square, so give a square number such as 4, 9 or 16")

    @property
    def boxes(self) -> int:
        """K, the number of candidate boxes in a mosaic."""
        return len(self.scales) * self.locations

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        return Shared()  # it reads only a few training images

    def cost(self, scale: Scale) -> Work:
        crops, queries = -(-scale.images["val"] // self.tiles) * self.boxes, min(scale.images.values())
        return feature_work(
            scale,
            {f"boxes of {self.tiles} tiles": crops, "queries of train": queries},
            memory=feature_bytes(scale.spec, crops + queries),
        )

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = open_splits(space)
        check_labels(train.labels, val.labels, train)
        transform = transform_of(export, space, self)
        search = self.search(train, val, transform, space.seed)
        distinct, query_of = np.unique(search.queries, return_inverse=True)
        query_images = train.subset(distinct, f"locality-seed{space.seed}")
        queries = extract(export, query_images, [self.kind], space, transform)
        crops = search.mosaics.image_set(f"mosaics-{self.tiles}-seed{space.seed}")
        # The crops already have the network's size.
        gallery = extract(export, crops, [self.kind], space, replace(transform, crop=1.0))
        query_rows = self.all_rows(queries, len(query_images))[query_of]
        similarities = query_box_similarities(self.all_rows(gallery, len(crops)), query_rows, search, self.boxes)
        return self.outcome(similarities, search, val, queries, gallery)

    def search(self, train: ImageSet, val: ImageSet, transform: EvalTransform, seed: int) -> Search:
        """Mosaics of the validation images, and a training image of the class of each validation image."""
        tiles = tile_numbers(val.labels, self.tiles)
        height, width = transform.window
        side = round(self.tiles**0.5)
        size = (side * width, side * height)
        boxes = candidate_boxes(len(tiles), size, (width, height), self.scales, self.locations, seed)
        mosaics = Mosaics(source=val, transform=transform, tiles=tiles, boxes=boxes)
        _, targets = np.unique(tiles.ravel(), return_index=True)  # the first tile of an image that is on two
        return Search(mosaics, targets, draw_queries(train.labels, val.labels, seed))

    def all_rows(self, features: FeatureSet, images: int) -> np.ndarray:
        """Unit vectors (images, D) of all images of a set, NaN for skipped ones."""
        rows = np.full((images, features[self.kind].shape[1]), np.nan, np.float32)
        rows[features.indices] = unit_rows(features[self.kind])
        return rows

    def outcome(
        self, similarities: np.ndarray, search: Search, val: ImageSet, queries: FeatureSet, gallery: FeatureSet
    ) -> Outcome:
        """Accuracy and overlap of the most similar box. similarities: (N, K), NaN where images were skipped."""
        read = np.flatnonzero(~np.isnan(similarities).any(axis=1))
        if not len(read):
            raise ValueError(f"{val.url}: no mosaic has all its images; see what is unreadable with bench data check")
        is_correct, overlaps = (array[read] for array in self.box_targets(search, val.labels))  # (n, K) each
        best = similarities[read].argmax(axis=1)
        rows = np.arange(len(read))
        iou = overlaps[rows, best]
        mean_iou = Metric(value=100 * float(iou.mean()), per_image=spread_out(iou, read, len(val)))
        chance = {"top1": 100 * float(is_correct.mean()), "iou": 100 * float(overlaps.mean())}
        bound = {
            "top1": 100 * float(is_correct.any(axis=1).mean()),
            "iou": 100 * float(overlaps.max(axis=1).mean()),
        }
        return Outcome(
            metrics={"top1": accuracy(is_correct[rows, best], read, len(val)), "iou": mean_iou},
            arrays={"box": spread_out(best, read, len(val))},
            facts={"train": queries.facts, "val": gallery.facts, "chance": chance, "at_most": bound},
            cost=cost(queries, gallery),
        )

    def box_targets(self, search: Search, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each validation image (N,) and each box of its mosaic (K,): (N, K) bool, whether the centre of the box is
        on a tile of the image's class; and (N, K), the box's intersection over union with the image's own tile.
        """
        mosaics = search.mosaics
        mosaic, tile = np.divmod(search.targets, self.tiles)
        centres = centre_tiles(mosaics.boxes, mosaics.tile_size, mosaics.side)[mosaic]  # (N, K)
        classes = labels[mosaics.tiles[mosaic]]  # (N, T)
        overlaps = tile_overlaps(mosaics.boxes, mosaics.tile_size, mosaics.side)[mosaic]  # (N, K, T)
        own_overlaps = np.take_along_axis(overlaps, tile[:, None, None], axis=2)[..., 0]
        return np.take_along_axis(classes, centres, axis=1) == labels[:, None], own_overlaps


def query_box_similarities(gallery: np.ndarray, queries: np.ndarray, search: Search, boxes: int) -> np.ndarray:
    """Cosine similarities (N, K) of each query to the boxes of its mosaic.

    gallery: (M K, D) and queries: (N, D), unit vectors. boxes: K.
    """
    tiles = search.mosaics.tiles.shape[1]
    crops = gallery.reshape(-1, boxes, gallery.shape[1])
    return np.stack([crops[target // tiles] @ query for target, query in zip(search.targets, queries, strict=True)])


def draw_queries(train_labels: np.ndarray, val_labels: np.ndarray, seed: int) -> np.ndarray:
    """A random training image (N,) of the class of each validation image.

    A training image is used again only after all others of its class.
    """
    shuffled = np.random.RandomState([seed, 1]).permutation(len(train_labels))
    queries = np.empty(len(val_labels), np.int64)
    for label in np.unique(val_labels):
        of_class, indices = shuffled[train_labels[shuffled] == label], np.flatnonzero(val_labels == label)
        queries[indices] = of_class[np.arange(len(indices)) % len(of_class)]
    return queries


EXTREMA_LOCALITY = Locality()
PROTOCOLS = {
    "locality@extrema": Protocol(
        task=EXTREMA_LOCALITY,
        version=1,
        source="ExtreMA section 4 and figure 3 (25 boxes, 5 scales x 5 random places, another image of the category as "
        "the query, instance representation, nearest box); no code released and no number given; ours: mosaics, in "
        "which the positions of categories are known, the sizes of the boxes and cosine similarity",
    ),
}

SUITES = {
    "smoke": ("locality@extrema",),
    "full": ("locality@extrema",),
    "everything": ("locality@extrema",),
}
