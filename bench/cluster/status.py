"""`bench status`: a line for each job, what is left, and how long that will take.

The time of a job is that of the same protocols of other checkpoints in the same folder, where these are finished;
otherwise that of the plan, where `bench plan` has calibrated, or follows from the tasks' `COST`. A running job also
shows what it printed last.
"""

import os
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from bench.cluster.task import (
    AttemptState,
    Submission,
    TaskRecord,
    lock_of,
    read_attempt,
    seconds_since,
    submissions,
)
from bench.results.record import Result, read_result
from engine.files import is_locked
from engine.printing import printable
from engine.progress import span

State = Literal["finished", "running", "waiting", "stopped", "failed"]
WAITING_OR_RUNNING = ("waiting", "running")
# Of squeue (man squeue, JOB STATE CODES), as sacct, which submitit asks, needs accounting and gives no reason. What
# is in neither list has ended.
WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ENDINGS = {
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "its time ran out",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it needed more memory than --mem gives it",
    "PREEMPTED": "it was preempted",
}
KILLED = "it was killed, or its node was lost"
GO_ON = "run the same command again to go on"
TAIL = 1 << 16  # bytes of a log in which the error is looked for
ERROR = "bench: error: "

Queue = Mapping[str, tuple[str, str]]  # job -> SLURM's state and reason


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One task of a submission and its state."""

    task: TaskRecord
    submission: Submission
    state: State
    attempt: AttemptState | None
    reason: str = ""  # of waiting, stopping or failing
    results: Mapping[str, Result] = field(default_factory=dict)  # those of its result files that are good

    @property
    def seconds(self) -> float:
        """Length of the present or last attempt."""
        return seconds_since(self.attempt.begun, self.attempt.ended) if self.attempt and self.attempt.begun else 0.0

    @property
    def log(self) -> Path | None:
        return Path(self.attempt.log) if self.attempt and self.attempt.log else None


def rows_of(out: Path) -> list[TaskRow]:
    """All tasks, the oldest first, without those whose results a later submission was to write. ValueError for damaged
    records."""
    recorded = submissions(out)
    queue = slurm_queue() if any(submission.cluster == "slurm" for _, submission in recorded) else {}
    rows: list[TaskRow] = []
    resubmitted: set[str] = set()
    for folder, submission in reversed(recorded):
        tasks = [task for task in submission.tasks if not resubmitted.issuperset(task.results)]
        rows = [_row(out, folder, submission, task, queue) for task in tasks] + rows
        resubmitted.update(*(task.results for task in tasks))
    return rows


def slurm_queue() -> Queue | None:
    """The user's jobs, also those that ended some minutes ago; None where SLURM cannot be asked."""
    if not shutil.which("squeue"):
        return None
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    lines = (line.strip().split("|", 2) for line in done.stdout.splitlines())
    return {job: (state, reason) for job, state, reason in lines}


def _row(out: Path, folder: Path, submission: Submission, task: TaskRecord, queue: Queue | None) -> TaskRow:
    attempt = read_attempt(folder, task.number)
    results = good_results(out, submission.date, task)
    if submission.cluster == "slurm":
        state, reason = _state_in_slurm(task, attempt, queue)
    else:
        state, reason = _state_here(folder, task, attempt)
    if state is None:
        state, reason = ended_state(out, task, attempt, reason, complete=len(results) == len(task.results))
    return TaskRow(task=task, submission=submission, state=state, attempt=attempt, reason=reason, results=results)


def _state_in_slurm(task: TaskRecord, attempt: AttemptState | None, queue: Queue | None) -> tuple[State | None, str]:
    """Waiting, running, or None for a job that ended; and why."""
    if queue is None:  # what the job itself wrote last
        if attempt is None or attempt.stage == "queued again":
            return "waiting", "SLURM cannot be asked here"
        return ("running", "SLURM cannot be asked here") if attempt.stage == "running" else (None, "")
    state, reason = queue.get(task.job, ("", ""))
    if state in WAITS:
        return "waiting", reason
    return ("running", "") if state in RUNS else (None, ENDINGS.get(state, ""))


def _state_here(folder: Path, task: TaskRecord, attempt: AttemptState | None) -> tuple[State | None, str]:
    if is_locked(lock_of(folder, task.number)):
        return "running", ""
    queued = is_locked(lock_of(folder)) and (attempt is None or attempt.stage == "queued again")
    return ("waiting", "for its turn") if queued else (None, "")


def ended_state(
    out: Path, task: TaskRecord, attempt: AttemptState | None, reason: str = "", complete: bool = False
) -> tuple[State, str]:
    """State of a task that neither waits nor runs, and why. reason: SLURM's. complete: all its results are good."""
    if complete or (attempt and attempt.stage == "ended" and attempt.code == 0):
        return "finished", ""
    if attempt is None:
        return "stopped", f"{reason or 'it never began'}; {GO_ON}"
    if attempt.stage in ("stopped", "queued again"):
        return "stopped", f"{reason or 'a signal stopped it'}, its state is saved; {GO_ON}"
    if attempt.stage == "running":
        return "failed", f"{reason or KILLED}; {GO_ON}"
    return "failed", failure_of(out, task, attempt)


def failure_of(out: Path, task: TaskRecord, attempt: AttemptState) -> str:
    """One line: why an ended task failed."""
    failures = [result.message for result in readable_results(out, task).values() if result.status == "failed"]
    if failures:
        return failures[0] + (f"; and {len(failures) - 1} more" if len(failures) > 1 else "")
    log = Path(attempt.log)
    job = log.name.rsplit("_", 2)[0]  # JOB_PROCESS_log.out
    errors = [
        printable(line.removeprefix(ERROR))
        for path in sorted(log.parent.glob(f"{job}_*_log.out"))
        for line in _tail(path)
        if line.startswith(ERROR)
    ]
    if errors:
        return errors[-1]
    code = attempt.code or 0
    return f"killed by signal {-code}; {GO_ON}" if code < 0 else f"exit code {code}"


def _tail(path: Path) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace").splitlines()


def last_line(path: Path | None) -> str:
    """What a job printed last."""
    lines = _tail(path) if path and path.exists() else []
    return printable(next((line for line in reversed(lines) if line.strip()), ""))


def good_results(out: Path, since: str, task: TaskRecord) -> dict[str, Result]:
    """The task's result files that were written since it was submitted, and are no failures."""
    results = readable_results(out, task)
    return {name: result for name, result in results.items() if result.status == "ok" and result.date >= since}


def readable_results(out: Path, task: TaskRecord) -> dict[str, Result]:
    """The task's result files that exist and can be read."""
    results = {}
    for name in task.results:
        if name.endswith(".json"):
            with suppress(OSError, ValueError):  # not yet written, or damaged: to be made again
                results[name] = read_result(out / name)
    return results


SHOWN = 100  # characters of what a job printed last


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What jobs take in seconds, from those that are finished."""

    by_result: Mapping[str, float]  # image set and result file -> median of all checkpoints
    by_cost: float | None  # of one unit of the tasks' COST

    @classmethod
    def of(cls, rows: Sequence[TaskRow]) -> "Durations":
        seconds_by_kind: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            for name, result in row.results.items():
                seconds_by_kind[_kind(name)].append(result.seconds)
        finished = [row for row in rows if row.state == "finished" and row.results]
        cost = sum(row.task.cost for row in finished)
        seconds = sum(result.seconds for row in finished for result in row.results.values())
        by_result = {kind: median(seconds) for kind, seconds in seconds_by_kind.items()}
        return cls(by_result=by_result, by_cost=seconds / cost if cost else None)

    def left(self, row: TaskRow) -> float | None:
        """Seconds until a job is over, once it runs; None where nothing like it is finished."""
        if row.state not in WAITING_OR_RUNNING:
            return 0.0
        missing = [name for name in row.task.results if name not in row.results]
        known = row.task.expected | {
            name: self.by_result[_kind(name)] for name in missing if _kind(name) in self.by_result
        }
        if known.keys() >= set(missing):
            total = sum(known[name] for name in missing)
        elif self.by_cost is not None:
            total = self.by_cost * row.task.cost * len(missing) / len(row.task.results)
        else:
            return None
        done = sum(result.seconds for result in row.results.values())
        return max(0.0, total - (max(0.0, row.seconds - done) if row.state == "running" else 0.0))


def _kind(name: str) -> str:
    """results/CHECKPOINT/SET/PROTOCOL-seed0.json -> SET/PROTOCOL-seed0.json"""
    return "/".join(Path(name).parts[2:])


def until_all_are_over(rows: Sequence[TaskRow], durations: Durations) -> float | None:
    """Seconds, with every job begun as soon as one that ran before it ends; None where nothing is known of one."""
    open_rows = [row for row in rows if row.state in WAITING_OR_RUNNING]
    left = {row.task.number: durations.left(row) for row in open_rows}
    if not open_rows or None in left.values():
        return None
    running = [row for row in open_rows if row.state == "running"]
    at_once = max([row.submission.at_once or len(running) or 1 for row in open_rows])
    ends = sorted(float(durations.left(row) or 0) for row in running)
    ends += [0.0] * (at_once - len(ends))
    for row in open_rows:
        if row.state == "waiting":
            ends = sorted([ends[0] + float(durations.left(row) or 0), *ends[1:]])
    return ends[-1]


def status_lines(rows: Sequence[TaskRow]) -> Iterator[str]:
    """A line for each job and one for all."""
    durations = Durations.of(rows)
    width = max(len(row.task.title) for row in rows)
    for row in rows:
        yield f"{row.state:8}  {row.task.title:{width}}  {_details(row, durations)}".rstrip()
    count = Counter(row.state for row in rows)
    left = until_all_are_over(rows, durations)
    counts = ", ".join(f"{count[state]} {state}" for state in get_args(State) if count[state])
    yield f"{counts}; about {span(left)} left" if left is not None else counts


def _details(row: TaskRow, durations: Durations) -> str:
    job = f"job {row.task.job}" if row.task.job else ""
    done = f"{len(row.results)} of {len(row.task.results)} results" if row.results else ""
    left = durations.left(row)
    if row.state == "finished":
        words = [job, f"in {span(row.seconds)}" if row.attempt else ""]
    elif row.state == "running":
        where = f"on {row.attempt.host}" if row.attempt else ""
        attempt = f"attempt {row.attempt.attempts}" if row.attempt and row.attempt.attempts > 1 else ""
        about = f"about {span(left)} left" if left is not None else ""
        words = [job, done, f"for {span(row.seconds)} {where}", attempt, about, last_line(row.log).strip()[:SHOWN]]
    elif row.state == "waiting":
        words = [job, done, row.reason, f"takes about {span(left)}" if left is not None else ""]
    else:
        words = [job, done, row.reason, f"log: {row.log}" if row.log else ""]
    return ", ".join(filter(None, words))


def status_json(rows: Sequence[TaskRow]) -> dict[str, Any]:
    """The same as JSON values."""
    durations = Durations.of(rows)
    tasks = [
        {
            "state": row.state,
            "title": row.task.title,
            "cluster": row.submission.cluster,
            "job": row.task.job,
            "command": ["bench", *row.task.words],
            "results": list(row.task.results),
            "results_there": list(row.results),
            "reason": row.reason,
            "log": str(row.log or ""),
            "host": row.attempt.host if row.attempt else "",
            "attempts": row.attempt.attempts if row.attempt else 0,
            "exit_code": row.attempt.code if row.attempt else None,
            "seconds": round(row.seconds, 1),
            "seconds_left": durations.left(row),
            "printed_last": last_line(row.log) if row.state == "running" else "",
        }
        for row in rows
    ]
    return {"tasks": tasks, "seconds_left": until_all_are_over(rows, durations)}
