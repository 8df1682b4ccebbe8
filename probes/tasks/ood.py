"""Detection of out-of-distribution images by the distance of frozen features to the training images.

Nothing is trained (Sun et al. 2022, Out-of-Distribution Detection with Deep Nearest Neighbors). The score of an image
is its cosine similarity to the k-th nearest training image, which should be high for validation images and low for
images of the sets that the user names.

Q: images of a set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from sklearn.metrics import roc_auc_score

from checkpoints.frozen import FrozenExport
from engine.errors import option
from engine.neighbours import search, search_bytes, unit_rows
from engine.settings import OneOrMoreDifferent, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.work import Part, Scale, Work
from imagesets.sets import ImageSet, open_set, parse_url
from probes.features.extract import FeatureSet, extract, feature_work, transform_of
from probes.pooled import PooledTask
from probes.scores import cost, gather_in_order
from probes.splits import open_splits

TRUE_POSITIVE_RATE = 0.95  # of the validation images, at the threshold for the false positive rate


@dataclass(frozen=True, kw_only=True)
class Ood(PooledTask):
    """Settings of an out-of-distribution detection."""

    COST: ClassVar[float] = 1.1  # after k-NN, which reads the same features
    is_random: ClassVar[bool] = False

    sets: OneOrMoreDifferent[str] = ("noisydigits:",)  # URLs of sets whose validation images are out of distribution
    k: PositiveInt = 50  # rank of the neighbour that gives the score, or the number of training images if smaller
    backend: Literal["faiss", "torch"] = "faiss"  # library that searches for neighbours

    def check_images(self, space: Workspace) -> None:
        for url in self.sets:
            parse_url(url)
        if space.data in self.sets:
            raise ValueError(
                f"{space.data}: cannot be out of distribution for itself; give "
                f"{option('settings', {'ood.sets': 'OTHER'})}"
            )

    def reads(self, space: Workspace) -> dict[str, ImageSet]:
        return {url: open_set(url, "val") for url in self.sets}

    def passes(self, images: Mapping[str, int]) -> dict[str, int]:
        """Number of images of each split and of each out-of-distribution set."""
        return dict(images) | {f"val of {url}": len(open_set(url, "val")) for url in self.sets}

    def cost(self, scale: Scale) -> Work:
        passes, width = self.passes(scale.images), scale.spec.width
        gallery = scale.images["train"]
        queries = sum(passes.values()) - gallery
        search = Part(kind="heads", count=len(passes) - 1, flops=2.0 * width * gallery * queries / (len(passes) - 1))
        return feature_work(scale, passes, search, memory=search_bytes(gallery, queries, width, self.k))

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_images(space)
        train, val = open_splits(space)
        others = self.reads(space).values()
        transform = transform_of(export, space, self)
        gallery, known, *foreign = (
            extract(export, images, [self.kind], space, transform) for images in (train, val, *others)
        )
        known_scores = self.scores(gallery, known, space)
        rates = [detection_rates(known_scores, self.scores(gallery, features, space)) for features in foreign]
        metrics = {
            "auroc": Metric(value=float(np.mean([auroc for auroc, _ in rates]))),
            "fpr95": Metric(value=float(np.mean([fpr for _, fpr in rates])), higher_is_better=False),
        }
        for number, (auroc, fpr) in enumerate(rates, 1) if len(rates) > 1 else ():
            metrics[f"auroc_set{number}"] = Metric(value=auroc)
            metrics[f"fpr95_set{number}"] = Metric(value=fpr, higher_is_better=False)
        facts: Mapping[str, Any] = {
            "train": gallery.facts,
            "val": known.facts,
            "sets": [features.facts for features in foreign],
            "k": min(self.k, len(gallery)),
        }
        return Outcome(metrics=metrics, facts=facts, cost=cost(gallery, known, *foreign))

    def scores(self, gallery: FeatureSet, queries: FeatureSet, space: Workspace) -> np.ndarray:
        """Cosine similarity (Q,) of each query to its k-th nearest image of the gallery, in every process."""
        k = min(self.k, len(gallery))
        rows = gallery[self.kind], queries[self.kind]
        near = search(*rows, k, self.backend, space.device, prepare=unit_rows, world=space.world)
        return gather_in_order(space.world, lambda: (near.places, near.similarities[:, -1]))[1]


def detection_rates(known: np.ndarray, foreign: np.ndarray) -> tuple[float, float]:
    """AUROC, and the false positive rate at a true positive rate of 95 %, in percent.

    known, foreign: scores (Q,) of images in and out of distribution; known images should have higher ones.
    """
    is_known = np.concatenate([np.ones(len(known)), np.zeros(len(foreign))])
    threshold = np.sort(known)[::-1][int(np.ceil(TRUE_POSITIVE_RATE * len(known))) - 1]
    auroc = roc_auc_score(is_known, np.concatenate([known, foreign]))
    return 100 * float(auroc), 100 * float((foreign >= threshold).mean())


PROTOCOLS = {
    "ood@knn": Protocol(
        task=Ood(),
        version=1,
        source="Sun et al. 2022 (arXiv 2204.06507): k-th nearest neighbour among normalised features, AUROC and FPR at "
        "95 %; ours: frozen features in place of a trained classifier's, k=50 of all training images, and noisy digits "
        "unless sets are named",
    ),
}
SUITES = {
    "smoke": ("ood@knn",),
    "full": ("ood@knn",),
    "everything": ("ood@knn",),
}
