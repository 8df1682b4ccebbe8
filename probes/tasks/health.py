"""Health of features without labels: effective ranks, decay of the spectrum, spread, dead dimensions, outlying norms.

Nothing is trained. RankMe, alpha-ReQ, uniformity and dead dimensions are of the validation images' features, which
other tasks extract too; LiDAR and alignment of random crops of a few of these images, norms of these images' patches.
N images, D width, n images of q views each. All values depend on N, so results record it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.settings import PositiveInt, TwoOrMore
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.work import Scale, Work
from imagesets.selection import evenly_spaced
from imagesets.sets import ImageSet, open_set
from probes.features.extract import (
    DecodedBatch,
    Reader,
    batch_spans,
    extract,
    for_each_batch,
    forward_batch,
    forward_bytes,
    transform_of,
)
from probes.features.fallbacks import PooledTask
from probes.features.kinds import FeatureKind, feature_bytes, feature_pass
from probes.label_free import (
    RANKME_EPS,
    alignment,
    alpha_req,
    dead_dimensions,
    lidar,
    norm_outliers,
    rankme,
    rankme_of_variances,
    uniformity,
)
from probes.linear.train_transform import TrainTransform
from probes.scores import cost

RANKED = 25_600  # images of which ranks are computed at most: RankMe's own number (section 3.2)
PAIRED = 2048  # images of which pairs are compared at most: 2 million pairs
COLLAPSED = 0.02  # RankMe below this share of what N and D allow, with which a warning begins (ours)
MOSTLY = 50.0  # percent of dead dimensions with which one does
LIDAR_DELTA, LIDAR_EPS = 1e-4, 1e-8  # stable-pretraining callbacks/lidar.py, as in the paper
FORMULAS = {
    "rankme": f"singular values of uncentred features, eps {RANKME_EPS:g} added to shares (Garrido et al. 2023)",
    "rankme_variance": f"variance ratios of centred features, eps {RANKME_EPS:g} (reptrix)",
    "alpha_req": "slope over eigenvalues 11 to 100, weighted by 1 / rank (reptrix)",
    "lidar": f"delta {LIDAR_DELTA:g}, eps {LIDAR_EPS:g}, crops of an image as a class (stable-pretraining)",
    "norm_outliers": "patches of the last block before the final norm, above 5 medians",
}


@dataclass(frozen=True, kw_only=True)
class Health(PooledTask):
    """Settings of one evaluation."""

    WITHOUT_VALUES: ClassVar[tuple[str, ...]] = ("*",)  # spectra, ranks and norms of all images together
    COST: ClassVar[float] = 0.1  # after a task that extracts the same features

    layers: Literal["last", "all"] = "last"  # of every block too: metrics named NAME_blockK, from 1 on
    images: PositiveInt = 100  # n, images whose random crops LiDAR compares; fewer where the set has fewer
    views: TwoOrMore = 10  # q, random crops of each

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        return self.kind.at_every_block(spec) if self.layers == "all" else (self.kind,)

    def takes(self, images: Any) -> bool:
        return True

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        few = min(self.images, images["val"])
        return {"image size": spec.image_size, "forward passes": images["val"] + few * self.views, "views": self.views}

    def cost(self, scale: Scale) -> Work:
        spec, val = scale.spec, scale.images["val"]
        few = min(self.images, val)
        parts = (feature_pass(spec, val, "val"), feature_pass(spec, few * self.views, "views of val", "crops"))
        memory = max(8 * 3 * spec.width * min(val, RANKED), forward_bytes(scale))
        held = feature_bytes(spec, val, len(self.kinds(spec))) + feature_bytes(spec, few * self.views)
        return Work(parts=parts, memory=memory, disk=held)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        val, kinds = space.images("val", open_set), self.kinds(export.spec)
        transform = transform_of(export, space, self)
        features = extract(export, val, kinds, space, transform)
        few = features.indices[evenly_spaced(len(features), min(self.images, len(features)))]
        shown = val.subset(np.repeat(few, self.views), f"views-{self.views}")
        crops = TrainTransform(
            size=export.spec.size,
            interpolation="bicubic",
            rule="torchvision",
            seed=space.seed,
            epoch=0,
            image_numbers=np.arange(len(shown)),
            decode=space.decode,
        )
        views = extract(export, shown, kinds, space, crops)
        if len(views) < len(shown):
            raise ValueError(f"{val.url}: images that could be read before cannot be read now; run the same again")
        metrics: dict[str, Metric] = {}
        for place, kind in enumerate(kinds):
            suffix = f"_block{kind.layer + 1}" if place else ""
            rows = features[kind][evenly_spaced(len(features), min(RANKED, len(features)))]
            metrics |= {f"{name}{suffix}": metric for name, metric in spectrum_metrics(rows)}
            groups = views[kind][:].reshape(len(few), self.views, -1)
            metrics |= {f"{name}{suffix}": metric for name, metric in view_metrics(groups)}
        if export.spec.has_patches:
            norms = patch_norms(export, val.subset(few, "norms"), space, self)
            outliers = norm_outliers(norms)
            share = Metric(value=100 * outliers["share_5_median"], higher_is_better=None)
            metrics |= {"norm_outliers": share, "norm_ratio": neither(outliers["ratio"])}
        facts = {
            "val": features.facts,
            "images": min(RANKED, len(features)),
            "views": [len(few), self.views],
            "formulas": FORMULAS,
            "warnings": warnings_of(metrics, min(len(features), RANKED, export.spec.width)),
        }
        return Outcome(metrics=metrics, facts=facts, cost=cost(features, views))


def neither(value: float) -> Metric:
    """A number without unit that is neither better nor worse."""
    return Metric(value=value, unit="", higher_is_better=None)


def spectrum_metrics(features: np.ndarray) -> Iterator[tuple[str, Metric]]:
    """Of features (N, D), without those that too few or constant features have not."""
    yield "rankme", Metric(value=rankme(features), unit="")
    if (np.ptp(features, axis=0) > 0).any():
        yield "rankme_variance", Metric(value=rankme_of_variances(features), unit="")
    with suppress(ValueError):  # fewer eigenvalues than are fitted
        yield "alpha_req", neither(alpha_req(features))
    pairs = features[evenly_spaced(len(features), min(PAIRED, len(features)))]
    if len(pairs) > 1:
        yield "uniformity", Metric(value=uniformity(pairs), unit="", higher_is_better=False)
    yield "dead_dimensions", Metric(value=dead_dimensions(features), higher_is_better=False)


def view_metrics(views: np.ndarray) -> Iterator[tuple[str, Metric]]:
    """Of views (n, q, D) of some images. LiDAR has no value where nothing tells the images apart: without any
    difference all its eigenvalues are eps, as if they were evenly spread."""
    if len(views) > 1:
        value, eigenvalues = lidar(views, LIDAR_DELTA, LIDAR_EPS)
        if eigenvalues[0] > 10 * LIDAR_EPS:
            yield "lidar", Metric(value=value, unit="")
    yield "alignment", Metric(value=alignment(views), unit="", higher_is_better=False)


def patch_norms(export: FrozenExport, images: ImageSet, space: Workspace, task: Health) -> np.ndarray:
    """Of each patch of the last block, before the final norm -> (n, L)."""
    backbone = Backbone(export, space.device, space.precision, space.compiled)
    spans = batch_spans(len(images), space.batch_size or forward_batch(space.device))
    parts: dict[int, np.ndarray] = {}

    def measure(loaded: DecodedBatch, span: range) -> None:
        features = backbone.views(backbone.prepare(loaded.pixels), [(-1, False)])[-1, False]
        parts[loaded.number] = features.patches.norm(dim=-1).flatten(1).cpu().numpy()

    for_each_batch(
        Reader(images, transform_of(export, space, task), spans, False), measure, space.device, space.workers
    )
    return np.concatenate([parts[number] for number in sorted(parts)])


def warnings_of(metrics: Mapping[str, Metric], most: int) -> list[str]:
    """Signs of a collapse, a line each. most: the highest rank that images and width allow."""
    lines, rank, dead = [], metrics["rankme"].value, metrics["dead_dimensions"].value
    if rank < max(COLLAPSED * most, 2.0):
        lines.append(f"the features have collapsed: RankMe {rank:.3g}, where {most} is possible")
    if dead > MOSTLY:
        lines.append(f"{dead:.0f} % of the dimensions are dead: they hardly vary between images")
    return lines


PROTOCOLS = {
    "health@val": Protocol(
        task=Health(),
        version=1,
        source="RankMe (Garrido et al. 2023), LiDAR (Thilak et al. 2023; views and constants of stable-pretraining "
        "d15ec96d), alpha-ReQ (BARL-SSL/reptrix dbf53c5), uniformity and alignment (Wang and Isola 2020), norms "
        "(Darcet et al. 2023); ours: of the validation images' encoder output, 100 images of 10 random crops",
    ),
    "health@layers": Protocol(
        task=Health(layers="all"),
        version=1,
        source="ours: health@val of every block in one pass",
    ),
}

SUITES = {
    "smoke": ("health@val",),
    "full": ("health@val",),
    "today": ("health@val",),
    "everything": tuple(PROTOCOLS),
    "layers": ("health@layers",),
}
