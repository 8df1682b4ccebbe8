"""Forecasts of a run for `bench plan` and `--dry-run`: tasks count their work, a few rates of the machine time it.

Work that several jobs share, such as the forward pass for frozen features, counts for the first of them. A job that
another checkpoint of the same architecture has run takes as long as that one.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from shlex import quote
from statistics import median
from typing import Any

from PIL import Image

from bench.checkpoints import LoadedCheckpoint
from bench.names import ready_device
from bench.options import EvaluationOptions
from bench.published.values import SETS
from bench.results.record import DataUsed, read_result
from bench.run.calibration import LIMIT, Machine, Measurements, keep_rates, kept_rates, measured, measurements
from bench.run.prepare import Job, Preparation, checkpoint_title, prepare, size_lines
from bench.run.sharing import shared_by
from bench.run.suites import ChosenProtocol
from bench.settings import setting_text
from checkpoints.frozen import FrozenExport
from engine.distributed import start_world
from engine.errors import UserError, in_one_line
from engine.machine import cores
from engine.printing import counted, say, table
from engine.tasks import Shared, Workspace
from engine.work import Part, Scale, Work

STEPS = ((86400, "d"), (3600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """A time as text: `4.2 s`, `42 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    for step, name in STEPS:
        if seconds >= 2 * step:
            return f"{seconds / step:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """A number of bytes as text: `0.4 MB`, `15 MB`, `2.1 GB`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def operations(count: float) -> str:
    """A number of floating-point operations as text: `0.03 TFLOP`, `1.5 PFLOP`."""
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"


def shares(terms: Mapping[str, float]) -> list[str]:
    """Shares of the total as text, `, 87% decoding`, the largest first, without those below half a percent."""
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda term: -term[1])
    return [f", {seconds / total:.0%} {name}" for name, seconds in largest if seconds > 0.005 * total]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A job with its work, and the time that this takes."""

    job: Job
    work: Work = field(default_factory=Work)  # without shared work that counts for earlier jobs
    seconds: float | None = None  # None: not measured, or the task does not count its work
    terms: Mapping[str, float] = field(default_factory=dict)  # name of a kind of work -> its part of the seconds
    problem: str = ""  # why the job would fail

    @property
    def text(self) -> str:
        """`12 s, 80% heads; 60000 images in 1.0 passes, 0.4 PFLOP, 15 MB disk, 0.4 GB memory`.

        Omits an unknown time; trainings also have their iterations. A pass is over all images of the set; images whose
        features another job extracts are not counted again.
        """
        if self.problem:
            return f"would fail: {self.problem}"
        work = self.work
        if not work.parts:
            return f"no time known: {self.job.chosen.key} does not count its work"
        passes = work.images / max(sum(self.job.images.values()), 1)
        counts = [f"{work.images:.0f} images in {passes:.1f} passes" if work.images else "no images to read"]
        counts += [f"{work.iterations:.0f} iterations"] if work.iterations else []
        counts += [operations(work.flops), f"{size(work.disk)} disk", f"{size(work.memory)} memory"]
        return ", ".join(counts) if self.seconds is None else f"{self.time}; {', '.join(counts)}"

    @property
    def time(self) -> str:
        """`12 s, 80% heads`, or that the time is unknown, with the operations that it would take."""
        if self.seconds is None:
            return f"time not known, {operations(self.work.flops)}"
        return f"{duration(self.seconds)}{''.join(shares(self.terms)[:1])}"

    def timed(self, machine: Machine) -> "Forecast":
        """The forecast with times; unchanged if it has them or a rate is not known."""
        parts = [machine.terms(part) for part in self.work.parts]
        if not parts or self.seconds is not None or None in parts:
            return self
        terms: dict[str, float] = defaultdict(float, start=machine.job)
        for name, seconds in (term for part in parts if part for term in part.items()):
            terms[name] += seconds
        return replace(self, seconds=sum(terms.values()), terms=dict(terms))


CLASSES = {"imagenet": 1000, "ade20k": 150, "cityscapes": 19, "coco": 80}  # of sets that --assume takes by name


def count_jobs(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[Forecast]:
    """Forecasts, without times, of the jobs of one export that are not done, in their order."""
    done: dict[Hashable, float] = {}  # key of shared work -> units that earlier jobs do
    for job in sorted(jobs, key=lambda job: job.state != "done"):  # finished jobs left their features on disk
        if job.problem or (job.state == "done" and job.chosen.task.LAYOUT):
            if job.problem and job.state != "done":
                yield Forecast(job=job, problem=job.problem)
            continue
        image_set = space.opened.known(job.data.url, "val")  # None for sets that --assume takes by name
        scale = Scale(
            spec=job.network(export).spec,
            images=job.images,
            classes=len(image_set.classes) if image_set is not None else CLASSES.get(job.data.name, 0),
            several_labels=getattr(image_set, "has_several_labels", False),
            size=size_of_scenes(image_set) if image_set is not None and job.chosen.layout else None,
            batch_size=space.batch_size,
            device=space.device,
        )
        try:
            work = job.chosen.task.cost(scale)
            shared = shared_by(job, export, space)
            keys = [shared_key(shared, part, job.data.url) for part in work.parts]
        except Exception as error:  # mostly settings that do not fit; a plugin may raise anything
            if job.state != "done":
                yield Forecast(job=job, problem=in_one_line(error))
            continue
        if job.state == "done":  # its crops were not stored
            keys = [None if part.kind == "crops" else key for part, key in zip(work.parts, keys, strict=True)]
        remaining = remaining_work(work, keys, done)
        if job.state != "done":
            yield forecast_from_results(Forecast(job=job, work=remaining), export, space)


def size_of_scenes(scenes: Any) -> tuple[int, int] | None:
    """Height and width of the first image of a scene set."""
    with suppress(OSError, ValueError), Image.open(scenes.image_path(0)) as image:
        return image.height, image.width
    return None


def remaining_work(work: Work, keys: Sequence[Hashable], done: dict[Hashable, float]) -> Work:
    """The work without units that earlier jobs do; adds its own units to `done`.

    keys: `shared_key` of each part. done: key -> units.
    """
    parts = []
    for part, key in zip(work.parts, keys, strict=True):
        before = done.get(key, 0.0) if key else 0.0
        if key:
            done[key] = max(before, part.count)
        parts.append(replace(part, count=max(part.count - before, 0.0)))
    return replace(work, parts=tuple(parts))


def shared_key(shared: Shared, part: Part, url: str) -> Hashable:
    """A key of a part's work, equal in all jobs that can share it; None if no job can.

    shared: what the task shares; nothing if it reads its images itself. url: of the images.
    """
    source = {"features": ",".join(shared.features), "crops": shared.stream}
    of = source.get(part.kind, part.of) if part.of else ""
    return (part.kind, part.of, url, of) if of else None


def forecast_from_results(forecast: Forecast, export: FrozenExport, space: Workspace) -> Forecast:
    """The forecast with the time that the same job took for checkpoints of the same architecture, if there are any."""
    path, times = forecast.job.path, []
    for other in path.parents[2].glob(f"*/{path.parent.name}/{path.name}"):
        with suppress(OSError, ValueError):
            result = read_result(other)
            here = result.device == space.device and result.checkpoint.architecture == export.spec.label
            here &= result.image_size in (None, forecast.job.image_size)
            times += [result.seconds] if here and result.status == "ok" else []
    seconds = median(times) if times else None
    return replace(forecast, seconds=seconds, terms={} if seconds is None else {"in earlier runs": seconds})


ANNOUNCED_FROM = {"cpu": 2e12, "cuda": 1e15}  # operations whose time a run measures and prints: a minute or so
ANNOUNCED_IN = 3.0  # approximate seconds of these measurements


def announcement(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[str]:
    """A line with the work of the jobs that are not done, and about how long it takes; none for little work.

    Rates of this machine that no earlier plan measured are measured now, with fewer repetitions.
    """
    forecasts = [forecast for forecast in forecasts_without_measuring(jobs, export, space) if not forecast.problem]
    flops = sum(forecast.work.flops for forecast in forecasts)
    if flops < ANNOUNCED_FROM["cuda" if space.device.startswith("cuda") else "cpu"]:
        return
    untimed = [forecast for forecast in forecasts if forecast.seconds is None and space.world.size == 1]
    skipped = set() if any(part.kind == "training" for f in untimed for part in f.work.parts) else {"training"}
    rates = kept_rates(space)
    missing = {
        key: measure
        for forecast in untimed
        for key, measure in measurements_of(forecast.job, export, space).items()
        if key not in rates and key.split()[0] not in skipped
    }
    rates |= measure_rates(missing, space, ANNOUNCED_IN, lambda *lines: None)
    timed = [timed_by(rates, forecast, export, space) for forecast in forecasts]
    times = [forecast.seconds for forecast in timed if forecast.seconds is not None]
    images = sum(forecast.work.images for forecast in forecasts)
    known = "" if len(times) == len(forecasts) else f" for {len(times)} of them"
    about = f", about {duration(sum(times))}{known}" if times else ""
    yield f"  {counted(len(forecasts), 'job')}: {images:,.0f} images through the network, {operations(flops)}{about}"


def measurements_of(job: Job, export: FrozenExport, space: Workspace) -> Measurements:
    """How the rates are measured that a job needs."""
    return measurements(job.network(export), job.workspace(space), job.data.fingerprints)


def timed_by(rates: Mapping[str, float], forecast: Forecast, export: FrozenExport, space: Workspace) -> Forecast:
    """The forecast with times, if it has none and these rates of this machine suffice."""
    keys = measurements_of(forecast.job, export, space)
    return forecast.timed(measured(keys, forecast.job.workspace(space), rates))


def forecasts_without_measuring(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[Forecast]:
    """Forecasts of the jobs that are not done, with times if an earlier plan measured the rates."""
    rates = kept_rates(space)
    return (timed_by(rates, forecast, export, space) for forecast in count_jobs(jobs, export, space))


STATES: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
INDENT = 6  # spaces before lines about a job or a protocol
MAX_LISTED = 8  # protocols whose settings are listed


def dry_run(options: EvaluationOptions) -> int:
    """Prepare a run and print what it would do. Returns 1 if a checkpoint or a task would fail."""
    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world, dry_run=True)
        return world.on_rank0(lambda: _show(preparation))


def _show(preparation: Preparation) -> int:
    """Print what a run would do, and return the exit code: 1 if a job would fail or a checkpoint cannot be loaded."""
    say(*preparation.left_out)
    all_jobs = [job for _, jobs in preparation.jobs for job in jobs]
    names = {job.chosen.name for job in all_jobs}
    selected = [chosen for chosen in preparation.protocols if chosen.name in names or not preparation.jobs]
    say(*settings_lines(selected))  # without protocols that have no jobs
    forecasts: list[Forecast] = []
    for checkpoint, jobs in preparation.jobs:
        say(checkpoint_title(checkpoint), *size_lines(checkpoint, jobs))
        export = preparation.exports.pop(checkpoint.used.key)
        by_path = {f.job.path: f for f in forecasts_without_measuring(jobs, export, preparation.space)}
        for job in jobs:
            say(*dry_run_lines(job, checkpoint, by_path.get(job.path)))
        forecasts += by_path.values()
    say(*(f"cannot be used: {reason}" for reason in preparation.unavailable))
    if len(all_jobs) > 1 and any(not job.chosen.task.LAYOUT for job in all_jobs):
        say("tasks that read the same features share their forward passes")
    failing = sum(bool(forecast.problem) for forecast in forecasts)
    untimed = sum(forecast.seconds is None for forecast in forecasts)
    if untimed:
        which = f"{untimed} of {len(forecasts)} jobs" if untimed < len(forecasts) else "these jobs"
        say(f"the time of {which} is not known: bench plan, with the same options, measures it")
    would_fail = f", of which {failing} would fail" if failing else ""
    say(f"{len(forecasts)} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing or preparation.unavailable else 0


def dry_run_lines(job: Job, checkpoint: LoadedCheckpoint, forecast: Forecast | None) -> Iterator[str]:
    """Lines about a job: its images and state, a summary of the task, and its work if the task counts it."""
    counts = " + ".join(f"{count} {split}" for split, count in job.images.items())
    yield f"  {job.title}: {counts} images, {STATES[job.state]}"
    if forecast is None:
        return
    if forecast.problem:
        yield from table([(forecast.text,)], indent=INDENT)
        return
    summary = job.chosen.task.summary(checkpoint.spec_of(job.chosen.task), job.images)
    yield from table([(", ".join(f"{name} {value}" for name, value in summary.items()),)], indent=INDENT)
    if forecast.work.parts:
        yield from table([(forecast.text,)], indent=INDENT)


def settings_lines(selected: Sequence[ChosenProtocol]) -> Iterator[str]:
    """All settings of every protocol as values of `--set`; for many protocols just the command that lists them."""
    if len(selected) > MAX_LISTED:
        yield f"settings of these {len(selected)} protocols: bench list PROTOCOL"
        return
    yield "settings (explained by: bench list PROTOCOL)"
    for chosen in selected:
        names = [entry.name for entry in fields(chosen.task)]
        values = [f"{name}={quote(setting_text(getattr(chosen.task, name)))}" for name in names]
        yield f"  {chosen.name}, version {chosen.protocol.version}{' (modified)' if chosen.changes else ''}"
        yield from table([(" ".join(values),)], indent=INDENT)


Command = Callable[[LoadedCheckpoint, Sequence[Job]], list[str]]  # makes the arguments of `bench run` for some jobs
Plan = Sequence[tuple[LoadedCheckpoint, list[Forecast]]]


def plan(options: EvaluationOptions, assumed: Machine | None, show: Callable[..., None]) -> Plan:
    """Forecasts of all jobs without a result, by checkpoint. ValueError for invalid options.

    For an assumed machine, image sets may be given by name, such as `imagenet`: their counts are known. show: prints
    counts at once, and times when the rates are measured.
    """
    named = [text for text in options.data if text in SETS]
    if named and not assumed:
        raise UserError(
            "data", "images are needed to measure this machine: give NAME=URL, or add --assume MACHINE", named[0]
        )
    with_urls = replace(options, data=tuple(text for text in options.data if text not in SETS))
    known = [DataUsed(name=name, url=SETS[name].url, images=SETS[name].images) for name in named]
    preparation = prepare(with_urls, known=known)
    space = preparation.space
    say(*preparation.left_out, errors=True)
    counted = []
    for checkpoint, jobs in preparation.jobs:
        export, forecasts = preparation.exports[checkpoint.used.key], []
        show(checkpoint_title(checkpoint), *size_lines(checkpoint, jobs))
        for forecast in count_jobs(jobs, export, space):
            forecasts.append(forecast.timed(assumed) if assumed else forecast)
            show(f"  {forecast.job.title}: {forecasts[-1].text}")
        counted.append((checkpoint, forecasts))
    return counted if assumed else timed_jobs(counted, preparation, show)


def timed_jobs(plan: Plan, preparation: Preparation, show: Callable[..., None]) -> Plan:
    """The plan with the times that are missing, from rates that are measured on this machine."""
    space, exports, started = preparation.space, preparation.exports, time.perf_counter()
    missing = {
        key: measure
        for checkpoint, forecasts in plan
        for forecast in forecasts
        if forecast.work.parts and forecast.seconds is None
        for key, measure in measurements_of(forecast.job, exports[checkpoint.used.key], space).items()
    }
    if not missing:
        return plan
    show(f"measuring this machine for about {LIMIT:.0f} s:")
    rates = measure_rates(missing, space, LIMIT, show)
    timed = []
    for checkpoint, forecasts in plan:
        export = exports[checkpoint.used.key]
        timed.append((checkpoint, [timed_by(rates, forecast, export, space) for forecast in forecasts]))
        pairs = zip(forecasts, timed[-1][1], strict=True)
        show(*(f"  {new.job.title}: {new.time}" for old, new in pairs if old.work.parts and old.seconds is None))
    show(f"measured in {duration(time.perf_counter() - started)}")
    return timed


def measure_rates(
    missing: Measurements, space: Workspace, seconds: float, show: Callable[..., None]
) -> dict[str, float]:
    """Measure rates in about so many seconds together, and keep them; those that cannot be measured are shown."""
    rates: dict[str, float] = {}
    for key, measure in missing.items():
        try:
            rates[key] = measure(seconds / len(missing))
        except Exception as error:  # the run itself would fail, too, and report it in full
            show(f"  {key.split()[0]} not measured: {in_one_line(error)}")
    if rates:
        keep_rates(space, rates)
    return rates


def totals(plan: Plan, memory: float, gpus: int, decode: str) -> Iterator[str]:
    """Lines about all jobs together: their time, what it is spent on, and how many can run at once.

    memory: free bytes on the device.
    """
    forecasts = [forecast for _, of_checkpoint in plan for forecast in of_checkpoint]
    if not forecasts:
        yield "nothing is left to run: every result exists"
        return
    times = [forecast.seconds for forecast in forecasts if forecast.seconds is not None]
    flops, disk = (sum(getattr(forecast.work, name) for forecast in forecasts) for name in ("flops", "disk"))
    largest = max((forecast.work.memory for forecast in forecasts), default=0.0)
    unknown = [forecast.work.flops for forecast in forecasts if forecast.seconds is None and not forecast.problem]
    parts = [f"{len(times)} of {len(forecasts)} jobs one after another: {duration(sum(times))}"] if times else []
    parts += [f"time not known of {len(unknown)} jobs with {operations(sum(unknown))}"] if unknown else []
    yield ", ".join([*parts, operations(flops), f"up to {size(disk)} disk", f"{size(largest)} memory"])
    terms: dict[str, float] = defaultdict(float)
    for name, seconds in (term for forecast in forecasts for term in forecast.terms.items()):
        terms[name] += seconds
    if terms:
        yield f"of this time{''.join(shares(terms))}"
    if terms["reading"] > 0.1 * sum(times):
        fast = "--decode fast, " if decode == "exact" else ""
        yield f"networks wait for images: {fast}more cores and, on a GPU, more --workers help"
    yield f"at once: {at_once(largest, memory, gpus)}"


def at_once(memory_of_job: float, memory: float, gpus: int) -> str:
    """How many jobs can run at once, with the reason."""
    fitting = int(memory // memory_of_job) if memory_of_job and memory else 1
    if not fitting:
        return f"none: the largest does not fit into the {size(memory)} of free memory; give a smaller --batch-size"
    if gpus:
        return f"{gpus} jobs, one on each GPU" if gpus > 1 else "1 job, on the GPU"
    return f"1 job, which uses all {cores()} cores; memory has room for {fitting}"


def entries(plan: Plan, command: Command, gpus: int) -> list[dict[str, Any]]:
    """A JSON object for each job, cheapest first, for schedulers."""
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
