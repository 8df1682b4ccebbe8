"""How submitted jobs are: what they said themselves, what the scheduler says of them, and which results are there."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.cluster.records import (
    Going,
    Submission,
    TaskRecord,
    going_of,
    lock_of,
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
    going: Going | None
    reason: str = ""  # of waiting, stopping or failing
    results: Mapping[str, Result] = field(default_factory=dict)  # those of its result files that are there and good

    @property
    def seconds(self) -> float:
        """That the present or last attempt took."""
        begun = self.going.begun if self.going else ""
        return seconds_since(begun, self.going.ended if self.going else "") if begun else 0.0

    @property
    def log(self) -> Path | None:
        return Path(self.going.log) if self.going and self.going.log else None


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
    going = going_of(folder, task.number)
    good = _good(out, submission.date, task)
    slurm = submission.cluster == "slurm"
    reached, reason = _in_slurm(task, going, queue) if slurm else _here(folder, task, going)
    state: State
    if reached == "over":
        state, reason = _over(out, task, going, reason, all_there=len(good) == len(task.results))
    else:
        state = reached
    return TaskRow(
        folder=folder, task=task, submission=submission, state=state, going=going, reason=reason, results=good
    )


def _in_slurm(task: TaskRecord, going: Going | None, queue: Queue | None) -> tuple[Reached, str]:
    """How far the task is, and why."""
    if queue is None:  # as far as the job itself has said
        if going is None or going.stage == "queued again":
            return "waiting", "SLURM cannot be asked here"
        return ("running", "SLURM cannot be asked here") if going.stage == "running" else ("over", "")
    state, reason = queue.get(task.job, ("", ""))
    if state in WAITS:
        return "waiting", reason
    return ("running", "") if state in RUNS else ("over", ENDINGS.get(state, ""))


def _here(folder: Path, task: TaskRecord, going: Going | None) -> tuple[Reached, str]:
    if is_locked(lock_of(folder, task.number)):
        return "running", ""
    queued = is_locked(lock_of(folder)) and (going is None or going.stage == "queued again")
    return ("waiting", "for its turn") if queued else ("over", "")


def _over(out: Path, task: TaskRecord, going: Going | None, reason: str, all_there: bool) -> tuple[State, str]:
    if all_there or (going and going.stage == "ended" and going.code == 0):
        return "finished", ""
    if going is None:
        return "stopped", f"{reason or 'it never began'}; {GO_ON}"
    if going.stage in ("stopped", "queued again"):
        return "stopped", f"{reason or 'a signal stopped it'}, its state is saved; {GO_ON}"
    if going.stage == "running":
        return "failed", f"{reason or UNSAID}; {GO_ON}"
    return "failed", failure_of(out, task, going)


def failure_of(out: Path, task: TaskRecord, going: Going) -> str:
    """One line: why an ended task failed."""
    failures = [result.message for result in _read(out, task).values() if result.status == "failed"]
    if failures:
        return failures[0] + (f"; and {len(failures) - 1} more" if len(failures) > 1 else "")
    log = Path(going.log)
    job = log.name.rsplit("_", 2)[0]  # JOB_PROCESS_log.out
    said = [line for path in sorted(log.parent.glob(f"{job}_*_log.out")) for line in _errors_in(path)]
    if said:
        return said[-1]
    code = going.code or 0
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


def ending_of(out: Path, begun: str, task: TaskRecord, going: Going) -> str:
    """`finished in 3 min 20 s`, or why not. begun: when it was submitted."""
    all_there = len(_good(out, begun, task)) == len(task.results)
    state, reason = _over(out, task, going, "", all_there)
    took = f" in {span(seconds_since(going.begun, going.ended))}" if going.begun else ""
    return f"{state}{took}" if state == "finished" else f"{state}: {reason} (log: {going.log})"


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
