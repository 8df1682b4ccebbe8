"""`--cluster` of `bench run` and `bench pretrain`: tasks given to submitit's executors, one array of SLURM jobs or
processes of this machine, so many at once.

Every checkpoint and protocol is a task, cheap ones first: the same command with fewer checkpoints and protocols, so
that tasks share a folder of results as runs of a user's own would. Protocols of a checkpoint that read the same
features, or train on the same stream of augmented images, are one task: in jobs of their own they would compute these
again, or wait for each other beside idle GPUs. The checkpoints are imported here, once; the tasks read the exports.
"""

import argparse
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from bench.cli.main import add_shared_arguments, command_module
from bench.cli.settings import check_writable
from bench.cluster.options import PREFIX, ClusterOptions
from bench.cluster.status import WAITING_OR_RUNNING, ending_of, rows_of
from bench.cluster.task import (
    FOLDER,
    AttemptState,
    BenchTask,
    Submission,
    TaskRecord,
    lock_of,
    new_folder,
    now,
    read_attempt,
    results_of,
    write_attempt,
    write_submission,
)
from bench.pretraining.run import PretrainRequest, check_request
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.forecast import expectations
from bench.run.prepare import Job, RunRequest, prepare, without_problems
from checkpoints.frozen import FrozenExport
from downstream.data.scenes import layout_of
from engine.files import locked
from engine.optional import require
from engine.printing import say
from engine.tasks import Workspace
from engine.training.interruptions import STOPPED, listening

ATTEMPTS = 1000  # times that a job may be queued again; a pretraining of weeks needs many
NOTICE = 180  # seconds before the end of the time at which a job is asked to save its state
KEPT = ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL")  # of the cluster, not of a job
LOOK = 0.5  # seconds between two looks at the local jobs
Heard = Callable[[TaskRecord, AttemptState], None]  # of a local job that began or ended


def submit_to_slurm(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> Submission:
    """Submit one array of jobs, in the order of the tasks. ValueError, one line, where SLURM refuses."""
    if not shutil.which("sbatch"):
        raise ValueError("--cluster slurm: there is no sbatch here; run this on a login node, or --cluster local")
    require("submitit")
    with _folder_of(out) as folder:
        executor = slurm_executor(folder / "logs", options)
        try:
            with _no_job_of_ours(), redirect_stderr(StringIO()):  # submitit prints what it raises
                jobs = executor.submit_array([_task(folder, task) for task in tasks])
        except (RuntimeError, ValueError, OSError) as error:  # what sbatch said is its last line
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"--cluster slurm: {said[-1].removeprefix('sbatch: error: ')}") from error
        named = tuple(replace(task, job=job.job_id) for task, job in zip(tasks, jobs, strict=True))
        submission = Submission(cluster="slurm", date=now(), at_once=options.jobs, tasks=named)
        write_submission(folder, submission)
    return submission


@contextmanager
def _no_job_of_ours() -> Iterator[None]:
    """Without the variables of a job that this command runs in: the jobs that it submits have places of their own."""
    from submitit.helpers import clean_env

    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    with clean_env():
        os.environ.update(kept)
        yield


@contextmanager
def _folder_of(out: Path) -> Iterator[Path]:
    """A new submission's folder, which goes again where nothing was submitted."""
    folder = new_folder(out)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _task(folder: Path, task: TaskRecord) -> BenchTask:
    return BenchTask(folder=str(folder.absolute()), number=task.number, words=task.words)


def slurm_executor(logs: Path, options: ClusterOptions) -> Any:
    """submitit's executor with the options as sbatch's own. A job that SLURM preempts or whose node dies comes back."""
    from submitit import SlurmExecutor

    further = {key: value or True for key, _, value in (text.partition("=") for text in options.slurm)}
    executor = SlurmExecutor(logs, max_num_timeout=ATTEMPTS)
    given = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "gpus_per_node": options.gpus or None,
        "cpus_per_task": options.cpus,
        "array_parallelism": options.jobs,
    }
    executor.update_parameters(
        job_name="bench",
        time=options.minutes,
        nodes=options.nodes,
        ntasks_per_node=options.processes,
        signal_delay_s=min(NOTICE, options.minutes * 60 // 4),
        stderr_to_stdout=True,
        additional_parameters={"requeue": True} | ({"mem": options.mem} if options.mem else {}) | further,
        **{name: value for name, value in given.items() if value is not None},
    )
    return executor


class LocalQueue:
    """Jobs of this machine, so many at once. heard: called when one begins and when it ends."""

    def __init__(self, folder: Path, tasks: Sequence[TaskRecord], options: ClusterOptions, heard: Heard) -> None:
        require("submitit")
        self.folder, self.options, self.heard = folder, options, heard
        self.waiting = list(tasks)
        self.places: dict[int, tuple[TaskRecord, Any]] = {}  # place -> the task in it, and submitit's job
        self.stopping = False

    def run(self) -> list[int]:
        """Run all to their end; their exit codes. A signal stops them, with their states saved."""
        codes = []
        with listening(self.stop):
            while (self.waiting and not self.stopping) or self.places:
                self.start_some()
                time.sleep(LOOK)
                codes += [self.ended(place) for place, (_, job) in [*self.places.items()] if job.done()]
        return codes + [STOPPED] * len(self.waiting)

    def start_some(self) -> None:
        """A job in every free place."""
        for place in range(self.options.jobs or 1):
            if place not in self.places and self.waiting and not self.stopping:
                task = self.waiting.pop(0)
                self.places[place] = task, self.start(task, place)
                self.heard(task, AttemptState(stage="running"))

    def start(self, task: TaskRecord, place: int) -> Any:
        """submitit's job, on the GPUs of its place."""
        from submitit import LocalExecutor

        gpus = self.options.gpus
        executor = LocalExecutor(self.folder / "logs", max_num_timeout=ATTEMPTS)
        executor.update_parameters(
            timeout_min=self.options.minutes,
            signal_delay_s=min(NOTICE, self.options.minutes * 60 // 4),
            tasks_per_node=self.options.processes,
            gpus_per_node=gpus,
            visible_gpus=tuple(range(place * gpus, (place + 1) * gpus)),
            stderr_to_stdout=True,
        )
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the jobs hear of it by `stop`
        try:
            return executor.submit(_task(self.folder, task))
        finally:
            signal.signal(signal.SIGINT, before)

    def ended(self, place: int) -> int:
        """Free a place; the exit code of its task."""
        task, _ = self.places.pop(place)
        attempt = read_attempt(self.folder, task.number) or AttemptState(stage="ended", code=1)
        if attempt.stage == "running":  # it was killed, and could not say so
            attempt = replace(attempt, stage="ended", code=-signal.SIGKILL, ended=now())
            write_attempt(self.folder, task.number, attempt)
        self.heard(task, attempt)
        return attempt.code if attempt.code is not None else 1

    def stop(self) -> None:
        """Ask all jobs to save and leave; no other one begins."""
        self.stopping = True
        for _, job in self.places.values():
            os.kill(int(job.job_id), signal.SIGTERM)


def run_locally(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions, heard: Heard) -> list[int]:
    """Run the tasks on this machine and return their exit codes."""
    with _folder_of(out) as folder:
        write_submission(folder, Submission(cluster="local", date=now(), at_once=options.jobs, tasks=tuple(tasks)))
    with locked(lock_of(folder), "it starts these jobs"):
        return LocalQueue(folder, tasks, options, heard).run()


NOT_OF_A_JOB = ("help", "cluster", "command")


def argv_of(command: str, arguments: argparse.Namespace, replaced: Mapping[str, Any]) -> list[str]:
    """`command` and its options, without defaults and without those of `--cluster`.

    replaced: name that argparse keeps an option under -> another value.
    """
    parser = argparse.ArgumentParser()
    command_module(command).add_arguments(parser)
    add_shared_arguments(parser)
    words, positional = [], [command]
    for action in parser._actions:  # argparse has no other way to list them
        if action.dest in NOT_OF_A_JOB or action.dest.startswith(PREFIX):
            continue
        value = replaced.get(action.dest, getattr(arguments, action.dest))
        if not action.option_strings:
            positional.append(str(value))
        elif value != action.default:
            words += _option(action, value)
    return positional + words


def _option(action: argparse.Action, value: Any) -> list[str]:
    name = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [name, *map(str, value)] if value else []
    return [f"{name}={value}"]


SHOWN = 2  # protocols that the title of a task names


def evaluation_tasks(arguments: argparse.Namespace, request: RunRequest, submitted: set[str]) -> list[TaskRecord]:
    """A task for every group of jobs without a result. submitted: results that jobs of earlier submissions will write.

    Prints what is left out and why. ValueError where the request itself is wrong.
    """
    preparation = prepare(request)
    say(*preparation.left_out)
    found: list[tuple[LoadedCheckpoint, list[Job]]] = []
    expected: dict[Path, float] = {}
    left_out = {"have a result": 0, "are submitted already": 0}
    for checkpoint, jobs in without_problems(preparation)[0]:
        export = preparation.exports[checkpoint.key]
        todo = [job for job in jobs if job.state != "done"]
        new = [job for job in todo if str(job.path.relative_to(request.out)) not in submitted]
        left_out["have a result"] += len(jobs) - len(todo)
        left_out["are submitted already"] += len(todo) - len(new)
        expected |= expectations(new, export, request.space)
        found += [(checkpoint, group) for group in groups_sharing(new, export, request.space)]
    say(*(f"{count} jobs {why}, skipped" for why, count in left_out.items() if count))
    found.sort(key=lambda pair: _cost(pair[1]))
    tasks = [_task_of(number, arguments, request, *pair) for number, pair in enumerate(found)]
    seconds = {_relative(path, request.out): each for path, each in expected.items()}
    return [replace(task, expected={name: seconds[name] for name in task.results if name in seconds}) for task in tasks]


def groups_sharing(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[list[Job]]:
    """The jobs of one checkpoint in groups: those of a group share features or a stream, or are one protocol."""
    groups: list[tuple[set[Hashable], list[Job]]] = []
    for job in jobs:
        shares = _shared(job, export, space)
        met = [group for group in groups if group[0] & shares]
        groups = [group for group in groups if group not in met]
        keys = shares.union(*(keys for keys, _ in met))
        groups.append((keys, [*(each for _, members in met for each in members), job]))
    return [sorted(members, key=jobs.index) for _, members in groups]


def _shared(job: Job, export: FrozenExport, space: Workspace) -> set[Hashable]:
    """What a job shares with others: its protocol, the features and the stream of augmented images that it reads."""
    task = job.chosen.task
    try:
        transforms = task.features(export, space)
        stream = task.stream(export, space)
    except Exception:  # the task will fail on its own, in its own job
        return {job.chosen.name}
    return {
        job.chosen.name,
        *(("features", name) for name in transforms),
        *([(job.chosen.key, stream)] if stream else []),
    }


def _cost(jobs: Sequence[Job]) -> float:
    return sum(job.chosen.task.COST for job in jobs)


def _task_of(
    number: int, arguments: argparse.Namespace, request: RunRequest, checkpoint: LoadedCheckpoint, jobs: Sequence[Job]
) -> TaskRecord:
    chosen = {job.chosen.name: job.chosen for job in jobs}
    targets = {word for each in chosen.values() for word in (each.key, each.name)}
    layouts = {each.layout for each in chosen.values()}
    data = {job.data.name: job.data.url for job in jobs if layout_of(job.data.url) in layouts}
    replaced = {
        "checkpoint": [checkpoint.reference],
        "name": [checkpoint.used.name],
        "statistics": None,  # of an import, which is done
        "suite": ",".join(chosen),
        "data": [f"{name}={url}" for name, url in data.items()],
        "set": [text for text in arguments.set if text.partition("=")[0].rpartition(".")[0] in targets],
    }
    more = f" and {len(chosen) - SHOWN} more" if len(chosen) > SHOWN else ""
    return TaskRecord(
        number=number,
        title=f"{checkpoint.used.name}: {', '.join([*chosen][:SHOWN])}{more}",
        words=tuple(argv_of("run", arguments, replaced)),
        results=tuple(_relative(job.path, request.out) for job in jobs),
        cost=_cost(jobs),
    )


def _relative(path: Path, out: Path) -> str:
    return str(path.relative_to(out))


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
        words = argv_of("pretrain", arguments, {"resume": True})
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

    def heard(task: TaskRecord, attempt: AttemptState) -> None:
        how = "begins" if attempt.stage == "running" else ending_of(out, begun, task, attempt)
        say(f"  [{task.number + 1}/{count}] {task.title}: {how}")

    codes = run_locally(out, tasks, options, heard)
    failed = sum(code not in (0, STOPPED) for code in codes)
    stopped = codes.count(STOPPED)
    say(f"{count - failed - stopped} done, {stopped} stopped, {failed} failed; the same command goes on")
    if (out / "results").is_dir():  # of evaluations
        say(f"the numbers: bench leaderboard --out {shlex.quote(str(out))}")
    return STOPPED if stopped else 1 if failed else 0
