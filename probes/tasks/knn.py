"""Weighted k-nearest-neighbour accuracy of frozen features, without any training.

DINO's evaluation (facebookresearch/dino eval_knn.py), after Wu et al. 2018: the k training images of the largest cosine
similarity vote for their class with the weight exp(similarity / T). One search serves every k and T.

Q: queries (validation images). K: neighbours that the search returns for a query, the largest k.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.distributed import World
from engine.machine import run_on_core_threads
from engine.neighbours import Neighbours, search, search_bytes, unit_rows
from engine.rows import row_slices
from engine.settings import Fraction, OneOrMoreDifferent, PositiveFloat, PositiveInt
from engine.sweeps import edge_warnings
from engine.tasks import ADDED, Outcome, Protocol, Workspace
from engine.work import Part, Scale, Work
from imagesets.decoding import UnreadableImage
from imagesets.selection import evenly_spaced
from imagesets.sets import ImageSet
from imagesets.subsets import fraction
from probes.features.extract import FeatureSet, extract, feature_work, transform_of
from probes.features.kinds import FeatureKind
from probes.lowshot.shots import share_warning
from probes.pooled import PooledTask
from probes.scores import (
    accuracy,
    cost,
    equal_features_warning,
    gather_in_order,
    percent,
    prediction_arrays,
    with_blocks,
    with_class_means,
)
from probes.splits import check_labels, open_splits

BLOCK = 1 << 19  # scores, of queries times classes, that are counted together: 4 MB fit into a core's cache
MIN_EXPONENT = -700.0  # float64 exp(-745) is 0, and every neighbour's weight must be positive


class TopHits(NamedTuple):
    """Whether the class of each query is among the 1 or 5 classes with the highest scores: (Q,) bool."""

    top1: np.ndarray
    top5: np.ndarray


def vote(
    similarities: np.ndarray,
    neighbour_labels: np.ndarray,
    labels: np.ndarray,
    ks: Sequence[int],
    temperatures: Sequence[float],
) -> dict[tuple[int, float], TopHits]:
    """Hits of each (k, T).

    A class's score is the sum of the weights of its neighbours among the first k. Classes with equal scores are ranked
    by class number. Only classes that occur among the k neighbours count for the top five: the official codes fill free
    places with classes of weight zero in whatever order their sort leaves them, so that the same features gave 87.0,
    88.0 and 89.5 % in three of them at k=5.

    Args:
        similarities: (Q, K) float32, of each query to its neighbours, in descending order.
        neighbour_labels: (Q, K), classes of these neighbours.
        labels: (Q,), classes of the queries.
        ks: Numbers of neighbours that vote, each from 1 to K.
        temperatures: Values of T, all above 0.

    Raises:
        ValueError: For a k or T out of range.
    """
    if not all(1 <= k <= similarities.shape[1] for k in ks) or not all(t > 0 for t in temperatures):
        raise ValueError(
            f"k={list(ks)}, T={list(temperatures)}: give k from 1 to the {similarities.shape[1]} neighbours and T > 0"
        )
    hits = {(k, t): TopHits(*np.zeros((2, len(labels)), bool)) for k in ks for t in temperatures}
    classes = int(max(neighbour_labels.max(initial=0), labels.max(initial=0))) + 1
    numbers = np.arange(classes)

    def count_block(rows: slice) -> None:
        relative, own_class = _relative_similarities(similarities[rows]), labels[rows, None]
        wins_ties = numbers < own_class
        for temperature in temperatures:
            weights, scores, counted = _weights(relative, temperature), np.zeros(wins_ties.shape), 0
            for k in sorted(ks):
                _add_votes(scores, neighbour_labels[rows, counted:k], weights[:, counted:k])
                counted = k
                own_score = np.take_along_axis(scores, own_class, axis=1)
                ahead = ((scores > own_score) | (wins_ties & (scores == own_score))).sum(axis=1)
                has_votes = own_score[:, 0] > 0
                hits[k, temperature].top1[rows] = has_votes & (ahead < 1)
                hits[k, temperature].top5[rows] = has_votes & (ahead < 5)

    run_on_core_threads(count_block, list(row_slices(len(labels), max(1, BLOCK // classes))))
    return hits


def predict_classes(
    similarities: np.ndarray, neighbour_labels: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The class with the highest score (Q,) int64, the lowest of equals, and its share of all scores (Q,) float32.

    All given neighbours vote: similarities (Q, k) float32, in descending order, and neighbour_labels (Q, k).
    """
    predicted, confidence = np.zeros(len(similarities), np.int64), np.zeros(len(similarities), np.float32)
    classes = int(neighbour_labels.max(initial=0)) + 1

    def predict_block(rows: slice) -> None:
        weights = _weights(_relative_similarities(similarities[rows]), temperature)
        scores = np.zeros((len(weights), classes))
        _add_votes(scores, neighbour_labels[rows], weights)
        predicted[rows] = scores.argmax(axis=1)
        confidence[rows] = scores.max(axis=1) / scores.sum(axis=1)

    run_on_core_threads(predict_block, list(row_slices(len(similarities), max(1, BLOCK // classes))))
    return predicted, confidence


def _relative_similarities(similarities: np.ndarray) -> np.ndarray:
    """Similarities (Q, K) float64 minus the largest of each query.

    This multiplies all scores of a query by one factor and keeps exp from overflowing.
    """
    return similarities.astype(np.float64) - similarities[:, :1]


def _weights(relative: np.ndarray, temperature: float) -> np.ndarray:
    return torch.from_numpy(relative / temperature).clamp_(min=MIN_EXPONENT).exp_().numpy()


def _add_votes(scores: np.ndarray, neighbour_labels: np.ndarray, weights: np.ndarray) -> None:
    """Add each neighbour's weight (Q, k) to the score of its class (Q, C), in place, nearest neighbours first."""
    cells = neighbour_labels + scores.shape[1] * np.arange(len(scores))[:, None]
    np.add.at(scores.reshape(-1), cells.ravel(), weights.ravel())


DUPLICATE_SIMILARITY = 1 - 1e-5  # above it, the pixels of a validation and a training image are compared
MAX_COMPARED = 500  # pairs of images whose pixels are compared
EXAMPLES = 8  # a result keeps so many neighbours of so many validation images, for `bench report`


@dataclass(frozen=True, kw_only=True)
class Knn(PooledTask):
    """Settings of a k-NN evaluation. Every k is evaluated with every temperature."""

    k: OneOrMoreDifferent[PositiveInt] = (10, 20, 100, 200)  # numbers of neighbours that vote
    # T of a vote's weight exp(similarity / T). With several, the best on the validation images is reported as
    # top1_k20_bestT, an optimistic number that is not comparable with one of a fixed T.
    temperature: OneOrMoreDifferent[PositiveFloat] = (0.07,)
    layer: int = -1  # block whose output is the feature; -1 is the last
    # Blocks to evaluate. all: also reports the main metric of each earlier block, as NAME_blockN, N from 1.
    layers: Literal["last", "all"] = field(default="last", metadata=ADDED)
    norm: bool = True  # apply the network's final norm
    fraction: Fraction = 1.0  # share of the training images in the gallery, class-balanced, drawn by the seed
    backend: Literal["faiss", "torch"] = "faiss"  # library that searches for neighbours

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == "all" and self.layer != -1:
            raise ValueError(f"layers=all, layer={self.layer}: to evaluate all blocks, leave layer at -1")

    @property
    def is_random(self) -> bool:
        return self.fraction < 1

    @property
    def kind(self) -> FeatureKind:
        return FeatureKind(self.pool, self.layer, self.norm)

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        return self.kind.at_every_block(spec) if self.layers == "all" else (self.kind,)

    def cost(self, scale: Scale) -> Work:
        spec, queries = scale.spec, scale.images["val"]
        gallery, kinds = round(self.fraction * scale.images["train"]), len(self.kinds(spec))
        passes = {"train" if self.fraction == 1 else f"{self.fraction:g} of train": gallery, "val": queries}
        search = Part(kind="heads", count=kinds, flops=2.0 * spec.width * gallery * queries)
        memory = search_bytes(gallery, queries, spec.width, max(self.k))
        return feature_work(scale, passes, search, kinds=kinds, memory=memory)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        outcome = self.evaluate_kind(export, space)
        by_block = {
            kind.layer + 1: replace(self, layer=kind.layer, layers="last").evaluate_kind(export, space, details=False)
            for kind in self.kinds(export.spec)[1:]
        }
        return with_blocks(outcome, by_block)

    def evaluate_kind(self, export: FrozenExport, space: Workspace, *, details: bool = True) -> Outcome:
        """The outcome of `self.kind`; the features of all `kinds` are extracted in the same pass.

        details: with examples of neighbours, and a search for validation images that are training images.
        """
        world, kinds = space.world, self.kinds(export.spec)
        train, val = open_splits(space)
        drawn_larger = share_warning(train, self.fraction, "")
        if self.fraction < 1:
            train = fraction(train, self.fraction, space.seed)
        transform = transform_of(export, space, self)
        gallery = extract(export, train, kinds, space, transform)
        queries = extract(export, val, kinds, space, transform)
        check_labels(gallery.labels, queries.labels, train)
        # If the gallery is too small for every k, all its images vote, as in DINOv2's eval/knn.py:198-231.
        ks = [k for k in self.k if k <= len(gallery)] or [len(gallery)]

        near = search(
            gallery[self.kind],
            queries[self.kind],
            max(ks),
            self.backend,
            space.device,
            prepare=unit_rows,
            world=world,
        )
        hits = self.hits(near, gallery, queries, ks, world)
        temperature = self.best_temperature(hits, ks[0])
        predicted, confidence = predictions(near, gallery.labels, ks[0], temperature, world)
        arrays = example_neighbours(near, gallery, queries, world) if self.fraction == 1 and details else {}
        arrays |= prediction_arrays(predicted, confidence, queries.indices, len(val))
        duplicates = ""
        if details:
            candidates = duplicate_candidates(near, gallery, queries, world)
            duplicates = world.on_rank0(lambda: duplicates_warning(train, val, candidates))
        return self.outcome(hits, arrays, ks, gallery, queries, val, [drawn_larger, duplicates])

    def hits(
        self, near: Neighbours, gallery: FeatureSet, queries: FeatureSet, ks: Sequence[int], world: World
    ) -> dict[tuple[int, float], TopHits]:
        """Hits of all queries for each (k, T); every process counts the votes for the queries that it searched for."""

        def count_votes() -> list[np.ndarray]:
            neighbour_labels, labels = gallery.labels[near.indices], queries.labels[near.places]
            hits = vote(near.similarities, neighbour_labels, labels, ks, self.temperature)
            return [near.places, *(correct for top_hits in hits.values() for correct in top_hits)]

        _, *correct = gather_in_order(world, count_votes)
        return dict(zip(product(ks, self.temperature), map(TopHits, correct[::2], correct[1::2]), strict=True))

    def best_temperature(self, hits: Mapping[tuple[int, float], TopHits], k: int) -> float:
        """The temperature with the highest top-1 accuracy on the validation images; the first of several equal ones."""
        return max(self.temperature, key=lambda temperature: percent(hits[k, temperature].top1))

    def outcome(
        self,
        hits: Mapping[tuple[int, float], TopHits],
        arrays: Mapping[str, np.ndarray],
        ks: Sequence[int],
        gallery: FeatureSet,
        queries: FeatureSet,
        val: ImageSet,
        warnings: Sequence[str] = (),
    ) -> Outcome:
        """Top-1 and top-5 accuracy for each k. warnings: about the images, "" for none."""
        metrics, sweep, several = {}, {}, len(self.temperature) > 1
        for k in ks:
            suffix = f"k{k}_bestT" if several else f"k{k}"
            best = hits[k, self.best_temperature(hits, k)]
            for top, correct in (("top1", best.top1), ("top5", best.top5)):
                metrics[f"{top}_{suffix}"] = accuracy(correct, queries.indices, len(val), chosen_on_val=several)
            sweep[f"k{k}"] = [
                {"T": t, "top1": percent(hits[k, t].top1), "top5": percent(hits[k, t].top5)} for t in self.temperature
            ]
        facts: dict[str, Any] = {"train": gallery.facts, "val": queries.facts, "gallery": len(gallery)}
        if several:
            facts["per_temperature"] = sweep
            chosen = {"T": self.best_temperature(hits, ks[0])}
            warnings = [*warnings, *edge_warnings(sweep[f"k{ks[0]}"], chosen, "top1", len(queries))]
        warnings = [*filter(None, warnings), *equal_features_warning(gallery, [self.kind])]
        if dropped := [k for k in self.k if k > len(gallery)]:
            facts["k_beyond_the_gallery"] = dropped
            instead = f"k={len(gallery)} was used instead" if ks == [len(gallery)] else "left out"
            listed = ", ".join(map(str, dropped))
            warnings.insert(0, f"k={listed} is more than the {len(gallery)} images of the gallery: {instead}")
        if warnings:
            facts["warnings"] = warnings
        metrics = with_class_means(metrics, val)
        return Outcome(metrics=metrics, arrays=arrays, facts=facts, cost=cost(gallery, queries))


def predictions(
    near: Neighbours, gallery_labels: np.ndarray, k: int, temperature: float, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted classes (Q,) of all queries by their first k neighbours, and their shares of all scores (Q,)."""

    def predict() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels = gallery_labels[near.indices[:, :k]]
        return near.places, *predict_classes(near.similarities[:, :k], labels, temperature)

    _, predicted, confidence = gather_in_order(world, predict)
    return predicted, confidence


def example_neighbours(
    near: Neighbours, gallery: FeatureSet, queries: FeatureSet, world: World
) -> dict[str, np.ndarray]:
    """The nearest EXAMPLES neighbours of EXAMPLES evenly spread queries, as arrays of the result.

    neighbours_of: (E,) places of these queries in the validation images. neighbours: (E, k) places of their neighbours
    in the training images. similarities: (E, k) float32.
    """

    def select() -> Neighbours:
        is_example = np.isin(near.places, evenly_spaced(len(queries), min(EXAMPLES, len(queries))))
        similarities, indices = near.similarities[is_example, :EXAMPLES], near.indices[is_example, :EXAMPLES]
        return Neighbours(near.places[is_example], similarities, indices)

    places, similarities, indices = gather_in_order(world, select)
    return {
        "neighbours_of": queries.indices[places],
        "neighbours": gallery.indices[indices],
        "similarities": similarities,
    }


def duplicate_candidates(near: Neighbours, gallery: FeatureSet, queries: FeatureSet, world: World) -> np.ndarray:
    """Places in the validation and the training images (P, 2) of pairs that have practically the same features."""

    def select() -> tuple[np.ndarray, np.ndarray]:
        is_same = near.similarities[:, 0] > DUPLICATE_SIMILARITY
        return queries.indices[near.places[is_same]], gallery.indices[near.indices[is_same, 0]]

    return np.stack(gather_in_order(world, select), axis=1)


def duplicates_warning(train: ImageSet, val: ImageSet, candidates: np.ndarray) -> str:
    """A warning about validation images that are training images, too; "" if there are none.

    candidates: (P, 2) places of images in val and train; the pixels of up to MAX_COMPARED pairs are compared.
    """
    compared = candidates[evenly_spaced(len(candidates), min(MAX_COMPARED, len(candidates)))]
    duplicates = []
    for val_index, train_index in compared.tolist():
        with suppress(UnreadableImage):  # an image that became unreadable after its features were extracted
            val_image, train_image = val.image(val_index), train.image(train_index)
            if val_image.size == train_image.size and val_image.tobytes() == train_image.tobytes():
                duplicates.append((val.path(val_index), train.path(train_index)))
    if not duplicates:
        return ""
    is_complete = len(compared) == len(candidates)
    count = str(len(duplicates)) if is_complete else f"{len(duplicates)} of {len(compared)} compared"
    val_path, train_path = duplicates[0]
    return (
        f"{count} validation images are training images, too, such as {val_path} and {train_path}: they inflate the "
        f"score; bench data check {train.url} lists them all"
    )


SWEEP = (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10, 0.12, 0.15, 0.20)  # MOCA eval_knn.py:62-65

PROTOCOLS = {
    "knn@dino": Protocol(
        task=Knn(k=(10, 20, 100, 200), temperature=(0.07,), pool="cls"),
        version=1,
        source="facebookresearch/dino eval_knn.py:194-197 (k, T), :32-37 (transform), :146-181 (vote); "
        "top-5 among classes that occur, see probes/tasks/knn.py",
    ),
    "knn@dinov2": Protocol(
        task=Knn(k=(10, 20, 100, 200), temperature=(0.07,), pool="cls"),
        version=1,
        source="facebookresearch/dinov2 eval/knn.py:87-95 (k, T), data/transforms.py:77-91; the same top-1 as knn@dino",
    ),
    "knn@ibot": Protocol(
        task=Knn(k=(10, 20, 100, 200), temperature=(0.07,), pool="cls"),
        version=1,
        source="bytedance/ibot evaluation/eval_knn.py:272-281 with run.sh (n_last_blocks=1, avgpool=0)",
    ),
    "knn@moca": Protocol(
        task=Knn(k=(10, 20), temperature=SWEEP, pool="avg"),
        version=1,
        source="valeoai/MOCA eval_knn.py:38-65 (k, best of ten T), util/knn_utils.py:20-26 (mean patch token); "
        "the paper reports k=20",
    ),
    "knn@mst": Protocol(
        task=Knn(k=(10, 20, 100, 200), temperature=(0.07,), pool="cls"),
        version=1,
        source="MST (NeurIPS 2021) appendix: k=10 in the main table, 20, 100 and 200 tabulated; T not stated, "
        "0.07 (Wu et al. 2018) is ours",
    ),
    "knn@layers": Protocol(
        task=Knn(k=(10, 20, 100, 200), temperature=(0.07,), pool="cls", layers="all"),
        version=1,
        source="ours: knn@dino of every block in one pass, each behind the final norm",
    ),
    "knn_online@extrema": Protocol(
        task=Knn(k=(200,), temperature=(0.07,), pool="cls", fraction=0.1),
        version=1,
        source="ExtreMA section 4 (figure 4): k=200 on 10 % of ImageNet's training images; no code released; "
        "T=0.07, the balanced draw and the transform are ours",
    ),
}

SUITES = {
    "smoke": ("knn@dino",),
    "quick": ("knn@dino",),
    "frozen": ("knn@dino", "knn@moca"),
    "full": ("knn@dino",),
    "today": ("knn@dinov2",),
    "everything": tuple(PROTOCOLS),
    "layers": ("knn@layers",),
    "transfer": ("knn@dino",),
    "paper:moca": ("knn@moca",),
    "paper:mst": ("knn@mst",),
}
