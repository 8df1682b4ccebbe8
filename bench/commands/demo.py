"""Pretrain a tiny ViT, compare it with raw pixels, and write a report; no data, no network; about a minute."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench demo`."""

    # DIR: folder of exports, results, leaderboard and report (bench-results/demo)
    out: Path = Path("bench-results/demo")
    seed: int = 0  # N: seed of initial weights, batches and tasks (0)


def run(options: Options) -> int:
    """Exit code of the evaluation, or 75 if a signal stopped the training; reuses the network of an earlier demo."""
    from bench.demo import evaluate_demo, pretrained
    from engine.training.interruptions import STOPPED

    network = pretrained(options.out / "pretraining", options.seed)
    return STOPPED if network is None else evaluate_demo(network, options.out, options.seed)
