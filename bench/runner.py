"""`bench run`: checkpoints x image sets x protocols, each to one result file.

What exists is skipped, what failed before is tried again after everything new, and a result is written the moment it
is known. Under torchrun every process runs every task on its share of the images, and the first one writes.
"""

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np

from bench import leaderboard, resampled
from bench.board import group_of
from bench.candidates import Candidate, prepare
from bench.environment import hardware, versions
from bench.intervals import METHOD, intervals_of
from bench.messages import in_one_line, millions
from bench.outputs import check_writable
from bench.plan import Job, named_urls, open_data, plan, without_data
from bench.results import (
    DataUsed,
    Result,
    failure_beside,
    is_good,
    read_result,
    record,
    resampled_name,
    validation_images,
)
from bench.suites import Chosen, Select, catalogue, choose, warn_of_broken, with_changes
from bench.tables import to_terminal
from checkpoints.export import ViTExport
from checkpoints.resolve import load
from engine.distributed import World, start_world
from engine.tasks import Outcome, Workspace

MAIN_METRICS = 3  # how many a line of output shows


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. `space.data` is filled in for every job."""

    checkpoints: tuple[str, ...]
    names: tuple[str, ...] = ()
    suite: str
    data: tuple[str, ...] = ()
    select: Select = "holdout"
    changes: tuple[str, ...] = ()
    out: Path
    space: Workspace
    rerun: bool = False
    dry_run: bool = False


@dataclass(kw_only=True)
class Tally:
    """How many jobs ended how."""

    done: int = 0
    skipped: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A job after it was run: an outcome or an error, and the time it took."""

    seconds: float
    outcome: Outcome = field(default_factory=lambda: Outcome(metrics={}))
    error: Exception | None = None


def run(request: Request) -> int:
    """Do what was asked and return the exit code. ValueError for whatever is wrong with the request itself."""
    with start_world(request.space.device) as world:
        selected = world.each(lambda: _selected(request, world))
        # The first process imports, proves and saves; the others load what it saved.
        data, candidates = world.first(lambda: _prepared(request))
        lacking = world.each(lambda: without_data(data, selected))
        if lacking and world.is_first:
            tasks = ", ".join(dict.fromkeys(chosen.key for chosen in lacking))
            print(f"{len(lacking)} protocols are left out, none of the --data is for them: {tasks}")
        if request.dry_run:
            if world.is_first:
                _show_plan(request, candidates, data, selected)
            return 0
        return _run_all(request, world, candidates, data, selected)


def _selected(request: Request, world: World) -> list[Chosen]:
    found = catalogue()
    if world.is_first:
        warn_of_broken(found)
    return with_changes(choose(request.suite, found), request.changes, request.select)


def _prepared(request: Request) -> tuple[list[DataUsed], list[Candidate]]:
    if request.names and len(request.names) != len(request.checkpoints):
        raise ValueError(f"--name: {len(request.names)} names for {len(request.checkpoints)} checkpoints; give as many")
    cache = request.space.cache
    data = [open_data(name, url, cache) for name, url in named_urls(request.data, request.suite).items()]
    if not request.dry_run:
        check_writable(request.out)  # now, and not after the first task has run for hours
    names = request.names or (None,) * len(request.checkpoints)
    pairs = dict.fromkeys(zip(request.checkpoints, names, strict=True))
    found = [prepare(reference, name, request.out, save=not request.dry_run) for reference, name in pairs]
    return data, list({(each.used.name, each.used.digest): each for each in found}.values())


def _run_all(
    request: Request,
    world: World,
    candidates: Sequence[Candidate],
    data: Sequence[DataUsed],
    selected: Sequence[Chosen],
) -> int:
    # What the first process found undone is what all do.
    plans = world.first(
        lambda: [plan(request.out, each.used, data, selected, request.space, request.rerun) for each in candidates]
    )
    tally = Tally()
    try:
        for candidate, jobs in zip(candidates, plans, strict=True):
            _run_one(request, world, candidate, jobs, tally)
    finally:
        if world.is_first:
            _rewrite_leaderboard(request.out, [job for jobs in plans for job in jobs])
    if world.is_first:
        print(
            f"{tally.done} done, {tally.skipped} skipped, {tally.failed} failed; see {request.out / 'leaderboard.md'}"
        )
        if tally.failed:
            print("tracebacks are in the .log files beside the failed results; the same command tries them again")
    return 1 if tally.failed else 0


def _rewrite_leaderboard(out: Path, jobs: Sequence[Job]) -> None:
    board = leaderboard.rewrite(out)
    shown = {group_of(read_result(job.path)) for job in jobs if is_good(job.path)}
    print(f"\n{to_terminal(board, get_terminal_size().columns, shown)}\n")


def _run_one(request: Request, world: World, candidate: Candidate, jobs: Sequence[Job], tally: Tally) -> None:
    say = print if world.is_first else _say_nothing
    say(title_of(candidate))
    undone = any(job.state != "done" for job in jobs)
    export = world.each(lambda: _loaded(candidate)) if undone else None
    wanted = _wanted(export, jobs, request.space) if export else {}
    for count, job in enumerate(jobs, start=1):
        if job.state == "done" or export is None:
            say(f"  [{count}/{len(jobs)}] {job.title}: exists, skipped")
            tally.skipped += 1
            continue
        say(f"  [{count}/{len(jobs)}] {job.title} ...", flush=True)
        attempt = _attempt(job, export, replace(request.space, data=job.data.url, wanted=wanted))
        attempt = _agreed(attempt, job, world)
        if world.is_first:
            path = _record(job, candidate, request.space, attempt, world)
            kept = "; the earlier result is kept" if path == failure_beside(job.path) else ""
            print(f"  [{count}/{len(jobs)}] {_ending(attempt)}{kept}", flush=True)
        tally.done += attempt.error is None
        tally.failed += attempt.error is not None


def _loaded(candidate: Candidate) -> ViTExport:
    export = load(candidate.reference)
    if export.digest != candidate.used.digest:
        raise ValueError(f"{candidate.reference} was replaced while this ran; run the same command again")
    return export


def _wanted(export: ViTExport, jobs: Sequence[Job], space: Workspace) -> dict[str, tuple[Any, ...]]:
    """Transform name -> all feature kinds that the jobs will read, so that one pass over the images serves them all."""
    found: dict[str, tuple[Any, ...]] = {}
    for job in jobs:
        if job.state != "done" and hasattr(job.chosen.task, "features"):
            for transform, kinds in job.chosen.task.features(export, space).items():
                found[transform] = tuple(dict.fromkeys([*found.get(transform, ()), *kinds]))
    return found


def _agreed(attempt: Attempt, job: Job, world: World) -> Attempt:
    """The attempt as all processes see it: failed if it failed in one.

    A process that left its task alone may meet the others inside theirs; they could then never agree again, so a run
    whose processes are at different places ends here.
    """
    mine = (str(job.path), "ended", in_one_line(attempt.error) if attempt.error else None)
    found = world.gather_objects(mine)
    if any(not isinstance(other, tuple) or other[:2] != mine[:2] for other in found):
        raise RuntimeError(f"{job.title}: the processes are out of step") from attempt.error
    messages = [message for *_, message in found if message]
    if attempt.error is None and messages:
        return Attempt(seconds=attempt.seconds, error=RuntimeError(f"in another process: {messages[0]}"))
    return attempt


def _attempt(job: Job, export: ViTExport, space: Workspace) -> Attempt:
    started = time.perf_counter()
    try:
        outcome = _checked(job.chosen.task.run(export, space))
    except Exception as error:  # whatever a task raises becomes a failed result, and the other tasks go on
        return Attempt(seconds=time.perf_counter() - started, error=error)
    return Attempt(seconds=time.perf_counter() - started, outcome=outcome)


def _checked(outcome: Outcome) -> Outcome:
    """ValueError for an outcome that cannot be a result: no metric, a metric that is no number, facts beyond JSON."""
    if not outcome.metrics:
        raise ValueError("the task returned no metrics")
    if odd := [name for name, values in outcome.per_image.items() if np.asarray(values).dtype == object]:
        raise ValueError(f"arrays that hold objects, not numbers: {', '.join(odd)}")
    if wrong := [name for name, value in outcome.metrics.items() if not isfinite(value)]:
        raise ValueError(f"metrics that are not finite: {', '.join(wrong)}")
    try:
        json.dumps(dict(outcome.facts), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"facts that are not JSON: {error}") from error
    return outcome


def _record(job: Job, candidate: Candidate, space: Workspace, attempt: Attempt, world: World) -> Path:
    outcome = attempt.outcome
    arrays = {name: np.asarray(values) for name, values in outcome.per_image.items()}
    of_means = intervals_of(outcome.metrics, arrays)
    of_sets = resampled.intervals_of(outcome.resampled, validation_images(job.data, space.limit))
    arrays |= {resampled_name(name): values for name, values in outcome.resampled.items()}
    result = Result(
        status="failed" if attempt.error else "ok",
        message=in_one_line(attempt.error) if attempt.error else "",
        task=job.chosen.key,
        protocol=job.protocol,
        metrics={name: float(value) for name, value in outcome.metrics.items()},
        intervals=of_means | of_sets,
        interval_method="; ".join([METHOD] * bool(of_means) + [resampled.METHOD] * bool(of_sets)),
        checkpoint=candidate.used,
        data=job.data,
        seed=space.seed,
        random=outcome.random,
        limit=space.limit,
        precision=space.precision,
        decode=space.decode,
        skip_bad=space.skip_bad,
        settings=job.settings,
        facts=dict(outcome.facts),
        per_image=list(outcome.per_image),
        resampled=list(outcome.resampled),
        device=space.device,
        processes=world.size,
        seconds=round(attempt.seconds, 3),
        cost=dict(outcome.cost),
        images_per_second=_rate(outcome.cost),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware=hardware(),
    )
    log = "".join(traceback.format_exception(attempt.error)) if attempt.error else ""
    return record(job.path, result, arrays, log)


def _rate(cost: Mapping[str, float]) -> float | None:
    forwards, seconds = cost.get("forwards", 0), cost.get("extraction_seconds", 0)
    return round(forwards / seconds, 1) if forwards and seconds else None


def title_of(candidate: Candidate) -> str:
    """`vit_tiny: dino, vit_tiny_patch16_224, 5.5 M parameters, digest 1a2b3c4d`"""
    used = candidate.used
    facts = [used.method, used.architecture, millions(used.parameters), f"digest {used.digest[:8]}"]
    return f"{used.name}: {', '.join(filter(None, facts))}"


def _ending(attempt: Attempt) -> str:
    if attempt.error is not None:
        return f"FAILED after {attempt.seconds:.1f} s: {in_one_line(attempt.error)}"
    metrics = list(attempt.outcome.metrics.items())
    shown = ", ".join(f"{name} {float(value):.2f}" for name, value in metrics[:MAIN_METRICS])
    more = f" and {len(metrics) - MAIN_METRICS} more" if len(metrics) > MAIN_METRICS else ""
    return f"{shown}{more}, {attempt.seconds:.1f} s"


def _show_plan(
    request: Request, candidates: Sequence[Candidate], data: Sequence[DataUsed], selected: Sequence[Chosen]
) -> None:
    to_do: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
    open_jobs = 0
    for candidate in candidates:
        print(title_of(candidate))
        for job in plan(request.out, candidate.used, data, selected, request.space, request.rerun):
            images = " + ".join(f"{min(n, request.space.limit or n)} {s}" for s, n in job.data.images.items())
            print(f"  {job.title}: {images} images, {to_do[job.state]}")
            open_jobs += job.state != "done"
    print(f"{open_jobs} to do; nothing was run or written (--dry-run)")


def _say_nothing(*words: object, flush: bool = False) -> None:
    """Stands for `print` in every process but the first."""
