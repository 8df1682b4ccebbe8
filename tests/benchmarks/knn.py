"""Cost of a k-NN evaluation: `python tests/benchmarks/knn.py` (about 4 minutes on two cores). It prints two tables.

Whole: 50 000 gallery and 5 000 query features, four k and ten temperatures, 40 accuracies: normalise, search once at
the largest k, vote. Bare: IndexFlatIP.search of normalised features at the largest k, index already built, with the
kernel that `search` uses. Rounds of the two alternate in one process.

Search: features of width 384 in 1000 classes, 200 neighbours, FAISS with each kernel of its OpenBLAS against torch and
ours; "unknown" is a processor that OpenBLAS does not know. OpenBLAS chooses once a process, so each line is a process
of its own, and the lines alternate in rounds. Ratio: seconds over those of FAISS as it comes. CPU s: of
all threads together, hardly changed by other work on the machine. Peak: memory beyond libraries and features; of "from
files", the evaluation's own way, beyond libraries alone, as its features stay on disk.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from measuring import peak, resident

from engine import blas_kernel
from engine.machine import keep_memory
from engine.neighbours import search, unit_rows
from probes.tasks.knn import vote

GALLERY, QUERIES, WIDTH, CLASSES = 50_000, 5_000, 384, 1_000
KS = (10, 20, 100, 200)
TEMPERATURES = (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10, 0.12, 0.15, 0.20)
COLUMNS = ("search", "kernel", "s", "CPU s", "GFLOP/s", "ratio", "peak MiB", "as first")
TOGETHER = 1024  # gallery rows in one product, as in FAISS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of the whole evaluation; 0 leaves it out")
    parser.add_argument("--search-rounds", type=int, default=3, help="of each way to search; 0 leaves them out")
    parser.add_argument("--gallery", type=int, default=200_000, help="rows to search, 1281167 for ImageNet")
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), metavar="WAY", help="lines of the table, all by default"
    )
    parser.add_argument("--way", help="internal: the line that this process measures")
    parser.add_argument("--folder", type=Path, help="internal: where its features are")
    arguments = parser.parse_args()
    keep_memory()
    if arguments.way:
        measure(WAYS[arguments.way], arguments.folder)
        return
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)", flush=True)
    if arguments.rounds:
        whole_evaluation(arguments.rounds)
    if arguments.search_rounds:
        compare_searches(arguments.ways, arguments.gallery, arguments.queries, arguments.search_rounds)


Features = np.ndarray  # (N, D) float32, normalised
Found = tuple[np.ndarray, np.ndarray]


def whole_evaluation(rounds: int) -> None:
    """Print the table of whole evaluations, compared with one bare search."""
    with blas_kernel.fitting_kernel():
        import faiss  # noqa: F401
    before = resident()
    gallery, gallery_labels, queries, labels = data(GALLERY, QUERIES)
    totals, parts, bares = [], [], []
    for number in range(rounds + 1):
        times, hits = evaluation(gallery, gallery_labels, queries, labels)
        if number == 0:
            beyond = peak() - before - gallery.nbytes - queries.nbytes
            continue  # warm-up
        totals.append(sum(times))
        parts.append(times)
        bares.append(bare_search(unit_rows(gallery), unit_rows(queries)))
    shares = [statistics.median(column) for column in zip(*parts, strict=True)]
    print(
        "{:>12} {:>12} {:>12} {:>12} {:>12} {:>8}".format(
            "normalise s", "search s", "vote s", "whole s", "bare s", "ratio"
        )
    )
    row = [*shares, statistics.median(totals), statistics.median(bares)]
    print(("{:12.3f} " * 5).format(*row) + f"{row[3] / row[4]:8.3f}")
    print(f"peak memory beyond libraries and features, making the data included: {beyond >> 20} MiB")
    print(
        "top-1 at T=0.07: " + ", ".join(f"k={k} {100 * hits[k, 0.07].top1.mean():.2f}" for k in KS) + "\n", flush=True
    )


def bare(gallery: Features, queries: Features) -> Callable[[], Found]:
    import faiss

    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    return lambda: index.search(queries, max(KS))


def by_torch(gallery: Features, queries: Features) -> Callable[[], Found]:
    return lambda: search(gallery, queries, max(KS), "torch")


def torch_products(gallery: Features, queries: Features) -> Callable[[], Found]:
    """Products by torch, the k largest by FAISS's heaps."""
    import faiss

    def call() -> Found:
        best = np.empty((len(queries), max(KS)), np.float32), np.empty((len(queries), max(KS)), np.int64)
        heaps = faiss.float_minheap_array_t()
        heaps.nh, heaps.k = len(queries), max(KS)
        heaps.val, heaps.ids = (faiss.swig_ptr(array) for array in best)
        heaps.heapify()
        for start in range(0, len(gallery), TOGETHER):
            product = (torch.from_numpy(queries) @ torch.from_numpy(gallery[start : start + TOGETHER]).T).numpy()
            heaps.addn(product.shape[1], faiss.swig_ptr(product), start, 0, len(queries))
        heaps.reorder()
        return best

    return call


def ours(gallery: Features, queries: Features) -> Callable[[], Found]:
    return lambda: search(gallery, queries, max(KS))


def from_file(gallery: Features, queries: Features) -> Callable[[], Found]:
    """As in a k-NN evaluation: features from files, the gallery normalised block by block."""
    return lambda: search(gallery, queries, max(KS), prepare=unit_rows)


def ours_unknown(gallery: Features, queries: Features) -> Callable[[], Found]:
    blas_kernel.default_kernel = lambda: "Prescott"
    return ours(gallery, queries)


@dataclass(frozen=True)
class SearchMethod:
    """A row of the table: how a search is prepared, and the OpenBLAS kernel set in the environment."""

    prepare: Callable[[Features, Features], Callable[[], Found]]
    kernel: str | None = None
    needed: set[str] = field(default_factory=set)
    mapped: bool = False  # features stay in their files, not normalised; else they are in memory, normalised


WAYS = {"FAISS as it comes": SearchMethod(bare), "FAISS, unknown": SearchMethod(bare, "Prescott")}
WAYS |= {
    f"FAISS, {kernel}": SearchMethod(bare, kernel, needed) for kernel, needed in reversed(blas_kernel.NEEDED.items())
}
WAYS |= {"torch": SearchMethod(by_torch), "torch's products, FAISS's heaps": SearchMethod(torch_products)}
WAYS |= {
    "ours": SearchMethod(ours),
    "ours, unknown": SearchMethod(ours_unknown),
    "ours, from files": SearchMethod(from_file, mapped=True),
}


def compare_searches(asked_for: list[str], gallery: int, queries: int, rounds: int) -> None:
    """Print the table of search methods."""
    flags = blas_kernel.processor_flags()
    ways = [name for name in asked_for if WAYS[name].needed <= flags]
    answers: dict[str, list[dict]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        bank, _, query_rows, _ = data(gallery, queries)
        for name, rows in (("gallery", bank), ("queries", query_rows)):
            np.save(Path(folder) / f"{name}-raw.npy", rows)
            np.save(Path(folder) / f"{name}.npy", unit_rows(rows))
        del bank, query_rows, rows
        for _ in range(rounds):
            for name in ways:
                answers[name].append(measure_in_process(name, folder))
    print(f"{gallery} x {queries} x {WIDTH}, {max(KS)} neighbours, {torch.get_num_threads()} threads, {rounds} rounds")
    print("{:32} {:>10} {:>8} {:>8} {:>8} {:>6} {:>9} {:>9}".format(*COLUMNS))
    for name, results in answers.items():
        wall, cpu, peak_mib = (median_of(results, key) for key in ("wall", "cpu", "peak_mib"))
        rate, ratio = 2e-9 * gallery * queries * WIDTH / wall, wall / median_of(answers[ways[0]], "wall")
        row = f"{wall:8.2f} {cpu:8.2f} {rate:8.1f} {ratio:6.2f} {peak_mib:9.0f} {results[0]['same']:9.3%}"
        print(f"{name:32} {results[0]['kernel']:>10} {row}")
    print("as first: share of the neighbours, place by place, that are those of the first line")


def median_of(answers: list[dict], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def measure_in_process(name: str, folder: str) -> dict:
    """Measurements of a search method, from a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != blas_kernel.VARIABLE}
    if WAYS[name].kernel:
        environment[blas_kernel.VARIABLE] = WAYS[name].kernel
    command = [sys.executable, __file__, "--way", name, "--folder", folder]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def measure(way: SearchMethod, folder: Path) -> None:
    """Search once after a small warm-up, and print the measurements."""
    suffix, mode = ("-raw.npy", "r") if way.mapped else (".npy", None)
    gallery, queries = (np.load(folder / f"{name}{suffix}", mmap_mode=mode) for name in ("gallery", "queries"))
    way.prepare(gallery[:4096], queries[:256])()
    before = resident()
    search_all = way.prepare(gallery, queries)
    started, of_cores = time.perf_counter(), time.process_time()
    indices = search_all()[-1]
    wall, cpu = time.perf_counter() - started, time.process_time() - of_cores
    kernel = (blas_kernel.in_use() or "?") if "faiss" in sys.modules else "torch's"
    beyond = peak() - before
    first = folder / "indices.npy"
    if not first.exists():
        np.save(first, indices)
    same = float((np.load(first) == indices).mean())
    print(json.dumps({"wall": wall, "cpu": cpu, "kernel": kernel, "peak_mib": beyond / 2**20, "same": same}))


def data(gallery: int, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Class centres plus three standard deviations of noise: features (N, D) and labels (N,), gallery then queries."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLASSES, WIDTH), dtype=np.float32)
    arrays = []
    for count in (gallery, queries):
        labels = random.integers(0, CLASSES, count)
        arrays += [centres[labels] + 3 * random.standard_normal((count, WIDTH), dtype=np.float32), labels]
    return tuple(arrays)


def evaluation(gallery, gallery_labels, queries, labels) -> tuple[tuple[float, float, float], dict]:
    """Seconds of normalising, searching and voting, and the hits."""
    times = [time.perf_counter()]
    bank, unit_queries = unit_rows(gallery), unit_rows(queries)
    times.append(time.perf_counter())
    _, similarities, indices = search(bank, unit_queries, max(KS))
    times.append(time.perf_counter())
    hits = vote(similarities, gallery_labels[indices], labels, KS, TEMPERATURES)
    times.append(time.perf_counter())
    return tuple(np.diff(times)), hits


def bare_search(bank: Features, queries: Features) -> float:
    """Seconds of one FAISS search."""
    search_all = bare(bank, queries)
    started = time.perf_counter()
    search_all()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
