"""Pretrain an encoder with a method's recipe; resumable at any step."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cli.settings import ClusterOptions, NetworkOptions, Positional, cluster_of, ready_device
from engine.settings import Fraction, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
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


@dataclass(frozen=True, kw_only=True)
class Options(NetworkOptions, ClusterOptions):
    """Of `bench pretrain`."""

    method: Positional[str]  # such as mae
    recipe: str | None = None  # R: one of the method's recipes, which bench list METHOD shows
    images: str  # URL: images:PATH, any folder of images; the training images of folder:PATH, imagenet:ROOT, ...
    out: Path  # DIR: folder of this run alone
    # FIELD=VALUE: change recipe, method or encoder, such as epochs=100 schedule.warmup=5 mask_ratio=0.6
    set: tuple[str, ...] = ()
    # CHECKPOINT: start the encoder from these weights: a training's folder, an export, timm:NAME, a file, ...
    init: str | None = None
    freeze_first_epochs: NonNegativeInt = 0  # N: with --init: train the other parameters alone for N epochs (0)
    resume: bool = False  # go on where this run was; start it where there is none
    dry_run: bool = False  # print the recipe and its sizes, and do nothing
    seed: NonNegativeInt = 0  # N: of everything random (0)
    # N: at most N images of a process in a forward pass; the recipe's batch is made of several
    batch_size: PositiveInt | None = field(default=None, metadata={"flags": ("--micro-batch", "--at-once")})
    skip_bad: bool = False  # replace and count unreadable images
    save_minutes: PositiveFloat = 10.0  # M: between two states (10)
    export_every: NonNegativeInt = 0  # EPOCHS: write the export that often, not at the end alone
    knn_every: NonNegativeInt = 0  # EPOCHS: log the encoder's k-NN accuracy that often
    knn_data: str | None = None  # URL: labelled images for that (--images)
    knn_k: PositiveInt | None = None  # K: neighbours that vote in it (20)
    # F: share of the training images in its gallery (1); ExtreMA's: --knn-k 200 --knn-fraction 0.1
    knn_fraction: Fraction | None = None
    knn_limit: PositiveInt | None = None  # N: at most N images of each split for that
    # EPOCHS: log effective ranks, spread and dead dimensions of the encoder's features that often
    health_every: NonNegativeInt = 0
    health_data: str | None = None  # URL: images for that, whose validation split is taken (--images)
    health_limit: PositiveInt | None = None  # N: at most N images for that (25 600)
    wandb: str | None = None  # PROJECT: log to Weights & Biases as well


def run(options: Options) -> int:
    """0: finished; 75: stopped by a signal, after saving."""
    from engine.extensions import extensions, load_extension

    if options.method not in extensions("methods"):
        load_extension("methods", options.method)  # says which there are, before torch is imported
    cluster = cluster_of(options)
    if cluster and not options.dry_run:
        from bench.cluster.submit import launch_pretraining

        precision = options.precision if options.precision != "auto" else "bfloat16" if cluster.gpus else "float32"
        resumed = replace(cluster, resume=True)
        return launch_pretraining(resumed, pretraining_request(replace(options, device="cpu"), precision))
    from bench.pretraining.run import run_pretraining

    return run_pretraining(pretraining_request(options))


def pretraining_request(options: Options, precision: "Precision | None" = None) -> "PretrainRequest":
    """The request that the options make. precision: in place of theirs, on a machine that is not this one."""
    from bench.pretraining.online import OnlineHealth, OnlineKnn, online_space
    from bench.pretraining.run import PretrainRequest, training_precision
    from pretrain.loop.trainer import Run
    from probes.tasks.health import RANKED

    for probe in ("knn", "health"):
        names = [field.name for field in fields(options) if field.name.startswith(f"{probe}_")]
        given = [name for name in names if name != f"{probe}_every" and getattr(options, name) is not None]
        if given and not getattr(options, f"{probe}_every"):
            named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{named} without --{probe}-every EPOCHS, which says how often: add it")
    device = ready_device(options.device, options.compiled)
    products = precision or training_precision(options.precision or "auto", device)
    space = partial(online_space, options.out, device=device, precision=products, skip_bad=options.skip_bad)
    voting: dict[str, Any] = {"k": options.knn_k, "fraction": options.knn_fraction}
    knn = OnlineKnn(
        space=space(data=options.knn_data or options.images, limit=options.knn_limit),
        **{name: value for name, value in voting.items() if value is not None},
    )
    health = OnlineHealth(space=space(data=options.health_data or options.images, limit=options.health_limit or RANKED))
    settings = Run(
        out=options.out,
        device=device,
        precision=products,
        compiled=options.compiled,
        decode=options.decode,
        seed=options.seed,
        workers=options.workers,
        micro_batch=options.batch_size,
        skip_bad=options.skip_bad,
        resume=options.resume,
        save_minutes=options.save_minutes,
        export_every=options.export_every,
        monitor_every=options.knn_every,
        monitor=knn if options.knn_every else None,
        health_every=options.health_every,
        health=health if options.health_every else None,
        wandb=options.wandb,
    )
    return PretrainRequest(
        method=options.method,
        recipe=options.recipe,
        changes=options.set,
        images=options.images,
        run=settings,
        init=options.init,
        frozen_epochs=options.freeze_first_epochs,
        dry_run=options.dry_run,
    )
