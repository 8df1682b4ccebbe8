"""The weighted vote of DINO's k-NN on neighbours that were found.

Score of class c = sum of exp(similarity / T) over those of the first k neighbours that are labelled c (InstDisc, Wu et
al. 2018; DINO eval_knn.py:146-181). One search at the largest k answers every k and temperature.

Letters: Q queries, K neighbours found, k that vote, T temperature.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.core_threads import run_on_core_threads
from probes.features.rows import row_slices
from probes.scores import Hits

VOTERS = 512  # queries whose votes are counted together: stays in a core's cache


def no_hits(queries: int) -> Hits:
    """To be filled in."""
    return Hits(*(np.zeros(queries, dtype) for dtype in (bool, bool, np.int64, np.float32)))


class _Decision(NamedTuple):
    """Of some queries (q,): the place of their class, from 0; the number of the first class, its share of scores."""

    place: np.ndarray
    first: np.ndarray
    share: np.ndarray


def vote(
    similarities: np.ndarray,
    neighbour_labels: np.ndarray,
    labels: np.ndarray,
    ks: Sequence[int],
    temperatures: Sequence[float],
) -> dict[tuple[int, float], Hits]:
    """(k, T) -> hits, from similarities (Q, K) float32, falling, and neighbour_labels (Q, K), for the `labels` (Q,).

    Classes with equal scores rank by number. Only classes that occur among the k neighbours count for the top five: the
    official codes fill free places with classes of weight zero in the order their sort happens to leave, so that the
    same features gave 87.0, 88.0 and 89.5 % in three of them at k=5.
    """
    if not all(1 <= k <= similarities.shape[1] for k in ks) or not all(t > 0 for t in temperatures):
        raise ValueError(f"votes of k={list(ks)}, T={list(temperatures)} on {similarities.shape[1]} neighbours")
    hits = {(k, t): no_hits(len(labels)) for k in ks for t in temperatures}

    def count(rows: slice) -> None:
        near, candidates, truth = _local_classes(neighbour_labels[rows], labels[rows])
        classes = np.zeros((len(near), candidates), np.int64)  # number among the query's neighbours -> class
        np.put_along_axis(classes, near.numpy(), neighbour_labels[rows], axis=1)
        lead = torch.from_numpy(similarities[rows]).double()
        lead = lead - lead[:, :1]  # a common factor of all scores, taken out so that exp cannot overflow
        for temperature in temperatures:
            weights = (lead / temperature).clamp_(min=-700).exp_()  # exp(-745) is 0, and weights are positive
            for k, ranked in _ranks(weights, near, candidates, truth, ks):
                found = hits[k, temperature]
                found.top1[rows], found.top5[rows] = ranked.place < 1, ranked.place < 5
                found.predicted[rows] = np.take_along_axis(classes, ranked.first[:, None], axis=1)[:, 0]
                found.confidence[rows] = ranked.share

    run_on_core_threads(count, list(row_slices(len(labels), VOTERS)))
    return hits


def all_hits(
    parts: Sequence[tuple[np.ndarray, Mapping[tuple[int, float], Hits]]], queries: int
) -> dict[tuple[int, float], Hits]:
    """Hits of all queries, from parts: places of some of them, and (k, T) -> their hits."""
    whole = {pair: no_hits(queries) for pair in parts[0][1]}
    for places, hits in parts:
        for pair, found in hits.items():
            for all_values, values in zip(whole[pair], found, strict=True):
                all_values[places] = values
    return whole


def _local_classes(neighbour_labels: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Number the classes among each query's neighbours in rising order: 0, 1, ...

    Returns these numbers for the neighbours (Q, K), how many there are at most, and each query's own (Q, 1): -1 where
    it is not among them. Scores need (Q, how many) then, not (Q, all classes).
    """
    near = torch.from_numpy(np.ascontiguousarray(neighbour_labels, np.int64))
    ordered, places = near.sort(dim=1)
    number = torch.zeros_like(near)
    number[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
    local = torch.empty_like(near).scatter_(1, places, number)
    matches = near == torch.from_numpy(np.ascontiguousarray(labels, np.int64)).unsqueeze(1)
    truth = torch.where(matches, local, -1).amax(dim=1, keepdim=True)
    return local, int(number.max()) + 1, truth


def _ranks(
    weights: torch.Tensor, near: torch.Tensor, candidates: int, truth: torch.Tensor, ks: Sequence[int]
) -> Iterator[tuple[int, _Decision]]:
    """For each k what the first k neighbours say; the place of the true class is a large number where it is not among
    them."""
    scores = torch.zeros(len(weights), candidates, dtype=weights.dtype)
    before_truth = torch.arange(candidates) < truth
    counted = 0
    for k in sorted(ks):
        scores.scatter_add_(1, near[:, counted:k], weights[:, counted:k])
        counted = k
        own = scores.gather(1, truth.clamp(min=0))
        ahead = (scores > own) | ((scores == own) & before_truth)
        absent = (truth < 0) | (own == 0)
        place = ahead.sum(dim=1, keepdim=True).masked_fill_(absent, candidates + 5)
        counts = scores.numpy()
        first = counts.argmax(axis=1)  # of equals the first, as above
        share = np.take_along_axis(counts, first[:, None], axis=1)[:, 0] / counts.sum(axis=1)
        yield k, _Decision(place.squeeze(1).numpy(), first, share)
