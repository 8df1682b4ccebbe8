"""`bench status`: a line for each job, and how long the remaining jobs will take.

The time of a job is estimated from finished jobs of the same protocols for other checkpoints in the same folder; or
else from a plan, if `bench plan` has measured the machine, or from the tasks' `COST`. For a running job, the line that
it printed last is shown as well.
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

from bench.cluster.task import AttemptState, Submission, TaskRecord, lock_of, read_attempt, seconds_since, submissions
from bench.results.record import Result, read_result
from engine.files import is_locked, open_regular
from engine.printing import printable
from engine.progress import span

State = Literal["finished", "running", "waiting", "stopped", "failed"]
WAITING_OR_RUNNING = ("waiting", "running")
# States of squeue (man squeue, JOB STATE CODES); sacct, which submitit uses, needs accounting and reports no reason. A
# job in none of these states has ended.
WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ENDINGS = {
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "its time ran out",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it needed more memory than --mem allows",
    "PREEMPTED": "it was preempted",
}
KILLED = "it was killed, or its node was lost"
GO_ON = "run the same command again to continue"
TAIL = 1 << 16  # bytes at the end of a log that are searched for the error
ERROR = "bench: error: "

Queue = Mapping[str, tuple[str, str]]  # job id -> SLURM's state and reason


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One task of a submission and its state."""

    task: TaskRecord
    submission: Submission
    state: State
    attempt: AttemptState | None
    reason: str = ""  # why it waits, stopped or failed
    results: Mapping[str, Result] = field(default_factory=dict)  # result file -> good result, for those that exist

    @property
    def seconds(self) -> float:
        """Duration of the current or last attempt."""
        return seconds_since(self.attempt.begun, self.attempt.ended) if self.attempt and self.attempt.begun else 0.0

    @property
    def log(self) -> Path | None:
        return Path(self.attempt.log) if self.attempt and self.attempt.log else None


def rows_of(out: Path) -> list[TaskRow]:
    """All tasks, the oldest first, without those that were submitted again later. ValueError for damaged records."""
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
    """The user's jobs, including those that ended some minutes ago; None if SLURM cannot be queried."""
    if not shutil.which("squeue"):
        return None
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        return None
    lines = (line.strip().split("|", 2) for line in completed.stdout.splitlines())
    return {job: (state, reason) for job, state, reason in lines}


def _row(out: Path, folder: Path, submission: Submission, task: TaskRecord, queue: Queue | None) -> TaskRow:
    """The state of one job, with its attempt and its results so far."""
    attempt = read_attempt(folder, task.number)
    results = good_results(out, submission.date, task)
    if submission.cluster == "slurm":
        state, reason = _state_in_slurm(task, attempt, queue)
    else:
        state, reason = _state_on_this_machine(folder, task, attempt)
    if state is None:
        state, reason = ended_state(out, task, attempt, reason, complete=len(results) == len(task.results))
    return TaskRow(task=task, submission=submission, state=state, attempt=attempt, reason=reason, results=results)


def _state_in_slurm(task: TaskRecord, attempt: AttemptState | None, queue: Queue | None) -> tuple[State | None, str]:
    """Whether a job waits or runs, or None if it has ended; with the reason. queue: None if SLURM cannot be queried."""
    if queue is None:  # rely on the state that the job itself wrote last
        if attempt is None or attempt.stage == "queued again":
            return "waiting", "SLURM cannot be queried here"
        return ("running", "SLURM cannot be queried here") if attempt.stage == "running" else (None, "")
    state, reason = queue.get(task.job, ("", ""))
    if state in WAITS:
        return "waiting", reason
    return ("running", "") if state in RUNS else (None, ENDINGS.get(state, ""))


def _state_on_this_machine(folder: Path, task: TaskRecord, attempt: AttemptState | None) -> tuple[State | None, str]:
    """`_state_in_slurm` for a local job, from the locks that it and the command that starts the jobs hold."""
    if is_locked(lock_of(folder, task.number)):
        return "running", ""
    queued = is_locked(lock_of(folder)) and (attempt is None or attempt.stage == "queued again")
    return ("waiting", "for its turn") if queued else (None, "")


def ended_state(
    out: Path, task: TaskRecord, attempt: AttemptState | None, reason: str = "", complete: bool = False
) -> tuple[State, str]:
    """The state of a task that neither waits nor runs, with the reason.

    reason: SLURM's reason for its end, "" if unknown. complete: whether all of its results exist and are good.
    """
    if complete or (attempt and attempt.stage == "ended" and attempt.code == 0):
        return "finished", ""
    if attempt is None:
        return "stopped", f"{reason or 'it never started'}; {GO_ON}"
    if attempt.stage in ("stopped", "queued again"):
        return "stopped", f"{reason or 'a signal stopped it'}, its state is saved; {GO_ON}"
    if attempt.stage == "running":
        return "failed", f"{reason or KILLED}; {GO_ON}"
    return "failed", failure_of(out, task, attempt)


def failure_of(out: Path, task: TaskRecord, attempt: AttemptState) -> str:
    """The reason, in one line, why an ended task failed."""
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
    """The last lines of a log."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace").splitlines()


def last_line(path: Path | None) -> str:
    """The last line of a log that is not empty; "" if there is none."""
    lines = _tail(path) if path and path.exists() else []
    return printable(next((line for line in reversed(lines) if line.strip()), ""))


def good_results(out: Path, since: str, task: TaskRecord) -> dict[str, Result]:
    """The task's successful results that were written since it was submitted, by file."""
    results = readable_results(out, task)
    return {name: result for name, result in results.items() if result.status == "ok" and result.date >= since}


def readable_results(out: Path, task: TaskRecord) -> dict[str, Result]:
    """The task's results whose files exist and can be read, by file."""
    results = {}
    for name in task.results:
        if name.endswith(".json"):
            with suppress(OSError, ValueError):  # not written yet, or damaged, which counts as not written
                results[name] = read_result(out / name)
    return results


MAX_LAST_LINE = 100  # characters that are shown of the line that a job printed last


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of jobs in seconds, estimated from finished results."""

    by_result: Mapping[str, float]  # image set and result file -> median over checkpoints
    by_cost: float | None  # seconds per unit of the tasks' COST; None if nothing has finished

    @classmethod
    def of(cls, rows: Sequence[TaskRow]) -> "Durations":
        """The estimates from all tasks of a folder."""
        seconds_by_kind: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            for name, result in row.results.items():
                seconds_by_kind[_kind(name)].append(result.seconds)
        finished = [row for row in rows if row.state == "finished" and row.results]
        cost = sum(row.task.cost for row in finished)
        seconds = sum(result.seconds for row in finished for result in row.results.values())
        by_result = {kind: median(seconds) for kind, seconds in seconds_by_kind.items()}
        return cls(by_result=by_result, by_cost=seconds / cost if cost else None)

    def remaining(self, row: TaskRow) -> float | None:
        """Seconds of a job that remain, counted from its start if it waits; None if there is no estimate."""
        if row.state not in WAITING_OR_RUNNING:
            return 0.0
        missing = [name for name in row.task.results if name not in row.results]
        seconds = row.task.expected | {
            name: self.by_result[_kind(name)] for name in missing if _kind(name) in self.by_result
        }
        if seconds.keys() >= set(missing):
            total = sum(seconds[name] for name in missing)
        elif self.by_cost is not None:
            total = self.by_cost * row.task.cost * len(missing) / len(row.task.results)
        else:
            return None
        done = sum(result.seconds for result in row.results.values())
        return max(0.0, total - (max(0.0, row.seconds - done) if row.state == "running" else 0.0))


def _kind(name: str) -> str:
    """A result file without its checkpoint: results/CHECKPOINT/SET/PROTOCOL-seed0.json -> SET/PROTOCOL-seed0.json."""
    return "/".join(Path(name).parts[2:])


def total_remaining(rows: Sequence[TaskRow], durations: Durations) -> float | None:
    """Seconds until all jobs are over, each started as soon as a running one ends; None without an estimate for all."""
    open_rows = [row for row in rows if row.state in WAITING_OR_RUNNING]
    if not open_rows or any(durations.remaining(row) is None for row in open_rows):
        return None
    running = [row for row in open_rows if row.state == "running"]
    at_once = max([row.submission.at_once or len(running) or 1 for row in open_rows])
    ends = sorted(float(durations.remaining(row) or 0) for row in running)
    ends += [0.0] * (at_once - len(ends))
    for row in open_rows:
        if row.state == "waiting":
            ends = sorted([ends[0] + float(durations.remaining(row) or 0), *ends[1:]])
    return ends[-1]


def status_lines(rows: Sequence[TaskRow]) -> Iterator[str]:
    """A line for each job and one for all."""
    durations = Durations.of(rows)
    width = max(len(row.task.title) for row in rows)
    for row in rows:
        yield f"{row.state:8}  {row.task.title:{width}}  {_details(row, durations)}".rstrip()
    count = Counter(row.state for row in rows)
    remaining = total_remaining(rows, durations)
    counts = ", ".join(f"{count[state]} {state}" for state in get_args(State) if count[state])
    yield f"{counts}; about {span(remaining)} left" if remaining is not None else counts


def _details(row: TaskRow, durations: Durations) -> str:
    """The details of a job in one line: results, times, and the last line of its log or why it ended."""
    job = f"job {row.task.job}" if row.task.job else ""
    done = f"{len(row.results)} of {len(row.task.results)} results" if row.results else ""
    remaining = durations.remaining(row)
    if row.state == "finished":
        parts = [job, f"in {span(row.seconds)}" if row.attempt else ""]
    elif row.state == "running":
        where = f"on {row.attempt.host}" if row.attempt else ""
        attempt = f"attempt {row.attempt.attempts}" if row.attempt and row.attempt.attempts > 1 else ""
        about = f"about {span(remaining)} left" if remaining is not None else ""
        printed = last_line(row.log).strip()[:MAX_LAST_LINE]
        parts = [job, done, f"for {span(row.seconds)} {where}", attempt, about, printed]
    elif row.state == "waiting":
        parts = [job, done, row.reason, f"takes about {span(remaining)}" if remaining is not None else ""]
    else:
        parts = [job, done, row.reason, f"log: {row.log}" if row.log else ""]
    return ", ".join(filter(None, parts))


def status_json(rows: Sequence[TaskRow]) -> dict[str, Any]:
    """The state of all jobs as JSON values."""
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
            "seconds_left": durations.remaining(row),
            "printed_last": last_line(row.log) if row.state == "running" else "",
        }
        for row in rows
    ]
    return {"tasks": tasks, "seconds_left": total_remaining(rows, durations)}
