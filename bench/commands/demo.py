"""Train a tiny ViT for seconds, evaluate it beside a random one, and write a leaderboard; no data, no network."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench demo`."""
    parser.add_argument("--out", type=Path, default=Path("bench-results/demo"), metavar="DIR",
        help="folder of exports, results and leaderboard (bench-results/demo)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of initial weights, batches and tasks (0)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the evaluation; exports that are there from an earlier demo are used again."""
    from bench.demo_training import random_export, trained_export
    from bench.runner import Request
    from bench.runner import run as evaluate
    from engine.tasks import Workspace

    makers = {"random-tiny": random_export, "trained-tiny": trained_export}
    folders = {name: arguments.out / "demo" / f"{name}-seed{arguments.seed}" for name in makers}
    for name, make in makers.items():
        if not (folders[name] / "config.json").exists():
            make(arguments.seed).save(folders[name])
    space = Workspace(cache=arguments.out / "cache", data="", seed=arguments.seed)
    checkpoints = tuple(str(folder) for folder in folders.values())
    return evaluate(
        Request(checkpoints=checkpoints, names=tuple(makers), suite="smoke", out=arguments.out, space=space)
    )
