"""Cost of a leaderboard: `python tests/benchmarks/leaderboard.py` (some minutes for 500 checkpoints on two cores).

Results of --checkpoints checkpoints on --protocols protocols with four metrics each are made up; two protocols of ten
have fractions, the others 0/1 correctness of --images images. Rewritten: nothing kept; again: nothing changed; then
after one new result that leads no column, and after one that leads all columns of its protocol. Compared: --compared
checkpoints, all pairs, then again. Peak: memory of the process so far.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measuring import peak

sys.path.insert(0, str(Path(__file__).parents[1]))
from made_results import made_checkpoint, made_result, save_result

from bench.reports.leaderboard import write_leaderboard
from bench.results.record import DataUsed, MetricRecord, ProtocolUsed
from bench.statistics.compare import compare
from engine.files import digest

METRICS = 4
FRACTIONS = (2, 3)  # of every ten protocols
SETTINGS = {"k": [10, 20, 100, 200], "temperature": 0.07, "image_size": 224, "interpolation": "bicubic"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--protocols", type=int, default=10)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--compared", type=int, default=30)
    arguments = parser.parse_args()
    os.fsync = lambda handle: None  # would take long for thousands of generated files
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    with tempfile.TemporaryDirectory() as folder:
        out, generator = Path(folder), np.random.default_rng(0)
        hard = generator.normal(size=arguments.images)
        skills = generator.normal(scale=0.15, size=arguments.checkpoints)
        for number, skill in enumerate(skills):
            for protocol in range(arguments.protocols):
                save(out, number, protocol, skill, hard, generator)
        print(f"{arguments.checkpoints} checkpoints x {arguments.protocols} protocols x {METRICS} metrics")
        print(f"{'':34} {'s':>8} {'CPU s':>8} {'peak MiB':>9}")
        timed("rewritten", lambda: write_leaderboard(out))
        timed("again", lambda: write_leaderboard(out))
        save(out, len(skills), 0, -1.0, hard, generator)
        timed("after a new result", lambda: write_leaderboard(out))
        save(out, len(skills) + 1, 1, 2.0, hard, generator)
        timed("after a new leader", lambda: write_leaderboard(out))
        names = [f"model{number:03d}" for number in range(arguments.compared)]
        for protocol in ("task@0", "task@2", None):
            for when in ("first", "again"):
                timed(
                    f"compared, {protocol or 'all protocols'}, {when}",
                    lambda p=protocol: compare(out, names, protocol=p),
                )


def timed(name: str, work: Callable[[], object]) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    spent, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"{name:34} {spent:8.2f} {cpu:8.2f} {peak() / 2**20:9.0f}", flush=True)


def save(
    out: Path, number: int, protocol: int, skill: float, difficulty: np.ndarray, generator: np.random.Generator
) -> None:
    """Save a result of a checkpoint of this skill on images of this difficulty (N,)."""
    splits = 3 if protocol % 10 in FRACTIONS else 1
    arrays, metrics = {}, {}
    for metric in range(METRICS):
        noise = generator.normal(size=(splits, len(difficulty)))
        values = (skill + 0.1 * metric + noise > difficulty).mean(0).astype(np.float32)
        value = 100 * float(values.mean(dtype=np.float64))
        arrays[f"top1_{metric}"] = values
        metrics[f"top1_{metric}"] = MetricRecord(value=value, interval=(value - 1, value + 1), array=f"top1_{metric}")
    result = made_result(
        made_checkpoint(f"model{number:03d}", method="dino", digest=digest(number)),
        metrics,
        task="task",
        protocol=ProtocolUsed(name=f"task@{protocol}", version=1),
        data=DataUsed(name="images", url="x:", fingerprints={"val": digest("val")}, images={"val": len(difficulty)}),
        settings=SETTINGS,
        facts={"transform": "t" * 60, "search": {f"option {number}": number for number in range(90)}},
    )
    save_result(out, result, arrays)


if __name__ == "__main__":
    main()
