"""Pretrain a tiny ViT for seconds, evaluate it beside a random one and raw pixels; no data, no network."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench demo`."""
    parser.add_argument("--out", type=Path, default=Path("bench-results/demo"), metavar="DIR",
        help="folder of exports, results and leaderboard (bench-results/demo)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of initial weights, batches and tasks (0)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the evaluation, or 75 where a signal stopped the training; an earlier demo's networks are used."""
    from bench.pretraining.demo_training import pretrain
    from bench.run.runner import RunRequest
    from bench.run.runner import run_suite as evaluate
    from engine.tasks import Workspace
    from engine.training.interruptions import STOPPED

    networks = pretrain(arguments.out / "demo", arguments.seed)
    if networks is None:
        return STOPPED
    space = Workspace(cache=arguments.out / "cache", data="", seed=arguments.seed)
    checkpoints = ("pixels:16", str(networks / "start"), str(networks / "export"))  # 16 px is what the networks see
    names = ("pixels-16", "random-tiny", "trained-tiny")
    data = ("digits=digits:",)  # without the dense tasks, which take minutes
    request = RunRequest(checkpoints=checkpoints, names=names, suite="smoke", data=data, out=arguments.out, space=space)
    return evaluate(request)
