"""Probes on as many features as ImageNet has: `python tests/benchmarks/scale.py` (minutes on two cores, 2 GB of disk).

Features of width 384 (--width) in 1000 classes, 1 281 167 of them (--rows), in a file as extraction leaves it. Each
line is a process of its own that does one piece of a probe's work. FLOPs: of its matrix products, counted. Peak: memory
beyond the libraries. Stated: what the probe says that it needs.

knn        neighbours and votes of --queries queries; "bare" is one FAISS search on normalised copies in memory
lowshot    a fit to 1 % of the images
evaluation objective, gradient and certificate of the full logistic regression, once; a fit to it takes tens
epoch      the batches of 1024 of one epoch, read from a file that is not in the page cache; TFLOP: of the 45 heads that
           it would be given to, which are not computed
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measuring import peak, resident

from engine.distributed import World
from engine.machine import keep_memory
from engine.neighbours import _faiss, search, search_bytes, unit_rows
from probes.features.kinds import FeatureKind
from probes.linear.batches import EpochPlan, Table, window_size
from probes.lowshot.blocks import BlockedRows, BlockObjective, PreparedRows, max_absolute_value, second_moments
from probes.lowshot.fitting import FitSettings, Fitter
from probes.tasks.knn import vote
from probes.tasks.lowshot import fit_bytes

CLASSES, K, BATCH, HEADS = 1000, 200, 1024, 45
COLUMNS = ("work", "s", "CPU s", "TFLOP", "GFLOP/s", "peak MB", "stated MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_281_167)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--file", type=Path, help="internal: the features, for the process of one line")
    arguments = parser.parse_args()
    keep_memory()
    if arguments.file:
        measure(arguments)
        return
    print(f"load average before: {os.getloadavg()[0]:.2f}, {torch.get_num_threads()} threads; {arguments.rows} rows")
    print("{:12} {:>8} {:>8} {:>8} {:>8} {:>9} {:>10}".format(*COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kind.f32"
        write_features(path, arguments.rows, arguments.width)
        for name in arguments.work:
            sizes = [
                "--rows",
                str(arguments.rows),
                "--width",
                str(arguments.width),
                "--queries",
                str(arguments.queries),
            ]
            command = [sys.executable, __file__, "--file", str(path), "--work", name, *sizes]
            print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)


def write_features(path: Path, rows: int, width: int) -> None:
    """Write class centres plus three standard deviations of noise, sorted by class as in a listing."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLASSES, width), dtype=np.float32)
    labels = labels_of(rows)
    with open(path, "wb") as file:
        for start in range(0, rows, 65536):
            part = labels[start : start + 65536]
            (centres[part] + 3 * random.standard_normal((len(part), width), dtype=np.float32)).tofile(file)
        file.flush()
        os.fsync(file.fileno())


def labels_of(rows: int) -> np.ndarray:
    return np.arange(rows) * CLASSES // rows


def measure(arguments: argparse.Namespace) -> None:
    """Do one piece of work and print its line."""
    rows = np.memmap(arguments.file, np.float32, mode="r", shape=(arguments.rows, arguments.width))
    WORK[arguments.work[0]](rows[:3000], labels_of(3000), 256)  # warm-up: loads libraries, chooses kernels
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    started, of_cores = time.perf_counter(), time.process_time()
    flops, stated = WORK[arguments.work[0]](rows, labels_of(arguments.rows), arguments.queries)
    wall, cpu = time.perf_counter() - started, time.process_time() - of_cores
    most = (peak() - before) / 1e6  # MB
    print(
        f"{arguments.work[0]:12} {wall:8.1f} {cpu:8.1f} {flops / 1e12:8.2f} {flops / 1e9 / wall:8.1f} {most:9.0f} "
        f"{stated / 1e6:10.0f}"
    )


Counted = tuple[float, float]  # FLOPs, and bytes that the work states


def knn(rows: np.ndarray, labels: np.ndarray, queries: int) -> Counted:
    near = search(rows, rows[:queries], K, prepare=unit_rows)
    vote(near.similarities, labels[near.indices], labels[:queries], (10, 20, 100, 200), (0.07,))
    return 2.0 * rows.size * queries, search_bytes(len(rows), queries, rows.shape[1], K)


def bare(rows: np.ndarray, labels: np.ndarray, queries: int) -> Counted:
    unit_queries = unit_rows(rows, slice(0, queries))
    _faiss(unit_rows(rows), K, "cpu")(unit_queries)
    return 2.0 * rows.size * queries, 4.0 * rows.size


def lowshot(rows: np.ndarray, labels: np.ndarray, queries: int) -> Counted:
    one_percent = np.linspace(0, len(rows) - 1, len(rows) // 100).astype(np.int64)
    source = PreparedRows(features=rows, preprocess="centre_and_normalise")
    fitter = Fitter(
        settings=FitSettings(),
        train=source,
        labels=labels,
        val=PreparedRows(features=rows[:5000], preprocess="centre_and_normalise"),
        val_labels=labels[:5000],
        classes=CLASSES,
        seed=0,
    )
    fits = fitter.fit("1percent", one_percent, (0.1,), (), World())
    return 4.0 * len(one_percent) * rows.shape[1] * CLASSES * fits[0].record["iterations"], fit_bytes(
        len(one_percent), rows.shape[1], CLASSES
    )


def evaluation(rows: np.ndarray, labels: np.ndarray, queries: int) -> Counted:
    blocks = BlockedRows(
        source=PreparedRows(features=rows, preprocess="normalise"),
        rows=np.arange(len(rows)),
        labels=torch.from_numpy(labels),
        world=World(),
    )
    largest = max_absolute_value(blocks)
    second_moments(blocks, largest)
    task = BlockObjective(features=blocks, classes=CLASSES, penalty=0.01, max_feature=largest, dtype=torch.float32)
    task.at(torch.zeros(rows.shape[1], CLASSES, dtype=torch.float64))
    flops = rows.size * (4.0 * CLASSES + 2.0 * rows.shape[1])
    return flops, fit_bytes(len(rows), rows.shape[1], CLASSES)


def epoch(rows: np.ndarray, labels: np.ndarray, queries: int) -> Counted:
    with open(rows.filename, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    kind = FeatureKind("cls")
    table = Table(arrays={kind: rows}, labels=labels, readouts={"cls1": (kind,)}, device="cpu")
    plan = EpochPlan(images=len(rows), requested_batch=BATCH, drop_last=False, seed=0)
    assert sum(len(truth) for _, _, truth in table.batches(np.arange(len(rows)), plan, 0)) == len(rows)
    return 4.0 * rows.size * CLASSES * HEADS, 4.0 * rows.shape[1] * window_size(len(rows)) + 50.0 * len(rows)


WORK = {work.__name__: work for work in (bare, knn, lowshot, evaluation, epoch)}


if __name__ == "__main__":
    main()
