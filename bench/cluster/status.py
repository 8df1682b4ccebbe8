"""`bench status`: a line for each job, what is left, and when it will be over.

How long a job takes is known from the same protocols of other checkpoints in the same folder, where these are finished;
otherwise from the plan, where `bench plan` has calibrated, or from what the tasks say they cost. A running job also
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
from typing import Any, Literal

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

State = Literal["waiting", "running", "stopped", "failed", "finished"]
Reached = Literal["waiting", "running", "over"]
WAITING_OR_RUNNING = ("waiting", "running")
# Of squeue (man squeue, JOB STATE CODES). What is in neither list has ended.
WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ENDINGS = {
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "its time was over",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it needed more memory than --mem gives it",
    "PREEMPTED": "it was preempted",
}
UNSAID = "it ended without a word: it was killed, or its node was lost"
GO_ON = "the same command goes on"
TAIL = 1 << 16  # bytes of a log in which the error is looked for
ERROR = "bench: error: "

Queue = Mapping[str, tuple[str, str]]  # job -> SLURM's state and reason


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One task of a submission and how it is."""

    folder: Path  # of the submission
    task: TaskRecord
    submission: Submission
    state: State
    attempt: AttemptState | None
    reason: str = ""  # of waiting, stopping or failing
    results: Mapping[str, Result] = field(default_factory=dict)  # those of its result files that are there and good

    @property
    def seconds(self) -> float:
        """That the present or last attempt took."""
        begun = self.attempt.begun if self.attempt else ""
        return seconds_since(begun, self.attempt.ended if self.attempt else "") if begun else 0.0

    @property
    def log(self) -> Path | None:
        return Path(self.attempt.log) if self.attempt and self.attempt.log else None


def rows_of(out: Path) -> list[TaskRow]:
    """All tasks, the oldest first, without those whose results a later submission was to write. ValueError for damaged
    records."""
    found = submissions(out)
    queue = slurm_queue() if any(submission.cluster == "slurm" for _, submission in found) else {}
    rows: list[TaskRow] = []
    taken: set[str] = set()
    for folder, submission in reversed(found):
        new = [task for task in submission.tasks if not taken.issuperset(task.results)]
        rows = [_row(out, folder, submission, task, queue) for task in new] + rows
        taken.update(*(task.results for task in new))
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
    good = _good(out, submission.date, task)
    slurm = submission.cluster == "slurm"
    reached, reason = _in_slurm(task, attempt, queue) if slurm else _here(folder, task, attempt)
    state: State
    if reached == "over":
        state, reason = _over(out, task, attempt, reason, all_there=len(good) == len(task.results))
    else:
        state = reached
    return TaskRow(
        folder=folder, task=task, submission=submission, state=state, attempt=attempt, reason=reason, results=good
    )


def _in_slurm(task: TaskRecord, attempt: AttemptState | None, queue: Queue | None) -> tuple[Reached, str]:
    """How far the task is, and why."""
    if queue is None:  # as far as the job itself has said
        if attempt is None or attempt.stage == "queued again":
            return "waiting", "SLURM cannot be asked here"
        return ("running", "SLURM cannot be asked here") if attempt.stage == "running" else ("over", "")
    state, reason = queue.get(task.job, ("", ""))
    if state in WAITS:
        return "waiting", reason
    return ("running", "") if state in RUNS else ("over", ENDINGS.get(state, ""))


def _here(folder: Path, task: TaskRecord, attempt: AttemptState | None) -> tuple[Reached, str]:
    if is_locked(lock_of(folder, task.number)):
        return "running", ""
    queued = is_locked(lock_of(folder)) and (attempt is None or attempt.stage == "queued again")
    return ("waiting", "for its turn") if queued else ("over", "")


def _over(out: Path, task: TaskRecord, attempt: AttemptState | None, reason: str, all_there: bool) -> tuple[State, str]:
    if all_there or (attempt and attempt.stage == "ended" and attempt.code == 0):
        return "finished", ""
    if attempt is None:
        return "stopped", f"{reason or 'it never began'}; {GO_ON}"
    if attempt.stage in ("stopped", "queued again"):
        return "stopped", f"{reason or 'a signal stopped it'}, its state is saved; {GO_ON}"
    if attempt.stage == "running":
        return "failed", f"{reason or UNSAID}; {GO_ON}"
    return "failed", failure_of(out, task, attempt)


def failure_of(out: Path, task: TaskRecord, attempt: AttemptState) -> str:
    """One line: why an ended task failed."""
    failures = [result.message for result in _read(out, task).values() if result.status == "failed"]
    if failures:
        return failures[0] + (f"; and {len(failures) - 1} more" if len(failures) > 1 else "")
    log = Path(attempt.log)
    job = log.name.rsplit("_", 2)[0]  # JOB_PROCESS_log.out
    said = [line for path in sorted(log.parent.glob(f"{job}_*_log.out")) for line in _errors_in(path)]
    if said:
        return said[-1]
    code = attempt.code or 0
    return f"killed by signal {-code}; {GO_ON}" if code < 0 else f"exit code {code}"


def _errors_in(path: Path) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    return [printable(line.removeprefix(ERROR)) for line in text.splitlines() if line.startswith(ERROR)]


def last_line(path: Path | None) -> str:
    """What a job printed last."""
    if path is None or not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    return printable(next((line for line in reversed(lines) if line.strip()), ""))


def ending_of(out: Path, begun: str, task: TaskRecord, attempt: AttemptState) -> str:
    """`finished in 3 min 20 s`, or why not. begun: when it was submitted."""
    all_there = len(_good(out, begun, task)) == len(task.results)
    state, reason = _over(out, task, attempt, "", all_there)
    took = f" in {span(seconds_since(attempt.begun, attempt.ended))}" if attempt.begun else ""
    return f"{state}{took}" if state == "finished" else f"{state}: {reason} (log: {attempt.log})"


def _good(out: Path, since: str, task: TaskRecord) -> dict[str, Result]:
    """Its result files that were written since it was submitted, and are no failures."""
    return {name: each for name, each in _read(out, task).items() if each.status == "ok" and each.date >= since}


def _read(out: Path, task: TaskRecord) -> dict[str, Result]:
    found = {}
    for name in task.results:
        if name.endswith(".json"):
            with suppress(OSError, ValueError):  # not there yet, or damaged: to be made again
                found[name] = read_result(out / name)
    return found


ORDER: tuple[State, ...] = ("finished", "running", "waiting", "stopped", "failed")
SHOWN = 100  # characters of what a job printed last


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What jobs take in seconds, from those that are finished."""

    by_result: Mapping[str, float]  # image set and result file -> median of all checkpoints
    by_cost: float | None  # of one unit of the tasks' COST

    @classmethod
    def of(cls, rows: Sequence[TaskRow]) -> "Durations":
        taken: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            for name, result in row.results.items():
                taken[_kind(name)].append(result.seconds)
        whole = [row for row in rows if row.state == "finished" and row.results]
        cost = sum(row.task.cost for row in whole)
        seconds = sum(result.seconds for row in whole for result in row.results.values())
        by_result = {kind: median(values) for kind, values in taken.items()}
        return cls(by_result=by_result, by_cost=seconds / cost if cost else None)

    def left(self, row: TaskRow) -> float | None:
        """Seconds until a job is over, once it runs; None where nothing like it is finished."""
        if row.state not in WAITING_OR_RUNNING:
            return 0.0
        todo = [name for name in row.task.results if name not in row.results]
        known = row.task.expected | {
            name: self.by_result[_kind(name)] for name in todo if _kind(name) in self.by_result
        }
        if known.keys() >= set(todo):
            whole = sum(known[name] for name in todo)
        elif self.by_cost is not None:
            whole = self.by_cost * row.task.cost * len(todo) / len(row.task.results)
        else:
            return None
        done = sum(result.seconds for result in row.results.values())
        return max(0.0, whole - (max(0.0, row.seconds - done) if row.state == "running" else 0.0))


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


def status_lines(out: Path) -> Iterator[str]:
    """A line for each job and one for all. ValueError where nothing was submitted."""
    rows = _rows(out)
    durations = Durations.of(rows)
    width = max(len(row.task.title) for row in rows)
    for row in rows:
        yield f"{row.state:8}  {row.task.title:{width}}  {_says(row, durations)}".rstrip()
    count = Counter(row.state for row in rows)
    left = until_all_are_over(rows, durations)
    counts = ", ".join(f"{count[state]} {state}" for state in ORDER if count[state])
    yield f"{counts}; about {span(left)} left" if left is not None else counts


def _rows(out: Path) -> list[TaskRow]:
    rows = rows_of(out)
    if not rows:
        raise ValueError(f"{out}: nothing was submitted from there; `bench run ... --out {out} --cluster slurm` does")
    return rows


def _says(row: TaskRow, durations: Durations) -> str:
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


def status_json(out: Path) -> dict[str, Any]:
    """The same as JSON values. ValueError where nothing was submitted."""
    rows = _rows(out)
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
