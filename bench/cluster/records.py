"""What is known of submitted jobs: files below OUT/cluster/, written by the submitting command and by the jobs.

    OUT/cluster/TIME/submission.json     what was submitted: a task for each job, with its command and its results
    OUT/cluster/TIME/task-N.json         how task N goes, as its job last said; task-N.lock is held while it runs
    OUT/cluster/TIME/logs/               what the jobs print, and submitit's own files

All are JSON: submitit's pickles are read by its jobs alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from engine.files import write_atomic

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
class Going:
    """How a task goes, as its job last said."""

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


def going_of(folder: Path, number: int) -> Going | None:
    """What task `number` last said; None before it began."""
    path = folder / f"task-{number}.json"
    return _read(path, Going) if path.exists() else None


def write_going(folder: Path, number: int, going: Going) -> None:
    write_atomic(folder / f"task-{number}.json", msgspec.json.encode(going))


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


def results_of(tasks: Sequence[TaskRecord]) -> set[str]:
    """All result files of tasks."""
    return {result for task in tasks for result in task.results}
