"""Evaluate checkpoints on image sets."""

from dataclasses import dataclass

from bench.options import EvaluationOptions, cluster_of
from bench.run.index import check_names

EPILOG = """examples:
  bench run --checkpoint timm:vit_small_patch16_224.dino pixels:32 --suite smoke --out results
  bench run --checkpoint a.pth b.pth --suite knn@dino --data cifar10=folder:/data/cifar10 --out results
  bench run --checkpoint exports/a --suite knn --set knn.k=10,20 --data digits=digits: --out results
  torchrun --nproc-per-node 4 --no-python bench run --checkpoint X --suite frozen --data x=imagenet:/data --out results
  bench run --checkpoint X Y --suite full --data x=imagenet:/data --out results --cluster slurm --partition p --gpus 8

exit codes: 0 finished; 1 a task failed; 2 an error; 75 a signal (SIGTERM, SIGUSR1, Ctrl-C) stopped a training, whose
state is saved: run the same command again
"""


@dataclass(frozen=True, kw_only=True)
class Options(EvaluationOptions):
    """Options of `bench run`."""

    dry_run: bool = False  # print what would be done, and do nothing


def run(options: Options) -> int:
    """0: all tasks succeeded; 1: a task failed. Raises Stopped (exit code 75) if a signal stopped a training."""
    check_names(options.checkpoint, options.suite, options.data)
    cluster = cluster_of(options)
    if cluster and not options.dry_run:
        from bench.run.cluster import evaluation_tasks, launch

        return launch(cluster, evaluation_tasks)
    if options.dry_run:
        from bench.run.forecast import dry_run

        return dry_run(options)
    from bench.api import run_evaluation

    return 1 if run_evaluation(options).failed else 0
