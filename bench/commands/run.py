"""Evaluate checkpoints on image sets."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.cli.settings import EvaluationOptions, check_names, cluster_of, ready_device

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


@dataclass(frozen=True, kw_only=True)
class Options(EvaluationOptions):
    """Of `bench run`."""

    dry_run: bool = False  # print what would be done, and do nothing


def run(options: Options) -> int:
    """0: every task has a good result; 1: some task failed; Stopped, which ends with 75, where a signal stopped a
    training."""
    check_names(options.checkpoint, options.suite, options.data)
    cluster = cluster_of(options)
    if cluster and not options.dry_run:
        from bench.cluster.submit import launch_evaluation

        return launch_evaluation(cluster, evaluation_request(cluster, "cpu"))
    from bench.run.runner import run_suite

    request = evaluation_request(options, ready_device(options.device, options.compiled))
    return run_suite(replace(request, dry_run=options.dry_run))


def evaluation_request(options: EvaluationOptions, device: str) -> "RunRequest":
    """The request that the options make, on a device."""
    from bench.run.prepare import RunRequest
    from checkpoints.import_options import ImportOptions
    from engine.tasks import Workspace

    if options.precision == "float16":
        raise ValueError("--precision float16: it is for pretraining; choose float32 or bfloat16")
    space = Workspace(
        cache=options.out / "cache",
        data="",
        device=device,
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        compiled=options.compiled,
        decode=options.decode,
        seed=options.seed,
        limit=options.limit,
        skip_bad=options.skip_bad,
        batch_size=options.batch_size,
        workers=options.workers,
    )
    return RunRequest(
        checkpoints=options.checkpoint,
        names=options.name,
        imports=ImportOptions(statistics=options.statistics),
        suite=options.suite,
        data=options.data,
        select=options.select,
        changes=options.set,
        out=options.out,
        space=space,
        rerun=options.rerun,
    )
