"""What the jobs of a checkpoint share: one pass over the images for all features, and trainings side by side.

A task says what it shares (`Task.shares`).
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from bench.run.outcomes import checked
from bench.run.prepare import Job
from checkpoints.frozen import FrozenExport
from engine.tasks import Outcome, Shared, Task, Workspace, all_features
from engine.training.interruptions import Stopped


def shared_by(job: Job, export: FrozenExport, space: Workspace) -> Shared:
    """What a job shares; nothing if its task raises an error, which fails it when it runs, and no other one."""
    try:
        return job.chosen.task.shares(job.network(export), job.workspace(space))
    except Exception:
        return Shared()


def group_of(job: Job, shared: Shared) -> Hashable:
    """A key of a job to run, equal for jobs that run together on the images of one set.

    A job that failed before runs only with failed jobs of the same stream, because it might stop all others.
    """
    failed_stream = shared.stream if job.state == "failed before" else ""
    return (job.data.url, job.seed, shared.together, failed_stream, job.state) if shared.together else job.path


def grouped(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[tuple[list[Job], Workspace]]:
    """The jobs in groups that run together, in the order of each group's first job, and the workspace of each group.

    All groups extract the features of all jobs in one pass over the images.
    """
    shared = {job.path: shared_by(job, export, space) for job in jobs}
    wanted = all_features(of_job.features for of_job in shared.values())
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group_of(job, shared[job.path]), []).append(job)
    return [(group, replace(group[0].workspace(space), wanted=wanted)) for group in groups.values()]


def groups_sharing(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[list[Job]]:
    """The jobs of a checkpoint in groups that share features, a training or a protocol: for separate processes."""
    groups: list[tuple[set[Hashable], list[Job]]] = []
    for job in jobs:
        shared = shared_by(job, export, space)
        keys = {job.chosen.name, *shared.features, *([(job.chosen.key, shared.stream)] if shared.stream else [])}
        joined = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        members = [member for _, group_members in joined for member in group_members]
        groups.append((keys.union(*(group_keys for group_keys, _ in joined)), [*members, job]))
    return [sorted(members, key=jobs.index) for _, members in groups]


def run_together(
    jobs: Sequence[Job], export: FrozenExport, space: Workspace
) -> Iterator[tuple[Job, Outcome | Exception, float]]:
    """Run the jobs of a group. Yields each job as it ends, with its outcome or error, and its seconds.

    Time is divided equally among the jobs that are still running, so that the sum over results is the time of the run.
    """
    running, seconds = dict(enumerate(jobs)), dict.fromkeys(range(len(jobs)), 0.0)
    outcomes = _outcomes([job.chosen.task for job in jobs], jobs[0].network(export), space)
    while running:
        started, finished = time.perf_counter(), None
        outcome: Outcome | Exception
        try:
            finished, outcome = next(outcomes)
            if not isinstance(outcome, Exception):
                checked(outcome)
        except Stopped:  # not a failure: the same command resumes it
            raise
        except Exception as error:  # any other error is recorded: for one job, or for all that are still running
            outcome = error
        share = (time.perf_counter() - started) / len(running)
        seconds = {index: seconds[index] + share for index in running}
        for index in list(running) if finished is None else [finished]:
            yield running.pop(index), outcome, seconds[index]


def _outcomes(
    tasks: Sequence[Task], export: FrozenExport, space: Workspace
) -> Iterator[tuple[int, Outcome | Exception]]:
    """Index and outcome, or error, of each task of a group, as soon as it ends."""
    if len(tasks) == 1:
        yield 0, tasks[0].run(export, space)
    elif together := tasks[0].shares(export, space).together:
        yield from together(tasks, export, space)
