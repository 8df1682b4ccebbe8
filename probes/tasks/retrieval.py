"""Image retrieval with frozen features: revisited Oxford and Paris, and images of the same class in any labelled set.

Revisited sets (`revisited:FOLDER`) are evaluated as in DINO's eval_image_retrieval.py: whole images, resized to a
maximal length of the longer side, one at a time, at one scale or averaged over three; at the levels easy, medium and
hard, each of which ignores some images. In other sets, validation images search for training images of their class.

N: images of the database. Q: queries. D: width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from engine.errors import option
from engine.neighbours import unit_rows
from engine.progress import with_progress
from engine.settings import Fraction, PositiveInt
from engine.tasks import Outcome, Protocol, Shared, Workspace
from engine.work import Part, Scale, Work
from imagesets.schemes.revisited import ground_truth
from imagesets.selection import evenly_spaced
from imagesets.sets import ImageSet, open_set, parse_url
from imagesets.transforms import image_to_tensor
from probes.features.extract import extract, feature_work, transform_of
from probes.features.kinds import feature_bytes
from probes.pooled import PooledTask
from probes.retrieved import KAPPAS, SCALES, describe_images, level_scores, multiscale
from probes.scores import cost, mean_metric
from probes.splits import check_labels, open_splits

MAX_QUERIES = 1000  # of a labelled set, evenly spread; each is compared with the whole database


@dataclass(frozen=True, kw_only=True)
class Retrieval(PooledTask):
    """Settings of an image retrieval."""

    COST: ClassVar[float] = 1.1  # after k-NN, which reads the same features of a labelled set
    is_random: ClassVar[bool] = False

    size: PositiveInt = 224  # maximal length of the longer side of images of revisited sets
    scales: Literal["one", "three"] = "one"  # of images of revisited sets; three: also scaled by 0.7 and 0.5
    crop: Fraction = 0.875  # for labelled sets: images are resized to the network's image size / crop

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        return Shared() if parse_url(space.data)[0] == "revisited" else super().shares(export, space)

    def reads(self, space: Workspace) -> dict[str, Path]:
        scheme, place = parse_url(space.data)
        return {"ground truth": Path(ground_truth(place)[1])} if scheme == "revisited" else {}

    def cost(self, scale: Scale) -> Work:
        images = scale.images
        product = Part(kind="heads", count=1, flops=2.0 * scale.spec.width * images["train"] * images["val"])
        return feature_work(scale, images, product, memory=feature_bytes(scale.spec, sum(images.values())))

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        is_revisited = parse_url(space.data)[0] == "revisited"
        return self.revisited(export, space) if is_revisited else self.by_class(export, space)

    def by_class(self, export: FrozenExport, space: Workspace) -> Outcome:
        """The outcome on a labelled set: training images of the query's class are positives."""
        train, val = open_splits(space)
        transform = transform_of(export, space, self)
        gallery, queries = (extract(export, images, [self.kind], space, transform) for images in (train, val))
        check_labels(gallery.labels, queries.labels, train)
        chosen = evenly_spaced(len(queries), min(MAX_QUERIES, len(queries)))
        database = unit_rows(gallery[self.kind])
        scores = []
        for query in with_progress(chosen.tolist(), "ranking the images", "queries"):
            order = nearest_first(database, unit_rows(queries[self.kind], slice(query, query + 1)))
            positives = np.flatnonzero(gallery.labels == queries.labels[query]).tolist()
            scores.append(level_scores(order, [{"easy": positives, "hard": [], "junk": []}], "easy"))
        average, at = (np.concatenate(values) for values in zip(*scores, strict=True))
        indices = queries.indices[chosen]
        metrics = {"map": mean_metric(average, indices, len(val))}
        metrics |= {f"mp{kappa}": mean_metric(at[:, column], indices, len(val)) for column, kappa in enumerate(KAPPAS)}
        facts = {"train": gallery.facts, "val": queries.facts, "queries": len(chosen)}
        return Outcome(metrics=metrics, facts=facts, cost=cost(gallery, queries))

    def revisited(self, export: FrozenExport, space: Workspace) -> Outcome:
        """The outcome on a revisited set, by its ground truth for each level."""
        database, queries = (space.images(split, open_set) for split in ("train", "val"))
        truth, path = ground_truth(parse_url(space.data)[1])
        if (len(truth["imlist"]), len(truth["qimlist"])) != (len(database), len(queries)):
            raise ValueError(
                f"{space.data}: {path} is for all images of the set, so they cannot be limited; drop {option('limit')}"
            )
        rows, query_rows = (self.descriptors(export, images, space) for images in (database, queries))
        order = nearest_first(rows, query_rows)
        metrics, indices = {}, np.arange(len(queries))
        for level in ("medium", "hard", "easy"):  # the papers' numbers first
            scores = level_scores(order, truth["gnd"], level)
            if np.isnan(scores.average).all():  # no query has positives
                continue
            metrics[f"map_{level}"] = mean_metric(scores.average, indices, len(queries))
            for column, kappa in enumerate(KAPPAS):
                metrics[f"mp{kappa}_{level}"] = mean_metric(scores.at[:, column], indices, len(queries))
        facts = {"train": database.facts, "val": queries.facts}
        return Outcome(metrics=metrics, facts=facts, cost={"forwards": len(rows) + len(query_rows)})

    def descriptors(self, export: FrozenExport, images: ImageSet, space: Workspace) -> np.ndarray:
        """Unit vectors (N, D) of whole images, at one or three scales."""
        backbone = Backbone(export, space.device, space.precision, space.compiled)
        scales = SCALES if self.scales == "three" else SCALES[:1]

        def encode(pixels: Tensor) -> Tensor:
            patch = export.spec.patch_size or 1
            height, width = (
                side // patch * patch for side in pixels.shape[-2:]
            )  # cut to whole patches, as by the source's strided convolution
            features = backbone.views(pixels[..., :height, :width], [(self.kind.layer, self.kind.norm)])
            return self.kind.of(features[self.kind.layer, self.kind.norm])

        def describe(image: Image.Image) -> Tensor:
            image.thumbnail((self.size, self.size), Image.Resampling.LANCZOS)
            return multiscale(encode, backbone.prepare(image_to_tensor(image)[None]), scales)[0]

        return describe_images(images, describe, space)


def nearest_first(database: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Indices (N, Q) of the database (N, D), by descending dot product with each query (Q, D); ties by index."""
    return np.argsort(-(database @ queries.T), axis=0, kind="stable")


DINO = "facebookresearch/dino 7c446df eval_image_retrieval.py and utils.py:708-800; whole queries, no boxes"
PROTOCOLS = {
    "retrieval@dino_oxford": Protocol(
        task=Retrieval(), version=1, source=f"{DINO}; its README for ROxford: imsize 224, one scale"
    ),
    "retrieval@dino_paris": Protocol(
        task=Retrieval(size=512, scales="three"),
        version=1,
        source=f"{DINO}; its README for RParis: imsize 512, multiscale",
    ),
}
SUITES = {
    "smoke": ("retrieval@dino_oxford",),
    "full": ("retrieval@dino_oxford",),
    "today": tuple(PROTOCOLS),
    "everything": tuple(PROTOCOLS),
}
