"""Jobs that are tried: those on one stream together, each with its outcome or error as soon as it ends."""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.cli.messages import in_one_line
from bench.run.outcomes import checked
from bench.run.plan import Job
from checkpoints.frozen import FrozenExport
from engine.distributed import World
from engine.tasks import Outcome, Workspace
from engine.training.interruptions import Stopped


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one job ended: with an outcome, or with an error."""

    seconds: float
    outcome: Outcome = field(default_factory=lambda: Outcome(metrics={}))  # empty after an error
    error: Exception | None = None
    planned: float | None = None  # seconds that the plan foresaw

    @property
    def ratio(self) -> float | None:
        """Truth by plan."""
        return self.seconds / self.planned if self.planned and not self.error else None


def in_groups(jobs: Sequence[Job], export: FrozenExport | None, space: Workspace) -> list[list[Job]]:
    """The jobs in their order; those on one stream of one image set together, where the first of them stands.

    A job that failed before is not put together with new ones, which it might stop.
    """
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        stream = job.chosen.task.stream(export, space) if export and job.state != "done" else ""
        key = (job.data.url, job.chosen.key, stream, job.state) if stream else job.path
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def attempts(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[tuple[Job, Attempt]]:
    """Run jobs of one stream together, or a single one: each as soon as it ends.

    Time is divided equally among the jobs that were not over, so that the sum over results is what a run took.
    """
    left, seconds = dict(enumerate(jobs)), dict.fromkeys(range(len(jobs)), 0.0)
    task = jobs[0].chosen.task
    ended = task.together([job.chosen.task for job in jobs], export, space)
    while left:
        started = time.perf_counter()
        over, found = _next_ended(ended, list(left))
        share = (time.perf_counter() - started) / len(left)
        seconds = {place: seconds[place] + share for place in left}
        for place in over:
            yield left.pop(place), _attempt(found, seconds[place])


def _next_ended(
    ended: Iterator[tuple[int, Outcome | Exception]], left: Sequence[int]
) -> tuple[Sequence[int], Outcome | Exception]:
    """The places of jobs that are over, and how they ended; left: of those that are not over yet."""
    try:
        place, found = next(ended)
    except Stopped:  # not a failure: the same command resumes it
        raise
    except Exception as error:  # whatever else a task raises becomes a failed result of all
        return left, error
    return [place], found


def _attempt(found: Outcome | Exception, seconds: float) -> Attempt:
    if isinstance(found, Exception):
        return Attempt(seconds=seconds, error=found)
    try:
        return Attempt(seconds=seconds, outcome=checked(found))
    except Exception as error:
        return Attempt(seconds=seconds, error=error)


def agreed(attempt: Attempt, job: Job, world: World) -> Attempt:
    """The attempt as all processes record it: failed if it failed in any.

    A process that left its task early may have met the others inside one of the task's collectives. Processes that are
    at different places could never agree again, so the run ends here with RuntimeError.
    """
    mine = (str(job.path), "ended", in_one_line(attempt.error) if attempt.error else None)
    found = world.gather_objects(mine)
    if any(not isinstance(other, tuple) or other[:2] != mine[:2] for other in found):
        raise RuntimeError(f"{job.title}: the processes are out of step") from attempt.error
    messages = [message for *_, message in found if message]
    if attempt.error is None and messages:
        return Attempt(seconds=attempt.seconds, error=RuntimeError(f"in another process: {messages[0]}"))
    return attempt
