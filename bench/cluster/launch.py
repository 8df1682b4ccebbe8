"""`--cluster` of `bench run` and `bench pretrain`: submit, say what was and how to follow it; locally, wait."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from bench.cli.outputs import check_writable
from bench.cluster.evaluation import evaluation_tasks
from bench.cluster.options import ClusterOptions
from bench.cluster.records import FOLDER, Going, TaskRecord, now, results_of
from bench.cluster.state import WAITING_OR_RUNNING, ending_of, rows_of
from bench.cluster.submission import run_locally, submit_to_slurm
from bench.cluster.words import words_of
from bench.pretraining.run import PretrainRequest, check_request
from bench.run.runner import RunRequest
from engine.files import locked
from engine.printing import say
from engine.training.interruptions import STOPPED


def launch_evaluation(arguments: argparse.Namespace, request: RunRequest, options: ClusterOptions) -> int:
    """Submit the jobs of a run that nobody has submitted yet; the exit code. ValueError for a wrong request."""
    check_writable(request.out)
    with locked(request.out / FOLDER / "lock", "it submits jobs"):
        tasks = evaluation_tasks(arguments, request, submitted(request.out))
        if not tasks:
            say("nothing is left to submit")
            return 0
        if options.kind == "slurm":
            return _submitted(request.out, tasks, options)
    return _ran(request.out, tasks, options)


def launch_pretraining(arguments: argparse.Namespace, request: PretrainRequest, options: ClusterOptions) -> int:
    """Submit a pretraining as one job; the exit code. ValueError for a wrong request, and where it runs already."""
    check_request(request)
    check_writable(request.run.out)
    with locked(request.run.out / FOLDER / "lock", "it submits jobs"):
        if submitted(request.run.out):
            raise ValueError(f"{request.run.out}: it is submitted already; see {status_command(request.run.out)}")
        words = words_of("pretrain", arguments, {"resume": True})
        title = " ".join(filter(None, (request.method, request.recipe)))
        task = TaskRecord(number=0, title=title, words=tuple(words), results=("export",))
        if options.kind == "slurm":
            return _submitted(request.run.out, [task], options)
    return _ran(request.run.out, [task], options)


def submitted(out: Path) -> set[str]:
    """Results that jobs of earlier submissions will write: those that wait or run."""
    return results_of([row.task for row in rows_of(out) if row.state in WAITING_OR_RUNNING])


def status_command(out: Path) -> str:
    return f"bench status --out {shlex.quote(str(out))}"


def _submitted(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> int:
    submission = submit_to_slurm(out, tasks, options)
    say(*(f"  {task.job}  {task.title}" for task in submission.tasks))
    size = (
        f"{options.nodes * options.processes} processes on {options.nodes} nodes"
        if options.nodes > 1
        else (f"{options.processes} processes" if options.processes > 1 else "one process")
    )
    where = f" with {options.gpus} GPUs a node" if options.gpus else ", without a GPU (no --gpus)"
    limit = f", at most {options.jobs} at once" if options.jobs else ""
    say(f"{len(tasks)} jobs of {size}{where} are submitted{limit}; follow them: {status_command(out)}")
    return 0


def _ran(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> int:
    count = len(tasks)
    say(f"{count} job{'s' * (count != 1)}, {options.jobs} at once; Ctrl-C stops them; elsewhere: {status_command(out)}")

    begun = now()

    def heard(task: TaskRecord, going: Going) -> None:
        how = "begins" if going.stage == "running" else ending_of(out, begun, task, going)
        say(f"  [{task.number + 1}/{count}] {task.title}: {how}")

    codes = run_locally(out, tasks, options, heard)
    failed = sum(code not in (0, STOPPED) for code in codes)
    stopped = codes.count(STOPPED)
    say(f"{count - failed - stopped} done, {stopped} stopped, {failed} failed; the same command goes on")
    if (out / "results").is_dir():  # of evaluations
        say(f"the numbers: bench leaderboard --out {shlex.quote(str(out))}")
    return STOPPED if stopped else 1 if failed else 0
