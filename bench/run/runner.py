"""The jobs of a run: each computes and writes the result of a checkpoint by one protocol on one image set.

Existing results are skipped, and jobs that failed before are tried again after all new ones. Each result is written as
soon as it is known. Under torchrun every process runs every task on its share of the images, and rank 0 writes. Jobs
that share a training run together, and each of them ends with its own outcome or error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.options import EvaluationOptions, ready_device
from bench.results.heads import write_head
from bench.results.record import Result, failure_path, record
from bench.run.calibration import Key
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.forecast import announcement
from bench.run.outcomes import arrays_of, result_line, result_of
from bench.run.prepare import (
    Job,
    Preparation,
    checkpoint_title,
    job_state,
    prepare,
    size_lines,
    without_problems,
)
from bench.run.sharing import grouped, run_together
from checkpoints.frozen import FrozenExport
from checkpoints.resolve import load_frozen
from engine.distributed import World, start_world
from engine.errors import in_one_line, traceback_of
from engine.printing import say, text_of
from engine.progress import Progress
from engine.tasks import Outcome


@dataclass(kw_only=True)
class Tally:
    """How the jobs of a run ended."""

    jobs: Sequence[Job] = ()  # all, in the order of the checkpoints
    is_rank0: bool = True  # whether this process writes
    left_out: int = 0  # jobs that were not run because of a known problem
    skipped: int = 0  # jobs whose result existed
    results: list[tuple[Result, Mapping[str, Any]]] = field(default_factory=list)  # of rank 0: with the export's facts
    done: int = 0
    failed: list[str] = field(default_factory=list)  # a line for each failed job, with the reason
    errors: list[Exception] = field(default_factory=list)  # of the failed jobs


def run_jobs(options: EvaluationOptions, tally: Tally | None = None) -> Tally:
    """Run all jobs, print how each ends, and return how all did. ValueError for invalid options.

    tally: filled as jobs end, for callers that need it after an error or a signal.
    """
    tally = tally or Tally()
    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world)
        say(*(preparation.left_out if world.is_rank0 else ()))
        # All processes follow the plan of rank 0.
        plans, tally.left_out = world.on_rank0(lambda: without_problems(preparation))
        jobs = [job for _, jobs_of_checkpoint in plans for job in jobs_of_checkpoint]
        tally.jobs, tally.is_rank0 = jobs, world.is_rank0
        rates: dict[Key, float] = {}  # of this machine: networks of one architecture have the same
        for checkpoint, jobs_of_checkpoint in plans:
            _run_checkpoint(preparation, checkpoint, jobs_of_checkpoint, tally, rates)
    return tally


def _run_checkpoint(
    preparation: Preparation, checkpoint: LoadedCheckpoint, jobs: Sequence[Job], tally: Tally, rates: dict[Key, float]
) -> None:
    """Run the jobs of one checkpoint that have no result yet, in groups that share work.

    rates: those that the announcements of earlier checkpoints measured.
    """
    space, world = preparation.space, preparation.space.world
    export = preparation.exports.pop(checkpoint.used.key, None)  # if this process has loaded it already
    number = {job.path: f"  [{count}/{len(jobs)}]" for count, job in enumerate(jobs, start=1)}

    def say_once(*lines: str) -> None:
        say(*(lines if world.is_rank0 else ()))

    def say_of_each(jobs: Sequence[Job], ending: str) -> None:
        say_once(*(f"{number[job.path]} {job.title}{ending}" for job in jobs))

    say_once(checkpoint_title(checkpoint))
    if checkpoint.used.assumed:
        say_once(f"  assumed: {checkpoint.used.assumed}")
    done = [job for job in jobs if job.state == "done"]
    say_of_each(done, ": exists, skipped")
    tally.skipped += len(done)
    if len(done) == len(jobs):
        return
    export = world.on_all_ranks(lambda: export or _loaded(checkpoint))
    announced = announcement(jobs, export, space, rates) if world.is_rank0 else ()
    say_once(*size_lines(checkpoint, jobs), *announced)
    if not export.spec.has_class_token:
        say_once("  it has no class token: protocols that read it read avg, the mean of the patches, instead")
    for group, group_space in grouped([job for job in jobs if job.state != "done"], export, space):
        if not space.reread and world.on_rank0(partial(_made_meanwhile, group, space.skip_bad)):
            say_of_each(group, ": made by another run meanwhile, skipped")
            tally.skipped += len(group)
            continue
        say_of_each(group, " ...")
        with Progress(", ".join(job.title for job in group), None):
            for job, outcome, seconds in run_together(group, export, group_space):
                outcome = common_outcome(job, outcome, world)
                if world.is_rank0:
                    result = result_of(job, checkpoint, space, outcome, seconds)
                    is_kept = _write(job, result, outcome) == failure_path(job.path)
                    title = f"{job.title}: " if len(group) > 1 else ""
                    kept = "; the earlier result is kept" if is_kept else ""
                    say(f"{number[job.path]} {title}{result_line(result)}{kept}")
                    tally.results.append((result, export.facts))
                    if job.head and isinstance(outcome, Outcome) and outcome.head:
                        write_head(job.head, outcome.head, job.chosen.task, job.network(export), space, result)
                        say(f"    head: {job.head}")
                    elif job.head and not isinstance(outcome, Exception):
                        say("    no head is kept: images with several labels have none")
                if isinstance(outcome, Exception):
                    tally.failed.append(f"{checkpoint.used.name}: {job.title}: {in_one_line(outcome)}")
                    tally.errors.append(outcome)
                else:
                    tally.done += 1


def _made_meanwhile(jobs: Sequence[Job], skip_bad: bool) -> bool:
    """Whether all jobs have results by now, which another run wrote since the preparation."""
    return all(job_state(job.path, job.data, job.chosen.task, skip_bad, job.head) == "done" for job in jobs)


def _loaded(checkpoint: LoadedCheckpoint) -> FrozenExport:
    """The export of a checkpoint, loaded again. ValueError if it was replaced since the preparation."""
    export = load_frozen(checkpoint.reference)
    if export.digest != checkpoint.used.digest:
        raise ValueError(f"{checkpoint.reference} was replaced during this run; run the same command again")
    return export


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


def _write(job: Job, result: Result, outcome: Outcome | Exception) -> Path:
    """Write the result of a job; returns its path, or that of the failure if an earlier good result was kept."""
    if isinstance(outcome, Exception):
        return record(job.path, result, {}, log=text_of([*traceback_of(outcome), ""]))
    return record(job.path, result, arrays_of(outcome))
