"""Copy detection on INRIA Copydays with frozen features, as in DINO's eval_copy_detection.py.

An image is resized to a square, without keeping its aspect ratio, and described by its class token and the generalised
mean of its patches. If FOLDER/whitening contains images, descriptors are whitened by theirs. The original of each
altered image is searched for among all originals and distractors; beyond the 20 nearest images it counts as not found.

N: images of the database. Q: altered images. D: width.
"""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.errors import option
from engine.neighbours import unit_rows
from engine.settings import PositiveInt
from engine.tasks import Outcome, Protocol, Task, Workspace
from imagesets.listing import optional_path
from imagesets.schemes.copydays import COPIES, DISTRACTORS
from imagesets.sets import ImageSet, open_set, parse_url
from imagesets.transforms import image_to_tensor
from probes.retrieved import average_precision, copy_descriptor, describe_images, whiten
from probes.scores import mean_metric
from probes.splits import open_splits

NEAREST = 20  # images retrieved for a query


@dataclass(frozen=True, kw_only=True)
class Copydays(Task):
    """Settings of a copy detection."""

    COST: ClassVar[float] = 1.5
    is_random: ClassVar[bool] = False

    size: PositiveInt = 320  # side in pixels to which images are resized

    def check_network(self, spec: FrozenSpec) -> None:
        if not (spec.has_class_token and spec.has_patches):
            raise ValueError("copy detection reads class token and patches, but the network lacks one of them")

    def check_images(self, space: Workspace) -> None:
        if parse_url(space.data)[0] != "copydays":
            raise ValueError(f"{space.data}: not a set for copy detection; add {option('data')} NAME=copydays:FOLDER")

    def reads(self, space: Workspace) -> dict[str, ImageSet]:
        folder = optional_path(parse_url(space.data)[1], "whitening")
        return {"whitening": open_set(f"images:{folder}", "train")} if folder else {}

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        self.check_images(space)
        database, queries = open_splits(space)
        place = parse_url(space.data)[1]
        backbone = Backbone(export, space.device, space.precision, space.compiled)

        def describe(image: Image.Image) -> Tensor:
            pixels = image_to_tensor(image.resize((self.size, self.size), Image.Resampling.BICUBIC))
            features = backbone.views(backbone.prepare(pixels[None]), [(-1, True)])[-1, True]
            assert features.cls is not None  # check_network
            return copy_descriptor(features.cls, features.patches.flatten(1, 2))[0]

        rows, query_rows = (describe_images(images, describe, space) for images in (database, queries))
        whitening = 0  # images that whiten
        for images in self.reads(space).values():
            reference = describe_images(images, describe, space)
            rows, query_rows, whitening = whiten(rows, reference), whiten(query_rows, reference), len(reference)
        nearest = np.argsort(-(unit_rows(query_rows) @ unit_rows(rows).T), axis=1, kind="stable")[:, :NEAREST]
        is_original = database.labels[nearest] == queries.labels[:, None]  # (Q, NEAREST)
        originals = np.bincount(database.labels, minlength=len(database.classes))[queries.labels]  # (Q,)
        precisions = np.array(
            [average_precision(np.flatnonzero(hits), count) for hits, count in zip(is_original, originals, strict=True)]
        )
        blocks = [os.path.relpath(os.path.dirname(queries.path(index)), place) for index in range(len(queries))]
        metrics = {}
        for block in sorted(set(blocks), key=lambda block: (block != "strong", block)):  # the papers' number first
            indices = np.flatnonzero((np.array(blocks) == block) & (originals > 0))
            metrics[f"map_{block.replace('/', '_')}"] = mean_metric(precisions[indices], indices, len(queries))
        distractors = int((database.labels == database.classes.index(DISTRACTORS)).sum())
        facts: dict[str, Any] = {"train": database.facts, "val": queries.facts}
        facts |= {"distractors": distractors, "whitened by": whitening}
        if missing := [name for name in COPIES if not os.path.isdir(os.path.join(place, name))]:
            facts["warnings"] = [f"no number for {', '.join(missing)}: {place} has no such folder"]
        forwards = len(rows) + len(query_rows) + whitening
        return Outcome(metrics=metrics, facts=facts, cost={"forwards": forwards})


PROTOCOLS = {
    "copydays@dino": Protocol(
        task=Copydays(),
        version=1,
        source="facebookresearch/dino eval_copy_detection.py (320 px, GeM 4, the 20 nearest); its paper: 10 000 "
        "distractors and 20 000 images for the whitening, both of YFCC100M; its number is map_strong",
    ),
}
SUITES: dict[str, tuple[str, ...]] = {"smoke": (), "everything": ("copydays@dino",)}
