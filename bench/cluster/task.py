"""A job of a cluster: runs `bench` as a child process, forwards signals to it, and is queued again if it was stopped.

submitit, in place of torchrun, starts one `BenchTask` for every process of a job. The command runs in a child process,
so that this process survives whatever happens to it: it only waits. A scheduler announces the end of a job's time, or a
preemption, by a signal. The command then saves its state and exits with code STOPPED, submitit's `checkpoint` keeps the
task for the next attempt, and the job is queued again.

This file imports nothing heavy, because it stays in memory while the command runs.

The state of submitted jobs is kept in files in OUT/cluster/, written by the submitting command and by the jobs:

    OUT/cluster/TIME/submission.json     what was submitted: a task for each job, with its command and its results
    OUT/cluster/TIME/task-N.json         the state of task N, as its job last wrote it; task-N.lock: held while it runs
    OUT/cluster/TIME/logs/               what the jobs print, and submitit's own files

They are JSON; submitit's own pickles are read only by its jobs.
"""

import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import msgspec

from engine.files import locked, read_json, write_atomic
from engine.printing import say
from engine.training.interruptions import STOPPED

NAME = "%Y%m%d-%H%M%S-%f"  # of a submission's folder; the order of names is the order of submissions
FOLDER = "cluster"  # subfolder of a folder of results or of a pretraining
Stage = Literal["running", "queued again", "stopped", "ended"]
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One job of a submission."""

    number: int
    title: str
    words: tuple[str, ...]  # arguments of `bench`
    results: tuple[str, ...]  # files that it will write, relative to OUT
    cost: float = 1.0  # sum of the protocols' `COST`
    expected: dict[str, float] = field(default_factory=dict)  # result -> forecast in seconds
    job: str = ""  # the scheduler's id; "" for a local job


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One `bench run` or `bench pretrain` with `--cluster`."""

    cluster: Literal["slurm", "local"]
    date: str  # ISO 8601, UTC
    at_once: int | None  # maximum of jobs that run at the same time; None: no limit
    tasks: tuple[TaskRecord, ...]


@dataclass(frozen=True, kw_only=True)
class AttemptState:
    """The state of the newest attempt of a task, as its job last wrote it."""

    stage: Stage
    code: int | None = None  # exit code of the command; negative: the signal that killed it
    attempts: int = 1  # number of attempts, including this one
    begun: str = ""  # start of this attempt, ISO 8601, UTC
    ended: str = ""  # its end, likewise
    host: str = ""
    log: str = ""  # path of the first process's output

    def __post_init__(self) -> None:
        """ValueError for times that cannot be subtracted."""
        for date in filter(None, (self.begun, self.ended)):
            if datetime.fromisoformat(date).tzinfo is None:
                raise ValueError(f"{date!r} is a time without its zone")


def now() -> str:
    """The current time, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(date: str, until: str = "") -> float:
    """Seconds from one ISO 8601 time to another, or to now; 0 if the clock was set back between them."""
    end = datetime.fromisoformat(until) if until else datetime.now(UTC)
    return max(0.0, (end - datetime.fromisoformat(date)).total_seconds())


def new_folder(out: Path) -> Path:
    """Create a folder for a submission, named by the current time, or after the newest if the clock was set back."""
    while True:
        time_of_name = datetime.now(UTC)
        for path in (out / FOLDER).glob("*/"):
            with suppress(ValueError):  # another folder
                newest = datetime.strptime(path.name, NAME).replace(tzinfo=UTC)
                time_of_name = max(time_of_name, newest + timedelta(microseconds=1))
        folder = out / FOLDER / time_of_name.strftime(NAME)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def submissions(out: Path) -> list[tuple[Path, Submission]]:
    """All submissions of a folder of results with their own folders, the oldest first. ValueError for damaged files."""
    paths = sorted((out / FOLDER).glob("*/submission.json"))
    return [(path.parent, _read(path, Submission)) for path in paths]


def write_submission(folder: Path, submission: Submission) -> None:
    write_atomic(folder / "submission.json", msgspec.json.format(msgspec.json.encode(submission)) + b"\n")


def read_attempt(folder: Path, number: int) -> AttemptState | None:
    """The state of the newest attempt of task `number`, or None before the first."""
    path = folder / f"task-{number}.json"
    return _read(path, AttemptState) if path.exists() else None


def write_attempt(folder: Path, number: int, attempt: AttemptState) -> None:
    write_atomic(folder / f"task-{number}.json", msgspec.json.encode(attempt))


def lock_of(folder: Path, number: int | None = None) -> Path:
    """The lock that task `number` holds while it runs; None: the one of the command that starts local jobs."""
    return folder / ("queue.lock" if number is None else f"task-{number}.lock")


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        return read_json(path, type=kind)
    except ValueError as error:
        raise ValueError(
            f"not a valid file of a submission: {error}; move {path.parent} away and submit again"
        ) from error


PORTS = (10000, 20000)  # below the kernel's range of ephemeral ports
GRACE = 0.3  # seconds in which the other processes can find out how one died (engine/distributed.py)
RUNNING = "RUNNING"  # SLURM's state of a job that was not cancelled


@dataclass
class BenchTask:
    """A task of a submission; submitit pickles it and calls it in every process of the job."""

    folder: str  # of the submission
    number: int
    words: tuple[str, ...]  # arguments of `bench`

    def __call__(self) -> int:
        """Run the command. A code other than 0 is raised as SystemExit, so that the scheduler sees it."""
        from submitit import JobEnvironment

        if code := Attempt(self, JobEnvironment()).run():
            sys.exit(code)
        return 0

    def checkpoint(self) -> Any:
        """The task that submitit queues for the next attempt: the same command, which resumes by itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Attempt:
    """One attempt of a task, in one process of its job."""

    def __init__(self, task: BenchTask, environment: Any) -> None:
        self.task, self.environment = task, environment
        self.folder, self.is_first = Path(task.folder), environment.global_rank == 0
        self.time_limit_signal = getattr(signal, f"SIG{environment.USR_SIG}")
        self.received: int | None = None  # the last signal
        self.command: subprocess.Popen | None = None

    def run(self) -> int:
        """Run the attempt and record its state; the command's exit code. SystemExit if the job is queued again."""
        queue_again = signal.getsignal(self.time_limit_signal)  # submitit's handler, which requeues the job
        for number in {self.time_limit_signal, signal.SIGUSR1, signal.SIGTERM}:
            signal.signal(number, self.request_stop)
        if not self.is_first:
            return self.run_command()
        with locked(lock_of(self.folder, self.task.number), "it is the same job"):
            earlier = read_attempt(self.folder, self.task.number)
            self.attempt = AttemptState(
                stage="running",
                attempts=earlier.attempts + 1 if earlier else 1,
                begun=now(),
                host=self.environment.hostname,
                log=str(self.environment.paths.stdout),
            )
            write_attempt(self.folder, self.task.number, self.attempt)
            code = self.run_command()
            requeue = self.received is not None and code != 0 and self.may_resume()
            if requeue:
                stage: Stage = "queued again"
            else:
                stage = "stopped" if code == STOPPED or self.received is not None else "ended"
            write_attempt(self.folder, self.task.number, replace(self.attempt, stage=stage, code=code, ended=now()))
        if requeue and callable(queue_again):
            queue_again(self.time_limit_signal, None)  # raises SystemExit
        return code

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: ask the command, by SIGUSR1, to save its state and stop."""
        self.received = number
        if self.command and self.command.poll() is None:
            self.command.send_signal(signal.SIGUSR1)

    def run_command(self) -> int:
        """Run the command to its end; its exit code, negative for the signal that killed it."""
        # SLURM signals every process of a job, but the command should get the time limit's signal only from here.
        handler = None
        if self.time_limit_signal != signal.SIGUSR1:
            handler = signal.signal(self.time_limit_signal, signal.SIG_IGN)
        command = [sys.executable, "-P", "-m", "bench", *self.task.words]
        self.command = subprocess.Popen(command, env=os.environ | process_variables(self.environment))
        if handler is not None:
            signal.signal(self.time_limit_signal, handler)
        if self.received is not None:  # while the command was being started
            self.command.send_signal(signal.SIGUSR1)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.command.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(GRACE)
        code = self.command.wait()
        if code < 0 and self.received is None and self.environment.num_tasks == 1:  # else another process reports it
            cause = ", which often means a lack of memory" if code == -signal.SIGKILL else ""
            say(
                f"bench: error: the process was killed by signal {-code}{cause}; run the same command again to continue"
            )
        return code

    def may_resume(self) -> bool:
        """Whether this attempt was stopped to be resumed later, and not cancelled."""
        if self.environment.name() != "slurm":
            return self.received == self.time_limit_signal
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={self.environment.raw_job_id}"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        return completed.stdout.strip() == RUNNING


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
