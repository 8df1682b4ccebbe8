"""`bench run --cluster`: the jobs of a run as tasks, one for each checkpoint and protocol, cheap ones first.

Protocols of a checkpoint that read the same features, or train on the same stream of augmented images, are one task:
in jobs of their own they would compute these again, or wait for each other beside idle GPUs. The checkpoints are
imported here, once; the tasks read the exports.
"""

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cluster.records import TaskRecord
from bench.cluster.words import words_of
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.forecast import expectations
from bench.run.plan import Job
from bench.run.runner import RunRequest, known_problems, surveyed
from checkpoints.frozen import FrozenExport
from downstream.data.scenes import layout_of
from engine.printing import say
from engine.tasks import Workspace

SHOWN = 2  # protocols that the title of a task names


def evaluation_tasks(arguments: argparse.Namespace, request: RunRequest, submitted: set[str]) -> list[TaskRecord]:
    """A task for every group of jobs without a result. submitted: results that jobs of earlier submissions will write.

    Prints what is left out and why. ValueError where the request itself is wrong.
    """
    survey = surveyed(request)
    say(*survey.left_out)
    found: list[tuple[LoadedCheckpoint, list[Job]]] = []
    expected: dict[Path, float] = {}
    left_out = {"have a result": 0, "are submitted already": 0}
    problems = known_problems(
        [checkpoint for checkpoint, _, _ in survey.plans], [jobs for _, _, jobs in survey.plans], request.space
    )
    for checkpoint, export, planned in survey.plans:
        jobs = [job for job in planned if job.path not in problems]
        todo = [job for job in jobs if job.state != "done"]
        new = [job for job in todo if str(job.path.relative_to(request.out)) not in submitted]
        left_out["have a result"] += len(jobs) - len(todo)
        left_out["are submitted already"] += len(todo) - len(new)
        expected |= expectations(new, export, request.space)
        found += [(checkpoint, group) for group in groups_sharing(new, export, request.space)]
    say(*(f"{count} jobs {why}, skipped" for why, count in left_out.items() if count))
    found.sort(key=lambda pair: _cost(pair[1]))
    tasks = [_task(number, arguments, request, *pair) for number, pair in enumerate(found)]
    seconds = {_relative(path, request.out): each for path, each in expected.items()}
    return [replace(task, expected={name: seconds[name] for name in task.results if name in seconds}) for task in tasks]


def groups_sharing(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[list[Job]]:
    """The jobs of one checkpoint in groups: those of a group share features or a stream, or are one protocol."""
    groups: list[tuple[set[Hashable], list[Job]]] = []
    for job in jobs:
        shares = _shared(job, export, space)
        met = [group for group in groups if group[0] & shares]
        groups = [group for group in groups if group not in met]
        keys = shares.union(*(keys for keys, _ in met))
        groups.append((keys, [*(each for _, members in met for each in members), job]))
    return [sorted(members, key=jobs.index) for _, members in groups]


def _shared(job: Job, export: FrozenExport, space: Workspace) -> set[Hashable]:
    """What a job shares with others: its protocol, the features and the stream of augmented images that it reads."""
    task = job.chosen.task
    try:
        transforms = task.features(export, space)
        stream = task.stream(export, space)
    except Exception:  # the task will fail on its own, in its own job
        return {job.chosen.name}
    return {
        job.chosen.name,
        *(("features", name) for name in transforms),
        *([(job.chosen.key, stream)] if stream else []),
    }


def _cost(jobs: Sequence[Job]) -> float:
    return sum(job.chosen.task.COST for job in jobs)


def _task(
    number: int, arguments: argparse.Namespace, request: RunRequest, checkpoint: LoadedCheckpoint, jobs: Sequence[Job]
) -> TaskRecord:
    chosen = {job.chosen.name: job.chosen for job in jobs}
    targets = {word for each in chosen.values() for word in (each.key, each.name)}
    layouts = {each.layout for each in chosen.values()}
    data = {job.data.name: job.data.url for job in jobs if layout_of(job.data.url) in layouts}
    replaced = {
        "checkpoint": [checkpoint.reference],
        "name": [checkpoint.used.name],
        "statistics": None,  # of an import, which is done
        "suite": ",".join(chosen),
        "data": [f"{name}={url}" for name, url in data.items()],
        "set": [text for text in arguments.set if text.partition("=")[0].rpartition(".")[0] in targets],
    }
    more = f" and {len(chosen) - SHOWN} more" if len(chosen) > SHOWN else ""
    return TaskRecord(
        number=number,
        title=f"{checkpoint.used.name}: {', '.join([*chosen][:SHOWN])}{more}",
        words=tuple(words_of("run", arguments, replaced)),
        results=tuple(_relative(job.path, request.out) for job in jobs),
        cost=_cost(jobs),
    )


def _relative(path: Path, out: Path) -> str:
    return str(path.relative_to(out))
