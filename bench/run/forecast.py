"""What the jobs of a run will do and take, for `bench plan` and `--dry-run`: counted by their tasks, and timed by a
calibration or an assumed machine.

Work that several jobs share, such as the pass for frozen features, counts for the first of them.
"""

import shlex
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

from bench.cli.options import EvaluationOptions
from bench.cli.output import in_one_line, table
from bench.cli.settings import setting_text
from bench.published.values import SETS
from bench.results.record import DataUsed
from bench.run.calibration import DECODING, Calibration, Machine, pass_seconds, scratch
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.prepare import Job, Preparation, checkpoint_title, group_of, prepare
from bench.run.suites import ChosenProtocol
from checkpoints.frozen import FrozenExport
from engine.files import digest
from engine.machine import cores
from engine.printing import say
from engine.tasks import Task, Workspace
from engine.work import Kind, Part, Scale, Work

STEPS = ((86400, "d"), (3600, "h"), (60, "min"))
# What seconds are spent on, in the words of a plan.
TERMS: Mapping[Kind, str] = {
    "features": "forward passes",
    "crops": "forward passes",
    "further crops": "forward passes",
    "evaluation": "forward passes",
    "training": "training steps",
    "updates": "training steps",
    "head steps": "heads",
    "head images": "heads",
    "comparisons": "search",
    "fits": "fits",
    "fit rows": "fits",
}
# What a network waits for, where not for decoding.
WAITING: Mapping[Kind, str] = {"training": "augmentation", "further crops": "augmentation"}


def duration(seconds: float) -> str:
    """`4.2 s`, `42 s`, `3.5 min`, `2.1 h`, `4.0 d`"""
    for step, name in STEPS:
        if seconds >= 2 * step:
            return f"{seconds / step:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """`0.4 MB`, `15 MB`, `2.1 GB`"""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def operations(count: float) -> str:
    """`0.03 TFLOP`, `1.5 PFLOP`"""
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"


def shares(terms: Mapping[str, float]) -> list[str]:
    """`, 87% decoding` for each term, the largest first, without those below half a percent."""
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda term: -term[1])
    return [f", {seconds / total:.0%} {name}" for name, seconds in largest if seconds > 0.005 * total]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One job, what it does, and what that takes."""

    job: Job
    work: Work = field(default_factory=Work)  # without what earlier jobs do for it
    seconds: float | None = None  # None: not measured, or the task does not count its work
    terms: Mapping[str, float] = field(default_factory=dict)  # what is done -> its share of the seconds
    problem: str = ""  # why it would fail

    @property
    def text(self) -> str:
        """`12 s; 60000 images in 1.0 passes, 0.4 PFLOP, 15 MB disk, 0.4 GB memory`, without a time that is not known;
        trainings also have their iterations. Passes are over all images of the set; features that another job
        extracts are not read again."""
        if self.problem:
            return f"would fail: {self.problem}"
        work = self.work
        if not work.parts:
            return f"no time known: {self.job.chosen.key} does not count its work"
        passes = work.images / max(sum(self.job.images.values()), 1)
        counts = [f"{work.images:.0f} images in {passes:.1f} passes" if work.images else "no images to read"]
        counts += [f"{work.iterations:.0f} iterations"] if work.iterations else []
        counts += [operations(work.flops), f"{size(work.disk)} disk", f"{size(work.memory)} memory"]
        if self.seconds is None:
            return ", ".join(counts)
        return f"{duration(self.seconds)}{''.join(shares(self.terms)[:1])}; {', '.join(counts)}"

    def timed(self, speed: Calibration | Machine) -> "Forecast":
        """With the time that it takes; without one where its task was not measured."""
        task = task_key(self.job)
        if not self.work.parts or (isinstance(speed, Calibration) and speed.unmeasured(self.work, task)):
            return self
        terms: dict[str, float] = defaultdict(float)
        for part in self.work.parts:
            seconds, decoding = speed.seconds(part, task), speed.decoding(part)
            terms[WAITING.get(part.kind, "decoding")] += decoding
            terms[TERMS.get(part.kind, "start and end")] += seconds - decoding
        return replace(self, seconds=sum(terms.values()), terms=dict(terms))


def task_key(job: Job) -> str:
    """A task with its settings, in a calibration: `knn@dino 1a2b3c4d`."""
    return f"{job.chosen.name} {digest(dict(job.settings))[:8]}"


CLASSES = {"imagenet": 1000, "ade20k": 150, "cityscapes": 19, "coco": 80}  # of sets that --assume takes by name


def count_jobs(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[Forecast]:
    """The work of each job of one export that is not done, in their order."""
    done: dict[Hashable, float] = {}  # what is read, or who reads together -> units that earlier jobs do
    for job in sorted(jobs, key=lambda job: job.state != "done"):  # what is done has left its features on disk
        if job.problem or (job.state == "done" and job.chosen.task.LAYOUT):
            if job.problem and job.state != "done":
                yield Forecast(job=job, problem=job.problem)
            continue
        opened = space.opened.known(job.data.url, "val")  # None of sets that --assume takes by name
        scale = Scale(
            spec=export.spec,
            images=job.images,
            classes=len(opened.classes) if opened is not None else CLASSES.get(job.data.name, 0),
            several_labels=getattr(opened, "has_several_labels", False),
            batch_size=space.batch_size,
            device=space.device,
        )
        try:
            work = job.chosen.task.cost(scale)
            keys = [shared_key(job.chosen.task, part, export, job.place(space)) for part in work.parts]
        except Exception as error:  # mostly settings that do not fit; a plugin may raise anything
            if job.state != "done":
                yield Forecast(job=job, problem=in_one_line(error))
            continue
        if job.state == "done":
            done |= {key: part.count for key, part in zip(keys, work.parts, strict=True) if part.kind == "features"}
            continue
        yield Forecast(job=job, work=without_done(work, keys, done, group_of(job, export, space)))


def without_done(work: Work, keys: Sequence[str], done: dict[Hashable, float], group: Hashable) -> Work:
    """The work without units that are done, which `done` (what is read -> units) then has too. keys: of its parts.

    group: of the job (`group_of`). Its streams crop the same decoded images, which `done` counts under it.
    """
    parts = []
    for part, key in zip(work.parts, keys, strict=True):
        before = done.get(key, 0.0) if key else 0.0
        if key:
            done[key] = max(before, part.count)
        if key and part.kind == "crops":
            decoded = done.get(group, 0.0)
            done[group] = max(decoded, part.count)
            if (cropped := min(decoded, part.count) - before) > 0:
                parts.append(replace(part, kind="further crops", count=cropped))
                before += cropped
        parts.append(replace(part, count=max(part.count - before, 0.0)))
    return replace(work, parts=tuple(parts))


def shared_key(task: Task, part: Part, export: FrozenExport, space: Workspace) -> str:
    """What a part reads, the same text in all jobs that read it; "" where none can share it.

    Features are shared where `Task.features` names the transform, augmented images where `Task.stream` names the
    stream; both are empty for tasks that read their images themselves.
    """
    if not part.of:
        return ""
    if part.kind == "libraries":
        return part.of
    source = {"features": ",".join(task.features(export, space)), "crops": task.stream(export, space)}
    return f"{part.of} of {space.data} by {source[part.kind]}" if source.get(part.kind) else ""


def forecasts_without_measuring(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[Forecast]:
    """What jobs that are not done take; with times where an earlier plan has measured."""
    for forecast in count_jobs(jobs, export, space):
        yield forecast.timed(Calibration.kept(space, export, forecast.job.data.fingerprints))


def expectations(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> dict[Path, float]:
    """Result path -> seconds that the job should take, where an earlier plan has measured."""
    measured = [job for job in jobs if task_key(job) in Calibration.kept(space, export, job.data.fingerprints).units]
    forecasts = forecasts_without_measuring(measured, export, space)
    return {forecast.job.path: forecast.seconds for forecast in forecasts if forecast.seconds}


STATES: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
INDENT = 6  # of what belongs to a job or a protocol
MAX_LISTED = 8  # protocols whose settings are listed


def show_dry_run(preparation: Preparation) -> int:
    """Print what a run would do. Returns 1 if a checkpoint or a task would fail."""
    space, forecasts = preparation.space, {}
    jobs = [job for _, planned in preparation.jobs for job in planned]
    for checkpoint, planned in preparation.jobs:
        export = preparation.exports.pop(checkpoint.used.key)
        forecasts[checkpoint.used.key] = {f.job.path: f for f in forecasts_without_measuring(planned, export, space)}
    names = {job.chosen.name for job in jobs}
    selected = [chosen for chosen in preparation.protocols if chosen.name in names or not preparation.jobs]
    say(*settings_lines(selected))  # others are left out
    for checkpoint, planned in preparation.jobs:
        say(checkpoint_title(checkpoint))
        for job in planned:
            say(*dry_run_lines(job, checkpoint, forecasts[checkpoint.used.key].get(job.path)))
    say(*(f"cannot be used: {reason}" for reason in preparation.unavailable))
    if len(jobs) > 1 and any(not job.chosen.task.LAYOUT for job in jobs):
        say("tasks that read the same features share their forward passes")
    everything = [forecast for of_checkpoint in forecasts.values() for forecast in of_checkpoint.values()]
    failing = sum(bool(forecast.problem) for forecast in everything)
    untimed = sum(forecast.seconds is None for forecast in everything)
    if untimed:
        unknown = f"of {untimed} of {len(everything)} jobs" if untimed < len(everything) else "of these jobs"
        say(f"the time {unknown} is not known: bench plan, with the same options, measures it")
    would_fail = f", of which {failing} would fail" if failing else ""
    say(f"{len(everything)} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing or preparation.unavailable else 0


def dry_run_lines(job: Job, checkpoint: LoadedCheckpoint, forecast: Forecast | None) -> Iterator[str]:
    """Three lines, the last where the task counts its work."""
    counts = " + ".join(f"{count} {split}" for split, count in job.images.items())
    yield f"  {job.title}: {counts} images, {STATES[job.state]}"
    if forecast is None:
        return
    if forecast.problem:
        yield from table([(forecast.text,)], indent=INDENT)
        return
    summary = job.chosen.task.summary(checkpoint.spec, job.images)
    yield from table([(", ".join(f"{name} {value}" for name, value in summary.items()),)], indent=INDENT)
    if forecast.work.parts:
        yield from table([(forecast.text,)], indent=INDENT)


def settings_lines(selected: Sequence[ChosenProtocol]) -> Iterator[str]:
    """All settings of every protocol, as `--set` takes them; of many protocols, the command that lists them."""
    if len(selected) > MAX_LISTED:
        yield f"settings of these {len(selected)} protocols: bench list PROTOCOL"
        return
    yield "settings; what they mean: bench list PROTOCOL"
    for chosen in selected:
        names = [entry.name for entry in fields(chosen.task)]
        values = [f"{name}={quote(setting_text(getattr(chosen.task, name)))}" for name in names]
        yield f"  {chosen.name}, version {chosen.protocol.version}{' (modified)' if chosen.changes else ''}"
        yield from table([(" ".join(values),)], indent=INDENT)


MEASURING = 25.0  # seconds of measuring in all, after which no job's measuring begins
LIMIT = 30.0  # seconds after which what is being measured is given up
MAX_MEASURING = 4.0  # seconds of measuring for one job
Command = Callable[[LoadedCheckpoint, Sequence[Job]], list[str]]  # words of the `bench run` of some jobs
Plan = Sequence[tuple[LoadedCheckpoint, list[Forecast]]]


def plan(options: EvaluationOptions, assumed: Machine | None, fresh: bool, tell: Callable[..., None]) -> Plan:
    """Forecasts of all jobs without a result, by checkpoint. ValueError for a wrong request.

    Sets of an assumed machine may be named alone, as `imagenet`: their counts are known. fresh: measure again. tell:
    prints counts at once, and times as they are measured.
    """
    named = [text for text in options.data if text in SETS]
    if named and not assumed:
        raise ValueError(f"--data {named[0]}: to measure this machine, images are read: give NAME=URL, or add --assume")
    rest = replace(options, data=tuple(text for text in options.data if text not in SETS))
    known = [DataUsed(name=name, url=SETS[name].url, images=SETS[name].images) for name in named]
    preparation = prepare(rest, known=known)
    space = preparation.space
    say(*preparation.left_out, errors=True)
    counted = []
    for checkpoint, jobs in preparation.jobs:
        export, forecasts = preparation.exports[checkpoint.used.key], []
        tell(checkpoint_title(checkpoint))
        for forecast in count_jobs(jobs, export, space):
            speed = assumed or Calibration.kept(space, export, forecast.job.data.fingerprints)
            if fresh and isinstance(speed, Calibration):
                speed.path.unlink(missing_ok=True)
                speed.units.clear()
            forecasts.append(forecast.timed(speed))
            tell(f"  {forecast.job.title}: {forecasts[-1].text}")
        counted.append((checkpoint, forecasts))
    if not assumed:
        measure_jobs(counted, preparation, tell)
    return counted


class MeasuringEnded(BaseException):
    """The limit is over; no Exception, so that no library that is being timed catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A block that MeasuringEnded leaves after `seconds`; no limit outside the main thread, which alone has signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise MeasuringEnded

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_jobs(plan: Plan, preparation: Preparation, tell: Callable[..., None]) -> None:
    """Fill in the times of the jobs that lack one, those with the fewest operations first, as far as time allows."""
    started, space = time.perf_counter(), preparation.space
    lacking = [
        (checkpoint, forecasts, place)
        for checkpoint, forecasts in plan
        for place, forecast in enumerate(forecasts)
        if forecast.work.parts and forecast.seconds is None
    ]
    if not lacking:
        return
    # A job whose measuring takes too long comes last, so that no other one waits for it in every plan.
    lacking.sort(key=lambda entry: entry[1][entry[2]].work.flops)
    tell(f"measuring this machine for at most {LIMIT:.0f} s:")
    measured = 0
    with suppress(MeasuringEnded), time_limit(LIMIT):
        for checkpoint, forecasts, place in lacking:
            left = started + MEASURING - time.perf_counter()
            if left <= 0:
                break
            forecast, export = forecasts[place], preparation.exports[checkpoint.used.key]
            calibration = Calibration.kept(space, export, forecast.job.data.fingerprints)
            try:
                measure_job(forecast, calibration, export, space, min(left / (len(lacking) - measured), MAX_MEASURING))
                forecasts[place] = forecast.timed(calibration)
                tell(f"  {forecast.job.title}: {duration(forecasts[place].seconds or 0.0)}")
            except Exception as error:  # what prevents a benchmark prevents the run, which says more
                tell(f"  {forecast.job.title}: not measured: {in_one_line(error)}")
            measured += 1
    if measured < len(lacking):
        tell(f"  {len(lacking) - measured} jobs are not measured yet: the same command goes on with them")
    tell(f"measured in {duration(time.perf_counter() - started)}")


def measure_job(
    forecast: Forecast, calibration: Calibration, export: FrozenExport, space: Workspace, seconds: float
) -> None:
    """Measure what a job does, unless it is known, in about `seconds`."""
    task = task_key(forecast.job)
    with scratch(forecast.job.place(space)) as inside:
        if task not in calibration.units:
            calibration.keep(task, forecast.job.chosen.task.benchmark(export, inside, seconds))
        for kind in sorted(calibration.unmeasured(forecast.work, task)):
            whole, decoding = pass_seconds(kind, export, inside, seconds / 4)
            calibration.keep("", {kind: whole})
            calibration.keep(DECODING, {kind: decoding})


def totals(plan: Plan, memory: float, gpus: int, decode: str) -> Iterator[str]:
    """All jobs together, what takes their time, and how many fit at once. memory: free bytes."""
    forecasts = [forecast for _, of_checkpoint in plan for forecast in of_checkpoint]
    if not forecasts:
        yield "nothing is left to run: every result exists"
        return
    times = [forecast.seconds for forecast in forecasts if forecast.seconds is not None]
    flops, disk = (sum(getattr(forecast.work, name) for forecast in forecasts) for name in ("flops", "disk"))
    largest = max((forecast.work.memory for forecast in forecasts), default=0.0)
    jobs = f"{len(times)} of {len(forecasts)} jobs one after another: {duration(sum(times))}"
    yield f"{jobs}, {operations(flops)}, up to {size(disk)} disk, {size(largest)} memory"
    terms: dict[str, float] = defaultdict(float)
    for name, seconds in (term for forecast in forecasts for term in forecast.terms.items()):
        terms[name] += seconds
    if terms:
        yield f"of this time{''.join(shares(terms))}"
    waiting = [name for name in ("augmentation", "decoding") if terms[name] > 0.1 * sum(times)]
    if waiting:
        fast = "--decode fast, " if decode == "exact" else ""
        yield f"networks wait for {' and '.join(waiting)}: {fast}more cores, and beside a GPU more --workers help"
    yield f"at once: {at_once(largest, memory, gpus)}"


def at_once(memory_of_job: float, memory: float, gpus: int) -> str:
    """How many jobs can run at once, and why."""
    fitting = int(memory // memory_of_job) if memory_of_job and memory else 1
    if not fitting:
        return f"none: the largest does not fit into the {size(memory)} that are free, give a smaller --batch-size"
    if gpus:
        return f"{gpus} jobs, one on each GPU" if gpus > 1 else "1 job, on the GPU"
    return f"1 job, which uses all {cores()} cores; memory has room for {fitting}"


def entries(plan: Plan, command: Command, gpus: int) -> list[dict[str, Any]]:
    """A JSON value for each job, cheapest first, for schedulers."""
    values = [
        {
            "checkpoint": checkpoint.used.name,
            "protocol": forecast.job.protocol.name,
            "data": forecast.job.data.name,
            "command": ["bench", *command(checkpoint, [forecast.job])],
            "seconds": forecast.seconds,
            "terms": forecast.terms,
            "images": round(forecast.work.images),
            "iterations": round(forecast.work.iterations),
            "flops": forecast.work.flops,
            "memory_bytes": round(forecast.work.memory),
            "disk_bytes": round(forecast.work.disk),
            "gpus": gpus,
            "problem": forecast.problem,
        }
        for checkpoint, forecasts in plan
        for forecast in forecasts
    ]
    return sorted(values, key=lambda entry: (entry["seconds"] is None, entry["seconds"] or 0.0))


def script_lines(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A shell script with a command for each job, cheapest first. The first one that reads features computes them."""
    yield "#!/usr/bin/env bash"
    yield "# Written by bench plan. Every command can be repeated: what is done is skipped or goes on."
    yield "set -euo pipefail"
    for entry in entries:
        duration_text = "no estimate" if entry["seconds"] is None else f"about {duration(entry['seconds'])}"
        why = f"; would fail: {entry['problem']}" if entry["problem"] else ""
        yield f"# {entry['checkpoint']}, {entry['protocol']} on {entry['data']}: {duration_text}{why}"
        line = shlex.join(entry["command"])
        yield f"# {line}" if entry["problem"] else line
