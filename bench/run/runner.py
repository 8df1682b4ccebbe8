"""`bench run`: one result file for every checkpoint, image set and protocol.

Existing results are skipped, and jobs that failed before are tried again after all new ones. Each result is written as
soon as it is known. Under torchrun every process runs every task on its share of the images, and rank 0 writes. Jobs
that train on augmented images run together, and each ends with an outcome or an error of its own.
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

from bench.cli.names import ready_device
from bench.cli.options import EvaluationOptions
from bench.cli.output import in_one_line, traceback_of
from bench.leaderboards.files import write_leaderboard
from bench.leaderboards.tables import to_terminal
from bench.published.values import against_published
from bench.results.record import (
    MetricRecord,
    Result,
    failure_beside,
    images_seen,
    number_text,
    record,
)
from bench.run.checkpoints import LoadedCheckpoint
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
from engine.extensions import extensions, load_extension
from engine.machine import hardware, versions
from engine.printing import say, text_of
from engine.tasks import Metric, Outcome, Workspace
from engine.training.interruptions import Stopped


def checked(outcome: Outcome) -> Outcome:
    """The outcome itself. ValueError where it cannot be a result; it names what is wrong and the metric or array."""
    if not isinstance(outcome, Outcome):
        raise ValueError(f"the task's run() returned {type(outcome).__name__}; return an engine.tasks.Outcome")
    if not outcome.metrics:
        raise ValueError("the task returned no metrics")
    _refuse("metrics that are no engine.tasks.Metric", outcome, lambda metric: isinstance(metric, Metric))
    _refuse("metrics that are not finite", outcome, lambda metric: isfinite(metric.value))
    known = (None, *outcome.metrics)
    _refuse("deviations of no metric of the task", outcome, lambda metric: metric.deviation_of in known)
    why = 'of "%" shares from 0 to 1, of any other unit in that unit'
    _refuse(f"metrics that are not the mean of their values per image ({why})", outcome, _is_mean)
    if odd := [name for name, values in arrays_of(outcome).items() if values.dtype == object]:
        raise ValueError(f"arrays that hold objects, not numbers: {', '.join(odd)}")
    try:
        json.dumps(dict(outcome.facts), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"facts that are not JSON: {error}") from error
    return outcome


def _refuse(what: str, outcome: Outcome, is_right: Callable[[Metric], bool]) -> None:
    if wrong := [name for name, metric in outcome.metrics.items() if not is_right(metric)]:
        raise ValueError(f"{what}: {', '.join(wrong)}")


def _is_mean(metric: Metric) -> bool:
    values = metric.per_image
    return values is None or intervals.averages_to(np.asarray(values), metric.value, metric.unit)


def arrays_of(outcome: Outcome) -> dict[str, np.ndarray]:
    """All arrays of the `.npz` file by name. ValueError where two have the same name."""
    arrays = dict(outcome.arrays)
    for name, metric in outcome.metrics.items():
        array, values = _array_of(name, metric)
        if array in arrays:
            raise ValueError(f"two arrays named {array}: that of the metric {name} and another one")
        if array and values is not None:
            arrays[array] = values
    return {name: np.asarray(values) for name, values in arrays.items()}


def _array_of(name: str, metric: Metric) -> tuple[str | None, np.ndarray | None]:
    """Name and values of the array that belongs to a metric; None where it has none."""
    if metric.resampled is not None:
        return f"{name}_resampled", metric.resampled
    return (None if metric.per_image is None else name), metric.per_image


def metric_records(outcome: Outcome, images: int) -> tuple[dict[str, MetricRecord], str]:
    """The metrics as a result file holds them, with intervals over `images` validation images, and their method."""
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


def in_groups(jobs: Sequence[Job], export: FrozenExport | None, space: Workspace) -> list[list[Job]]:
    """The jobs in their order; those on augmented images of one set together, where the first of them stands, as these
    are read once for all."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group_of(job, export, space), []).append(job)
    return list(groups.values())


def run_together(
    jobs: Sequence[Job], export: FrozenExport, space: Workspace
) -> Iterator[tuple[Job, Outcome | Exception, float]]:
    """Run the jobs of one stream, or a single one. Yields each job as it ends, its outcome or error, and its seconds.

    Time is divided equally among the jobs that are still running, so that the sum over results is what a run took.
    """
    running, seconds = dict(enumerate(jobs)), dict.fromkeys(range(len(jobs)), 0.0)
    outcomes = jobs[0].chosen.task.together([job.chosen.task for job in jobs], export, space)
    while running:
        started, place = time.perf_counter(), None
        ended: Outcome | Exception
        try:
            place, ended = next(outcomes)
            if not isinstance(ended, Exception):
                checked(ended)
        except Stopped:  # not a failure: the same command resumes it
            raise
        except Exception as error:  # any other error of a task is recorded: that of one job, or of all still running
            ended = error
        share = (time.perf_counter() - started) / len(running)
        seconds = {index: seconds[index] + share for index in running}
        for index in list(running) if place is None else [place]:
            yield running.pop(index), ended, seconds[index]


def agreed(job: Job, ended: Outcome | Exception, world: World) -> Outcome | Exception:
    """How the job ended in all processes: with an error if it failed in any.

    A process that left its task early may have met the others inside one of the task's collectives. Processes that are
    at different places could never agree again, so the run ends here with RuntimeError.
    """
    error = ended if isinstance(ended, Exception) else None
    mine = (str(job.path), "ended", in_one_line(error) if error else None)
    everywhere = world.gather_objects(mine)
    if any(not isinstance(other, tuple) or other[:2] != mine[:2] for other in everywhere):
        raise RuntimeError(f"{job.title}: the processes are out of step") from error
    messages = [message for *_, message in everywhere if message]
    return RuntimeError(f"in another process: {messages[0]}") if messages and error is None else ended


def result_of(
    job: Job, checkpoint: LoadedCheckpoint, space: Workspace, ended: Outcome | Exception, seconds: float
) -> Result:
    """What the result file of a job says."""
    error = ended if isinstance(ended, Exception) else None
    outcome = Outcome(metrics={}) if isinstance(ended, Exception) else ended
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
    """Which of the networks in its file an export holds; "" for its importer's first."""
    name, importer = str(export.facts.get("branch") or ""), str(export.facts.get("importer"))
    if not name or importer not in extensions("importers"):
        return ""
    return "" if name == next(iter(load_extension("importers", importer).BRANCHES)) else name


MAIN_METRICS = 3  # metrics that a line of output shows


def ending_of(result: Result) -> str:
    """`top1 76.1, top5 92.8, 12.3 s`"""
    if result.status == "failed":
        return f"FAILED after {result.seconds:.1f} s: {result.message}"
    metrics = list(result.metrics.items())
    floors = result.facts.get("floor", {}).get("metrics", {})
    texts = [f"{name} {number_text(metric.value, metric.unit)}" for name, metric in metrics[:MAIN_METRICS]]
    if metrics[0][0] in floors:
        texts[0] += f" (floor {number_text(floors[metrics[0][0]], metrics[0][1].unit)})"
    others = f" and {len(metrics) - MAIN_METRICS} more" if len(metrics) > MAIN_METRICS else ""
    return f"{', '.join(texts)}{others}, {result.seconds:.1f} s"


@dataclass(kw_only=True)
class Tally:
    """How the jobs ended."""

    jobs: Sequence[Job]  # all, in the order of the checkpoints
    left_out: int = 0  # jobs that were known to fail
    done: int = 0
    skipped: int = 0  # jobs whose result exists
    failed: list[str] = field(default_factory=list)  # a line for each: what failed and why
    errors: list[Exception] = field(default_factory=list)  # of the same


def run_suite(options: EvaluationOptions, dry_run: bool = False) -> int:
    """Run all jobs, or show them, and return the exit code. ValueError where the request itself is wrong."""
    if not dry_run:
        return 1 if run_jobs(options).failed else 0
    from bench.run.forecast import show_dry_run

    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world, dry_run=True)
        say(*(preparation.left_out if world.is_rank0 else ()))
        return world.on_rank0(lambda: show_dry_run(preparation))


def run_jobs(options: EvaluationOptions, show: bool = True, variations: Variations = ((),)) -> Tally:
    """Run all jobs, and say how they ended. ValueError where the request itself is wrong.

    show: print the leaderboard of these jobs.
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
                _run_one(preparation, checkpoint, jobs, tally)
        finally:
            if world.is_rank0:
                _rewrite_leaderboard(options.out, tally.jobs, show)
        if world.is_rank0:
            _say_ending(options.out, tally)
        return tally


def _say_ending(out: Path, tally: Tally) -> None:
    for line in tally.failed:
        say(f"failed: {line}")
    left_out = f"{tally.left_out} left out (above), " if tally.left_out else ""
    counts = f"{tally.done} done, {tally.skipped} skipped, {left_out}{len(tally.failed)} failed"
    say(f"{counts}; see {out / 'leaderboard.md'}")
    if tally.failed:
        say("tracebacks are in the .log files beside the failed results; the same command tries them again")


def _rewrite_leaderboard(out: Path, jobs: Sequence[Job], show: bool) -> None:
    leaderboard, of_run = write_leaderboard(out), {job.path for job in jobs}
    results = [stored.result for stored in leaderboard.results if stored.path in of_run]
    groups = {result.group for result in results if result.status == "ok"}
    if show:
        say("", *to_terminal(leaderboard, get_terminal_size().columns, groups).split("\n"), "")


def _run_one(preparation: Preparation, checkpoint: LoadedCheckpoint, jobs: Sequence[Job], tally: Tally) -> None:
    """Run all jobs of one checkpoint."""
    space, world = preparation.space, preparation.space.world
    export = preparation.exports.pop(checkpoint.used.key, None)  # if this process has loaded it already
    say_once = say if world.is_rank0 else lambda *lines: None
    say_once(checkpoint_title(checkpoint))
    if checkpoint.used.assumed:
        say_once(f"  assumed: {checkpoint.used.assumed}")
    undone = any(job.state != "done" for job in jobs)
    export = world.on_all_ranks(lambda: export or _loaded(checkpoint)) if undone else None
    features = _features_of(export, jobs, space) if export else {}
    if export and not export.spec.has_class_token:
        say("  it has no class token: protocols that read one read avg, the mean of its patches, instead")
    number = {job.path: f"[{count}/{len(jobs)}]" for count, job in enumerate(jobs, start=1)}
    for together in in_groups(jobs, export, space):
        reason = ""
        if together[0].state == "done" or export is None:
            reason = "exists"
        elif not space.reread and world.on_rank0(partial(_made_meanwhile, together, space.skip_bad)):
            reason = "made by another run meanwhile"
        if reason or export is None:
            say_once(*(f"  {number[job.path]} {job.title}: {reason}, skipped" for job in together))
            tally.skipped += len(together)
            continue
        say_once(*(f"  {number[job.path]} {job.title} ..." for job in together))
        own_space = replace(together[0].place(space), wanted=features)
        for job, ended, seconds in run_together(together, export, own_space):
            ended = agreed(job, ended, world)
            error = ended if isinstance(ended, Exception) else None
            if world.is_rank0:
                result = result_of(job, checkpoint, space, ended, seconds)
                arrays = {} if isinstance(ended, Exception) else arrays_of(ended)
                log = text_of([*traceback_of(error), ""]) if error else ""
                earlier_is_kept = record(job.path, result, arrays, log) == failure_beside(job.path)
                name = f"{job.title}: " if len(together) > 1 else ""
                kept = "; the earlier result is kept" if earlier_is_kept else ""
                say(f"  {number[job.path]} {name}{ending_of(result)}{kept}")
                digests = [export.digest, *filter(None, [export.facts.get("source_sha256")])]  # of published weights
                say(*(f"    {line}" for line in against_published(result, digests, branch_of(export))))
            tally.done += error is None
            if error:
                tally.failed.append(f"{checkpoint.used.name}: {job.title}: {in_one_line(error)}")
                tally.errors.append(error)


def _made_meanwhile(jobs: Sequence[Job], skip_bad: bool) -> bool:
    return all(job_state(job.path, job.data, skip_bad) == "done" for job in jobs)


def _loaded(candidate: LoadedCheckpoint) -> FrozenExport:
    export = load_frozen(candidate.reference)
    if export.digest != candidate.used.digest:
        raise ValueError(f"{candidate.reference} was replaced while this ran; run the same command again")
    return export


def _features_of(export: FrozenExport, jobs: Sequence[Job], space: Workspace) -> dict[str, tuple[Any, ...]]:
    """Transform name -> all feature kinds that the jobs will read; one pass over the images extracts them all."""
    features: dict[str, tuple[Any, ...]] = {}
    for job in jobs:
        try:
            own = job.chosen.task.features(export, space) if job.state != "done" else {}
        except Exception:  # the task will fail on its own, without the others
            continue
        for transform, kinds in own.items():
            features[transform] = tuple(dict.fromkeys([*features.get(transform, ()), *kinds]))
    return features
