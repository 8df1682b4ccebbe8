"""The weighted vote of DINO's k-NN on neighbours that were found.

Score of class c = sum of exp(similarity / T) over those of the first k neighbours that are labelled c (InstDisc, Wu et
al. 2018; DINO eval_knn.py:146-181). One search at the largest k answers every k and temperature.

Most classes among the neighbours cannot outrank the query's own class at any k and temperature, because each of their
neighbours lies behind one of its own. `_contenders` leaves them out once, before the votes of all k and temperatures.

Letters: Q queries, K neighbours found, k that vote, T temperature, P pairs of a query and a class that is counted, M
neighbours labelled with these classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.core_threads import run_on_core_threads
from probes.features.rows import row_slices

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
    if max(neighbour_labels.max(), labels.max()) < 1 << (31 - 2 * similarities.shape[1].bit_length()):
        neighbour_labels = neighbour_labels.astype(np.int32)  # `_by_class` sorts it in half the time
    hits = {(k, t): TopHits(*np.zeros((2, len(labels)), bool)) for k in ks for t in temperatures}

    def count(rows: slice) -> None:
        lead, own = _lead(similarities[rows]), labels[rows]
        places, ranks, pairs, queries, classes = _contenders(lead, neighbour_labels[rows], own, temperatures)
        is_lower = classes < own[queries]
        own_pairs = np.full(len(own), len(queries))  # of a query without one: a pair more, whose score is 0
        own_pairs[queries[classes == own[queries]]] = np.flatnonzero(classes == own[queries])
        for temperature in temperatures:
            weights = _weights(lead.ravel()[places], temperature)
            for k in ks:
                voters = np.searchsorted(ranks, k)
                present = int(pairs[:voters].max(initial=-1)) + 1  # pairs are numbered as they first occur
                scores = np.bincount(pairs[:voters], weights[:voters], len(queries) + 1)
                own_scores = scores[own_pairs]
                scores, to_beat = scores[:present], own_scores[queries[:present]]
                is_ahead = (scores > to_beat) | (is_lower[:present] & (scores == to_beat))
                ahead = np.bincount(queries[:present][is_ahead], minlength=len(own))
                ahead[own_scores == 0] = 5  # no neighbour of the query's class
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
        classes, ranks, _ = _by_class(neighbour_labels[rows])
        is_first = np.diff(classes, axis=1, prepend=-1) != 0
        numbers, each = is_first.cumsum(axis=1) - 1, np.arange(len(classes))
        weights = np.take_along_axis(_weights(_lead(similarities[rows]), temperature), ranks, axis=1)
        cells = numbers + classes.shape[1] * each[:, None]
        scores = np.bincount(cells.ravel(), weights.ravel(), cells.size).reshape(cells.shape)
        best = scores.argmax(axis=1)  # of equals the first, as above
        winner[rows] = classes[each, (numbers == best[:, None]).argmax(axis=1)]
        share[rows] = scores[each, best] / scores.sum(axis=1)

    run_on_core_threads(count, list(row_slices(len(similarities), VOTERS)))
    return winner, share


def all_hits(
    parts: Sequence[tuple[np.ndarray, Mapping[tuple[int, float], TopHits]]], queries: int
) -> dict[tuple[int, float], TopHits]:
    """Hits of all queries, from parts: places of some of them, and (k, T) -> their hits."""
    whole = {pair: TopHits(*np.zeros((2, queries), bool)) for pair in parts[0][1]}
    for places, hits in parts:
        for pair, found in hits.items():
            for all_values, values in zip(whole[pair], found, strict=True):
                all_values[places] = values
    return whole


def _lead(similarities: np.ndarray) -> np.ndarray:
    # Without the largest of each query: a common factor of all scores, taken out so that exp cannot overflow.
    return similarities.astype(np.float64) - similarities[:, :1]


def _weights(lead: np.ndarray, temperature: float) -> np.ndarray:
    return torch.from_numpy(lead / temperature).clamp_(min=LOWEST).exp_().numpy()


def _by_class(neighbour_labels: np.ndarray, more: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The neighbours (Q, K) of each query by class and rank: their classes, their ranks, and `more`, from 0 to K."""
    count = neighbour_labels.shape[1]
    bits = count.bit_length()
    mask = (1 << bits) - 1
    keys = neighbour_labels << 2 * bits
    keys |= np.arange(count, dtype=keys.dtype) << bits
    keys |= more
    keys.sort(axis=1)
    return keys >> 2 * bits, keys >> bits & mask, keys & mask


def _contenders(
    lead: np.ndarray, neighbour_labels: np.ndarray, labels: np.ndarray, temperatures: Sequence[float]
) -> tuple[np.ndarray, ...]:
    """The neighbours of each query's class and of those that may outrank it, of queries whose class has neighbours.

    Returns, by rank, their flat places in (Q, K), ranks and pairs (M,); and of the pairs queries and classes (P,).

    A class is left out if its j-th neighbour comes behind the j-th of the query's own class, for all j. As weights fall
    with the rank, it never has a higher score, nor the same one where the first of these differences is larger than
    what is lost in rounding: sums of up to K weights err by less than K^2 2^-53 of their largest.
    """
    count = neighbour_labels.shape[1]
    own = neighbour_labels == labels[:, None]
    nearer = own.cumsum(axis=1, dtype=neighbour_labels.dtype)
    has_own = nearer[:, -1] > 0
    nearer -= own  # neighbours of the own class nearer than each
    first = own.argmax(axis=1)[:, None]
    highest, following = (np.take_along_axis(lead, np.minimum(first + step, count - 1), 1)[:, 0] for step in (0, 1))
    no_ties = (highest - following > count**2 * 1e-15 * max(temperatures)) & (
        highest > (LOWEST + 1) * min(temperatures)
    )
    nearer[~no_ties] = 0
    classes, ranks, nearer = _by_class(neighbour_labels, nearer)
    classes = classes.ravel()
    is_first = np.ones(classes.size, bool)
    np.not_equal(classes[1:], classes[:-1], out=is_first[1:])
    is_first[::count] = True
    # The neighbour that many places before is of the same class: the class has had as many, and this one more.
    may_win = classes[np.arange(classes.size) - nearer.ravel()] == classes
    may_win &= ((nearer <= np.arange(count)) & has_own[:, None]).ravel()
    may_win[1:] &= is_first[1:] | ~may_win[:-1]
    starts = np.append(np.flatnonzero(is_first), classes.size)
    kept = np.unique(np.searchsorted(starts, np.flatnonzero(may_win), side="right")) - 1
    starts, sizes = starts[kept], starts[kept + 1] - starts[kept]
    by_rank = np.argsort(ranks.ravel()[starts], kind="stable")
    starts, sizes = starts[by_rank], sizes[by_rank]
    pairs = np.repeat(np.arange(len(starts)), sizes)
    places = np.arange(len(pairs)) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    ranks = ranks.ravel()[places]
    by_rank = np.argsort(ranks.astype(np.uint16 if count < 1 << 16 else np.int64), kind="stable")
    places = places // count * count + ranks
    return places[by_rank], ranks[by_rank], pairs[by_rank], starts // count, classes[starts]
