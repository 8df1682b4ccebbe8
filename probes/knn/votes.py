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

from engine.machine import run_on_core_threads
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


def _by_class(neighbour_labels: np.ndarray, nearer: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """The neighbours (Q, K) of each query by class and rank, and which of them is the first of its class (Q, K).

    A neighbour is a number: its class, its rank and `nearer`, from 0 to K, in as many bits each as returned.
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
    each = np.arange(len(places))
    starts = np.maximum.accumulate(np.where(is_first, each, 0))  # of its class, for each neighbour
    is_kept = np.zeros(len(places), bool)
    is_kept[starts[each - starts >= keys & mask]] = True  # a neighbour that is not behind its counterpart
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
