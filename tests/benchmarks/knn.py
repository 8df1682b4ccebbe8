"""Cost of a whole k-NN evaluation against one bare FAISS search: `python tests/benchmarks/knn.py` (half a minute).

50 000 gallery and 5 000 query features of width 384, 1000 classes; four k and ten temperatures, 40 accuracies. Whole:
normalise, search once at the largest k, vote. Bare: IndexFlatIP.search of normalised features at the largest k, index
already built. Rounds of the two alternate in one process.
"""

import argparse
import os
import resource
import statistics
import time
from pathlib import Path

import faiss
import numpy as np

from engine.memory import keep_memory
from probes.neighbours import normalised, search, vote

GALLERY, QUERIES, WIDTH, CLASSES = 50_000, 5_000, 384, 1_000
KS = (10, 20, 100, 200)
TEMPERATURES = (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10, 0.12, 0.15, 0.20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    keep_memory()
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    before = resident()
    gallery, gallery_labels, queries, labels = data()
    whole, parts, bare = [], [], []
    for number in range(rounds + 1):
        times, hits = evaluation(gallery, gallery_labels, queries, labels)
        if number == 0:
            memory = peak() - before - gallery.nbytes - queries.nbytes
            continue  # warm-up
        whole.append(sum(times))
        parts.append(times)
        bare.append(bare_search(normalised(gallery), normalised(queries)))
    shares = [statistics.median(column) for column in zip(*parts, strict=True)]
    print(
        "{:>12} {:>12} {:>12} {:>12} {:>12} {:>8}".format(
            "normalise s", "search s", "vote s", "whole s", "bare s", "ratio"
        )
    )
    row = [*shares, statistics.median(whole), statistics.median(bare)]
    print(("{:12.3f} " * 5).format(*row) + f"{row[3] / row[4]:8.3f}")
    print(f"peak memory beyond libraries and features, making the data included: {memory >> 20} MiB")
    print("top-1 at T=0.07: " + ", ".join(f"k={k} {100 * hits[k, 0.07].top1.mean():.2f}" for k in KS))


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Class centres plus three standard deviations of noise: features (N, D) and labels (N,), gallery then queries."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLASSES, WIDTH), dtype=np.float32)
    found = []
    for count in (GALLERY, QUERIES):
        labels = random.integers(0, CLASSES, count)
        found += [centres[labels] + 3 * random.standard_normal((count, WIDTH), dtype=np.float32), labels]
    return tuple(found)


def evaluation(gallery, gallery_labels, queries, labels) -> tuple[tuple[float, float, float], dict]:
    """Seconds of normalising, searching and voting, and the hits."""
    times = [time.perf_counter()]
    bank, asked = normalised(gallery), normalised(queries)
    times.append(time.perf_counter())
    similarities, indices = search(bank, asked, max(KS))
    times.append(time.perf_counter())
    hits = vote(similarities, gallery_labels[indices], labels, KS, TEMPERATURES)
    times.append(time.perf_counter())
    return tuple(np.diff(times)), hits


def bare_search(bank: np.ndarray, asked: np.ndarray) -> float:
    index = faiss.IndexFlatIP(WIDTH)
    index.add(bank)
    started = time.perf_counter()
    index.search(asked, max(KS))
    return time.perf_counter() - started


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Bytes of memory this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    main()
