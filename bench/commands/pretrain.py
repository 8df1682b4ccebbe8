"""Pretrain an encoder with a method's recipe; resumable at any step."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cli.settings import (
    above_zero,
    add_cluster,
    add_compile,
    add_decode,
    cluster_of,
    positive_integer,
    ready_device,
    share,
    whole_number,
)

if TYPE_CHECKING:
    from bench.pretraining.online import OnlineHealth, OnlineKnn
    from bench.pretraining.run import PretrainRequest
    from pretrain.loop.updates import Precision

EPILOG = """examples:
  bench pretrain mae --recipe smoke --images digits: --out runs/mae --dry-run
  bench pretrain mae --recipe vit_b --images imagenet:/data/ILSVRC --out runs/mae --micro-batch 128 --resume
  bench pretrain dino --recipe vit_b --init timm:vit_base_patch16_224.dino --images images:/data/photos --out runs/on
  bench pretrain mae --recipe 32px --images images:/data/photos --out runs/photos --set epochs=50 schedule.warmup=5
  torchrun --nproc-per-node 8 --no-python bench pretrain mae --recipe vit_b --images imagenet:/data --out runs/mae
  bench pretrain mae --recipe vit_b --images imagenet:/data --out runs/mae --cluster slurm --nodes 4 --gpus 8

methods and their recipes: bench list methods --recipes
exit codes: 0 finished; 75 a signal (SIGTERM, SIGUSR1, Ctrl-C) stopped it, all is saved: add --resume; 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench pretrain`."""
    parser.add_argument("method", metavar="METHOD", help="such as mae")
    parser.add_argument("--recipe", metavar="R", help="one of the method's recipes, which bench list METHOD shows")
    parser.add_argument(
        "--images",
        required=True,
        metavar="URL",
        help="images:PATH, any folder of images; the training images of folder:PATH, imagenet:ROOT, ...",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of this run alone")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="change recipe, method or encoder, such as epochs=100 schedule.warmup=5 mask_ratio=0.6",
    )
    parser.add_argument(
        "--init",
        metavar="CHECKPOINT",
        help="start the encoder from these weights: a training's folder, an export, timm:NAME, a file, ...",
    )
    parser.add_argument(
        "--freeze-first-epochs",
        type=whole_number,
        default=0,
        metavar="N",
        help="with --init: train the other parameters alone for N epochs (0)",
    )
    parser.add_argument("--resume", action="store_true", help="go on where this run was; start it where there is none")
    parser.add_argument("--dry-run", action="store_true", help="print the recipe and its sizes, and do nothing")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of matrix products (auto: bfloat16 on a GPU, float32 on a CPU)",
    )
    add_compile(parser)
    add_decode(parser)
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of everything random (0)")
    parser.add_argument("--workers", type=whole_number, metavar="N", help="loader processes (by machine)")
    parser.add_argument(
        "--micro-batch",
        "--at-once",
        type=positive_integer,
        metavar="N",
        help="at most N images of a process in a forward pass; the recipe's batch is made of several",
    )
    parser.add_argument("--skip-bad", action="store_true", help="replace and count unreadable images")
    parser.add_argument("--save-minutes", type=above_zero, default=10.0, metavar="M", help="between two states (10)")
    parser.add_argument(
        "--export-every",
        type=whole_number,
        default=0,
        metavar="EPOCHS",
        help="write the export that often, not at the end alone",
    )
    parser.add_argument(
        "--knn-every", type=whole_number, default=0, metavar="EPOCHS", help="log the encoder's k-NN accuracy that often"
    )
    parser.add_argument("--knn-data", metavar="URL", help="labelled images for that (--images)")
    parser.add_argument("--knn-k", type=positive_integer, metavar="K", help="neighbours that vote in it (20)")
    parser.add_argument(
        "--knn-fraction",
        type=share,
        metavar="F",
        help="share of the training images in its gallery (1); ExtreMA's: --knn-k 200 --knn-fraction 0.1",
    )
    parser.add_argument(
        "--knn-limit", type=positive_integer, metavar="N", help="at most N images of each split for that"
    )
    parser.add_argument(
        "--health-every",
        type=whole_number,
        default=0,
        metavar="EPOCHS",
        help="log effective ranks, spread and dead dimensions of the encoder's features that often",
    )
    parser.add_argument(
        "--health-data", metavar="URL", help="images for that, whose validation split is taken (--images)"
    )
    parser.add_argument("--health-limit", type=positive_integer, metavar="N", help="at most N images for that (25 600)")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases as well")
    add_cluster(parser, jobs=False)


def run(arguments: argparse.Namespace) -> int:
    """0: finished; 75: stopped by a signal, after saving."""
    from engine.extensions import extensions, load_extension

    if arguments.method not in extensions("methods"):
        load_extension("methods", arguments.method)  # says which there are, before torch is imported
    options = cluster_of(arguments)
    if options and not arguments.dry_run:
        from bench.cluster.submit import launch_pretraining

        there: Precision = "bfloat16" if options.gpus else "float32"
        precision: Precision = there if arguments.precision == "auto" else arguments.precision
        return launch_pretraining(arguments, pretraining_request(arguments, "cpu", precision), options)
    from bench.pretraining.run import run_pretraining, training_precision

    device = ready_device(arguments.device, arguments.compile)
    return run_pretraining(pretraining_request(arguments, device, training_precision(arguments.precision, device)))


def pretraining_request(arguments: argparse.Namespace, device: str, precision: "Precision") -> "PretrainRequest":
    """The request that the options make, on a device."""
    from bench.pretraining.run import PretrainRequest
    from pretrain.loop.trainer import Run

    settings = Run(
        out=arguments.out,
        device=device,
        precision=precision,
        compiled=arguments.compile,
        decode=arguments.decode,
        seed=arguments.seed,
        workers=arguments.workers,
        micro_batch=arguments.micro_batch,
        skip_bad=arguments.skip_bad,
        resume=arguments.resume,
        save_minutes=arguments.save_minutes,
        export_every=arguments.export_every,
        monitor_every=arguments.knn_every,
        monitor=_knn(arguments, device, precision),
        health_every=arguments.health_every,
        health=_health(arguments, device, precision),
        wandb=arguments.wandb,
    )
    return PretrainRequest(
        method=arguments.method,
        recipe=arguments.recipe,
        changes=tuple(arguments.set),
        images=arguments.images,
        run=settings,
        init=arguments.init,
        frozen_epochs=arguments.freeze_first_epochs,
        dry_run=arguments.dry_run,
    )


def _knn(arguments: argparse.Namespace, device: str, precision: "Precision") -> "OnlineKnn | None":
    """The online k-NN, where it was asked for."""
    from bench.pretraining.online import OnlineKnn, online_space

    options = _options(arguments, "knn", ("data", "k", "fraction", "limit"))
    if not arguments.knn_every:
        return None
    data, limit = options.pop("data", arguments.images), options.pop("limit", None)
    return OnlineKnn(space=online_space(arguments.out, data, device, precision, limit, arguments.skip_bad), **options)


def _health(arguments: argparse.Namespace, device: str, precision: "Precision") -> "OnlineHealth | None":
    """The online health, where it was asked for."""
    from bench.pretraining.online import OnlineHealth, online_space
    from probes.tasks.health import RANKED

    options = _options(arguments, "health", ("data", "limit"))
    if not arguments.health_every:
        return None
    data, limit = options.get("data", arguments.images), options.get("limit", RANKED)
    return OnlineHealth(space=online_space(arguments.out, data, device, precision, limit, arguments.skip_bad))


def _options(arguments: argparse.Namespace, probe: str, names: Sequence[str]) -> dict[str, Any]:
    """What was given of `--PROBE-NAME`. ValueError for such options without `--PROBE-every`."""
    given = {name: value for name in names if (value := getattr(arguments, f"{probe}_{name}")) is not None}
    if given and not getattr(arguments, f"{probe}_every"):
        named = " and ".join(f"--{probe}-{name}" for name in given)
        raise ValueError(f"{named} without --{probe}-every EPOCHS, which says how often: add it")
    return given
