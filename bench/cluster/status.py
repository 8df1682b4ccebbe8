"""`bench status`: a line for each job, what is left, and when it will be over.

How long a job takes is known from the same protocols of other checkpoints in the same folder, where these are finished;
otherwise from the plan, where `bench plan` has calibrated, or from what the tasks say they cost. A running job also
shows what it printed last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster.state import WAITING_OR_RUNNING, State, TaskRow, last_line, rows_of
from engine.progress import span

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
        words = [job, f"in {span(row.seconds)}" if row.going else ""]
    elif row.state == "running":
        where = f"on {row.going.host}" if row.going else ""
        attempt = f"attempt {row.going.attempts}" if row.going and row.going.attempts > 1 else ""
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
            "host": row.going.host if row.going else "",
            "attempts": row.going.attempts if row.going else 0,
            "exit_code": row.going.code if row.going else None,
            "seconds": round(row.seconds, 1),
            "seconds_left": durations.left(row),
            "printed_last": last_line(row.log) if row.state == "running" else "",
        }
        for row in rows
    ]
    return {"tasks": tasks, "seconds_left": until_all_are_over(rows, durations)}
