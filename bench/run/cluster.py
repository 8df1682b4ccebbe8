"""`--cluster` of `bench run` and `bench pretrain`, and `bench status`: jobs that submitit submits, and their states.

Every checkpoint and protocol is a task, cheap ones first: the same command with fewer checkpoints and protocols, so
that tasks share a folder of results as a user's own runs would. Protocols of a checkpoint that read the same features,
or train on the same stream of augmented images, are one task: separate jobs would compute these twice, or wait for each
other with idle GPUs. The checkpoints are imported here, once; the tasks read the exports.

    OUT/cluster/N/submission.json     submission number N: a task for each job, with its command and its results
    OUT/cluster/N/logs/               what the jobs print, and submitit's own files

The state of a job is what SLURM says of it while it waits or runs, then what its results and its log say.

The other modules of bench/ are imported where they are used, because this one stays in the memory of a job while its
command runs.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from engine.errors import UserError
from engine.files import json_bytes, locked, open_regular, read_json, write_atomic
from engine.optional import require
from engine.printing import counted, printable, say, table

if TYPE_CHECKING:
    from bench.options import ClusterOptions, EvaluationOptions, PretrainOptions
    from bench.run.checkpoints import LoadedCheckpoint
    from bench.run.prepare import Job

FOLDER, SUBMISSION = "cluster", "submission.json"  # OUT/cluster, and a file of each submission
State = Literal["finished", "running", "waiting", "failed"]
Launched = TypeVar("Launched", "EvaluationOptions", "PretrainOptions")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One job of a submission."""

    number: int
    title: str
    words: tuple[str, ...]  # arguments of `bench`
    results: tuple[str, ...]  # files that it will write, relative to OUT
    job: str = ""  # SLURM's id


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One `bench run` or `bench pretrain` with `--cluster`."""

    date: str  # ISO 8601, UTC
    tasks: tuple[Task, ...]


def numbered(out: Path) -> dict[int, Path]:
    """Number of each submission -> its folder, the oldest first."""
    folders = (path for path in (out / FOLDER).glob("*/") if path.name.isdecimal())
    return dict(sorted((int(path.name), path) for path in folders))


def submissions(out: Path) -> list[tuple[Path, Submission]]:
    """All submissions of a folder of results with their own folders, the oldest first. ValueError for damaged files."""
    recorded = []
    for folder in numbered(out).values():
        if (path := folder / SUBMISSION).exists():
            try:
                recorded.append((folder, read_json(path, type=Submission)))
            except ValueError as error:
                text = f"not a submission's file: {error}; move {folder} away and submit again"
                raise ValueError(text) from error
    return recorded


# A job. submitit, in place of torchrun, starts a BenchTask in every process of it. The command runs in a child process,
# so that this process survives whatever happens to it: it only waits.

COMMAND = (sys.executable, "-P", "-m", "bench")
PORTS = (10000, 20000)  # below the kernel's range of ephemeral ports
GRACE = 0.3  # seconds in which the other processes can find out how one died (engine/distributed.py)
GO_ON = "run the same command again to continue"


@dataclass
class BenchTask:
    """The command of a task; submitit pickles it and calls it in every process of the job.

    A scheduler announces the end of a job's time, or a preemption, by a signal. The command then saves its state and
    exits with code STOPPED, and submitit's handler of this signal queues the job again.
    """

    words: tuple[str, ...]  # arguments of `bench`
    received: int | None = field(default=None, init=False)  # the last signal
    command: subprocess.Popen | None = field(default=None, init=False)

    def checkpoint(self) -> Any:
        """The task that submitit queues for the next attempt: the same command, which resumes by itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self))

    def __call__(self) -> int:
        """Run the command. SystemExit with its code, unless that is 0."""
        from submitit import JobEnvironment

        environment = JobEnvironment()
        time_limit = getattr(signal, f"SIG{environment.USR_SIG}")
        queue_again = signal.getsignal(time_limit)  # submitit's handler
        for number in {time_limit, signal.SIGUSR1, signal.SIGTERM}:
            signal.signal(number, self.request_stop)
        code = self.run_command(environment)
        is_stopped = self.received is not None and code != 0 and environment.global_rank == 0
        if is_stopped and callable(queue_again) and was_not_cancelled(environment.raw_job_id):
            queue_again(time_limit, None)  # raises SystemExit
        if code:
            sys.exit(code)
        return 0

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: ask the command, by SIGUSR1, to save its state and stop."""
        self.received = number
        if self.command and self.command.poll() is None:
            self.command.send_signal(signal.SIGUSR1)

    def run_command(self, environment: Any) -> int:
        """Run the command to its end; its exit code, negative for the signal that killed it."""
        # SLURM signals every process of a job, but the command should get the time limit's signal only from here.
        time_limit, handler = getattr(signal, f"SIG{environment.USR_SIG}"), None
        if time_limit != signal.SIGUSR1:
            handler = signal.signal(time_limit, signal.SIG_IGN)
        self.command = subprocess.Popen([*COMMAND, *self.words], env=os.environ | process_variables(environment))
        if handler is not None:
            signal.signal(time_limit, handler)
        if self.received is not None:  # while the command was being started
            self.command.send_signal(signal.SIGUSR1)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.command.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(GRACE)
        code = self.command.wait()
        if code < 0 and self.received is None and environment.num_tasks == 1:  # else another process reports it
            cause = ", which often means a lack of memory" if code == -signal.SIGKILL else ""
            say(f"{ERROR}the process was killed by signal {-code}{cause}; {GO_ON}", errors=True)
        return code


def was_not_cancelled(job: str) -> bool:
    """Whether a job was stopped to be resumed later: SLURM's state of one that was not cancelled is RUNNING."""
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "RUNNING"


def process_variables(environment: Any) -> Mapping[str, str]:
    """The environment variables that torchrun would set for torch.distributed; empty for a job of one process."""
    if environment.num_tasks == 1:
        return {}
    port = PORTS[0] + zlib.crc32(environment.job_id.encode()) % (PORTS[1] - PORTS[0])
    return {
        "RANK": str(environment.global_rank),
        "LOCAL_RANK": str(environment.local_rank),
        "WORLD_SIZE": str(environment.num_tasks),
        "LOCAL_WORLD_SIZE": str(environment.num_tasks // environment.num_nodes),
        "MASTER_ADDR": environment.hostnames[0] if environment.num_nodes > 1 else "localhost",
        "MASTER_PORT": str(port),
    }


# Submission.

ATTEMPTS = 1000  # how often a job may be queued again; a pretraining of weeks needs many attempts
CLUSTER_VARIABLES = ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL")  # belong to the cluster, not to a job
MAX_IN_TITLE = 2  # protocols that the title of a task names


def words_of_run(options: "EvaluationOptions", checkpoint: "LoadedCheckpoint", jobs: Sequence["Job"]) -> list[str]:
    """The arguments of `bench run` for some jobs of one checkpoint, whose export is read instead of its source."""
    from bench.options import argv_of

    protocols = {job.chosen.name: job.chosen for job in jobs}
    targets = {word for chosen in protocols.values() for word in chosen.words}
    seeds = {job.seed for job in jobs}
    options_of_jobs = replace(
        options,
        checkpoint=(checkpoint.reference,),
        name=(checkpoint.used.name,),
        statistics=None,  # only for imports, and the checkpoint is imported already
        suite=",".join(protocols),
        data=tuple(dict.fromkeys(f"{job.data.name}={job.data.url}" for job in jobs)),
        set=tuple(text for text in options.set if text.partition("=")[0].rpartition(".")[0] in targets),
        seed=tuple(seed for seed in options.seed if seed in seeds),
    )
    return argv_of("run", options_of_jobs)


def pretraining_task(options: "PretrainOptions", submitted: set[str]) -> list[Task]:
    """A pretraining as one task. ValueError for invalid options, or if it is submitted already."""
    from bench.options import argv_of
    from bench.pretraining.run import check_request

    check_request(options)
    if submitted:
        raise ValueError(f"{options.out}: it is submitted already; see {status_command(options.out)}")
    title = " ".join(filter(None, (options.method, options.recipe)))
    return [Task(number=0, title=title, words=tuple(argv_of("pretrain", options)), results=("export",))]


def evaluation_tasks(options: "EvaluationOptions", submitted: set[str]) -> list[Task]:
    """A task for every group of jobs without a result; prints what is left out and why. ValueError for invalid options.

    submitted: result files that jobs of earlier submissions will write.
    """
    from bench.run.prepare import prepare, without_problems
    from bench.run.sharing import groups_sharing

    preparation = prepare(replace(options, device="cpu"))
    say(*preparation.left_out)
    tasks: list[tuple[float, Task]] = []
    left_out = {"have a result": 0, "are submitted already": 0}
    for checkpoint, jobs in without_problems(preparation)[0]:
        todo = [job for job in jobs if job.state != "done"]
        new = [job for job in todo if str(job.path.relative_to(options.out)) not in submitted]
        left_out["have a result"] += len(jobs) - len(todo)
        left_out["are submitted already"] += len(todo) - len(new)
        for group in groups_sharing(new, preparation.exports[checkpoint.used.key], preparation.space):
            protocols = list(dict.fromkeys(job.chosen.name for job in group))
            omitted = f" and {len(protocols) - MAX_IN_TITLE} more" if len(protocols) > MAX_IN_TITLE else ""
            task = Task(
                number=0,
                title=f"{checkpoint.used.name}: {', '.join(protocols[:MAX_IN_TITLE])}{omitted}",
                words=tuple(words_of_run(options, checkpoint, group)),
                results=tuple(str(job.path.relative_to(options.out)) for job in group),
            )
            tasks.append((sum(job.chosen.task.COST for job in group), task))
    say(*(f"{count} jobs {reason}, skipped" for reason, count in left_out.items() if count))
    tasks.sort(key=lambda pair: pair[0])
    return [replace(task, number=number) for number, (_, task) in enumerate(tasks)]


def launch(options: Launched, tasks_of: Callable[[Launched, set[str]], list[Task]]) -> int:
    """Submit tasks to SLURM; the exit code.

    tasks_of: the tasks to submit, by the options and the result files that jobs which wait or run will write.
    """
    from bench.options import check_writable

    out = options.out
    if not shutil.which("sbatch"):
        raise UserError("cluster", "sbatch is not installed here; run this on a login node, or omit it", "slurm")
    require("submitit")
    check_writable(out)
    with locked(out / FOLDER / "lock", "it submits jobs"):
        tasks = tasks_of(options, {name for row in rows_of(out) if row.is_open for name in row.task.results})
        if not tasks:
            say("nothing is left to submit")
            return 0
        folder = out / FOLDER / str(max(numbered(out), default=0) + 1)
        folder.mkdir()
        try:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            submission = Submission(date=date, tasks=tuple(submit_to_slurm(folder, tasks, options)))
            write_atomic(folder / SUBMISSION, json_bytes(submission))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    gpu = "" if options.gpus else ", without a GPU (no --gpus)"
    say(f"{counted(len(tasks), 'job')} submitted{gpu}; to follow: {status_command(out)}")
    return 0


def status_command(out: Path) -> str:
    """The command that shows the state of the jobs."""
    return f"bench status --out {shlex.quote(str(out))}"


def submit_to_slurm(folder: Path, tasks: Sequence[Task], options: "ClusterOptions") -> list[Task]:
    """Submit the tasks as one array of jobs, requeued after preemptions and node failures; the tasks with their jobs.

    ValueError, one line, if SLURM refuses.
    """
    from submitit import SlurmExecutor
    from submitit.helpers import clean_env

    extra = {key: value or True for key, _, value in (text.partition("=") for text in options.slurm)}
    cluster_variables = {name: os.environ[name] for name in CLUSTER_VARIABLES if name in os.environ}
    try:
        executor = SlurmExecutor(folder / "logs", max_num_timeout=ATTEMPTS)
        executor.update_parameters(
            job_name="bench",
            partition=options.partition,
            account=options.account,
            qos=options.qos,
            time=options.time,
            nodes=options.nodes,
            ntasks_per_node=options.processes,
            gpus_per_node=options.gpus or None,
            cpus_per_task=options.cpus,
            mem=options.mem,
            array_parallelism=options.jobs or len(tasks),
            signal_delay_s=min(180, options.time * 60 // 4),  # in which a job saves its state
            stderr_to_stdout=True,
            additional_parameters={"requeue": True} | extra,
        )
        # Submitted jobs must not inherit the variables of a job in which this command may run. submitit also prints the
        # errors that it raises.
        with clean_env(), redirect_stderr(StringIO()):
            os.environ.update(cluster_variables)
            jobs = executor.submit_array([BenchTask(task.words) for task in tasks])
    except (RuntimeError, ValueError, OSError) as error:  # sbatch's message is its last line
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError("cluster", lines[-1].removeprefix("sbatch: error: "), "slurm") from error
    return [replace(task, job=job.job_id) for task, job in zip(tasks, jobs, strict=True)]


# States.

# Of squeue (man squeue, JOB STATE CODES), which unlike sacct, submitit's, needs no accounting and gives a reason. A job
# in none of these states has ended.
WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ENDINGS = {
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "its time ran out",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it needed more memory than --mem allows",
    "PREEMPTED": "it was preempted",
}
TAIL = 1 << 16  # bytes at the end of a log that are searched for the error
ERROR = "bench: error: "


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job as squeue prints it."""

    state: str
    reason: str
    time: str  # that it has run, `1:12:30`
    nodes: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task of a submission and its state."""

    task: Task
    state: State
    reason: str = ""  # why it waits or failed; of a running job where and how long it runs, and its last line
    results: Sequence[str] = ()  # those that are there
    log: Path | None = None  # of the first process; None before its job has begun

    @property
    def is_open(self) -> bool:
        """Whether the task waits or runs."""
        return self.state in ("waiting", "running")


def rows_of(out: Path) -> list[Row]:
    """All tasks, the oldest first, without those that were submitted again later. ValueError for damaged records."""
    recorded = submissions(out)
    queue = slurm_queue() if recorded else None
    rows: list[Row] = []
    resubmitted: set[str] = set()
    for folder, submission in reversed(recorded):
        tasks = [task for task in submission.tasks if not resubmitted.issuperset(task.results)]
        rows = [_row(out, folder, submission, task, queue) for task in tasks] + rows
        resubmitted.update(*(task.results for task in tasks))
    return rows


def slurm_queue() -> Mapping[str, QueuedJob] | None:
    """The user's jobs by id, including those that ended some minutes ago; None if SLURM cannot be queried."""
    if not shutil.which("squeue"):
        return None
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%M|%N|%r"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        return None
    lines = (line.strip().split("|", 4) for line in completed.stdout.splitlines())
    return {job: QueuedJob(state=state, reason=why, time=time, nodes=nodes) for job, state, time, nodes, why in lines}


def _row(out: Path, folder: Path, submission: Submission, task: Task, queue: Mapping[str, QueuedJob] | None) -> Row:
    """The state of one task. queue: None if SLURM cannot be queried."""
    from bench.results.record import read_result

    results, failures = [], []
    for name in task.results:
        if name.endswith(".json"):
            with suppress(OSError, ValueError):  # not written yet, or damaged, which counts as not written
                result = read_result(out / name)
                if result.status == "failed":
                    failures.append(result.message)
                elif result.date >= submission.date:
                    results.append(name)
        elif (out / name).exists():  # the export of a pretraining
            results.append(name)
    logs = sorted((folder / "logs").glob(f"{task.job}_*_log.out"))  # JOB_PROCESS_log.out
    row = Row(task=task, state="waiting", results=results, log=logs[0] if logs else None)
    if len(results) == len(task.results):
        return replace(row, state="finished")
    if queue is None:
        return replace(row, reason="SLURM cannot be queried here")
    job = queue.get(task.job, QueuedJob(state="", reason="", time="", nodes=""))
    if job.state in WAITS:
        return replace(row, reason=job.reason)
    lines = {log: [line for line in _tail(log) if line.strip()] for log in logs}
    if job.state in RUNS:
        printed_last = printable(lines[logs[0]][-1][:100]) if logs and lines[logs[0]] else ""
        return replace(
            row, state="running", reason=", ".join(filter(None, (f"{job.time} on {job.nodes}", printed_last)))
        )
    errors = [line.removeprefix(ERROR) for log in logs for line in lines[log] if line.startswith(ERROR)]
    reason = ENDINGS.get(job.state) or (failures or [printable(error) for error in errors[-1:]] or [""])[0]
    if not reason:
        reason = "a signal stopped it" if logs else "it never started"
    return replace(row, state="failed", reason=f"{reason}; {GO_ON}")


def _tail(path: Path) -> list[str]:
    """The last lines of a log."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace").splitlines()


def status_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each job and one for all."""
    count = Counter(row.state for row in rows)
    counts = ", ".join(f"{count[state]} {state}" for state in get_args(State) if count[state])
    return [*table([(row.state, row.task.title, _details(row)) for row in rows]), counts]


def _details(row: Row) -> str:
    """The details of a job in one line: its number of results, where it runs or why it does not, and its log."""
    job = f"job {row.task.job}" if row.task.job else ""
    done = f"{len(row.results)} of {len(row.task.results)} results" if row.results and row.state != "finished" else ""
    log = f"log: {row.log}" if row.log and row.state == "failed" else ""
    return ", ".join(filter(None, (job, done, row.reason, log)))
