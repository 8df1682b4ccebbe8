"""What the jobs of a run will do and take, for `bench plan` and `--dry-run`: counted by their tasks, timed by a
calibration or an assumed machine.

Work that several tasks do together, such as the pass for frozen features, is counted once. Nothing is run or written.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from statistics import fmean
from textwrap import wrap
from typing import Any

from bench.cli.output import in_one_line
from bench.cli.settings import setting_text
from bench.published.values import SETS
from bench.results.environment import cores
from bench.results.record import DataUsed
from bench.run.calibration import (
    Calibration,
    Machine,
    Speed,
    calibrated,
    calibration_path,
    read_calibration,
    seconds_of_work,
)
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.prepare import Job, Preparation, RunRequest, checkpoint_title, prepare
from bench.run.suites import ChosenProtocol
from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.printing import say
from engine.tasks import Task, Workspace
from engine.work import Part, Scale, Work
from imagesets.sets import open_set

STEPS = ((86400, "d"), (3600, "h"), (60, "min"))


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


@dataclass(kw_only=True)
class Shares:
    """What the tasks of one export and image set have done so far."""

    done: dict[str, float] = field(default_factory=dict)  # what is read -> units done

    def left(self, work: Work, keys: Mapping[str, str]) -> Work:
        """The work that is left of a task's, which then counts as done. keys: `of` of a part -> what is read."""
        return replace(work, parts=tuple(self._left(part, keys) for part in work.parts))

    def _left(self, part: Part, keys: Mapping[str, str]) -> Part:
        key = keys.get(part.of, "")
        if not key:
            return part
        before = self.done.get(key, 0.0)
        self.done[key] = max(before, part.count)
        return replace(part, count=max(part.count - before, 0.0))


def shared_keys(task: Task, parts: Iterable[Part], export: Any, space: Workspace) -> dict[str, str]:
    """`of` of each part that other tasks may do as well -> what is read, the same text in all of them.

    Features are shared where `Task.features` names the transform, augmented images where a task's `stream` names the
    stream; both are empty for tasks that read their images themselves.
    """
    transforms = ",".join(task.features(export, space))
    stream = task.stream(export, space)
    inside = f" of {getattr(space, 'data', '')}"
    source = {
        "features": transforms and transforms + inside,
        "crops": stream and stream + inside,
        "libraries": "process",
    }
    return {part.of: f"{part.of} by {source[part.kind]}" for part in parts if part.of and source.get(part.kind)}


Classes = Callable[[Job], int]  # of the image set of a job


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One job, what it does, and what that takes."""

    job: Job
    images: Mapping[str, int]  # split -> images that it reads
    work: Work = field(default_factory=Work)  # without what earlier jobs do for it
    seconds: float | None = None  # None: not calibrated, or the task does not say what it does
    problem: str = ""  # why it would fail

    @property
    def passes(self) -> float:
        """Images through a network, in passes over both splits."""
        return self.work.images / max(sum(self.images.values()), 1)


def forecasts(
    jobs: Sequence[Job],
    export: FrozenExport,
    space: Workspace,
    speeds: Mapping[str, Speed],
    classes: Classes,
    count_models: bool = True,
) -> list[Forecast]:
    """Of the jobs of one export, in their order. speeds: name of the image set -> how fast it goes there.

    count_models: build the models of dense tasks to count their operations, which takes seconds.
    """
    shares = Shares()
    found = []
    for job in sorted(jobs, key=lambda job: job.state != "done"):  # what is done has left its features on disk
        inside, images = job.place(space), job.images
        if job.problem:
            found.append(Forecast(job=job, images=images, problem=job.problem))
            continue
        try:
            known = models_of(speeds.get(job.data.name), job, export, classes, count_models)
            work = work_of(job, export, inside, images, classes(job), known)
            keys = shared_keys(job.chosen.task, work.parts, export, inside)
        except Exception as error:  # mostly settings that do not fit; a plugin may raise anything
            found.append(Forecast(job=job, images=images, problem=in_one_line(error)))
            continue
        left = shares.left(work, keys)
        speed = speeds.get(job.data.name)
        timed = seconds_of_work(left, speed, job.chosen.name) if speed and left.parts else None
        found.append(Forecast(job=job, images=images, work=left, seconds=timed))
    return sorted(_in_company(found, export, space), key=lambda each: jobs.index(each.job))


def _in_company(found: Sequence[Forecast], export: FrozenExport, space: Workspace) -> list[Forecast]:
    """Jobs on one stream run together, and their time is divided equally among them, as in results."""
    streams: dict[Any, list[float]] = {}
    keys = [(each.job.data.url, each.job.chosen.key, each.job.chosen.task.stream(export, space)) for each in found]
    for key, each in zip(keys, found, strict=True):
        if key[-1] and each.job.state != "done" and each.seconds is not None:
            streams.setdefault(key, []).append(each.seconds)
    together = {key: fmean(seconds) for key, seconds in streams.items()}
    return [
        each if each.seconds is None else replace(each, seconds=together.get(key, each.seconds))
        for key, each in zip(keys, found, strict=True)
    ]


def models_of(
    speed: Speed | None, job: Job, export: FrozenExport, classes: Classes, count_models: bool
) -> Mapping[Any, float]:
    """Operations of the models that a task builds: those of a calibration, else counted, if asked."""
    if isinstance(speed, Calibration) and job.chosen.name in speed.models:
        return speed.models[job.chosen.name]
    return job.chosen.task.model_flops(export.spec, classes(job)) if count_models else {}


def work_of(
    job: Job,
    export: FrozenExport,
    space: Workspace,
    images: Mapping[str, int],
    classes: int,
    flops: Mapping[Any, float],
) -> Work:
    """All that a job does by itself."""
    opened = space.opened.known(space.data, "val")  # None of images of an assumed machine, which are not here
    scale = Scale(
        spec=export.spec,
        images=images,
        classes=classes,
        several_labels=getattr(opened, "has_several_labels", False),
        flops=flops,
        batch_size=space.batch_size,
        device=space.device,
    )
    return job.chosen.task.cost(scale)


def classes_of_opened(space: Workspace) -> Classes:
    """The classes of a set that this process has open."""
    return lambda job: len(space.opened.get(job.data.url, "val", open_set).classes)


def text_of_forecast(each: Forecast) -> str:
    """`12 s; 60000 images in 1.0 passes, 0.4 PFLOP, 15 MB disk, 0.4 GB memory`, without a time that is not known."""
    if each.problem:
        return f"would fail: {each.problem}"
    if not each.work.parts:
        return "no time known: the task does not say what it does"
    taken = "" if each.seconds is None else f"{duration(each.seconds)}; "
    counted = f"{each.work.images:.0f} images in {each.passes:.1f} passes, {operations(each.work.flops)}"
    return f"{taken}{counted}, {size(each.work.disk)} disk, {size(each.work.memory)} memory"


def expectations(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> dict[Path, float]:
    """Result path -> seconds that the job should take, where `bench plan` has calibrated before."""
    speeds = kept_calibrations(jobs, export, space)
    if not speeds:
        return {}
    found = forecasts(jobs, export, space, speeds, classes_of_opened(space), count_models=False)
    known = [each for each in found if each.seconds and each.job.chosen.name in speeds[each.job.data.name].of_task]
    return {each.job.path: each.seconds for each in known if each.seconds}


def kept_calibrations(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> dict[str, Calibration]:
    """Name of each image set on which this machine was measured before -> what was measured."""
    fingerprints = {job.data.name: job.data.fingerprints for job in jobs}
    found = {name: read_calibration(calibration_path(space, export, each)) for name, each in fingerprints.items()}
    return {name: each for name, each in found.items() if each}


def forecasts_without_measuring(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[Forecast]:
    """With times where they are known, and without building the models of dense tasks: quick, for a dry run."""
    speeds = kept_calibrations(jobs, export, space)
    return forecasts(jobs, export, space, speeds, classes_of_opened(space), count_models=False)


STATES: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
INDENT = " " * 6
MAX_SHOWN = 8  # protocols whose settings are shown


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job and what it would do."""

    job: Job
    images: Mapping[str, int]  # split -> images that it would read
    sizes: Mapping[str, Any] = field(default_factory=dict)  # what it would do in numbers, by name
    problem: str = ""  # why it would fail
    forecast: Forecast | None = None  # what that takes

    def lines(self, width: int) -> Iterator[str]:
        """Three lines, the last where the task counts its work; more if one is longer than `width`."""
        counts = " + ".join(f"{count} {split}" for split, count in self.images.items())
        yield f"  {self.job.title}: {counts} images, {STATES[self.job.state]}"
        # A name and its value stay on one line.
        words = [f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in self.sizes.items()]
        yield from _wrapped(f"would fail: {self.problem}" if self.problem else ", ".join(words), width)
        if self.forecast and self.forecast.work.parts and not self.problem:
            yield from _wrapped(text_of_forecast(self.forecast), width)


def planned(job: Job, spec: FrozenSpec, forecast: Forecast | None = None) -> Planned:
    """What a job would do with a network of this architecture."""
    if job.problem or job.state == "done":
        return Planned(job=job, images=job.images, problem=job.problem)
    return Planned(job=job, images=job.images, sizes=job.chosen.task.summary(spec, job.images), forecast=forecast)


def show_dry_run(preparation: Preparation, width: int) -> int:
    """Print what a run would do. Returns 1 if a checkpoint or a task would fail."""
    plans, space = {}, preparation.request.space
    for checkpoint, jobs in preparation.jobs:
        job_forecasts = forecasts_without_measuring(jobs, preparation.exports.pop(checkpoint.key), space)
        plans[checkpoint_title(checkpoint)] = [
            planned(job, checkpoint.spec, forecast) for job, forecast in zip(jobs, job_forecasts, strict=True)
        ]
    shown = {entry.job.chosen.name for entries in plans.values() for entry in entries}
    selected = [chosen for chosen in preparation.protocols if chosen.name in shown or not plans]  # others are left out
    return show(plans, preparation.unavailable, selected, width)


def show(
    plans: Mapping[str, Sequence[Planned]], unavailable: Sequence[str], selected: Sequence[ChosenProtocol], width: int
) -> int:
    """Print the plans, by title of the checkpoint. Returns 1 if a checkpoint or a task would fail."""
    say(*settings_lines(selected, width))
    for title, entries in plans.items():
        say(title, *(line for entry in entries for line in entry.lines(width)))
    for reason in unavailable:
        say(f"cannot be used: {reason}")
    everything = [entry for entries in plans.values() for entry in entries]
    if sum("forward passes" in entry.sizes for entry in everything) > 1:
        say("tasks that read the same features share their forward passes")
    failing = sum(bool(entry.problem) for entry in everything)
    would_fail = f", of which {failing} would fail" if failing else ""
    timed = [entry.forecast.seconds is not None for entry in everything if entry.forecast and entry.job.state != "done"]
    if not all(timed):
        unknown = f"of {timed.count(False)} of {len(timed)} jobs" if any(timed) else "of these jobs"
        say(f"the time {unknown} is not known: bench plan, with the same options, measures it")
    to_do = sum(entry.job.state != "done" for entry in everything)
    say(f"{to_do} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing or unavailable else 0


def settings_lines(selected: Sequence[ChosenProtocol], width: int) -> Iterator[str]:
    """All settings of every protocol, as `--set` takes them; of many protocols, the command that lists them."""
    if len(selected) > MAX_SHOWN:
        yield f"settings of these {len(selected)} protocols: bench list PROTOCOL"
        return
    yield "settings; what they mean: bench list PROTOCOL"
    for chosen in selected:
        values = [f"{each.name}={quote(setting_text(getattr(chosen.task, each.name)))}" for each in fields(chosen.task)]
        yield f"  {chosen.name}, version {chosen.protocol.version}{' (modified)' if chosen.changes else ''}"
        yield from _wrapped(" ".join(values), width)


def _wrapped(text: str, width: int) -> list[str]:
    lines = wrap(
        text,
        max(width, 60),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


CLASSES = {"imagenet": 1000, "ade20k": 150, "cityscapes": 19, "coco": 80}  # of the sets that papers evaluate on
Command = Callable[[LoadedCheckpoint, Job], list[str]]  # words of the `bench run` of one job


@dataclass(frozen=True, kw_only=True)
class CheckpointForecasts:
    """The jobs of one checkpoint, cheap ones first."""

    checkpoint: LoadedCheckpoint
    jobs: Sequence[Forecast]


def forecasts_by_checkpoint(
    request: RunRequest, assumed: Machine | None, fresh: bool
) -> tuple[list[CheckpointForecasts], list[str]]:
    """All jobs without a result, and lines about what their times rest on. ValueError for a wrong request.

    Images of an assumed machine may be named alone, as `imagenet`: their counts are known.
    """
    named = [text for text in request.data if text in SETS]
    if named and not assumed:
        raise ValueError(f"--data {named[0]}: to measure this machine, images are read: give NAME=URL, or add --assume")
    rest = replace(request, data=tuple(text for text in request.data if text not in SETS))
    preparation = prepare(rest, known=[_known(name) for name in named])
    say(*preparation.left_out, errors=True)
    opened = classes_of_opened(request.space)

    def classes(job: Job) -> int:
        return CLASSES[job.data.name] if job.data.name in named else opened(job)

    found, lines = [], list(assumed.lines()) if assumed else []
    for checkpoint, jobs in preparation.jobs:
        export = preparation.exports[checkpoint.key]
        todo = [job for job in jobs if job.state != "done"]
        speeds: dict[str, Speed] = {job.data.name: assumed for job in jobs} if assumed else {}
        if not assumed:
            measured = _calibrated(request, export, todo, classes, fresh)
            lines += [line for name, each in measured.items() for line in calibration_lines(name, each)]
            speeds |= measured
        each = forecasts(jobs, export, request.space, speeds, classes)
        found.append(CheckpointForecasts(checkpoint=checkpoint, jobs=[one for one in each if one.job.state != "done"]))
    return found, list(dict.fromkeys(lines))


def _known(name: str) -> DataUsed:
    return DataUsed(name=name, url=SETS[name].url, images=SETS[name].images)


def _calibrated(
    request: RunRequest, export: FrozenExport, jobs: Sequence[Job], classes: Callable[[Job], int], fresh: bool
) -> dict[str, Calibration]:
    """Name of the image set -> what is measured on it, for its jobs."""
    found = {}
    for name, first in {job.data.name: job for job in reversed(jobs)}.items():
        space = first.place(request.space)
        tasks = [(job.chosen.name, job.chosen.task) for job in jobs if job.data.name == name]
        path = calibration_path(space, export, first.data.fingerprints)
        found[name] = calibrated(path, export, space, tasks, classes(first), fresh)
    return found


def calibration_lines(name: str, found: Calibration) -> Iterator[str]:
    """What was measured, for people."""
    rates = [f"{kind} {1 / found.units[kind]:.4g} images/s" for kind in ("features", "crops") if found.units.get(kind)]
    rates += [f"reading {1 / found.reading:.4g} images/s a core"] if found.reading else []
    rates += [f"{kind} {rate / 1e9:.4g} GFLOP/s" for kind, rate in found.flops.items()]
    where = f"{found.machine.get('cpu')}, {found.device}, {found.precision}, {found.architecture}"
    yield f"{name}: calibrated {found.date} in {found.took:g} s on {where}: {', '.join(rates)}"


def report(found: Sequence[CheckpointForecasts], lines: Sequence[str], memory: float, gpus: int) -> Iterator[str]:
    """A line for each job, then the totals."""
    everything = [each for one in found for each in one.jobs]
    for one in found:
        yield checkpoint_title(one.checkpoint)
        yield from (f"  {each.job.title}: {text_of_forecast(each)}" for each in one.jobs)
    known = [each for each in everything if each.seconds is not None]
    disk, most = sum(each.work.disk for each in everything), max((each.work.memory for each in everything), default=0)
    whole, flops = sum(each.seconds or 0 for each in known), sum(each.work.flops for each in everything)
    counted = f"{len(known)} of {len(everything)} jobs one after another: {duration(whole)}"
    yield f"{counted}, {operations(flops)}, up to {size(disk)} disk, {size(most)} memory"
    yield f"at once: {at_once(most, memory, gpus)}"
    yield from lines


def at_once(memory_of_job: float, memory: float, gpus: int) -> str:
    """How many jobs can run at once, and why."""
    fitting = int(memory // memory_of_job) if memory_of_job and memory else 1
    if not fitting:
        return f"none: the largest does not fit into the {size(memory)} that are free, give a smaller --batch-size"
    if gpus:
        return f"{gpus} jobs, one on each GPU" if gpus > 1 else "1 job, on the GPU"
    return f"1 job, which uses all {cores()} cores; memory has room for {fitting}"


def entries(found: Sequence[CheckpointForecasts], command: Command, gpus: int) -> list[dict[str, Any]]:
    """A JSON value for each job, cheapest first, for schedulers."""
    made = [
        {
            "checkpoint": one.checkpoint.used.name,
            "protocol": each.job.protocol.name,
            "data": each.job.data.name,
            "command": command(one.checkpoint, each.job),
            "seconds": each.seconds,
            "images": round(each.work.images),
            "flops": each.work.flops,
            "memory_bytes": round(each.work.memory),
            "disk_bytes": round(each.work.disk),
            "gpus": gpus,
            "problem": each.problem,
        }
        for one in found
        for each in one.jobs
    ]
    return sorted(made, key=lambda entry: (entry["seconds"] is None, entry["seconds"] or 0.0))


def script_lines(made: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A shell script with a command for each job, cheapest first. The first one that reads features computes them."""
    yield "#!/usr/bin/env bash"
    yield "# Written by bench plan. Every command can be repeated: what is done is skipped or goes on."
    yield "set -euo pipefail"
    for entry in made:
        taken = "no estimate" if entry["seconds"] is None else f"about {duration(entry['seconds'])}"
        why = f"; would fail: {entry['problem']}" if entry["problem"] else ""
        yield f"# {entry['checkpoint']}, {entry['protocol']} on {entry['data']}: {taken}{why}"
        line = shlex.join(entry["command"])
        yield f"# {line}" if entry["problem"] else line


def as_json(made: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(made), indent=1)
