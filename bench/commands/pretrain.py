"""Pretrain an encoder with a method's recipe; resumable at any step."""

from dataclasses import replace

from bench.options import PretrainOptions, cluster_of
from engine.errors import UserError

EPILOG = """examples:
  bench pretrain mae --recipe smoke --images digits: --out runs/mae --dry-run
  bench pretrain mae --recipe vit_b --images imagenet:/data/ILSVRC --out runs/mae --micro-batch 128 --resume
  bench pretrain dino --init timm:vit_base_patch16_224.dino --images images:/data/photos --out runs/on
  bench pretrain mae --recipe 32px --images images:/data/photos --out runs/photos --set epochs=50 schedule.warmup=5
  torchrun --nproc-per-node 8 --no-python bench pretrain mae --recipe vit_b --images imagenet:/data --out runs/mae
  bench pretrain mae --recipe vit_b --images imagenet:/data --out runs/mae --cluster slurm --nodes 4 --gpus 8

methods and their recipes: bench list recipes
exit codes: 0 finished; 75 a signal (SIGTERM, SIGUSR1, Ctrl-C) stopped it after it saved its state: add --resume; 2 an
error
"""


Options = PretrainOptions


def run(options: Options) -> int:
    """0: finished. Raises Stopped (exit code 75) if a signal stopped it, after saving."""
    from engine.extensions import extensions, load_extension

    if options.method not in extensions("methods"):
        load_extension("methods", options.method)  # raises an error that lists the methods, before torch is imported
    cluster = cluster_of(options)
    if options.jobs:
        raise UserError("jobs", "bench pretrain is one job; omit it (for its size: --nodes, --gpus)", options.jobs)
    if cluster and not options.dry_run:
        from bench.run.cluster import launch, pretraining_task

        return launch(replace(cluster, resume=True), pretraining_task)
    from bench.pretraining.run import run_pretraining

    run_pretraining(options)
    return 0
