"""`--cluster` of `bench run` and `bench pretrain`: submits tasks by submitit, as one array of SLURM jobs, or as jobs on
this machine of which a limited number runs at the same time.

Every checkpoint and protocol is a task, cheap ones first: the same command with fewer checkpoints and protocols, so
that tasks share a folder of results as a user's own runs would. Protocols of a checkpoint that read the same features,
or train on the same stream of augmented images, are one task: separate jobs would compute these twice, or wait for each
other with idle GPUs. The checkpoints are imported here, once; the tasks read the exports.
"""

import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from bench.checkpoints import LoadedCheckpoint
from bench.cluster.status import GO_ON, WAITING_OR_RUNNING, ended_state, good_results, rows_of
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
    seconds_since,
    write_attempt,
    write_submission,
)
from bench.names import check_writable
from bench.options import ClusterOptions, EvaluationOptions, PretrainOptions, argv_of
from bench.pretraining.run import check_request
from bench.run.forecast import expectations
from bench.run.prepare import Job, prepare, without_problems
from checkpoints.frozen import FrozenExport
from engine.files import locked
from engine.optional import require
from engine.printing import counted, say
from engine.progress import span
from engine.tasks import Workspace
from engine.training.interruptions import STOPPED, listening

ATTEMPTS = 1000  # how often a job may be queued again; a pretraining of weeks needs many attempts
NOTICE = 180  # seconds before the time limit at which a job is told to save its state
CLUSTER_VARIABLES = ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL")  # belong to the cluster, not to a job
POLL = 0.5  # seconds between two checks of the local jobs


@contextmanager
def _submission_folder(out: Path) -> Iterator[Path]:
    """A new folder for a submission, which is removed if the block raises an error."""
    folder = new_folder(out)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _callable(folder: Path, task: TaskRecord) -> BenchTask:
    return BenchTask(folder=str(folder.absolute()), number=task.number, words=task.words)


def slurm_executor(logs: Path, options: ClusterOptions) -> Any:
    """submitit's executor, with the options passed to sbatch. Jobs are requeued after preemptions and node failures."""
    from submitit import SlurmExecutor

    extra = {key: value or True for key, _, value in (text.partition("=") for text in options.slurm)}
    executor = SlurmExecutor(logs, max_num_timeout=ATTEMPTS)
    optional = {
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
        additional_parameters={"requeue": True} | ({"mem": options.mem} if options.mem else {}) | extra,
        **{name: value for name, value in optional.items() if value is not None},
    )
    return executor


class LocalQueue:
    """Runs jobs on this machine, at most `options.jobs` at once; submitit's LocalExecutor would start all together."""

    def __init__(self, out: Path, folder: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> None:
        self.out, self.folder, self.options, self.count = out, folder, options, len(tasks)
        self.begun = now()
        self.waiting = list(tasks)
        self.running: dict[int, tuple[TaskRecord, Any]] = {}  # slot -> its task, and submitit's job
        self.stopping = False

    def run(self) -> list[int]:
        """Run all jobs to their end; their exit codes. A signal stops them after they have saved their states."""
        codes = []
        with listening(self.stop):
            while (self.waiting and not self.stopping) or self.running:
                for slot in range(self.options.jobs or 1):
                    if slot not in self.running and self.waiting and not self.stopping:
                        task = self.waiting.pop(0)
                        self.running[slot] = task, self.start(task, slot)
                        self.say(task, "starts")
                time.sleep(POLL)
                codes += [self.ended(slot) for slot, (_, job) in [*self.running.items()] if job.done()]
        return codes + [STOPPED] * len(self.waiting)

    def say(self, task: TaskRecord, text: str) -> None:
        """Print a line about a task."""
        say(f"  [{task.number + 1}/{self.count}] {task.title}: {text}")

    def start(self, task: TaskRecord, slot: int) -> Any:
        """Start a task on the GPUs of its slot; returns submitit's job."""
        from submitit import LocalExecutor

        gpus = self.options.gpus
        executor = LocalExecutor(self.folder / "logs", max_num_timeout=ATTEMPTS)
        executor.update_parameters(
            timeout_min=self.options.minutes,
            signal_delay_s=min(NOTICE, self.options.minutes * 60 // 4),
            tasks_per_node=self.options.processes,
            gpus_per_node=gpus,
            visible_gpus=tuple(range(slot * gpus, (slot + 1) * gpus)),
            stderr_to_stdout=True,
        )
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must reach the jobs only through `stop`
        try:
            return executor.submit(_callable(self.folder, task))
        finally:
            signal.signal(signal.SIGINT, handler)

    def ended(self, slot: int) -> int:
        """Free the slot of an ended task, print its state, and return its exit code."""
        task, _ = self.running.pop(slot)
        attempt = read_attempt(self.folder, task.number) or AttemptState(stage="ended", code=1)
        if attempt.stage == "running":  # it was killed before it could record its end
            attempt = replace(attempt, stage="ended", code=-signal.SIGKILL, ended=now())
            write_attempt(self.folder, task.number, attempt)
        complete = len(good_results(self.out, self.begun, task)) == len(task.results)
        state, reason = ended_state(self.out, task, attempt, complete=complete)
        duration = f" in {span(seconds_since(attempt.begun, attempt.ended))}" if attempt.begun else ""
        self.say(task, f"{state}{duration}" if state == "finished" else f"{state}: {reason} (log: {attempt.log})")
        return attempt.code if attempt.code is not None else 1

    def stop(self) -> None:
        """Tell all running jobs to save their states and exit; start no further ones."""
        self.stopping = True
        for _, job in self.running.values():
            os.kill(int(job.job_id), signal.SIGTERM)


def words_of_run(options: EvaluationOptions, checkpoint: LoadedCheckpoint, jobs: Sequence[Job]) -> list[str]:
    """The arguments of `bench run` for some jobs of one checkpoint, whose export is read instead of its source."""
    protocols = {job.chosen.name: job.chosen for job in jobs}
    targets = {word for chosen in protocols.values() for word in chosen.words}
    options_of_jobs = replace(
        options,
        checkpoint=(checkpoint.reference,),
        name=(checkpoint.used.name,),
        statistics=None,  # only for imports, and the checkpoint is imported already
        suite=",".join(protocols),
        data=tuple(dict.fromkeys(f"{job.data.name}={job.data.url}" for job in jobs)),
        set=tuple(text for text in options.set if text.partition("=")[0].rpartition(".")[0] in targets),
    )
    return argv_of("run", options_of_jobs)


MAX_IN_TITLE = 2  # protocols that the title of a task names


def evaluation_tasks(options: EvaluationOptions, submitted: set[str]) -> list[TaskRecord]:
    """A task for every group of jobs without a result; prints what is left out and why. ValueError for invalid options.

    submitted: result files that jobs of earlier submissions will write.
    """
    preparation = prepare(replace(options, device="cpu"))
    say(*preparation.left_out)
    tasks: list[TaskRecord] = []
    left_out = {"have a result": 0, "are submitted already": 0}
    for checkpoint, jobs in without_problems(preparation)[0]:
        export = preparation.exports[checkpoint.used.key]
        todo = [job for job in jobs if job.state != "done"]
        new = [job for job in todo if str(job.path.relative_to(options.out)) not in submitted]
        left_out["have a result"] += len(jobs) - len(todo)
        left_out["are submitted already"] += len(todo) - len(new)
        seconds = expectations(new, export, preparation.space)
        for group in groups_sharing(new, export, preparation.space):
            protocols = list(dict.fromkeys(job.chosen.name for job in group))
            omitted = f" and {len(protocols) - MAX_IN_TITLE} more" if len(protocols) > MAX_IN_TITLE else ""
            paths = {str(job.path.relative_to(options.out)): job.path for job in group}
            task = TaskRecord(
                number=0,
                title=f"{checkpoint.used.name}: {', '.join(protocols[:MAX_IN_TITLE])}{omitted}",
                words=tuple(words_of_run(options, checkpoint, group)),
                results=tuple(paths),
                cost=sum(job.chosen.task.COST for job in group),
                expected={name: seconds[path] for name, path in paths.items() if path in seconds},
            )
            tasks.append(task)
    say(*(f"{count} jobs {reason}, skipped" for reason, count in left_out.items() if count))
    tasks.sort(key=lambda task: task.cost)
    return [replace(task, number=number) for number, task in enumerate(tasks)]


def groups_sharing(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[list[Job]]:
    """The jobs of one checkpoint in groups that share features, a stream of augmented images, or a protocol."""
    groups: list[tuple[set[Hashable], list[Job]]] = []
    for job in jobs:
        keys = _shared(job, export, space)
        joined = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if group not in joined]
        members = [member for _, group_members in joined for member in group_members]
        groups.append((keys.union(*(group_keys for group_keys, _ in joined)), [*members, job]))
    return [sorted(members, key=jobs.index) for _, members in groups]


def _shared(job: Job, export: FrozenExport, space: Workspace) -> set[Hashable]:
    """Keys of what a job may share with others: its protocol, and the features and the stream that it reads."""
    task = job.chosen.task
    try:
        transforms = task.features(export, space)
        stream = task.stream(export, space)
    except Exception:  # the same error will fail the task in its own job
        return {job.chosen.name}
    return {
        job.chosen.name,
        *(("features", name) for name in transforms),
        *([(job.chosen.key, stream)] if stream else []),
    }


def launch_evaluation(options: EvaluationOptions) -> int:
    """Submit the jobs of a run that are not submitted yet; the exit code. ValueError for invalid options."""
    return launch(options, lambda: evaluation_tasks(options, submitted(options.out)))


def launch_pretraining(options: PretrainOptions) -> int:
    """Submit a pretraining as one job; the exit code. ValueError for invalid options, or if it is submitted already."""

    def task() -> list[TaskRecord]:
        if submitted(options.out):
            raise ValueError(f"{options.out}: it is submitted already; see {status_command(options.out)}")
        words = tuple(argv_of("pretrain", options))
        title = " ".join(filter(None, (options.method, options.recipe)))
        return [TaskRecord(number=0, title=title, words=words, results=("export",))]

    check_request(options)
    return launch(options, task)


def launch(options: EvaluationOptions | PretrainOptions, tasks_of: Callable[[], list[TaskRecord]]) -> int:
    """Submit the tasks to SLURM, or run them on this machine; the exit code."""
    check_writable(options.out)
    with ExitStack() as queue:
        with locked(options.out / FOLDER / "lock", "it submits jobs"):
            tasks = tasks_of()
            if not tasks:
                say("nothing is left to submit")
                return 0
            if options.cluster == "slurm":
                return submit_to_slurm(options.out, tasks, options)
            require("submitit")
            with _submission_folder(options.out) as folder:
                write_submission(
                    folder, Submission(cluster="local", date=now(), at_once=options.jobs, tasks=tuple(tasks))
                )
            # From here on the tasks count as waiting, so that another command does not submit them too.
            queue.enter_context(locked(lock_of(folder), "it starts these jobs"))
        return run_locally(options.out, folder, tasks, options)


def submitted(out: Path) -> set[str]:
    """Result files that jobs of earlier submissions will write: those that wait or run."""
    return {name for row in rows_of(out) if row.state in WAITING_OR_RUNNING for name in row.task.results}


def status_command(out: Path) -> str:
    """The command that shows the state of the jobs."""
    return f"bench status --out {shlex.quote(str(out))}"


def submit_to_slurm(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> int:
    """Submit the tasks as one array of jobs, in their order; exit code 0. ValueError, one line, if SLURM refuses."""
    if not shutil.which("sbatch"):
        raise ValueError("--cluster slurm: sbatch is not installed here; run this on a login node, or --cluster local")
    require("submitit")
    from submitit.helpers import clean_env

    cluster_variables = {name: os.environ[name] for name in CLUSTER_VARIABLES if name in os.environ}
    with _submission_folder(out) as folder:
        executor = slurm_executor(folder / "logs", options)
        try:
            # Submitted jobs must not inherit the variables of a job in which this command may run. submitit also prints
            # the errors that it raises.
            with clean_env(), redirect_stderr(StringIO()):
                os.environ.update(cluster_variables)
                jobs = executor.submit_array([_callable(folder, task) for task in tasks])
        except (RuntimeError, ValueError, OSError) as error:  # sbatch's message is its last line
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"--cluster slurm: {lines[-1].removeprefix('sbatch: error: ')}") from error
        with_jobs = tuple(replace(task, job=job.job_id) for task, job in zip(tasks, jobs, strict=True))
        write_submission(folder, Submission(cluster="slurm", date=now(), at_once=options.jobs, tasks=with_jobs))
    say(*(f"  {task.job}  {task.title}" for task in with_jobs))
    size = f"{options.nodes * options.processes} processes" if options.nodes * options.processes > 1 else "one process"
    nodes = f" on {options.nodes} nodes" if options.nodes > 1 else ""
    gpus = f" with {options.gpus} GPUs per node" if options.gpus else ", without a GPU (no --gpus)"
    limit = f", at most {options.jobs} at once" if options.jobs else ""
    say(f"{counted(len(tasks), 'job')} of {size}{nodes}{gpus} submitted{limit}; to follow: {status_command(out)}")
    return 0


def run_locally(out: Path, folder: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> int:
    """Run the tasks of a submission on this machine; the exit code of all together."""
    follow = f"to follow them elsewhere: {status_command(out)}"
    say(f"{counted(len(tasks), 'job')}, {options.jobs} at once; Ctrl-C stops them; {follow}")
    codes = LocalQueue(out, folder, tasks, options).run()
    failed, stopped = sum(code not in (0, STOPPED) for code in codes), codes.count(STOPPED)
    say(f"{len(tasks) - failed - stopped} done, {stopped} stopped, {failed} failed; {GO_ON}")
    if (out / "results").is_dir():  # these were evaluations
        say(f"to see the results: bench leaderboard --out {shlex.quote(str(out))}")
    return STOPPED if stopped else 1 if failed else 0
