"""Exact nearest neighbours by inner product, and the weighted vote of DINO's k-NN on them.

One search at the largest k answers every k and temperature (InstDisc, Wu et al. 2018; DINO eval_knn.py:146-181):
score of class c = sum of exp(similarity / T) over those of the first k neighbours that are labelled c.

Letters: N gallery rows, Q queries, D width, k neighbours, T temperature.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from engine.core_threads import run_on_core_threads
from probes.knn.blas_kernel import fitting_kernel
from probes.slices import row_slices

Backend = Literal["faiss", "torch"]
Advance = Callable[[int], None]  # told how many more queries are done

QUERIES = 4096  # searched together: FAISS's own block of queries, about 16 MiB of results
GALLERY = 65536  # rows that torch compares at once: 1 GiB of similarities with QUERIES
GPU_NEIGHBOURS = 2048  # that FAISS finds on a GPU at most (faiss/gpu/utils/DeviceDefs.cuh)
NORMALISED = 16384  # rows normalised at once
VOTERS = 512  # queries whose votes are counted together: stays in a core's cache
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize, which all official codes call


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Rows (N, D) of length one, contiguous float32, in new memory. Raises ValueError for NaN or infinite values.

    Of a memory-mapped input no page stays resident: the peak is one copy.
    """
    unit = np.empty(features.shape, np.float32)
    for start in range(0, len(features), NORMALISED):
        rows = np.asarray(features[start : start + NORMALISED], np.float32)
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
        if not np.isfinite(lengths).all():
            row = start + int(np.argmin(np.isfinite(lengths)))
            raise ValueError(f"features of row {row} are NaN, infinite or too large; extract them again")
        np.divide(rows, np.maximum(lengths, SMALLEST_NORM)[:, None], out=unit[start : start + len(rows)])
        _release(features)
    return unit


def _release(features: np.ndarray) -> None:
    """Give a mapped file's pages back to the page cache; they do not count as this process's memory then."""
    mapped = getattr(features, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def search(
    gallery: np.ndarray,
    queries: np.ndarray,
    k: int,
    backend: Backend = "faiss",
    device: str = "cpu",
    advance: Advance = lambda count: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of `gallery` (N, D) with the largest inner product for each of `queries` (Q, D).

    Both contiguous float32. Returns similarities (Q, k) float32, falling, and indices (Q, k) int64; equal similarities
    are in the order of their indices (which of several equal ones make the k-th place is the backend's choice). Both
    backends use `device`; a FAISS without GPUs uses the CPU. Raises ValueError for k > N and where FAISS is not
    installed.
    """
    if not 1 <= k <= len(gallery):
        raise ValueError(f"k={k} neighbours from a gallery of {len(gallery)} images; choose k from 1 to {len(gallery)}")
    find = {"faiss": _faiss, "torch": _torch}[backend](gallery, k, device)
    similarities = np.empty((len(queries), k), np.float32)
    indices = np.empty((len(queries), k), np.int64)
    for rows in row_slices(len(queries), QUERIES):
        similarities[rows], indices[rows] = find(queries[rows])
        advance(rows.stop - rows.start)
    order_ties(similarities, indices)
    return similarities, indices


Find = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _faiss(gallery: np.ndarray, k: int, device: str) -> Find:
    try:
        with fitting_kernel():
            import faiss
    except ImportError as error:
        raise ValueError(
            "FAISS is not installed: pip install 'ssl-vit-bench[cpu]' for machines without an NVIDIA GPU, "
            "'ssl-vit-bench[gpu]' (never both) for those with one; or search with --set knn.backend=torch"
        ) from error
    on_gpu = torch.device(device).type == "cuda" and getattr(faiss, "get_num_gpus", lambda: 0)()
    if on_gpu and k > GPU_NEIGHBOURS:
        return _torch(gallery, k, device)
    if not on_gpu:
        # What IndexFlatIP.search runs, on our memory in place of a copy inside an index.
        return lambda queries: faiss.knn(queries, gallery, k, metric=faiss.METRIC_INNER_PRODUCT)
    number = torch.device(device).index
    number = torch.cuda.current_device() if number is None else number  # processes have a GPU each
    index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, faiss.IndexFlatIP(gallery.shape[1]))
    index.add(gallery)
    return lambda queries: index.search(queries, k)


def _torch(gallery: np.ndarray, k: int, device: str) -> Find:
    # On a GPU the gallery lies there for all queries: a copy for every block of them would take longer than to search.
    parts = [(rows.start, torch.from_numpy(gallery[rows]).to(device)) for rows in row_slices(len(gallery), GALLERY)]

    def find(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked = torch.from_numpy(queries).to(device)
        best = []
        for start, part in parts:
            similarities, indices = (asked @ part.T).topk(min(k, len(part)))
            best.append((similarities, indices + start))
        similarities, places = torch.cat([found for found, _ in best], dim=1).topk(k)
        indices = torch.cat([found for _, found in best], dim=1).gather(1, places)
        return similarities.cpu().numpy(), indices.cpu().numpy()

    return find


def order_ties(similarities: np.ndarray, indices: np.ndarray) -> None:
    """Put the indices (Q, k) of equal similarities in rising order, in place."""
    tied = np.flatnonzero((similarities[:, 1:] == similarities[:, :-1]).any(axis=1))
    if len(tied):
        order = np.lexsort((indices[tied], -similarities[tied]), axis=1)
        indices[tied] = np.take_along_axis(indices[tied], order, axis=1)


class Hits(NamedTuple):
    """Which queries have their class among the 1 or 5 with the highest scores: two (Q,) arrays of bool."""

    top1: np.ndarray
    top5: np.ndarray


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
    hits = {(k, t): Hits(np.zeros(len(labels), bool), np.zeros(len(labels), bool)) for k in ks for t in temperatures}

    def count(rows: slice) -> None:
        near, candidates, truth = _local_classes(neighbour_labels[rows], labels[rows])
        lead = torch.from_numpy(similarities[rows]).double()
        lead = lead - lead[:, :1]  # a common factor of all scores, taken out so that exp cannot overflow
        for temperature in temperatures:
            weights = (lead / temperature).clamp_(min=-700).exp_()  # exp(-745) is 0, and weights are positive
            for k, place in _ranks(weights, near, candidates, truth, ks):
                hits[k, temperature].top1[rows] = place < 1
                hits[k, temperature].top5[rows] = place < 5

    run_on_core_threads(count, list(row_slices(len(labels), VOTERS)))
    return hits


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
) -> Iterator[tuple[int, np.ndarray]]:
    """For each k the place (Q,) of the true class among the classes of the first k neighbours, from 0; a large number
    where it is not among them."""
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
        yield k, place.squeeze(1).numpy()
