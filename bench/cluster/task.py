"""What a job does: it runs `bench` as a process of its own, passes signals on, and is queued again where it stopped.

submitit starts one of these for every process of a job, without torchrun. The command is a child process, so that its
memory, its signals and its death are its own: this one only waits. A scheduler announces the end of a job's time,
or a preemption, by a signal. The command then saves its state and leaves with code STOPPED, submitit's `checkpoint`
keeps the task for the next attempt, and the job is queued again.

This file imports nothing heavy: it stays in memory beside the command.

What is known of submitted jobs lies in files below OUT/cluster/, written by the submitting command and by the jobs:

    OUT/cluster/TIME/submission.json     what was submitted: a task for each job, with its command and its results
    OUT/cluster/TIME/task-N.json         the state of task N, as its job last wrote it; task-N.lock: held while it runs
    OUT/cluster/TIME/logs/               what the jobs print, and submitit's own files

All are JSON: submitit's pickles are read by its jobs alone.
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
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import msgspec

from engine.files import locked, write_atomic
from engine.printing import say
from engine.training.interruptions import STOPPED

FOLDER = "cluster"  # in a folder of results or of a pretraining
Stage = Literal["running", "queued again", "stopped", "ended"]
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One job. results: files that it will write, relative to OUT."""

    number: int
    title: str
    words: tuple[str, ...]  # of the command `bench`
    results: tuple[str, ...]
    cost: float = 1.0  # of the protocols' `COST`
    expected: dict[str, float] = field(default_factory=dict)  # result -> seconds, by the plan
    job: str = ""  # the scheduler's name of it; "" of a local one


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One `bench run` or `bench pretrain` with `--cluster`."""

    cluster: Literal["slurm", "local"]
    date: str  # ISO 8601, UTC
    at_once: int | None  # jobs that may run at once; None: as many as the cluster starts
    tasks: tuple[TaskRecord, ...]


@dataclass(frozen=True, kw_only=True)
class AttemptState:
    """State of the newest attempt of a task, as its job last wrote it."""

    stage: Stage
    code: int | None = None  # of the ended command; below 0: the signal that killed it
    attempts: int = 1
    begun: str = ""  # the present attempt, ISO 8601, UTC
    ended: str = ""
    host: str = ""
    log: str = ""  # what the first process prints


def now() -> str:
    """ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(date: str, until: str = "") -> float:
    """From one such date to another one, or to now."""
    end = datetime.fromisoformat(until) if until else datetime.now(UTC)
    return (end - datetime.fromisoformat(date)).total_seconds()


def new_folder(out: Path) -> Path:
    """A folder of its own for a submission, named by the time."""
    while True:
        folder = out / FOLDER / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def submissions(out: Path) -> list[tuple[Path, Submission]]:
    """All of a folder, the oldest first. ValueError for a damaged file."""
    paths = sorted((out / FOLDER).glob("*/submission.json"))
    return [(path.parent, _read(path, Submission)) for path in paths]


def write_submission(folder: Path, submission: Submission) -> None:
    write_atomic(folder / "submission.json", msgspec.json.format(msgspec.json.encode(submission)) + b"\n")


def read_attempt(folder: Path, number: int) -> AttemptState | None:
    """State of the newest attempt of task `number`, or None before the first."""
    path = folder / f"task-{number}.json"
    return _read(path, AttemptState) if path.exists() else None


def write_attempt(folder: Path, number: int, attempt: AttemptState) -> None:
    write_atomic(folder / f"task-{number}.json", msgspec.json.encode(attempt))


def lock_of(folder: Path, number: int | None = None) -> Path:
    """Held by a task while it runs; without a number by the command that starts the local ones."""
    return folder / ("queue.lock" if number is None else f"task-{number}.lock")


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except ValueError as error:
        raise ValueError(
            f"{path}: not what a submission writes ({error}); move {path.parent} away and submit again"
        ) from error


PORTS = (10000, 20000)  # below those that the kernel gives out by itself
LEAVE_TO_OTHERS = 0.3  # seconds in which other processes can find out how one died (engine/distributed.py)
RUNNING = "RUNNING"  # SLURM's state of a job that nobody has cancelled


@dataclass
class BenchTask:
    """A task of a submission; submitit pickles it and calls it in every process of the job."""

    folder: str  # of the submission
    number: int
    words: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command. SystemExit with its code where that is not 0, so that the scheduler sees it too."""
        from submitit import JobEnvironment

        if code := Attempt(self, JobEnvironment()).run():
            sys.exit(code)
        return 0

    def checkpoint(self) -> Any:
        """What submitit keeps for the next attempt: the same command, which goes on where it was."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Attempt:
    """One attempt, in one process of the job."""

    def __init__(self, task: BenchTask, environment: Any) -> None:
        self.task, self.environment = task, environment
        self.folder, self.is_first = Path(task.folder), environment.global_rank == 0
        self.limit = getattr(signal, f"SIG{environment.USR_SIG}")  # that announces the end of the time
        self.asked: int | None = None  # the last signal
        self.command: subprocess.Popen | None = None

    def run(self) -> int:
        """The command's exit code; SystemExit where the job is queued again."""
        queue_again = signal.getsignal(self.limit)  # submitit's: it keeps the task, and asks the scheduler
        for number in {self.limit, signal.SIGUSR1, signal.SIGTERM}:
            signal.signal(number, self.ask)
        if not self.is_first:
            return self.wait()
        with locked(lock_of(self.folder, self.task.number), "it is the same job"):
            before = read_attempt(self.folder, self.task.number)
            self.attempt = AttemptState(
                stage="running",
                attempts=before.attempts + 1 if before else 1,
                begun=now(),
                host=self.environment.hostname,
                log=str(self.environment.paths.stdout),
            )
            write_attempt(self.folder, self.task.number, self.attempt)
            code = self.wait()
            again = self.asked is not None and code != 0 and self.may_go_on()
            stage: Stage = (
                "queued again" if again else "stopped" if code == STOPPED or self.asked is not None else "ended"
            )
            write_attempt(self.folder, self.task.number, replace(self.attempt, stage=stage, code=code, ended=now()))
        if again and callable(queue_again):
            queue_again(self.limit, None)  # leaves
        return code

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Ask the command to save and stop, as SIGUSR1 does."""
        self.asked = number
        if self.command and self.command.poll() is None:
            self.command.send_signal(signal.SIGUSR1)

    def wait(self) -> int:
        """Run the command to its end; its exit code, below 0 for the signal that killed it."""
        # SLURM signals every process of a job: the command hears of the time limit from here alone.
        before = signal.signal(self.limit, signal.SIG_IGN) if self.limit != signal.SIGUSR1 else None
        command = [sys.executable, "-P", "-m", "bench", *self.task.words]
        self.command = subprocess.Popen(command, env=os.environ | process_variables(self.environment))
        if before is not None:
            signal.signal(self.limit, before)
        if self.asked is not None:  # while the command was started
            self.command.send_signal(signal.SIGUSR1)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.command.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(LEAVE_TO_OTHERS)
        code = self.command.wait()
        if code < 0 and self.asked is None and self.environment.num_tasks == 1:  # otherwise another process says so
            why = ", as happens for lack of memory" if code == -signal.SIGKILL else ""
            say(f"bench: error: the process was killed by signal {-code}{why}; run the same command again to go on")
        return code

    def may_go_on(self) -> bool:
        """Whether this attempt was stopped to go on later, not cancelled."""
        if self.environment.name() != "slurm":
            return self.asked == self.limit
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={self.environment.raw_job_id}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() == RUNNING


def process_variables(environment: Any) -> Mapping[str, str]:
    """What torch.distributed's env:// reads, as torchrun would set it; nothing for a job of one process."""
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
