"""`bench run`: computes a result file for every checkpoint, image set and protocol.

Existing results are skipped, and jobs that failed before are tried again after all new ones. Each result is written as
soon as it is known. Under torchrun every process runs every task on its share of the images, and rank 0 writes. Jobs
that train on augmented images run together, and each of them ends with its own outcome or error.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np

from bench.checkpoints import LoadedCheckpoint
from bench.names import ready_device
from bench.options import EvaluationOptions
from bench.published.values import against_published
from bench.reports.leaderboard import to_terminal, write_leaderboard
from bench.results.record import MetricRecord, Result, failure_path, images_seen, number_text, record
from bench.run.prepare import (
    Job,
    Preparation,
    Variations,
    checkpoint_title,
    group_of,
    job_state,
    prepare,
    refuse_mixed_contents,
    without_problems,
)
from bench.statistics import intervals
from checkpoints.frozen import FrozenExport
from checkpoints.resolve import load_frozen
from engine.distributed import World, start_world
from engine.errors import in_one_line, traceback_of
from engine.extensions import extensions, load_extension
from engine.machine import hardware, versions
from engine.printing import say, text_of
from engine.tasks import Metric, Outcome, Workspace
from engine.training.interruptions import Stopped


def checked(outcome: Outcome) -> Outcome:
    """The outcome itself. ValueError, naming the problem and the metric or array, if it cannot be a result."""
    if not isinstance(outcome, Outcome):
        raise ValueError(f"the task's run() returned {type(outcome).__name__}; return an engine.tasks.Outcome")
    if not outcome.metrics:
        raise ValueError("the task returned no metrics")
    units = 'for "%" fractions from 0 to 1, for any other unit in that unit'
    requirements: Sequence[tuple[str, Callable[[Metric], bool]]] = (
        ("that are not an engine.tasks.Metric", lambda metric: isinstance(metric, Metric)),
        ("whose value is not one number", lambda metric: np.ndim(metric.value) == 0),
        (
            "whose per_image or resampled values are not a vector",
            lambda metric: all(v is None or np.ndim(v) == 1 for v in (metric.per_image, metric.resampled)),
        ),
        ("that are not finite", lambda metric: isfinite(metric.value)),
        ("whose deviation_of is not a metric", lambda metric: metric.deviation_of in (None, *outcome.metrics)),
        (
            f"that are not the mean of their values per image ({units})",
            lambda metric: (
                metric.per_image is None
                or intervals.averages_to(np.asarray(metric.per_image), metric.value, metric.unit)
            ),
        ),
    )
    for problem, is_met in requirements:
        if invalid := [name for name, metric in outcome.metrics.items() if not is_met(metric)]:
            raise ValueError(f"metrics {problem}: {', '.join(invalid)}")
    if objects := [name for name, values in arrays_of(outcome).items() if values.dtype == object]:
        raise ValueError(f"arrays that hold objects, not numbers: {', '.join(objects)}")
    try:
        json.dumps(dict(outcome.facts), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"facts that are not JSON: {error}") from error
    return outcome


def arrays_of(outcome: Outcome) -> dict[str, np.ndarray]:
    """All arrays for the `.npz` file by name. ValueError if two have the same name."""
    arrays = dict(outcome.arrays)
    for name, metric in outcome.metrics.items():
        array, values = _array_of(name, metric)
        if array in arrays:
            raise ValueError(f"two arrays named {array}: that of the metric {name}, and another array")
        if array and values is not None:
            arrays[array] = values
    return {name: np.asarray(values) for name, values in arrays.items()}


def _array_of(name: str, metric: Metric) -> tuple[str | None, np.ndarray | None]:
    """Name and values of a metric's array over images or resamples; None if it has none."""
    if metric.resampled is not None:
        return f"{name}_resampled", metric.resampled
    return (None if metric.per_image is None else name), metric.per_image


def metric_records(outcome: Outcome, images: int) -> tuple[dict[str, MetricRecord], str]:
    """The metrics as recorded in a result file, with intervals over `images` validation images, and their method."""
    records, methods = {}, set()
    for name, metric in outcome.metrics.items():
        interval, method = None, ""
        if metric.per_image is not None:
            interval, method = intervals.of_mean(np.asarray(metric.per_image), metric.unit)
        elif metric.resampled is not None:
            interval, method = intervals.of_resampled(np.asarray(metric.resampled), images)
        if interval:
            methods.add(method)
        records[name] = MetricRecord(
            value=float(metric.value),
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
            interval=interval,
            chosen_on_val=metric.chosen_on_val,
            deviation_of=metric.deviation_of,
            array=_array_of(name, metric)[0],
            array_over="images" if metric.resampled is None else "resamples",
        )
    return records, "; ".join(sorted(methods))


def grouped(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[list[Job]]:
    """The jobs in groups that run together, in the order of each group's first job.

    Jobs that train on augmented images of one set form a group, as images are read once for all of them; every other
    job is a group by itself.
    """
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group_of(job, export, space), []).append(job)
    return list(groups.values())


def run_together(
    jobs: Sequence[Job], export: FrozenExport, space: Workspace
) -> Iterator[tuple[Job, Outcome | Exception, float]]:
    """Run the jobs of a group. Yields each job as it ends, with its outcome or error, and its seconds.

    Time is divided equally among the jobs that are still running, so that the sum over results is the time of the run.
    """
    running, seconds = dict(enumerate(jobs)), dict.fromkeys(range(len(jobs)), 0.0)
    outcomes = jobs[0].chosen.task.together([job.chosen.task for job in jobs], export, space)
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


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a job ended in one process."""

    path: str  # of the job's result
    message: str  # of the error; "" if it succeeded


def common_outcome(job: Job, outcome: Outcome | Exception, world: World) -> Outcome | Exception:
    """The outcome of a job over all processes: an error if it failed in any of them.

    A process whose task failed early may have met the others inside one of the task's collectives. Such processes would
    stay out of step for good, so RuntimeError ends the run.
    """
    error = outcome if isinstance(outcome, Exception) else None
    own = Ending(path=str(job.path), message=in_one_line(error) if error else "")
    endings = world.gather_objects(own)  # of a process that is still inside the task, one of the task's own objects
    if any(not isinstance(ending, Ending) or ending.path != own.path for ending in endings):
        raise RuntimeError(f"{job.title}: the processes are out of step; run the same command again") from error
    messages = [ending.message for ending in endings if ending.message]
    return RuntimeError(f"in another process: {messages[0]}") if messages and error is None else outcome


def result_of(
    job: Job, checkpoint: LoadedCheckpoint, space: Workspace, outcome: Outcome | Exception, seconds: float
) -> Result:
    """The result of a job, as it is written to its file; for an exception a failed result."""
    error = outcome if isinstance(outcome, Exception) else None
    outcome = Outcome(metrics={}) if isinstance(outcome, Exception) else outcome
    metrics, interval_method = metric_records(outcome, images_seen(job.data, job.limit))
    forwards, extraction_seconds = outcome.cost.get("forwards", 0), outcome.cost.get("extraction_seconds", 0)
    return Result(
        status="failed" if error else "ok",
        message=in_one_line(error) if error else "",
        task=job.chosen.key,
        protocol=job.protocol,
        metrics=metrics,
        interval_method=interval_method,
        checkpoint=checkpoint.used,
        data=job.data,
        seed=space.seed,
        random=outcome.random,
        limit=job.limit,
        precision=space.precision,
        decode=space.decode,
        skip_bad=space.skip_bad,
        settings=job.settings,
        facts=dict(outcome.facts),
        arrays=tuple(outcome.arrays),
        device=space.device,
        compiled=space.compiled and not job.chosen.task.LAYOUT,
        processes=space.world.size,
        seconds=round(seconds, 3),
        cost=dict(outcome.cost),
        images_per_second=round(forwards / extraction_seconds, 1) if forwards and extraction_seconds else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware=hardware(),
    )


def branch_of(export: FrozenExport) -> str:
    """The branch of its file that an export is, such as `student`; "" for its importer's default."""
    name, importer = str(export.facts.get("branch") or ""), str(export.facts.get("importer"))
    if not name or importer not in extensions("importers"):
        return ""
    return "" if name == next(iter(load_extension("importers", importer).BRANCHES)) else name


MAIN_METRICS = 3  # metrics in a line of output


def result_line(result: Result) -> str:
    """A result in one line: `top1 76.1, top5 92.8, 12.3 s`, or why it failed."""
    if result.status == "failed":
        return f"FAILED after {result.seconds:.1f} s: {result.message}"
    metrics = list(result.metrics.items())
    floors = result.facts.get("floor", {}).get("metrics", {})
    texts = [f"{name} {number_text(metric.value, metric.unit)}" for name, metric in metrics[:MAIN_METRICS]]
    if metrics[0][0] in floors:
        texts[0] += f" (floor {number_text(floors[metrics[0][0]], metrics[0][1].unit)})"
    omitted = f" and {len(metrics) - MAIN_METRICS} more" if len(metrics) > MAIN_METRICS else ""
    return f"{', '.join(texts)}{omitted}, {result.seconds:.1f} s"


@dataclass(kw_only=True)
class Tally:
    """How the jobs of a run ended."""

    jobs: Sequence[Job]  # all, in the order of the checkpoints
    left_out: int = 0  # jobs that were not run because of a known problem
    done: int = 0
    skipped: int = 0  # jobs whose result existed
    failed: list[str] = field(default_factory=list)  # a line for each failed job, with the reason
    errors: list[Exception] = field(default_factory=list)  # of the failed jobs


def run_jobs(options: EvaluationOptions, show: bool = True, variations: Variations = ((),)) -> Tally:
    """Run all jobs, and print and return how they ended. ValueError for invalid options.

    show: print the leaderboard of these jobs. variations: changes with each of which every protocol is evaluated.
    """
    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world, variations=variations)
        say(*(preparation.left_out if world.is_rank0 else ()))
        # All processes follow the plan of rank 0.
        plans, failing = world.on_rank0(lambda: without_problems(preparation))
        tally = Tally(jobs=[job for _, jobs in plans for job in jobs], left_out=failing)
        world.on_rank0(lambda: refuse_mixed_contents(options.out, tally.jobs))
        try:
            for checkpoint, jobs in plans:
                _run_checkpoint(preparation, checkpoint, jobs, tally)
        finally:
            if world.is_rank0:
                _rewrite_leaderboard(options.out, tally.jobs, show)
        if world.is_rank0:
            _say_ending(options.out, tally)
        return tally


def _say_ending(out: Path, tally: Tally) -> None:
    """Print the failed jobs, the numbers of jobs and where the leaderboard is."""
    for line in tally.failed:
        say(f"failed: {line}")
    left_out = f"{tally.left_out} left out (above), " if tally.left_out else ""
    counts = f"{tally.done} done, {tally.skipped} skipped, {left_out}{len(tally.failed)} failed"
    say(f"{counts}; see {out / 'leaderboard.md'}")
    if tally.failed:
        say("tracebacks are in the .log files next to the failed results; run the same command again to retry them")


def _rewrite_leaderboard(out: Path, jobs: Sequence[Job], show: bool) -> None:
    """Write the leaderboard of the whole folder; if `show`, print its tables that have results of these jobs."""
    leaderboard, paths = write_leaderboard(out), {job.path for job in jobs}
    results = [stored.result for stored in leaderboard.results if stored.path in paths]
    groups = {result.group for result in results if result.status == "ok"}
    if show:
        say("", *to_terminal(leaderboard, get_terminal_size().columns, groups).split("\n"), "")


def _run_checkpoint(preparation: Preparation, checkpoint: LoadedCheckpoint, jobs: Sequence[Job], tally: Tally) -> None:
    """Run all jobs of one checkpoint."""
    space, world = preparation.space, preparation.space.world
    export = preparation.exports.pop(checkpoint.used.key, None)  # if this process has loaded it already
    say_on_rank0 = say if world.is_rank0 else lambda *lines: None
    say_on_rank0(checkpoint_title(checkpoint))
    if checkpoint.used.assumed:
        say_on_rank0(f"  assumed: {checkpoint.used.assumed}")
    number = {job.path: f"[{count}/{len(jobs)}]" for count, job in enumerate(jobs, start=1)}
    done = [job for job in jobs if job.state == "done"]
    say_on_rank0(*(f"  {number[job.path]} {job.title}: exists, skipped" for job in done))
    tally.skipped += len(done)
    todo = [job for job in jobs if job.state != "done"]
    if not todo:
        return
    export = world.on_all_ranks(lambda: export or _loaded(checkpoint))
    features = _features_of(export, todo, space)
    if not export.spec.has_class_token:
        say_on_rank0("  it has no class token: protocols that read it read avg, the mean of the patches, instead")
    for group in grouped(todo, export, space):
        if not space.reread and world.on_rank0(partial(_made_meanwhile, group, space.skip_bad)):
            meanwhile = "made by another run meanwhile, skipped"
            say_on_rank0(*(f"  {number[job.path]} {job.title}: {meanwhile}" for job in group))
            tally.skipped += len(group)
            continue
        say_on_rank0(*(f"  {number[job.path]} {job.title} ..." for job in group))
        group_space = replace(group[0].workspace(space), wanted=features)
        for job, outcome, seconds in run_together(group, export, group_space):
            outcome = common_outcome(job, outcome, world)
            if world.is_rank0:
                result, kept = _record_outcome(job, checkpoint, space, outcome, seconds)
                name = f"{job.title}: " if len(group) > 1 else ""
                say(f"  {number[job.path]} {name}{result_line(result)}{kept}")
                digests = [export.digest, *filter(None, [export.facts.get("source_sha256")])]  # of published weights
                say(*(f"    {line}" for line in against_published(result, digests, branch_of(export))))
            if isinstance(outcome, Exception):
                tally.failed.append(f"{checkpoint.used.name}: {job.title}: {in_one_line(outcome)}")
                tally.errors.append(outcome)
            else:
                tally.done += 1


def _record_outcome(
    job: Job, checkpoint: LoadedCheckpoint, space: Workspace, outcome: Outcome | Exception, seconds: float
) -> tuple[Result, str]:
    """Write the result of a job. Returns it, and a note if it failed and an earlier good result was kept."""
    result = result_of(job, checkpoint, space, outcome, seconds)
    if isinstance(outcome, Exception):
        path = record(job.path, result, {}, log=text_of([*traceback_of(outcome), ""]))
    else:
        path = record(job.path, result, arrays_of(outcome))
    return result, "; the earlier result is kept" if path == failure_path(job.path) else ""


def _made_meanwhile(jobs: Sequence[Job], skip_bad: bool) -> bool:
    """Whether all jobs have results by now, which another run wrote since the preparation."""
    return all(job_state(job.path, job.data, skip_bad) == "done" for job in jobs)


def _loaded(checkpoint: LoadedCheckpoint) -> FrozenExport:
    """The export of a checkpoint, loaded again. ValueError if it was replaced since the preparation."""
    export = load_frozen(checkpoint.reference)
    if export.digest != checkpoint.used.digest:
        raise ValueError(f"{checkpoint.reference} was replaced during this run; run the same command again")
    return export


def _features_of(export: FrozenExport, jobs: Sequence[Job], space: Workspace) -> dict[str, tuple[Any, ...]]:
    """Transform name -> all feature kinds that the jobs will read; one pass over the images extracts them all."""
    features: dict[str, tuple[Any, ...]] = {}
    for job in jobs:
        try:
            of_job = job.chosen.task.features(export, space)
        except Exception:  # the same error will fail this job when it runs, and no other one
            continue
        for transform, kinds in of_job.items():
            features[transform] = tuple(dict.fromkeys([*features.get(transform, ()), *kinds]))
    return features
