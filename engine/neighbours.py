"""Exact nearest neighbours by inner product, in tiles of gallery rows x queries that several processes may share.

FAISS or torch searches each tile, and the best k of all tiles are kept. Tiles depend only on the numbers of rows and
queries, so that any number of processes finds the same similarities, in all bits, and the same neighbours. Each process
searches consecutive tiles in the order of the gallery. It reads one block of the gallery at a time from its file, and
queries when it needs them.

Memory of a process in addition to libraries: 4 D (GALLERY + 2 QUERIES) bytes for a block and its queries (405 MB for
D = 384, 811 MB for D = 768), 12 Q k bytes for the neighbours (120 MB for Q = 50 000, k = 200), and at most 150 MB for
the libraries' search (torch: 4 QUERIES TOGETHER, 0.5 GiB). It does not depend on the size of the gallery, N.

Letters: N gallery rows, Q queries, D width, k neighbours.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from engine.blas_kernel import fitting_kernel
from engine.distributed import World
from engine.progress import Progress
from engine.rows import Rows, release_pages, row_slices
from engine.work import Kind, seconds_of

Backend = Literal["faiss", "torch"]
Prepare = Callable[[Rows, slice], np.ndarray]  # some rows of a file -> contiguous float32 in memory
Pair = tuple[np.ndarray, np.ndarray]  # similarities (q, k) and indices (q, k)
Find = Callable[[np.ndarray], Pair]  # queries (q, D) -> their neighbours in a block

QUERIES = 2048  # queries of a tile
# Gallery rows of a tile: a multiple of the 1024 that FAISS multiplies at once, so that its products equal those of one
# search of the whole gallery. Selecting the 200 best starts anew in each block, which costs 2 % of the block's search
# (4 % in blocks half as large).
GALLERY = 1 << 18
TOGETHER = 65536  # gallery rows that torch compares with a tile's queries at once
GPU_NEIGHBOURS = 2048  # largest k of FAISS on a GPU (faiss/gpu/utils/DeviceDefs.cuh)
NORMALISED = 16384  # rows normalised at once
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize, which all official codes call


class Neighbours(NamedTuple):
    """The nearest neighbours of q queries."""

    places: np.ndarray  # (q,) positions of these queries among all queries
    similarities: np.ndarray  # (q, k) float32, descending
    indices: np.ndarray  # (q, k) int64, rows of the gallery


def unit_rows(features: Rows, rows: slice = slice(None)) -> np.ndarray:
    """A copy of some rows of (N, D), normalised to length one, contiguous float32. ValueError for NaN or infinite rows.

    Pages of a memory-mapped input do not stay resident: the peak is one copy.
    """
    start, stop, _ = rows.indices(len(features))
    unit = np.empty((stop - start, features.shape[1]), np.float32)
    for part in row_slices(stop - start, NORMALISED):
        values = np.asarray(features[start + part.start : start + part.stop], np.float32)
        lengths = np.sqrt(np.einsum("nd,nd->n", values, values))
        if not np.isfinite(lengths).all():
            row = start + part.start + int(np.argmin(np.isfinite(lengths)))
            raise ValueError(f"features of row {row} are NaN, infinite or too large; extract them again")
        np.divide(values, np.maximum(lengths, SMALLEST_NORM)[:, None], out=unit[part])
        release_pages(features)
    return unit


def plain_rows(features: Rows, rows: slice) -> np.ndarray:
    """Some rows of (N, D) without normalisation, contiguous float32."""
    return np.ascontiguousarray(features[rows], np.float32)


def search(
    gallery: Rows,
    queries: Rows,
    k: int,
    backend: Backend = "faiss",
    device: str = "cpu",
    *,
    prepare: Prepare = plain_rows,
    world: World = World(),  # noqa: B008  (frozen)
    label: str = "",
) -> Neighbours:
    """The k rows of `gallery` (N, D) with the largest inner product, for this process's share of `queries` (Q, D).

    All processes of `world` call it with the same features; a single process gets all queries, in their order. Equal
    similarities are ordered by index, but if several tie for the k-th place of a tile, the backend chooses among them.

    Args:
        prepare: reads rows of a file and returns the vectors to compare.
        device: of both backends; a FAISS built without GPU support uses the CPU.
        label: of the progress bar; "" for none.

    Raises:
        ValueError: k exceeds N, or FAISS is not installed.
    """
    if not 1 <= k <= len(gallery):
        raise ValueError(f"k={k} neighbours from a gallery of {len(gallery)} images; choose k from 1 to {len(gallery)}")

    index_block = {"faiss": _faiss, "torch": _torch}[backend]
    best = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)

    tiles = tiles_of(len(gallery), len(queries), world)
    count = sum(len(numbers) for _, numbers in tiles)

    def work() -> None:
        for rows, numbers in tiles:
            find = index_block(prepare(gallery, rows), min(k, rows.stop - rows.start), device)
            for part in (query_slice(number, len(queries)) for number in numbers):
                nearest = _in_tile(find, prepare(queries, part), rows.start)
                best[0][part], best[1][part] = merged([(best[0][part], best[1][part]), nearest], k)
                progress.advance(1)
            del find  # frees the block before the next one is read

    with Progress(label, count, "tiles", quiet=not (label and world.is_rank0)) as progress:
        world.on_all_ranks(work)
        return _merge_processes(best, world)


def search_bytes(gallery: int, queries: int, width: int, k: int) -> float:
    """Bytes of memory that a search needs in addition to libraries: the formula at the top of this file."""
    return 4.0 * width * (min(gallery, GALLERY) + 2 * min(queries, QUERIES)) + 12.0 * queries * k


def tiles_of(gallery: int, queries: int, world: World) -> list[tuple[slice, range]]:
    """This process's tiles: blocks of gallery rows, ascending, each with the numbers of the query slices to search."""
    blocks, across = list(row_slices(gallery, GALLERY)), -(-queries // QUERIES)
    tiles = len(blocks) * across
    first, last = (rank * tiles // world.size for rank in (world.rank, world.rank + 1))
    own = []
    for number, rows in enumerate(blocks):
        slices = range(max(first - number * across, 0), min(last - number * across, across))
        own += [(rows, slices)] if slices else []
    return own


def query_slice(number: int, queries: int) -> slice:
    """Slice `number` of all queries, those of one tile."""
    return slice(number * QUERIES, min((number + 1) * QUERIES, queries))


def _in_tile(find: Find, queries: np.ndarray, first: int) -> Pair:
    similarities, indices = find(queries)
    indices += first
    order_ties(similarities, indices)
    return similarities, indices


def merged(parts: Sequence[Pair], k: int) -> Pair:
    """The best k of several parts (q, k) whose indices ascend from part to part; ties go to the earlier part."""
    similarities, indices = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarities, order, axis=1), np.take_along_axis(indices, order, axis=1)


def _merge_processes(best: Pair, world: World) -> Neighbours:
    """Merge the neighbours (Q, k) of all processes; process r keeps the slices r, r + size, ... of the queries."""
    (count, k), own = best[0].shape, []
    if world.size == 1:
        return Neighbours(np.arange(count), *best)
    for number in range(-(-count // QUERIES)):
        part = query_slice(number, count)
        parts = world.gather_objects((best[0][part], best[1][part]))
        if number % world.size == world.rank:
            best[0][part], best[1][part] = merged(parts, k)
            own.append(np.arange(part.start, part.stop))
    places = np.concatenate([np.empty(0, np.int64), *own])
    return Neighbours(places, best[0][places], best[1][places])


@cache
def search_seconds(backend: Backend, device: str, width: int) -> dict[Kind, float]:
    """Seconds of a process's first search, mostly for loading FAISS, and of one inner product of `width` numbers."""
    started = time.perf_counter()
    search(np.eye(64, dtype=np.float32), np.eye(64, dtype=np.float32), 8, backend, device)
    loading = time.perf_counter() - started
    rows = unit_rows(np.random.default_rng(0).standard_normal((10_000, width), np.float32))
    searching = seconds_of(lambda: search(rows, rows[:512], 200, backend, device), 0.5)
    return {"libraries": loading, "comparisons": searching / (len(rows) * 512)}


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
        # What IndexFlatIP.search runs, but without copying the block into an index.
        return lambda queries: faiss.knn(queries, gallery, k, metric=faiss.METRIC_INNER_PRODUCT)
    number = torch.device(device).index
    number = torch.cuda.current_device() if number is None else number  # each process has its own GPU
    index = faiss.index_cpu_to_gpu(gpu_memory(), number, faiss.IndexFlatIP(gallery.shape[1]))
    index.add(gallery)
    return lambda queries: index.search(queries, k)


@cache
def gpu_memory() -> Any:
    """FAISS's scratch memory on this process's GPUs, 1.5 GiB each, shared by all tiles."""
    import faiss

    return faiss.StandardGpuResources()


def _torch(gallery: np.ndarray, k: int, device: str) -> Find:
    # A GPU holds the block for all queries: copying it again for each slice of them would take longer than searching.
    parts = [(rows.start, torch.from_numpy(gallery[rows]).to(device)) for rows in row_slices(len(gallery), TOGETHER)]

    def find(queries: np.ndarray) -> Pair:
        on_device = torch.from_numpy(queries).to(device)
        best = []
        for start, part in parts:
            similarities, indices = (on_device @ part.T).topk(min(k, len(part)))
            best.append((similarities, indices + start))
        similarities, places = torch.cat([values for values, _ in best], dim=1).topk(k)
        indices = torch.cat([indices for _, indices in best], dim=1).gather(1, places)
        return similarities.cpu().numpy(), indices.cpu().numpy()

    return find


def order_ties(similarities: np.ndarray, indices: np.ndarray) -> None:
    """Sort the indices (Q, k) of equal similarities in ascending order, in place."""
    tied = np.flatnonzero((similarities[:, 1:] == similarities[:, :-1]).any(axis=1))
    if len(tied):
        order = np.lexsort((indices[tied], -similarities[tied]), axis=1)
        indices[tied] = np.take_along_axis(indices[tied], order, axis=1)
