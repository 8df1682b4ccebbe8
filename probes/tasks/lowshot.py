"""Logistic regression on frozen features of few images: 1, 2, 5 or 16 per class, or a share of all.

The evaluations of MSN (Assran et al. 2022; facebookresearch/msn, logistic_eval.py), which MOCA uses as well, and those
of iBOT and DINOv2 on all images; and MIEB's, 16 images per class in five draws. probes/lowshot/logistic.py has
objective and solver, probes/lowshot/fitting.py the conventions for lambda.

n: images of a subset. V: validation images that were read. C: classes. D: width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from engine.rows import Rows
from engine.settings import Different, Fraction, PositiveInt, ReadIf
from engine.sweeps import edge_warnings
from engine.tasks import (
    ADDED,
    Emit,
    Head,
    Metric,
    Outcome,
    Predicts,
    Protocol,
    Reads,
    Workspace,
    as_reported,
    resampled,
)
from engine.work import Part, Scale, Work
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.features.extract import (
    DecodedBatch,
    Extraction,
    Extractor,
    FeatureSet,
    emit_logits,
    extract,
    feature_work,
    transform_of,
)
from probes.features.fallbacks import with_supported_pool
from probes.features.kinds import FeatureKind
from probes.lowshot.blocks import BLOCK_ROWS, PreparedRows, Preprocess
from probes.lowshot.fitting import MAX_IN_MEMORY, EvaluatedFit, FitSettings, Fitter, fit_subsets
from probes.lowshot.logistic import BLOCK_LOGITS, HISTORY
from probes.lowshot.several_labels import ClassByClass
from probes.lowshot.shots import (
    PUBLISHED_LISTS,
    Draws,
    Subset,
    draw_subsets,
    lists_read,
    possible_shots,
    rows_of_images,
    share_warning,
    subset_indices,
)
from probes.pooled import PooledTask
from probes.scores import (
    cost,
    equal_features_warning,
    mean_average_precision,
    nll_metric,
    prediction_arrays,
    spread_out,
    with_class_means,
)
from probes.splits import not_held_out_warning, open_splits

# Features of all training images are extracted, as other tasks read them, too, if the subsets together are at least as
# large as this share of them, or if all are on disk; otherwise those of the subsets alone.
EXTRACT_ALL_FROM = 0.25

# For plans: iterations of a fit, tens in float32 and another ten in float64 (docs/log.md), of two matrix products each.
STEPS = 60


def fit_bytes(count: int, width: int, classes: int) -> float:
    """Memory of a fit to `count` rows, in memory or in blocks (probes/lowshot/blocks.py), without libraries."""
    if count * max(width, classes) <= MAX_IN_MEMORY:
        return 16.0 * count * (width + classes)
    weights = 8.0 * width * classes * (2 * HISTORY + 8)
    return weights + 12.0 * width * BLOCK_ROWS + 24.0 * width**2 + 40.0 * BLOCK_LOGITS["cpu"] + 16.0 * count


@dataclass(frozen=True, kw_only=True)
class LowShot(FitSettings, PooledTask):
    """Settings of a low-shot evaluation: a logistic regression for every subset and lambda."""

    COST: ClassVar[float] = 1.5  # after k-NN, which extracts the same features

    shots: Different[PositiveInt] = (1, 2, 5)  # numbers of training images per class
    # random subsets for each number of shots; their mean is reported
    splits: Annotated[PositiveInt, ReadIf("shots")] = 3
    fractions: Different[Fraction] = (0.01,)  # shares of all training images, class-balanced, one subset each
    # Folder with MSN's lists of images, in place of random subsets; published: the folder of the images.
    lists: str = ""
    # Of each feature vector: subtract the mean of its D values and scale to unit length, only scale, or neither.
    preprocess: Preprocess = "centre_and_normalise"
    # How images of a class are drawn: nested, fewer shots being part of more, each split by a seed of its own; or by
    # MIEB's permutation, which takes all images of a class that has too few.
    draws: Annotated[Draws, ReadIf("shots")] = field(default="nested", metadata=ADDED)
    pool: Literal["cls", "avg"] = "avg"  # feature: the class token, or the mean of the patches
    layer: int = -1  # block whose output is the feature; -1 is the last
    norm: bool = False  # apply the network's final norm
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"  # for resizing images

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots and not self.fractions:
            raise ValueError("shots=(): must be 1 or more different values, because fractions are empty as well")
        if self.intercept and self.solver == "cyanure":
            raise ValueError(f"intercept={self.intercept}: fitted by solver=lbfgs or scikit-learn, not by cyanure")
        if self.draws == "mieb" and (self.lists or self.fractions):
            raise ValueError("draws=mieb: numbers of images per class alone; set fractions=() and no lists")

    @property
    def is_random(self) -> bool:
        draws_images = bool(self.shots) or min(self.fractions) < 1
        return bool(self.holdout) or (draws_images and not self.lists)

    @property
    def kind(self) -> FeatureKind:
        return FeatureKind(self.pool, self.layer, self.norm)

    def check_images(self, space: Workspace) -> None:
        train, _ = open_splits(space, several_labels=self.takes_several_labels)
        if not train.has_several_labels:
            possible_shots(train, self.shots, bool(self.fractions), self.draws)

    def reads(self, space: Workspace) -> Reads:
        return lists_read(self.lists, space)

    def cost(self, scale: Scale) -> Work:
        spec, train = scale.spec, scale.images["train"]
        counts, classes = self.subset_sizes(train, scale.classes), scale.classes
        if scale.several_labels:  # a fit with two classes for each class
            counts, classes = counts * scale.classes, 2
        fits = len(self.lambdas) + bool(self.holdout)  # of each subset
        read = sum(counts) if sum(counts) < EXTRACT_ALL_FROM * train else train
        passes = {"train": read, "val": scale.images["val"]}
        # A fit is computed in the smaller of the spaces of its images and of their features.
        flops = 4.0 * STEPS * sum(count * min(count, spec.width) * classes for count in counts) / max(len(counts), 1)
        solved = Part(kind="heads", count=fits * len(counts), flops=flops)
        return feature_work(scale, passes, solved, memory=max(fit_bytes(n, spec.width, classes) for n in [*counts, 1]))

    def subset_sizes(self, images: int, classes: int) -> list[int]:
        """Number of images of each subset. images: number of training images."""
        few_shot = [min(shots * classes, images) for shots in self.shots for _ in range(self.splits)]
        return [*few_shot, *(round(share * images) for share in self.fractions)]

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        world, (train, val) = space.world, open_splits(space, several_labels=self.takes_several_labels)
        if train.has_several_labels:
            return self.class_by_class(export, space, train, val)
        shots, shots_warning = possible_shots(train, self.shots, bool(self.fractions), self.draws)
        subsets = draw_subsets(train, shots, self.fractions, self.splits, space.seed, self.lists, self.draws)
        transform, indices = transform_of(export, space, self), subset_indices(train, subsets)
        drawn = np.concatenate(indices)
        reads_all = world.gather_objects(self.extracts_all(export, train, len(drawn), transform, space))[0]
        needed = np.arange(len(train)) if reads_all else np.unique(drawn)
        images = train if reads_all else train.subset(needed, f"union-of-{len(subsets)}-subsets")
        gallery = extract(export, images, [self.kind], space, transform)
        queries = extract(export, val, [self.kind], space, transform)
        rows = [rows_of_images(subset_images, needed[gallery.indices]) for subset_images in indices]
        check_classes(subsets, rows, gallery.labels, train.classes)
        per_class = val.reports == "mean per class"
        fitter = self.fitter(gallery, queries, len(train.classes), space, per_class)
        names = [f"{subset.name} of split {subset.split}" for subset in subsets]
        fits_by_subset = list(zip(subsets, fit_subsets(fitter, names, rows, world), strict=True))
        constant = world.on_rank0(
            lambda: {
                "train": fitter.train.count_constant(np.unique(np.concatenate(rows))),
                "val": fitter.val.count_constant(np.arange(len(queries))),
            }
        )
        warnings = [shots_warning, not_held_out_warning(gallery.labels, train.classes) if self.holdout else ""]
        warnings += [share_warning(train, share, self.lists) for share in self.fractions]
        warnings += equal_features_warning(gallery, [self.kind])
        return self.outcome(fits_by_subset, gallery, queries, val, constant, [text for text in warnings if text])

    @property
    def takes_several_labels(self) -> bool:
        """Whether images may have several labels: if all training images are used, and one fit is reported."""
        reports_one_fit = bool(self.holdout) or len(self.lambdas) == 1
        return not self.shots and self.fractions == (1.0,) and reports_one_fit

    def takes(self, images: ImageSet) -> bool:
        return self.takes_several_labels or not images.has_several_labels

    @property
    def predicts(self) -> Predicts:
        return "classes" if self.takes_several_labels else ""

    def apply_head(
        self, head: Head, export: FrozenExport, images: ImageSet, space: Workspace, emit: Emit, first: int = 0
    ) -> None:
        kind, weights = with_supported_pool(self, export.spec).kind, head.tensors["weight"].to(space.device)
        backbone = Backbone(export, space.device, space.precision, space.compiled)
        extractor = Extractor(backbone=backbone, kinds=(kind,), image_set=images)

        def logits_of(batch: DecodedBatch, span: range) -> torch.Tensor:
            features = self.prepared(extractor(batch, span)[kind], space).read(np.arange(len(span)))
            return features @ weights.to(features.dtype)

        emit_logits(logits_of, images, transform_of(export, space, self), space, emit, first)

    def prepared(self, features: Rows, space: Workspace) -> PreparedRows:
        """Features (N, D) as the classifier reads them."""
        return PreparedRows(
            features=features, preprocess=self.preprocess, device=space.device, intercept=self.intercept
        )

    def class_by_class(self, export: FrozenExport, space: Workspace, train: ImageSet, val: ImageSet) -> Outcome:
        """`evaluate` for images with several labels: mean average precision of a fit for each class."""
        transform = transform_of(export, space, self)
        gallery, queries = (extract(export, images, [self.kind], space, transform) for images in (train, val))
        fitter = self.fitter(gallery, queries, 2, space)
        fits = ClassByClass(fitter=fitter, classes=train.classes, labels=gallery.labels).fit(space.world)
        scores = np.stack([fit.scores for fit in fits], axis=1)
        facts = {"train": gallery.facts, "val": queries.facts, "fits": [fit.record for fit in fits]}
        return Outcome(
            metrics={"mAP": precision_metric(scores, queries, len(val))},
            arrays={"scores": scores.astype(np.float32), "read": queries.indices},
            facts=facts | {"solver": self.solver, "metric": "11-point average precision of VOC 2007"},
            cost=cost(gallery, queries),
        )

    def extracts_all(
        self, export: FrozenExport, train: ImageSet, drawn: int, transform: EvalTransform, space: Workspace
    ) -> bool:
        """Whether to extract features of all training images: if many are drawn, or if all are on disk."""
        if drawn >= EXTRACT_ALL_FROM * len(train):
            return True
        extraction = Extraction(export=export, image_set=train, kinds=(self.kind,), space=space, transform=transform)
        return extraction.is_complete(extraction.open_store())

    def fitter(
        self, gallery: FeatureSet, queries: FeatureSet, classes: int, space: Workspace, per_class: bool = False
    ) -> Fitter:
        """The fits on these features. per_class: choose lambda by mean per-class accuracy."""
        train, val = (self.prepared(features[self.kind], space) for features in (gallery, queries))
        return Fitter(
            settings=self,
            train=train,
            labels=gallery.labels,
            val=val,
            val_labels=queries.labels,
            classes=classes,
            seed=space.seed,
            per_class=per_class,
            keep_weights=bool(space.keep_heads and self.predicts),
        )

    def outcome(
        self,
        fits_by_subset: Sequence[tuple[Subset, Sequence[EvaluatedFit]]],
        gallery: FeatureSet,
        queries: FeatureSet,
        val: ImageSet,
        constant: dict[str, int],
        warnings: Sequence[str],
    ) -> Outcome:
        """Mean and population standard deviation over the splits, as in MOCA's README_LOWSHOT.md; of MIEB's draws that
        of a sample, as in its published tables.

        Predictions are those of the first metric's first split; `nll` is the mean over its splits. constant: split ->
        number of images with constant features.
        """
        groups: dict[str, list[EvaluatedFit]] = {}
        records = []
        for subset, fits in fits_by_subset:
            for fit in fits:
                suffix = f"_lambda{fit.raw_lambda:g}" if len(fits) > 1 else ""
                groups.setdefault(f"top1_{subset.name}{suffix}", []).append(fit)
                names = {"subset": subset.name, "split": subset.split, "fingerprint": subset.images.fingerprint}
                records.append(names | dict(fit.record))
        metrics, all_warnings, repeated = {}, list(warnings), {}
        ddof = int(self.draws == "mieb")
        for metric, fits in groups.items():
            values = [fit.record["top1"] for fit in fits]
            share_correct = np.mean([fit.correct for fit in fits], axis=0)
            per_image = spread_out(share_correct, queries.indices, len(val))
            metrics[metric] = Metric(value=float(np.mean(values)), per_image=per_image)
            if len(values) > 1:
                repeated[metric] = [spread_out(fit.correct, queries.indices, len(val)) for fit in fits]
                deviation = float(np.std(values, ddof=ddof))
                metrics[f"{metric}_std"] = Metric(value=deviation, higher_is_better=None, deviation_of=metric)
            all_warnings += [f"{metric}: {fit.warning}" for fit in fits if fit.warning][:1]
            record, chosen = fits[0].record, {"lambda": fits[0].raw_lambda}
            held_out = round(self.holdout * record["images"])
            all_warnings += edge_warnings(record.get("holdout", ()), chosen, "top1", held_out)
        for split, count in constant.items():
            all_warnings += [f"{count} {split} images have constant features, taken as zero"] if count else []
        first_subset = fits_by_subset[0][0]
        facts = {
            "train": gallery.facts,
            "val": queries.facts,
            "fits": records,
            "solver": self.solver,
            "per_image": "share of the splits in which the image is right",
            "predictions": f"{first_subset.name} of split {first_subset.split}",
            "warnings": all_warnings,
        }
        first_fits = next(iter(groups.values()))
        predicted, confidence = first_fits[0].predicted, first_fits[0].confidence
        arrays = prediction_arrays(predicted, confidence, queries.indices, len(val))
        nll = np.mean([fit.nll for fit in first_fits], axis=0)
        metrics["nll"] = nll_metric(nll, queries.indices, len(val))
        metrics, weights = with_class_means(metrics, val, repeated, ddof), first_fits[0].weights
        head = None if weights is None else Head(tensors={"weight": weights}, classes=val.classes)
        return Outcome(metrics=metrics, arrays=arrays, facts=facts, cost=cost(gallery, queries), head=head)


def precision_metric(scores: np.ndarray, queries: FeatureSet, images: int) -> Metric:
    """mAP of scores (V, C) of the images that were read, with its values on resamples of all `images`."""
    labels, indices = queries.labels, queries.indices
    values = resampled(lambda weights: {"": mean_average_precision(scores, labels, weights[:, indices])}, images)[""]
    value = float(mean_average_precision(scores, labels, np.ones((1, len(labels))))[0])
    return Metric(value=value, resampled=values)


def check_classes(
    subsets: Sequence[Subset], rows: Sequence[np.ndarray], labels: np.ndarray, classes: Sequence[str]
) -> None:
    """Raises ValueError for a subset without a readable image of some class."""
    for subset, subset_rows in zip(subsets, rows, strict=True):
        missing = np.setdiff1d(np.arange(len(classes)), labels[subset_rows])
        if len(missing):
            name = classes[missing[0]]
            raise ValueError(f"{subset.images.url}: no image of class {name!r} can be read; repair or replace them")


MOCA = LowShot(pool="avg", norm=False, lambdas=(0.1,), interpolation="bilinear")
MSN = replace(MOCA, pool="cls", lambdas=(0.00025, 0.0025))

PROTOCOLS = {
    "lowshot@bench": Protocol(
        task=replace(MSN, lambdas=(0.0025,), interpolation="bicubic"),
        version=1,
        source="ours: lowshot@msn with the one lambda of its README, and with the bicubic transform of the k-NN "
        "recipes, so that one pass over the images serves both; not to be compared with published numbers",
    ),
    "lowshot@transfer": Protocol(
        task=replace(MSN, fractions=(), lambdas=(0.0025,), interpolation="bicubic"),
        version=1,
        source="ours: lowshot@bench without its 1 %, which of most transfer sets is less than an image of each class",
    ),
    "lowshot@moca": Protocol(
        task=MOCA,
        version=1,
        source="MOCA (TMLR 2024) appendix and README_LOWSHOT.md (lambda 0.1, three splits, numpy's std), "
        "eval_lowshot_logistic.py:258-279 (bilinear), :381-386, :418-444 (mean of the patches, no final norm); solved "
        "by L-BFGS to 1e-6; the draws are ours unless `lists` is set",
    ),
    "lowshot@msn": Protocol(
        task=MSN,
        version=1,
        source="facebookresearch/msn logistic_eval.py:120-143 (transform), :172-187 (preparation, lambda / n), "
        ":255-260 (class token, no final norm); lambda is its default and its README's, both reported; solved by "
        "L-BFGS to 1e-6; the draws are ours unless `lists` is set",
    ),
    "lowshot@mieb": Protocol(
        task=LowShot(
            shots=(16,),
            splits=5,
            fractions=(),
            draws="mieb",
            pool="cls",
            norm=True,
            preprocess="none",
            lambdas=(1.0,),
            intercept=True,
            solver="scikit-learn",
            interpolation="bicubic",
        ),
        version=1,
        source="MIEB (arXiv:2504.10471), few-shot classification: embeddings-benchmark/mteb 9b178e60a, "
        "AbsTaskImageClassification.py:50-59, :188-213 (16 shots, five draws), ClassificationEvaluator.py:338-375 "
        "(scikit-learn, C = 1, at most 100 iterations), dino_models.py:46-51 (class token after the final norm, not "
        "normalised); Resize(256) and CenterCrop(224), bicubic, as DINOv2's processor; seed 0 is MIEB's 42",
    ),
    "logreg@ibot": Protocol(
        task=LowShot(
            shots=(),
            fractions=(1.0,),
            pool="cls",
            norm=True,
            preprocess="normalise",
            lambdas=(0.01, 0.1, 1.0),
            lambda_convention="as is",
            interpolation="bicubic",
        ),
        version=1,
        source="bytedance/ibot evaluation/eval_logistic_regression.py:54-59 (transform), :113-114 (L2), :221-235, "
        ":246, :269 (lambda, not divided by n), n_last_blocks 1, avgpool 0; all training images as in the code, its "
        "1 % and 10 % by fractions; solved by L-BFGS to 1e-6",
    ),
    "logreg@dinov2": Protocol(
        task=LowShot(
            shots=(),
            fractions=(1.0,),
            pool="cls",
            norm=True,
            preprocess="none",
            lambdas=tuple(float(f"{10 ** (6 - step / 4):.6g}") for step in range(45)),
            holdout=0.1,
            crop=1.0,
            interpolation="bicubic",
            max_iterations=1000,
            intercept=True,
        ),
        version=3,
        source="facebookresearch/dinov2 eval/log_regression.py:33-34 (C = 1 / lambda = 10^linspace(-6, 5, 45)), "
        ":294-340 (chosen on 10 % of train by the metric of the set, top-1 or mean per class), :376 (Resize 224); "
        "its solver, cuML's, fits intercepts without a penalty; its random 10 % are class-balanced here; solved by "
        "L-BFGS to 1e-6",
    ),
}

# On the sources' lists, and solved by cyanure (to 1e-3 in 300 epochs at most), with which both computed their numbers
# (the default of MOCA's released code is scikit-learn).
PROTOCOLS |= as_reported(
    {name: PROTOCOLS[name] for name in ("lowshot@moca", "lowshot@msn")}, lists=PUBLISHED_LISTS, solver="cyanure"
)

SUITES = {
    "smoke": ("lowshot@bench",),
    "quick": ("lowshot@mieb", "logreg@dinov2"),
    "frozen": ("lowshot@bench",),
    "full": ("lowshot@msn",),
    "everything": ("lowshot@bench", "lowshot@moca", "lowshot@msn", "lowshot@mieb", "logreg@ibot", "logreg@dinov2"),
    "transfer": ("lowshot@transfer", "logreg@dinov2"),
    "paper:moca": ("lowshot@moca_paper",),
}
