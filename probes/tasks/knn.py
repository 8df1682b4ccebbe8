"""Weighted k-nearest-neighbour accuracy on frozen features: what a checkpoint knows before any training.

DINO's evaluation (github facebookresearch/dino, eval_knn.py), after Wu et al. 2018: cosine similarity to the training
images, a vote of the k nearest weighted by exp(similarity / T). One search answers every k and T.

Letters: Q queries, K neighbours found, k that vote, T temperature, P pairs of a query and a class that is counted, M
neighbours labelled with these classes.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.machine import run_on_core_threads
from engine.neighbours import Neighbours, search, search_bytes, search_seconds, unit_rows
from engine.rows import row_slices
from engine.settings import Fraction, OneOrMoreDifferent, PositiveFloat, PositiveInt
from engine.tasks import ADDED, Outcome, Protocol, Workspace
from engine.work import Kind, Part, Scale, Work
from imagesets.decoding import UnreadableImage
from imagesets.selection import evenly
from imagesets.sets import ImageSet
from imagesets.subsets import fraction
from probes.features.extract import FeatureSet, extract, forward_bytes, transform_of
from probes.features.fallbacks import PooledTask
from probes.features.kinds import FeatureKind, feature_bytes, feature_pass
from probes.scores import accuracy, cost, in_order, percent, prediction_arrays, with_blocks, with_class_means
from probes.splits import check_labels, open_splits

VOTERS = 512  # queries whose votes are counted together: stays in a core's cache
LOWEST = -700.0  # exp(-745) is 0, and weights are positive


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
    """(k, T) -> hits, from similarities (Q, K) float32, falling, and neighbour_labels (Q, K), for the `labels` (Q,).

    Classes with equal scores rank by number. Only classes that occur among the k neighbours count for the top five: the
    official codes fill free places with classes of weight zero in the order their sort happens to leave, so that the
    same features gave 87.0, 88.0 and 89.5 % in three of them at k=5.
    """
    if not all(1 <= k <= similarities.shape[1] for k in ks) or not all(t > 0 for t in temperatures):
        raise ValueError(f"votes of k={list(ks)}, T={list(temperatures)} on {similarities.shape[1]} neighbours")
    if max(neighbour_labels.max(initial=0), labels.max(initial=0)) < 1 << (31 - 2 * similarities.shape[1].bit_length()):
        neighbour_labels = neighbour_labels.astype(np.int32)  # `_by_class` sorts it in half the time
    hits = {(k, t): TopHits(*np.zeros((2, len(labels)), bool)) for k in ks for t in temperatures}

    def count(rows: slice) -> None:
        lead, own = _lead(similarities[rows]), labels[rows]
        places, ranks, pairs, queries, classes = _contenders(lead, neighbour_labels[rows], own, temperatures)
        is_lower, is_own = classes < own[queries], classes == own[queries]
        own_pairs = np.full(len(own), len(queries))  # where there is none, one more than there are pairs
        own_pairs[queries[is_own]] = np.flatnonzero(is_own)
        weights = [_weights(lead.ravel()[places], temperature) for temperature in temperatures]
        for k in ks:
            voters = pairs[: np.searchsorted(ranks, k)]
            present = int(voters.max(initial=-1)) + 1  # pairs are numbered as they first occur
            lower, absent = is_lower[:present], own_pairs >= present
            own_pair = np.minimum(own_pairs, present)[queries[:present]]
            for temperature, weight in zip(temperatures, weights, strict=True):
                scores = np.bincount(voters, weight[: len(voters)], present + 1)
                to_beat, scores = scores[own_pair], scores[:present]
                is_ahead = scores > to_beat
                is_ahead |= lower & (scores == to_beat)
                ahead = np.bincount(queries[:present][is_ahead], minlength=len(own))
                ahead[absent] = 5
                hits[k, temperature].top1[rows], hits[k, temperature].top5[rows] = ahead < 1, ahead < 5

    run_on_core_threads(count, list(row_slices(len(labels), VOTERS)))
    return hits


def winners(
    similarities: np.ndarray, neighbour_labels: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of each query the class with the highest score (Q,) int64, and its share of all scores (Q,) float32.

    All the neighbours given vote: similarities (Q, k) float32, falling, and neighbour_labels (Q, k).
    """
    winner, share = np.zeros(len(similarities), np.int64), np.zeros(len(similarities), np.float32)

    def count(rows: slice) -> None:
        keys, is_first, bits = _by_class(neighbour_labels[rows])
        classes, ranks = keys >> 2 * bits, keys >> bits & ((1 << bits) - 1)
        numbers, queries = is_first.cumsum(axis=1) - 1, np.arange(len(classes))
        weights = np.take_along_axis(_weights(_lead(similarities[rows]), temperature), ranks, axis=1)
        cells = numbers + classes.shape[1] * queries[:, None]
        scores = np.bincount(cells.ravel(), weights.ravel(), cells.size).reshape(cells.shape)
        best = scores.argmax(axis=1)  # of equals the first, as above
        winner[rows] = classes[queries, (numbers == best[:, None]).argmax(axis=1)]
        share[rows] = scores[queries, best] / scores.sum(axis=1)

    run_on_core_threads(count, list(row_slices(len(similarities), VOTERS)))
    return winner, share


def _lead(similarities: np.ndarray) -> np.ndarray:
    # Without the largest of each query: a common factor of all scores, taken out so that exp cannot overflow.
    return similarities.astype(np.float64) - similarities[:, :1]


def _weights(lead: np.ndarray, temperature: float) -> np.ndarray:
    return torch.from_numpy(lead / temperature).clamp_(min=LOWEST).exp_().numpy()


def _by_class(neighbour_labels: np.ndarray, nearer: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """The neighbours (Q, K) of each query by class and rank, and which of them is the first of its class (Q, K).

    Each neighbour is one integer that packs its class, its rank and `nearer` (from 0 to K), so that sorting integers
    sorts by class and then by rank. Also returns the bits that rank and `nearer` take each.
    """
    count = neighbour_labels.shape[1]
    bits = count.bit_length()
    keys = neighbour_labels << 2 * bits
    keys |= np.arange(count, dtype=keys.dtype) << bits
    keys |= nearer
    keys.sort(axis=1)
    is_first = np.ones(keys.shape, bool)
    np.greater((keys[:, 1:] ^ keys[:, :-1]) >> 2 * bits, 0, out=is_first[:, 1:])
    return keys, is_first, bits


def _contenders(
    lead: np.ndarray, neighbour_labels: np.ndarray, labels: np.ndarray, temperatures: Sequence[float]
) -> tuple[np.ndarray, ...]:
    """The neighbours of each query's class and of those that may outrank it, of queries whose class has neighbours.

    Returns, by rank, their flat places in (Q, K), ranks and pairs (M,); and of the pairs queries and classes (P,).

    Pairs are numbered by the rank of their nearest neighbour, so that the first k neighbours have the first pairs.

    A class is left out if its j-th neighbour comes behind the j-th of the query's own class, for all j. As weights fall
    with the rank, it never has a higher score, nor the same one where the first of these differences is larger than
    what is lost in rounding: sums of up to K weights err by less than K^2 2^-53 of their largest.
    """
    count = neighbour_labels.shape[1]
    own = neighbour_labels == labels[:, None]
    nearer = own.astype(neighbour_labels.dtype).cumsum(axis=1, dtype=neighbour_labels.dtype)
    has_own = nearer[:, -1] > 0
    nearer -= own  # neighbours of the own class nearer than each
    queries, first = np.arange(len(labels)), own.argmax(axis=1)
    highest, following = lead[queries, first], lead[queries, np.minimum(first + 1, count - 1)]
    no_ties = highest - following > count**2 * 1e-15 * max(temperatures)
    no_ties &= highest > (LOWEST + 1) * min(temperatures)
    nearer[~no_ties] = 0
    nearer[~has_own] = count
    keys, is_first, bits = _by_class(neighbour_labels, nearer)
    mask = (1 << bits) - 1
    # The only neighbour of a class is left out at once where one of the own class is nearer: most of them.
    may_win = ~is_first | ((keys & mask) == 0)
    may_win[:, :-1] |= ~is_first[:, 1:]
    places = np.flatnonzero(may_win)
    keys, is_first = keys.ravel()[places], is_first.ravel()[places]
    ranks = keys >> bits & mask
    positions = np.arange(len(places))
    starts = np.maximum.accumulate(np.where(is_first, positions, 0))  # of its class, for each neighbour
    is_kept = np.zeros(len(places), bool)
    is_kept[starts[positions - starts >= keys & mask]] = True  # a neighbour that is not behind its counterpart
    kept, firsts = np.flatnonzero(is_kept[starts]), np.flatnonzero(is_kept)
    kept = kept[np.argsort(ranks[kept].astype(np.min_scalar_type(count)), kind="stable")]
    firsts = firsts[np.argsort(ranks[firsts].astype(np.min_scalar_type(count)), kind="stable")]
    pairs = np.zeros(len(places), np.int64)
    pairs[firsts] = np.arange(len(firsts))
    return (
        places[kept] // count * count + ranks[kept],
        ranks[kept],
        pairs[starts[kept]],
        places[firsts] // count,
        keys[firsts] >> 2 * bits,
    )


SAME = 1 - 1e-5  # similarity from which images are compared
COMPARED = 500  # pairs of images at most
SHOWN = 8  # validation images whose neighbours results keep, for `bench report`; and neighbours of each


@dataclass(frozen=True, kw_only=True)
class Knn(PooledTask):
    """Settings of one evaluation. Every k is evaluated with every temperature."""

    VARIATIONS = (
        "crop=1.0",
        "interpolation=bilinear",
        "k=20",
        "k=200",
        "temperature=0.2",
        "temperature=0.03,0.05,0.07,0.1,0.2",
        "pool=avg",
        "norm=false",
        "layer=-2",
        "fraction=0.125",
    )

    k: OneOrMoreDifferent[PositiveInt] = (10, 20, 100, 200)  # numbers of neighbours that vote
    # T of a vote's weight exp(similarity / T). Of several the best on the validation images is reported, under the name
    # top1_k20_bestT: an optimistic number, not comparable with one of a fixed T.
    temperature: OneOrMoreDifferent[PositiveFloat] = (0.07,)
    layer: int = -1  # block that it is read from; -1 is the last
    # Blocks that are evaluated: with all, the main metric of every other block too, as NAME_blockN, N from 1 on.
    layers: Literal["last", "all"] = field(default="last", metadata=ADDED)
    norm: bool = True  # read behind the network's final norm
    fraction: Fraction = 1.0  # share of the training images in the gallery, class-balanced, drawn by the seed
    backend: Literal["faiss", "torch"] = "faiss"  # library that searches

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == "all" and self.layer != -1:
            raise ValueError(f"layers=all, layer={self.layer}: with all blocks leave layer at -1")

    @property
    def kind(self) -> FeatureKind:
        return FeatureKind(self.pool, self.layer, self.norm)

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        return self.kind.at_every_block(spec) if self.layers == "all" else (self.kind,)

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        gallery = round(self.fraction * images["train"])
        summary = {"image size": spec.image_size, "forward passes": gallery + images["val"]}
        return summary | {"gallery": gallery, "queries": images["val"]}

    def cost(self, scale: Scale) -> Work:
        spec, queries = scale.spec, scale.images["val"]
        gallery, kinds = round(self.fraction * scale.images["train"]), len(self.kinds(spec))
        of = "train" if self.fraction == 1 else f"{self.fraction:g} of train"
        parts = (
            feature_pass(spec, gallery, of),
            feature_pass(spec, queries, "val"),
            Part(kind="comparisons", count=kinds * gallery * queries, flops=2 * spec.width),
            Part(kind="libraries", count=1, of=self.backend),
        )
        held = feature_bytes(spec, gallery + queries, kinds)
        searched = search_bytes(gallery, queries, spec.width, max(self.k))
        return Work(parts=parts, memory=max(searched, forward_bytes(scale)), disk=held)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        return search_seconds(self.backend, space.device, export.spec.width)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = open_splits(space)
        if self.fraction < 1:
            train = fraction(train, self.fraction, space.seed)
        transform = transform_of(export, space, self)
        last, *others = self.kinds(export.spec)
        gallery = extract(export, train, [last, *others], space, transform)
        queries = extract(export, val, [last, *others], space, transform)
        check_labels(gallery.labels, queries.labels, train)
        # A gallery too small for every k answers by all its images, as in DINOv2's eval/knn.py:198-231.
        ks = [k for k in self.k if k <= len(gallery)] or [len(gallery)]
        hits, predictions, neighbours, close = self.classify(gallery, queries, ks, space)
        arrays = neighbours if self.fraction == 1 else {}
        arrays |= prediction_arrays(*predictions, queries.indices, len(val))
        twins = space.world.on_rank0(lambda: twins_warning(train, val, close))
        outcome = self.outcome(hits, arrays, ks, gallery, queries, val, twins)
        alone = {kind.layer + 1: replace(self, layer=kind.layer, layers="last") for kind in others}
        return with_blocks(outcome, {block: task.evaluate(export, space) for block, task in alone.items()})

    def classify(
        self, gallery: FeatureSet, queries: FeatureSet, ks: Sequence[int], space: Workspace
    ) -> tuple[dict[tuple[int, float], TopHits], tuple[np.ndarray, np.ndarray], dict[str, np.ndarray], np.ndarray]:
        """Search and vote, shared by the processes.

        Returns (k, T) -> hits of all queries; predicted classes (Q,) and their confidence (Q,) by the first k and its
        best T; neighbours of a few queries to look at; and pairs of places in val and train (P, 2) with the same
        features.
        """
        world, count = space.world, len(queries)
        rows, label = (gallery[self.kind], queries[self.kind]), "nearest neighbours"
        near = search(*rows, max(ks), self.backend, space.device, prepare=unit_rows, world=world, label=label)

        def count_votes() -> list[np.ndarray]:
            labels = gallery.labels[near.indices], queries.labels[near.places]
            votes = vote(near.similarities, *labels, ks, self.temperature)
            return [near.places, *(correct for top_hits in votes.values() for correct in top_hits)]

        def predict() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            best, labels = self.best_temperature(hits, ks[0]), gallery.labels[near.indices[:, : ks[0]]]
            return near.places, *winners(near.similarities[:, : ks[0]], labels, best)

        def examples() -> Neighbours:
            """The nearest SHOWN neighbours of SHOWN evenly spread queries, of those that this process searched for."""
            kept = np.isin(near.places, evenly(count, min(SHOWN, count)))
            return Neighbours(near.places[kept], near.similarities[kept, :SHOWN], near.indices[kept, :SHOWN])

        def twins() -> tuple[np.ndarray, np.ndarray]:
            same = near.similarities[:, 0] > SAME
            return queries.indices[near.places[same]], gallery.indices[near.indices[same, 0]]

        _, *correct = in_order(world, count_votes)
        tops = map(TopHits, correct[::2], correct[1::2])
        hits = dict(zip(product(ks, self.temperature), tops, strict=True))
        _, classes, confidence = in_order(world, predict)
        places, similarities, indices = in_order(world, examples)
        neighbours = {
            "neighbours_of": queries.indices[places],
            "neighbours": gallery.indices[indices],
            "similarities": similarities,
        }
        return hits, (classes, confidence), neighbours, np.stack(in_order(world, twins), axis=1)

    def best_temperature(self, hits: Mapping[tuple[int, float], TopHits], k: int) -> float:
        """The temperature with the highest top-1 accuracy on the validation images; of equals the first."""
        return max(self.temperature, key=lambda temperature: percent(hits[k, temperature].top1))

    def outcome(
        self,
        hits: Mapping[tuple[int, float], TopHits],
        arrays: Mapping[str, np.ndarray],
        ks: Sequence[int],
        gallery: FeatureSet,
        queries: FeatureSet,
        val: ImageSet,
        twins: str = "",
    ) -> Outcome:
        """Accuracies on the validation images, and what they rest on."""
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
        if dropped := [k for k in self.k if k > len(gallery)]:
            facts["k_beyond_the_gallery"] = dropped
            instead = f"k={len(gallery)} was used instead" if ks == [len(gallery)] else "left out"
            listed = ", ".join(map(str, dropped))
            facts["warnings"] = [f"k={listed} is more than the {len(gallery)} images of the gallery: {instead}"]
        if twins:
            facts["warnings"] = [*facts.get("warnings", ()), twins]
        spent, drawn = cost(gallery, queries), self.fraction < 1
        metrics = with_class_means(metrics, val)
        return Outcome(metrics=metrics, arrays=arrays, facts=facts, cost=spent, random=drawn)


def twins_warning(train: ImageSet, val: ImageSet, close: np.ndarray) -> str:
    """A warning about validation images that are training images, too; "" if there are none.

    close: (P, 2) pairs of images of val and train with the same features; COMPARED of them are compared by pixels.
    """
    compared = close[evenly(len(close), min(COMPARED, len(close)))]
    twins = []
    for query, place in compared.tolist():
        with suppress(UnreadableImage):  # one that was left out
            image, other = val.image(query), train.image(place)
            if image.size == other.size and image.tobytes() == other.tobytes():
                twins.append((query, place))
    if not twins:
        return ""
    count = str(len(twins)) if len(compared) == len(close) else f"{len(twins)} of {len(compared)} compared"
    return (
        f"{count} validation images are training images, too, such as {val.path(twins[0][0])} and "
        f"{train.path(twins[0][1])}: their part of the score says nothing; bench data check {train.url} lists them all"
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
    "frozen": ("knn@dino", "knn@moca"),
    "full": ("knn@dino",),
    "today": ("knn@dinov2",),
    "everything": tuple(PROTOCOLS),
    "layers": ("knn@layers",),
    "transfer": ("knn@dino",),
    "paper:moca": ("knn@moca",),
    "paper:mst": ("knn@mst",),
}
