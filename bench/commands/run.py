"""Evaluate checkpoints on image sets."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli.settings import (
    REFERENCES,
    JoinedByCommas,
    add_cluster,
    add_compile,
    add_decode,
    add_statistics,
    check_names,
    cluster_of,
    positive_integer,
    ready_device,
    whole_number,
)

if TYPE_CHECKING:
    from bench.run.prepare import RunRequest

EPILOG = """examples:
  bench run --checkpoint timm:vit_small_patch16_224.dino pixels:32 --suite smoke --out results
  bench run --checkpoint a.pth b.pth --suite knn@dino --data cifar10=folder:/data/cifar10 --out results
  bench run --checkpoint exports/a --suite knn --set knn.k=10,20 --data digits=digits: --out results
  torchrun --nproc-per-node 4 --no-python bench run --checkpoint X --suite frozen --data x=imagenet:/data --out results
  bench run --checkpoint X Y --suite full --data x=imagenet:/data --out results --cluster slurm --partition p --gpus 8

exit codes: 0 finished; 1 some task failed; 2 an error; 75 a signal (SIGTERM, SIGUSR1, Ctrl-C) stopped a training, whose
state is saved: run the same command again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench run`."""
    add_request(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of `bench run` and `bench plan`."""
    add_several = partial(parser.add_argument, nargs="+", action="extend")
    add_several(
        "--checkpoint",
        required=True,
        metavar="X",
        help=f"{REFERENCES}, or module:PACKAGE:FUNCTION, a network of your own, whose code runs",
    )
    add_several("--name", default=[], metavar="NAME", help="label in results, one per checkpoint")
    add_statistics(parser)
    parser.add_argument(
        "--suite",
        required=True,
        nargs="+",
        action=JoinedByCommas,
        metavar="SUITE",
        help="smoke, frozen, full, everything, paper:moca, tasks (knn) and protocols (knn@dino)",
    )
    add_several(
        "--data",
        default=[],
        metavar="NAME=URL",
        help="image sets, such as cifar10=folder:/data/cifar10 (of --suite smoke: digits and tiny scenes)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results and leaderboard")
    parser.add_argument(
        "--select",
        choices=("holdout", "val"),
        help="what chooses heads and epochs: held-out training images, or those of validation as in many papers, which "
        "gives too much and is marked (as each protocol says: NAME_paper val, other linear probes holdout, other "
        "fine-tuning its last epoch)",
    )
    add_several(
        "--set",
        default=[],
        metavar="TASK.FIELD=VALUE",
        help="change a setting, such as knn.k=10,20; the results are marked as modified",
    )
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of everything random in a task (0)")
    parser.add_argument(
        "--limit", type=positive_integer, metavar="N", help="at most N images of each split, for smoke runs"
    )
    parser.add_argument("--skip-bad", action="store_true", help="count unreadable images instead of stopping")
    parser.add_argument("--rerun", action="store_true", help="run again what has a result already")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument(
        "--precision", choices=("auto", "float32", "bfloat16"), default="auto", help="of forward passes (auto: float32)"
    )
    add_decode(parser)
    parser.add_argument("--batch-size", type=positive_integer, metavar="N", help="images in a forward pass (by device)")
    parser.add_argument("--workers", type=whole_number, metavar="N", help="loader workers (by machine)")
    add_compile(parser)
    add_cluster(parser, jobs=True)


def run(arguments: argparse.Namespace) -> int:
    """0: every task has a good result; 1: some task failed; Stopped, which ends with 75, where a signal stopped a
    training."""
    check_names(arguments.checkpoint, arguments.suite, arguments.data)
    options = cluster_of(arguments)
    if options and not arguments.dry_run:
        from bench.cluster.submit import launch_evaluation

        return launch_evaluation(arguments, evaluation_request(arguments, "cpu"), options)
    from bench.run.runner import run_suite

    device = ready_device(arguments.device, arguments.compile)
    return run_suite(evaluation_request(arguments, device))


def evaluation_request(arguments: argparse.Namespace, device: str) -> "RunRequest":
    """The request that the options make, on a device."""
    from bench.run.prepare import RunRequest
    from checkpoints.import_options import ImportOptions
    from engine.tasks import Workspace

    space = Workspace(
        cache=arguments.out / "cache",
        data="",
        device=device,
        precision="float32" if arguments.precision == "auto" else arguments.precision,
        compiled=arguments.compile,
        decode=arguments.decode,
        seed=arguments.seed,
        limit=arguments.limit,
        skip_bad=arguments.skip_bad,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
    )
    return RunRequest(
        checkpoints=tuple(arguments.checkpoint),
        names=tuple(arguments.name),
        imports=ImportOptions(statistics=arguments.statistics),
        suite=arguments.suite,
        data=tuple(arguments.data),
        select=arguments.select,
        changes=tuple(arguments.set),
        out=arguments.out,
        space=space,
        rerun=arguments.rerun,
        dry_run=arguments.dry_run,
    )
