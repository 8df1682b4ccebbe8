"""Health of features without labels: effective ranks, decay of the spectrum, spread, dead dimensions, outlying norms.

Nothing is trained. RankMe, alpha-ReQ, uniformity and dead dimensions are computed from the features of the validation
images, which other tasks extract, too; LiDAR and alignment from random crops of a few of these images; norms from
these images' patches.

N: validation images. n: images with q views each. D: width. All values depend on N, so results record it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.progress import Progress
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
    feature_pass,
    feature_work,
    for_each_batch,
    forward_batch,
    transform_of,
)
from probes.features.kinds import FeatureKind
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
from probes.pooled import PooledTask
from probes.scores import cost

MAX_RANK_IMAGES = 25_600  # images for ranks, as in the paper of RankMe (section 3.2)
MAX_PAIR_IMAGES = 2048  # images for uniformity: 2 million pairs
COLLAPSED = 0.02  # warns if RankMe is below this share of its maximum for N and D (ours)
MOSTLY_DEAD = 50.0  # warns if more than this percentage of dimensions is dead (ours)
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
    """Settings of a health evaluation."""

    NEEDS_TRAIN: ClassVar[bool] = False
    COST: ClassVar[float] = 0.1  # after a task that extracts the same features

    layers: Literal["last", "all"] = "last"  # all: also of each earlier block, as NAME_blockN, N from 1
    images: PositiveInt = 100  # n, images whose random crops LiDAR compares, or all if there are fewer
    views: TwoOrMore = 10  # q, random crops of each of these images

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        return self.kind.at_every_block(spec) if self.layers == "all" else (self.kind,)

    def takes(self, images: Any) -> bool:
        return True

    def cost(self, scale: Scale) -> Work:
        spec, val = scale.spec, scale.images["val"]
        views = feature_pass(scale, min(self.images, val) * self.views, "views of val", "crops")
        memory = 8.0 * 3 * spec.width * min(val, MAX_RANK_IMAGES)
        return feature_work(scale, {"val": val}, views, kinds=len(self.kinds(spec)), memory=memory)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        val, kinds = space.images("val", open_set), self.kinds(export.spec)
        features = extract(export, val, kinds, space, transform_of(export, space, self))
        chosen = features.indices[evenly_spaced(len(features), min(self.images, len(features)))]
        repeated = val.subset(np.repeat(chosen, self.views), f"views-{self.views}")
        crops = TrainTransform(
            size=export.spec.size,
            interpolation="bicubic",
            rule="torchvision",
            seed=space.seed,
            epoch=0,
            image_numbers=np.arange(len(repeated)),
            decode=space.decode,
        )
        views = extract(export, repeated, kinds, space, crops)
        if len(views) < len(repeated):
            raise ValueError(f"{val.url}: images that could be read before cannot be read now; run the same again")
        metrics: dict[str, Metric] = {}
        for kind in kinds:
            suffix = "" if kind == kinds[0] else f"_block{kind.layer + 1}"
            rows = features[kind][evenly_spaced(len(features), min(MAX_RANK_IMAGES, len(features)))]
            metrics |= {f"{name}{suffix}": metric for name, metric in spectrum_metrics(rows)}
            groups = views[kind][:].reshape(len(chosen), self.views, -1)
            metrics |= {f"{name}{suffix}": metric for name, metric in view_metrics(groups)}
        if export.spec.has_patches:
            norms = patch_norms(export, val.subset(chosen, "norms"), space, self)
            outliers = norm_outliers(norms)
            share = Metric(value=100 * outliers["share_5_median"], higher_is_better=None)
            metrics |= {"norm_outliers": share, "norm_ratio": undirected(outliers["ratio"])}
        facts = {
            "val": features.facts,
            "images": min(MAX_RANK_IMAGES, len(features)),
            "views": [len(chosen), self.views],
            "formulas": FORMULAS,
            "warnings": collapse_warnings(metrics, min(len(features), MAX_RANK_IMAGES, export.spec.width)),
        }
        return Outcome(metrics=metrics, facts=facts, cost=cost(features, views))


def undirected(value: float) -> Metric:
    """A metric without unit for which neither higher nor lower is better."""
    return Metric(value=value, unit="", higher_is_better=None)


def spectrum_metrics(features: np.ndarray) -> Iterator[tuple[str, Metric]]:
    """Names and metrics of features (N, D), without those that are undefined for few or constant features."""
    yield "rankme", Metric(value=rankme(features), unit="")
    if (np.ptp(features, axis=0) > 0).any():
        yield "rankme_variance", Metric(value=rankme_of_variances(features), unit="")
    with suppress(ValueError):  # too few eigenvalues for the fit
        yield "alpha_req", undirected(alpha_req(features))
    pairs = features[evenly_spaced(len(features), min(MAX_PAIR_IMAGES, len(features)))]
    if len(pairs) > 1:
        yield "uniformity", Metric(value=uniformity(pairs), unit="", higher_is_better=False)
    yield "dead_dimensions", Metric(value=dead_dimensions(features), higher_is_better=False)


def view_metrics(views: np.ndarray) -> Iterator[tuple[str, Metric]]:
    """Names and metrics of views (n, q, D).

    LiDAR is left out if all images have the same features: all its eigenvalues are then eps, and their entropy is that
    of a perfectly even spectrum.
    """
    if len(views) > 1:
        value, eigenvalues = lidar(views, LIDAR_DELTA, LIDAR_EPS)
        if eigenvalues[0] > 10 * LIDAR_EPS:
            yield "lidar", Metric(value=value, unit="")
    yield "alignment", Metric(value=alignment(views), unit="", higher_is_better=False)


def patch_norms(export: FrozenExport, images: ImageSet, space: Workspace, task: Health) -> np.ndarray:
    """L2 norms (n, L) of the last block's patch tokens before the final norm."""
    backbone = Backbone(export, space.device, space.precision, space.compiled)
    spans = batch_spans(len(images), space.batch_size or forward_batch(space.device))
    norms: dict[int, np.ndarray] = {}

    def measure(batch: DecodedBatch, span: range) -> None:
        features = backbone.views(backbone.prepare(batch.pixels), [(-1, False)])[-1, False]
        norms[batch.number] = features.patches.norm(dim=-1).flatten(1).cpu().numpy()
        progress.advance(len(span))

    reader = Reader(images, transform_of(export, space, task), spans, skip_bad=False)
    with Progress("norms of patches", len(images)) as progress:
        for_each_batch(reader, measure, space.device, space.workers)
    return np.concatenate([norms[number] for number in sorted(norms)])


def collapse_warnings(metrics: Mapping[str, Metric], max_rank: int) -> list[str]:
    """Signs of a collapse, one line each. max_rank: the highest rank that N and D allow."""
    warnings, rank, dead = [], metrics["rankme"].value, metrics["dead_dimensions"].value
    if rank < max(COLLAPSED * max_rank, 2.0):
        warnings.append(f"the features have collapsed: RankMe is {rank:.3g} of at most {max_rank}")
    if dead > MOSTLY_DEAD:
        warnings.append(f"{dead:.0f} % of the dimensions are dead: they hardly vary between images")
    return warnings


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
    "quick": ("health@val",),
    "full": ("health@val",),
    "today": ("health@val",),
    "everything": tuple(PROTOCOLS),
    "layers": ("health@layers",),
}
