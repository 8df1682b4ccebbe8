"""Run as a program: evaluate features that are in a file, and print how much memory that takes.

memory_program.py FILE WORK ROWS...   prints as JSON: for each number of rows, smallest first, the peak in bytes beyond
what the process held after a small warm-up
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from engine import neighbours
from engine.distributed import World
from engine.rows import ChosenRows, are_equal
from probes.features.kinds import FeatureKind
from probes.linear import batches as linear_batches
from probes.linear.batches import EpochPlan, Table
from probes.lowshot import blocks, fitting
from probes.lowshot.blocks import PreparedRows
from probes.lowshot.fitting import FitSettings, Fitter

WIDTH, CLASSES = 128, 20
QUERIES, K = 1024, 50
KIND = FeatureKind("cls")


def knn(rows: np.ndarray, labels: np.ndarray) -> None:
    neighbours.TILE_ROWS, neighbours.TILE_QUERIES = 8192, 256
    neighbours.search(rows, rows[:QUERIES], K, prepare=neighbours.unit_rows)


def fitter(rows: np.ndarray, labels: np.ndarray) -> Fitter:
    source = PreparedRows(features=rows, preprocess="centre_and_normalise")
    return Fitter(
        settings=FitSettings(lambda_convention="as is"),
        train=source,
        labels=labels,
        val=PreparedRows(features=rows[:500], preprocess="normalise"),
        val_labels=labels[:500],
        classes=CLASSES,
        seed=0,
    )


def lowshot(rows: np.ndarray, labels: np.ndarray) -> None:
    few = np.linspace(0, len(rows) - 1, 1000).astype(np.int64)
    fitter(rows, labels).fit("1percent", few, (0.1,), (), World())


def logreg(rows: np.ndarray, labels: np.ndarray) -> None:
    blocks.BLOCK_ROWS, fitting.MAX_IN_MEMORY = 2048, 0
    task = fitter(rows, labels)
    task.train.count_constant(np.arange(len(rows)))
    task.fit("100percent", np.arange(len(rows)), (0.1,), (), World())


def linear(rows: np.ndarray, labels: np.ndarray) -> None:
    linear_batches.MAX_WINDOW = 8192
    chosen = ChosenRows(rows, np.arange(1, len(rows)))
    assert not are_equal(chosen)
    table = Table(arrays={KIND: chosen}, labels=labels, readouts={"cls1": (KIND,)}, device="cpu")
    plan = EpochPlan(images=len(chosen), requested_batch=512, drop_last=False, seed=0)
    assert sum(len(truth) for _, _, truth in table.batches(np.arange(len(chosen)), plan, 0)) == len(chosen)
    for features, _ in table.blocks(np.arange(len(chosen))):
        features["cls1"].sum()


def memory(name: str) -> int:
    """A quantity of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def main() -> None:
    path, counts, work = sys.argv[1], [int(count) for count in sys.argv[3:]], globals()[sys.argv[2]]
    torch.set_num_threads(1)
    rows = np.memmap(path, np.float32, mode="r").reshape(-1, WIDTH)
    labels = np.arange(len(rows)) % CLASSES
    work(rows[:3000], labels[:3000])
    before, peaks = memory("VmRSS"), []
    for count in counts:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        work(rows[:count], labels[:count])
        peaks.append(memory("VmHWM") - before)
    sys.stdout.write(json.dumps(peaks))


if __name__ == "__main__":
    main()
