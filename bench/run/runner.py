"""`bench run`: one result file for every checkpoint, image set and protocol.

Existing results are skipped, and jobs that failed before are tried again after all new ones. Each result is written as
soon as it is known. Under torchrun every process runs every task on its share of the images, and rank 0 writes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from bench.board import files as leaderboard
from bench.board.tables import to_terminal
from bench.cli.messages import in_one_line, millions
from bench.cli.outputs import check_writable
from bench.published.check import against_published
from bench.results.board import group_of
from bench.results.record import (
    DataUsed,
    failure_beside,
)
from bench.run.attempts import agreed, attempts, in_groups
from bench.run.checkpoints import LoadedCheckpoint, prepare
from bench.run.dry_run import planned, show
from bench.run.endings import ending_of_attempt, numbers_of, record_attempt
from bench.run.fitting import left_out_lines, without_data
from bench.run.forecast import expectations, forecasts_without_measuring
from bench.run.plan import Job, job_state, named_urls, open_data, plan, problem_of, refuse_mixed_contents
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from checkpoints.frozen import FrozenExport
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load_frozen
from downstream.data.scenes import drawn_first
from engine.distributed import World, start_world
from engine.extensions import warn_of
from engine.printing import say
from engine.tasks import SelectOn, Workspace

# Name and digest -> export, in the process that loaded it, until its tasks are done.
Exports = dict[tuple[str, str], FrozenExport]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The options of `bench run`."""

    checkpoints: tuple[str, ...]  # references, as `--checkpoint` takes them
    names: tuple[str, ...] = ()  # of the checkpoints; none: by their files
    imports: ImportOptions = field(default_factory=ImportOptions)  # of all checkpoints
    suite: str  # suites, tasks and protocols, comma-separated
    data: tuple[str, ...] = ()  # NAME=URL
    select: SelectOn | None = None  # images that select heads and epochs; none: as each protocol says
    changes: tuple[str, ...] = ()  # TASK.FIELD=VALUE
    out: Path  # folder of the results
    space: Workspace  # `run_suite` sets `world` and `reread`, and `data` for every job
    rerun: bool = False  # replace existing results, and read the images again
    dry_run: bool = False  # print what would be done


@dataclass(kw_only=True)
class Tally:
    """How the jobs ended."""

    jobs: Sequence[Job]  # all, in the order of the checkpoints
    left_out: int = 0  # jobs that were known to fail
    done: int = 0
    skipped: int = 0  # jobs whose result exists
    failed: list[str] = field(default_factory=list)  # a line for each: what failed and why
    errors: list[Exception] = field(default_factory=list)  # of the same
    planned: list[tuple[float, float]] = field(default_factory=list)  # seconds of jobs that went well: plan, truth


def run_suite(request: RunRequest) -> int:
    """Run all jobs, or show them, and return the exit code. ValueError where the request itself is wrong."""
    if not request.dry_run:
        return 1 if run_jobs(request).failed else 0
    with _begun(request) as (request, selected, data, found, exports):
        there = [chosen for chosen in selected if chosen not in without_data(data, selected)]
        return request.space.world.on_rank0(lambda: _show_plan(request, data, found, exports, there))


def run_jobs(request: RunRequest) -> Tally:
    """Run all jobs, and say how they ended. ValueError where the request itself is wrong."""
    with _begun(request) as (request, selected, data, found, exports):
        return _run_all(request, found.checkpoints, exports, data, selected)


@contextmanager
def _begun(
    request: RunRequest,
) -> Iterator[tuple[RunRequest, list[ChosenProtocol], list[DataUsed], "Prepared", Exports]]:
    """The connected processes' request, its protocols, images and checkpoints."""
    with start_world(request.space.device) as world:
        request = replace(request, space=replace(request.space, world=world, reread=request.rerun))
        selected = world.on_all_ranks(lambda: _selected(request, world))
        data = _opened(request)
        # Rank 0 imports, verifies and saves; the others load what it saved.
        exports: Exports = {}
        found = world.on_rank0(lambda: _prepared(request, exports))
        left = world.on_all_ranks(lambda: list(left_out_lines(data, selected, found.checkpoints, request.space)))
        say(*(left if world.is_rank0 else ()))
        yield request, selected, data, found, exports


def _selected(request: RunRequest, world: World) -> list[ChosenProtocol]:
    found = catalogue()
    if world.is_rank0:
        warn_of(found.broken)
    return changed_protocols(choose_protocols(request.suite, found), request.changes, request.select)


def _opened(request: RunRequest) -> list[DataUsed]:
    """Open the image sets, in every process, once for all tasks. A large one is listed by one process of a machine."""
    if request.names and len(request.names) != len(request.checkpoints):
        named, given = len(request.names), len(request.checkpoints)
        raise ValueError(f"--name: {named} names for {given} checkpoints; give one for each, in their order")
    space, urls = request.space, named_urls(request.data, request.suite)
    drawn_first(urls.values(), space.cache, space.world)
    data = space.world.first_on_each_machine(
        lambda: [open_data(name, url, space, request.rerun) for name, url in urls.items()]
    )
    for each in data if space.world.is_rank0 else ():
        say(*(f"{each.name}: {warning}" for warning in each.warnings), errors=True)
    return data


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The checkpoints of a run."""

    checkpoints: Sequence[LoadedCheckpoint]
    unavailable: Sequence[str] = ()  # in a dry run: a line for each that cannot be loaded


def _prepared(request: RunRequest, exports: Exports) -> Prepared:
    """Load and verify all checkpoints. Puts those that will be evaluated into `exports`."""
    if not request.dry_run:
        check_writable(request.out)  # now, and not after the first task has run for hours
    names = request.names or (None,) * len(request.checkpoints)
    found, unavailable = {}, []
    for reference, name in dict.fromkeys(zip(request.checkpoints, names, strict=True)):
        try:
            checkpoint, export = prepare(
                reference, name, request.out, save=not request.dry_run, options=request.imports
            )
            found[checkpoint.key] = checkpoint
            exports[checkpoint.key] = export
        except (ValueError, RuntimeError, MemoryError) as error:
            if not request.dry_run:
                raise
            named = "" if isinstance(error, ValueError) else f"--checkpoint {reference}: "
            unavailable.append(named + in_one_line(error))
    return Prepared(checkpoints=list(found.values()), unavailable=unavailable)


def _run_all(
    request: RunRequest,
    checkpoints: Sequence[LoadedCheckpoint],
    exports: Exports,
    data: Sequence[DataUsed],
    selected: Sequence[ChosenProtocol],
) -> Tally:
    world = request.space.world
    # All processes follow the plan of rank 0.
    plans = world.on_rank0(
        lambda: [plan(request.out, each, data, selected, request.space, request.rerun) for each in checkpoints]
    )
    problems = world.on_rank0(lambda: known_problems(checkpoints, plans, request.space))
    plans = [[job for job in jobs if job.path not in problems] for jobs in plans]
    tally = Tally(jobs=[job for jobs in plans for job in jobs], left_out=len(problems))
    world.on_rank0(lambda: refuse_mixed_contents(request.out, tally.jobs))
    try:
        for checkpoint, jobs in zip(checkpoints, plans, strict=True):
            _run_one(request, checkpoint, exports.pop(checkpoint.key, None), jobs, tally)
    finally:
        if world.is_rank0:
            _rewrite_leaderboard(request.out, tally.jobs)
    if world.is_rank0:
        _say_ending(request.out, tally)
    return tally


def known_problems(
    checkpoints: Sequence[LoadedCheckpoint], plans: Sequence[Sequence[Job]], space: Workspace
) -> dict[Path, str]:
    """Result path of each job that is known to fail -> why; prints a line for each. ValueError if that is all jobs."""
    found: dict[Path, str] = {}
    lines: dict[str, list[str]] = {}
    for checkpoint, jobs in zip(checkpoints, plans, strict=True):
        for job in jobs:
            if problem := problem_of(job, checkpoint.spec, space):
                found[job.path] = problem
                lines.setdefault(f"{job.title}: {problem}", []).append(checkpoint.used.name)
    if found and len(found) == sum(map(len, plans)):
        raise ValueError(f"nothing can run: {next(iter(lines))}")
    for line, names in lines.items():
        of_some = f" for {', '.join(names)}" if len(names) < len(checkpoints) else ""
        say(f"left out{of_some}: {line}")
    return found


def _say_ending(out: Path, tally: Tally) -> None:
    for line in tally.failed:
        say(f"failed: {line}")
    if tally.planned:
        planned, taken = (sum(column) for column in zip(*tally.planned, strict=True))
        say(f"planned {planned:.1f} s, took {taken:.1f} s (x {taken / planned:.2f}), {len(tally.planned)} jobs")
    left_out = f"{tally.left_out} left out (above), " if tally.left_out else ""
    counts = f"{tally.done} done, {tally.skipped} skipped, {left_out}{len(tally.failed)} failed"
    say(f"{counts}; see {out / 'leaderboard.md'}")
    if tally.failed:
        say("tracebacks are in the .log files beside the failed results; the same command tries them again")


def _rewrite_leaderboard(out: Path, jobs: Sequence[Job]) -> None:
    found = leaderboard.rewrite(out)
    of_run = {job.path for job in jobs}
    shown = {group_of(each.result) for each in found.measured if each.path in of_run and each.result.status == "ok"}
    say("", *to_terminal(found.board, get_terminal_size().columns, shown).split("\n"), "")


def _run_one(
    request: RunRequest, checkpoint: LoadedCheckpoint, export: FrozenExport | None, jobs: Sequence[Job], tally: Tally
) -> None:
    """Run all jobs of one checkpoint. export: the checkpoint, if this process has loaded it already."""
    world = request.space.world
    say_once = say if world.is_rank0 else _say_nothing
    say_once(checkpoint_title(checkpoint))
    if checkpoint.used.assumed:
        say_once(f"  assumed: {checkpoint.used.assumed}")
    undone = any(job.state != "done" for job in jobs)
    export = world.on_all_ranks(lambda: export or _loaded(checkpoint)) if undone else None
    wanted = _wanted(export, jobs, request.space) if export else {}
    planned = world.on_rank0(lambda: expectations(jobs, export, request.space)) if export else {}
    if export and not export.spec.has_class_token:
        say("  it has no class token: protocols that read one read avg, the mean of its patches, instead")
    number = {job.path: f"[{count}/{len(jobs)}]" for count, job in enumerate(jobs, start=1)}
    for together in in_groups(jobs, export, request.space):
        if together[0].state == "done" or export is None:
            say_once(*(f"  {number[job.path]} {job.title}: exists, skipped" for job in together))
            tally.skipped += len(together)
            continue
        if not request.rerun and world.on_rank0(partial(_made_meanwhile, together, request.space.skip_bad)):
            say_once(*(f"  {number[job.path]} {job.title}: made by another run meanwhile, skipped" for job in together))
            tally.skipped += len(together)
            continue
        say_once(*(f"  {number[job.path]} {job.title} ..." for job in together))
        space = replace(together[0].place(request.space), wanted=wanted)
        for job, attempt in attempts(together, export, space):
            ending = replace(agreed(attempt, job, world), planned=planned.get(job.path))
            if world.is_rank0:
                path = record_attempt(job, checkpoint, request.space, ending)
                kept = "; the earlier result is kept" if path == failure_beside(job.path) else ""
                name = f"{job.title}: " if len(together) > 1 else ""
                say(f"  {number[job.path]} {name}{ending_of_attempt(ending)}{kept}")
                say(*(f"    {line}" for line in against_published(numbers_of(job, export, request.space, ending))))
            tally.done += ending.error is None
            tally.planned += [(ending.planned, ending.seconds)] if ending.planned and ending.ratio else []
            if ending.error:
                tally.failed.append(f"{checkpoint.used.name}: {job.title}: {in_one_line(ending.error)}")
                tally.errors.append(ending.error)


def _made_meanwhile(jobs: Sequence[Job], skip_bad: bool) -> bool:
    return all(job_state(job.path, job.data, skip_bad) == "done" for job in jobs)


def _loaded(candidate: LoadedCheckpoint) -> FrozenExport:
    export = load_frozen(candidate.reference)
    if export.digest != candidate.used.digest:
        raise ValueError(f"{candidate.reference} was replaced while this ran; run the same command again")
    return export


def _wanted(export: FrozenExport, jobs: Sequence[Job], space: Workspace) -> dict[str, tuple[Any, ...]]:
    """Transform name -> all feature kinds that the jobs will read; one pass over the images extracts them all."""
    found: dict[str, tuple[Any, ...]] = {}
    for job in jobs:
        try:
            wanted = job.chosen.task.features(export, space) if job.state != "done" else {}
        except Exception:  # the task will fail on its own, without the others
            continue
        for transform, kinds in wanted.items():
            found[transform] = tuple(dict.fromkeys([*found.get(transform, ()), *kinds]))
    return found


def checkpoint_title(checkpoint: LoadedCheckpoint) -> str:
    """`vit_tiny: dino, vit_tiny_patch16_224, 5.5 M parameters, digest 1a2b3c4d`"""
    used = checkpoint.used
    facts = [used.method, used.architecture, millions(used.parameters), f"digest {used.digest[:8]}"]
    return f"{used.name}: {', '.join(filter(None, facts))}"


def _show_plan(
    request: RunRequest,
    data: Sequence[DataUsed],
    found: Prepared,
    exports: Exports,
    selected: Sequence[ChosenProtocol],
) -> int:
    plans = {}
    for checkpoint in found.checkpoints:
        jobs = plan(request.out, checkpoint, data, selected, request.space, request.rerun)
        foretold = forecasts_without_measuring(jobs, exports.pop(checkpoint.key), request.space)
        plans[checkpoint_title(checkpoint)] = [
            planned(job, checkpoint.spec, request.space, each) for job, each in zip(jobs, foretold, strict=True)
        ]
    shown = {entry.job.chosen.name for entries in plans.values() for entry in entries}
    chosen = [each for each in selected if each.name in shown or not plans]  # others are left out
    return show(plans, found.unavailable, chosen, get_terminal_size().columns)


def _say_nothing(*lines: object) -> None:
    """`say` in every process but rank 0."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a run would do, with its checkpoints imported."""

    plans: Sequence[tuple[LoadedCheckpoint, FrozenExport, Sequence[Job]]]
    left_out: Sequence[str]  # a line for each reason why protocols are left out


def surveyed(request: RunRequest, known: Sequence[DataUsed] = ()) -> Survey:
    """All jobs of a run, for those who have them run elsewhere. ValueError where the request itself is wrong.

    known: images that are not opened, beside those that the request names.
    """
    selected = _selected(request, World())
    data = [*known, *(_opened(request) if request.data or not known else ())]
    exports: Exports = {}
    found = _prepared(request, exports)
    plans = [
        (each, exports[each.key], plan(request.out, each, data, selected, request.space, request.rerun))
        for each in found.checkpoints
    ]
    return Survey(plans=plans, left_out=list(left_out_lines(data, selected, found.checkpoints, request.space)))
