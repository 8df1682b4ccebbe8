"""Pretrain a tiny ViT, evaluate it beside raw pixels, and write a report; no data, no network; 1 to 3 minutes."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench demo`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results/demo"),
        metavar="DIR",
        help="folder of exports, results, leaderboard and report (bench-results/demo)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of initial weights, batches and tasks (0)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the evaluation, or 75 where a signal stopped a training; an earlier demo's network is used."""
    from bench.demo import evaluate_demo, pretrain
    from engine.training.interruptions import STOPPED

    folders = pretrain(arguments.out / "pretraining", arguments.seed)
    return STOPPED if folders is None else evaluate_demo(folders, arguments.out, arguments.seed)
