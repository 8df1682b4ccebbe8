"""Exact nearest neighbours by inner product, in tiles of gallery rows x queries that several processes may share.

FAISS or torch searches each tile, and the best k of all tiles are kept. Tiles depend only on the numbers of rows and
queries, so that any number of processes finds the same similarities, in all bits, and the same neighbours. Each process
searches consecutive tiles in the order of the gallery. It reads one block of the gallery at a time from its file, and
queries when it needs them.

Memory of a process in addition to libraries: 4 D (TILE_ROWS + 2 TILE_QUERIES) bytes for a block and its queries (405
MB for D = 384, 811 MB for D = 768), 12 Q k bytes for the neighbours (120 MB for Q = 50 000, k = 200), and at most 150
MB for the libraries' search (torch: 4 TILE_QUERIES TORCH_ROWS, 0.5 GiB). It does not depend on N, the size of the
gallery.

N: rows of the gallery. Q: queries, of which a tile has q. D: width. k: neighbours.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from engine.blas_kernel import fitting_kernel
from engine.distributed import World
from engine.errors import option
from engine.progress import Progress
from engine.rows import Rows, release_pages, row_slices

Backend = Literal["faiss", "torch"]
Prepare = Callable[[Rows, slice], np.ndarray]  # some rows of a file -> contiguous float32 in memory
Pair = tuple[np.ndarray, np.ndarray]  # similarities (q, k) and indices (q, k)
Find = Callable[[np.ndarray], Pair]  # queries (q, D) -> their neighbours in a block

TILE_QUERIES = 2048  # queries of a tile
# Rows of the gallery in a tile: a multiple of the 1024 that FAISS multiplies at once, so that its products equal those
# of one search of the whole gallery. Selecting the 200 best starts anew in each block, which costs 2 % of the block's
# search (4 % in blocks half as large).
TILE_ROWS = 1 << 18
TORCH_ROWS = 65536  # gallery rows that torch compares with a tile's queries at once
MAX_GPU_NEIGHBOURS = 2048  # largest k of FAISS on a GPU (faiss/gpu/utils/DeviceDefs.cuh)
NORMALISED_ROWS = 16384  # rows that are normalised at once
MIN_NORM = 1e-12  # of torch.nn.functional.normalize, which all official codes call


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
    for part in row_slices(stop - start, NORMALISED_ROWS):
        values = np.asarray(features[start + part.start : start + part.stop], np.float32)
        lengths = np.sqrt(np.einsum("nd,nd->n", values, values))
        if not np.isfinite(lengths).all():
            row = start + part.start + int(np.argmin(np.isfinite(lengths)))
            raise ValueError(f"features of row {row} are NaN, infinite or too large; extract them again")
        np.divide(values, np.maximum(lengths, MIN_NORM)[:, None], out=unit[part])
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
    label: str = "nearest neighbours",
) -> Neighbours:
    """The k rows of a gallery with the largest inner products, for this process's share of the queries.

    All processes of `world` call it with the same features; a single process gets all queries, in their order. Equal
    similarities are ordered by index, but if several tie for the k-th place of a tile, the backend chooses among them.

    Args:
        gallery: (N, D), queries: (Q, D).
        k: 1 to N.
        prepare: reads rows of a file and returns the vectors to compare.
        device: of both backends; a FAISS built without GPU support uses the CPU.
        label: of the progress bar.

    Raises:
        ValueError: k exceeds N, or FAISS is not installed.
    """
    if not 1 <= k <= len(gallery):
        raise ValueError(f"k={k} neighbours from a gallery of {len(gallery)} images; choose k from 1 to {len(gallery)}")

    index_block = {"faiss": _faiss, "torch": _torch}[backend]
    similarities = np.full((len(queries), k), -np.inf, np.float32)
    indices = np.full((len(queries), k), -1, np.int64)
    blocks = tiles_of(len(gallery), len(queries), world)
    tiles = sum(len(slice_numbers) for _, slice_numbers in blocks)

    def search_tiles() -> None:
        for rows, slice_numbers in blocks:
            find = index_block(prepare(gallery, rows), min(k, rows.stop - rows.start), device)
            for part in (query_slice(number, len(queries)) for number in slice_numbers):
                tile_similarities, tile_indices = find(prepare(queries, part))
                tile_indices += rows.start
                order_ties(tile_similarities, tile_indices)
                best_so_far = similarities[part], indices[part]
                similarities[part], indices[part] = merge([best_so_far, (tile_similarities, tile_indices)], k)
                progress.advance(1)
            del find  # frees the block before the next one is read

    with Progress(label, tiles, "tiles") as progress:
        world.on_all_ranks(search_tiles)
        return _merge_processes(similarities, indices, world)


def search_bytes(gallery: int, queries: int, width: int, k: int) -> float:
    """Bytes of memory that a search needs in addition to libraries: the formula at the top of this file."""
    return 4.0 * width * (min(gallery, TILE_ROWS) + 2 * min(queries, TILE_QUERIES)) + 12.0 * queries * k


def tiles_of(gallery: int, queries: int, world: World) -> list[tuple[slice, range]]:
    """This process's tiles: blocks of gallery rows, ascending, each with the numbers of the query slices to search.

    Tiles are numbered block by block, and each process gets an equal share of consecutive numbers.
    """
    slices_per_block = -(-queries // TILE_QUERIES)
    blocks = list(row_slices(gallery, TILE_ROWS))
    tiles = len(blocks) * slices_per_block
    first_tile, end_tile = (rank * tiles // world.size for rank in (world.rank, world.rank + 1))
    own_blocks = []
    for number, rows in enumerate(blocks):
        first = max(first_tile - number * slices_per_block, 0)
        end = min(end_tile - number * slices_per_block, slices_per_block)
        if first < end:
            own_blocks.append((rows, range(first, end)))
    return own_blocks


def query_slice(number: int, queries: int) -> slice:
    """Slice `number` of all queries, those of one tile."""
    return slice(number * TILE_QUERIES, min((number + 1) * TILE_QUERIES, queries))


def merge(parts: Sequence[Pair], k: int) -> Pair:
    """The best k of several parts (q, k) whose indices ascend from part to part; ties go to the earlier part."""
    similarities, indices = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarities, order, axis=1), np.take_along_axis(indices, order, axis=1)


def _merge_processes(similarities: np.ndarray, indices: np.ndarray, world: World) -> Neighbours:
    """Merge the neighbours (Q, k) of all processes; process r keeps the slices r, r + size, ... of the queries."""
    queries, k = similarities.shape
    if world.size == 1:
        return Neighbours(np.arange(queries), similarities, indices)
    own_queries = [np.empty(0, np.int64)]
    for number in range(-(-queries // TILE_QUERIES)):
        part = query_slice(number, queries)
        parts = world.gather_objects((similarities[part], indices[part]))
        if number % world.size == world.rank:
            similarities[part], indices[part] = merge(parts, k)
            own_queries.append(np.arange(part.start, part.stop))
    places = np.concatenate(own_queries)
    return Neighbours(places, similarities[places], indices[places])


def _faiss(gallery: np.ndarray, k: int, device: str) -> Find:
    """A function that searches a block by FAISS, on a GPU if FAISS supports it. ValueError without FAISS."""
    try:
        with fitting_kernel():
            import faiss
    except ImportError as error:
        raise ValueError(
            "FAISS is not installed: pip install 'ssl-vit-bench[cpu]' for machines without an NVIDIA GPU, "
            f"'ssl-vit-bench[gpu]' (never both) for those with one; or search with "
            f"{option('settings', {'knn.backend': 'torch'})}"
        ) from error
    on_gpu = torch.device(device).type == "cuda" and getattr(faiss, "get_num_gpus", lambda: 0)()
    if on_gpu and k > MAX_GPU_NEIGHBOURS:
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
    """A function that searches a block by torch."""
    # A GPU holds the block for all queries: copying it again for each slice of them would take longer than searching.
    parts = [(rows.start, torch.from_numpy(gallery[rows]).to(device)) for rows in row_slices(len(gallery), TORCH_ROWS)]

    def find(queries: np.ndarray) -> Pair:
        on_device = torch.from_numpy(queries).to(device)
        nearest_by_part = []
        for start, part in parts:
            similarities, indices = (on_device @ part.T).topk(min(k, len(part)))
            nearest_by_part.append((similarities, indices + start))
        similarities, places = torch.cat([similarities for similarities, _ in nearest_by_part], dim=1).topk(k)
        indices = torch.cat([indices for _, indices in nearest_by_part], dim=1).gather(1, places)
        return similarities.cpu().numpy(), indices.cpu().numpy()

    return find


def order_ties(similarities: np.ndarray, indices: np.ndarray) -> None:
    """Sort the indices (Q, k) of equal similarities in ascending order, in place."""
    tied = np.flatnonzero((similarities[:, 1:] == similarities[:, :-1]).any(axis=1))
    if len(tied):
        order = np.lexsort((indices[tied], -similarities[tied]), axis=1)
        indices[tied] = np.take_along_axis(indices[tied], order, axis=1)
