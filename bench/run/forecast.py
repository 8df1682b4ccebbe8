"""Forecasts of a run for `bench plan` and `--dry-run`: tasks count their work, a few rates of the machine time it.

Work that several jobs share, such as the forward pass for frozen features, counts for the first of them. A job that
another checkpoint of the same architecture has run takes as long as that one.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from shlex import quote
from statistics import median
from typing import Any

from bench.checkpoints import LoadedCheckpoint
from bench.names import ready_device
from bench.options import EvaluationOptions
from bench.published.values import SETS
from bench.results.record import DataUsed, read_result
from bench.run.calibration import LIMIT, RATES, Machine, Measurements, keep_rates, kept_rates, measurements
from bench.run.prepare import Job, Preparation, checkpoint_title, prepare, scale_of, size_lines
from bench.run.sharing import shared_by
from bench.run.suites import ChosenProtocol
from bench.settings import setting_text
from checkpoints.frozen import FrozenExport
from engine.distributed import start_world
from engine.errors import UserError, in_one_line
from engine.printing import counted, say, size, table
from engine.progress import span
from engine.tasks import Shared, Workspace
from engine.work import Part, Work


def duration(seconds: float) -> str:
    """A forecast time as text: `4.2 s`, `3 min 20 s`."""
    return span(seconds) if seconds >= 10 else f"{seconds:.1f} s"


def operations(count: float) -> str:
    """A number of floating-point operations as text: `0.03 TFLOP`, `1.5 PFLOP`."""
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"


def shares(terms: Mapping[str, float]) -> list[str]:
    """Shares of the total as text, `, 87% decoding`, the largest first, without those below half a percent."""
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda term: -term[1])
    return [f", {seconds / total:.0%} {name}" for name, seconds in largest if seconds > 0.005 * total]


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each term over several parts."""
    terms: dict[str, float] = {}
    for name, seconds in chain.from_iterable(part.items() for part in parts):
        terms[name] = terms.get(name, 0.0) + seconds
    return terms


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A job with its work, and the time that this takes."""

    job: Job
    work: Work = field(default_factory=Work)  # without shared work that counts for earlier jobs
    seconds: float | None = None  # None: not measured, or the task does not count its work
    terms: Mapping[str, float] = field(default_factory=dict)  # name of a kind of work -> its part of the seconds

    @property
    def text(self) -> str:
        """`12 s, 80% heads; 60000 images in 1.0 passes, 0.4 PFLOP, 15 MB disk, 0.4 GB memory`.

        Omits an unknown time; trainings also have their iterations. A pass is over all images of the set; images whose
        features another job extracts are not counted again.
        """
        if self.job.problem:
            return f"would fail: {self.job.problem}"
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
        terms = added([{"start": machine.job}, *filter(None, parts)])
        return replace(self, seconds=sum(terms.values()), terms=terms)


def count_jobs(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[Forecast]:
    """Forecasts, without times, of the jobs of one export that are not done, in their order."""
    done: dict[Hashable, float] = {}  # key of shared work -> units that earlier jobs do
    to_do = [job for job in jobs if job.state != "done"]
    for job in [job for job in jobs if to_do and job.state == "done" and not job.chosen.layout]:
        with suppress(Exception):  # features on disk, but no crops, which are not stored
            work = job.chosen.task.cost(scale_of(job.data, job.limit, job.network(export).spec, space))
            parts = tuple(part for part in work.parts if part.kind != "crops")
            remaining_work(replace(work, parts=parts), shared_by(job, export, space), job.data.url, done)
    for job in to_do:
        if job.problem:
            yield Forecast(job=job)
        else:
            work = remaining_work(job.work, shared_by(job, export, space), job.data.url, done)
            yield from_results(Forecast(job=job, work=work), export, space)


def remaining_work(work: Work, shared: Shared, url: str, done: dict[Hashable, float]) -> Work:
    """The work of a job without units that earlier jobs do; adds its own units to `done`: key of shared work -> units.

    shared: what the task shares. url: of the images.
    """
    parts = []
    for part in work.parts:
        key = shared_key(shared, part, url)
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


def from_results(forecast: Forecast, export: FrozenExport, space: Workspace) -> Forecast:
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


Show = Callable[..., object]  # prints lines


def timed(
    forecasts: Sequence[Forecast],
    export: FrozenExport,
    space: Workspace,
    rates: dict[str, float],
    limit: float = 0.0,
    show: Show = lambda *lines: None,
) -> list[Forecast]:
    """The forecasts of an export's jobs, with times where the rates of this machine are known.

    rates: known ones, by key. limit: seconds in which those that are needed besides are measured, kept and added to
    `rates`; 0: nothing is measured. show: prints which cannot be measured.
    """
    known: list[Measurements] = []
    needed: dict[str, Callable[[float], float]] = {}
    for forecast in forecasts:
        keys = measurements(forecast.job.network(export), forecast.job.workspace(space), forecast.job.data.fingerprints)
        known.append(keys)
        names = {name for part in forecast.work.parts for name in RATES[part.kind]}
        if forecast.seconds is None:
            needed |= {key: measure for key, measure in keys.items() if key.split()[0] in names and key not in rates}
    for key, measure in needed.items() if limit else ():
        try:
            rates[key] = measure(limit / len(needed))
        except Exception as error:  # the run itself would fail, too, and report it in full
            show(f"  {key.split()[0]} not measured: {in_one_line(error)}")
    if needed and limit:
        keep_rates(space, rates)
    machines = [Machine.measured({key.split()[0]: rates[key] for key in keys if key in rates}, space) for keys in known]
    return [forecast.timed(machine) for forecast, machine in zip(forecasts, machines, strict=True)]


ANNOUNCED_FROM = {"cpu": 2e12, "cuda": 1e15}  # operations whose time a run measures and prints: a minute or so
ANNOUNCED_IN = 3.0  # approximate seconds of these measurements


def announcement(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> Iterator[str]:
    """A line with the work of the jobs that are not done, and about how long it takes; none for little work.

    Rates of this machine that no earlier plan measured are measured now, with fewer repetitions.
    """
    forecasts = list(count_jobs(jobs, export, space))
    flops = sum(forecast.work.flops for forecast in forecasts)
    if flops < ANNOUNCED_FROM["cuda" if space.device.startswith("cuda") else "cpu"]:
        return
    limit = ANNOUNCED_IN if space.world.size == 1 else 0.0
    times = [f.seconds for f in timed(forecasts, export, space, kept_rates(space), limit) if f.seconds is not None]
    images = sum(forecast.work.images for forecast in forecasts)
    known = "" if len(times) == len(forecasts) else f" for {len(times)} of them"
    about = f", about {duration(sum(times))}{known}" if times else ""
    yield f"  {counted(len(forecasts), 'job')}: {images:,.0f} images through the network, {operations(flops)}{about}"


STATES: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
INDENT = 6  # spaces before lines about a job or a protocol
MAX_LISTED = 8  # protocols whose settings are listed
Plan = Sequence[tuple[LoadedCheckpoint, list[Forecast]]]


def dry_run(options: EvaluationOptions) -> int:
    """Prepare a run and print what it would do. Returns 1 if a checkpoint or a task would fail."""
    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world, dry_run=True)
        return world.on_rank0(lambda: _show(preparation))


def _show(preparation: Preparation) -> int:
    """Print what a run would do, and return the exit code: 1 if a job would fail or a checkpoint cannot be loaded."""
    say(*preparation.left_out)
    names = {job.chosen.name for _, jobs in preparation.jobs for job in jobs}
    selected = [chosen for chosen in preparation.protocols if chosen.name in names or not preparation.jobs]
    say(*settings_lines(selected))  # without protocols that have no jobs
    forecasts = [forecast for _, of_checkpoint in show_jobs(preparation, None, say) for forecast in of_checkpoint]
    say(*(f"cannot be used: {reason}" for reason in preparation.unavailable))
    failing = sum(bool(forecast.job.problem) for forecast in forecasts)
    if untimed := sum(forecast.seconds is None for forecast in forecasts):
        which = f"{untimed} of {len(forecasts)} jobs" if untimed < len(forecasts) else "these jobs"
        say(f"the time of {which} is not known: bench plan, with the same options, measures it")
    would_fail = f", of which {failing} would fail" if failing else ""
    say(f"{len(forecasts)} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing or preparation.unavailable else 0


def show_jobs(preparation: Preparation, assumed: Machine | None, show: Show) -> Plan:
    """Show all jobs with their images, state and work, and return forecasts of those that are not done, by checkpoint.

    assumed: the machine that takes the time; None: this one, as far as an earlier plan measured its rates.
    """
    plan, space = [], preparation.space
    all_jobs = [job for _, jobs in preparation.jobs for job in jobs]
    for checkpoint, jobs in preparation.jobs:
        show(checkpoint_title(checkpoint), *size_lines(checkpoint, jobs))
        export = preparation.exports[checkpoint.used.key]
        forecasts = list(count_jobs(jobs, export, space))
        if assumed:
            forecasts = [forecast.timed(assumed) for forecast in forecasts]
        else:
            forecasts = timed(forecasts, export, space, kept_rates(space))
        texts = {forecast.job.path: [(forecast.text,)] for forecast in forecasts}
        for job in jobs:
            counts = " + ".join(f"{count} {split}" for split, count in job.images.items())
            show(f"  {job.title}: {counts} images, {STATES[job.state]}", *table(texts.get(job.path, []), indent=INDENT))
        plan.append((checkpoint, forecasts))
    if len(all_jobs) > 1 and any(not job.chosen.layout for job in all_jobs):
        show("tasks that read the same features share their forward passes")
    return plan


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


def plan(options: EvaluationOptions, assumed: Machine | None, show: Show) -> Plan:
    """Forecasts of all jobs without a result, by checkpoint. ValueError for invalid options.

    For an assumed machine, image sets may be given by name, such as `imagenet`: their counts are known. show: prints
    counts at once, and times when the rates are measured.
    """
    named = [text for text in options.data if text in SETS]
    if named and not assumed:
        text = "images are needed to measure this machine: give NAME=URL, or add --assume MACHINE"
        raise UserError("data", text, named[0])
    with_urls = replace(options, data=tuple(text for text in options.data if text not in SETS))
    known = [DataUsed(name=name, url=SETS[name].url, images=SETS[name].images) for name in named]
    preparation = prepare(with_urls, known=known)
    say(*preparation.left_out, errors=True)
    counted_jobs = show_jobs(preparation, assumed, show)
    if assumed or all(f.seconds is not None or not f.work.parts for _, of_one in counted_jobs for f in of_one):
        return counted_jobs
    show(f"measuring this machine for about {LIMIT:.0f} s:")
    started, rates, timed_plan = time.perf_counter(), dict[str, float](), []
    for checkpoint, forecasts in counted_jobs:
        export = preparation.exports[checkpoint.used.key]
        forecasts = timed(forecasts, export, preparation.space, rates, LIMIT / len(counted_jobs), show)
        show(*(f"  {forecast.job.title}: {forecast.time}" for forecast in forecasts if forecast.work.parts))
        timed_plan.append((checkpoint, forecasts))
    show(f"measured in {duration(time.perf_counter() - started)}")
    return timed_plan


def totals(plan: Plan) -> Iterator[str]:
    """Lines about all jobs together: their time and work, and what the time is spent on."""
    forecasts = [forecast for _, of_checkpoint in plan for forecast in of_checkpoint]
    if not forecasts:
        yield "nothing is left to run: every result exists"
        return
    times = [forecast.seconds for forecast in forecasts if forecast.seconds is not None]
    flops, disk = (sum(getattr(forecast.work, name) for forecast in forecasts) for name in ("flops", "disk"))
    unknown = [forecast.work.flops for forecast in forecasts if forecast.seconds is None and not forecast.job.problem]
    parts = [f"{len(times)} of {len(forecasts)} jobs one after another: {duration(sum(times))}"] if times else []
    parts += [f"time not known of {len(unknown)} jobs with {operations(sum(unknown))}"] if unknown else []
    memory = f"{size(max(forecast.work.memory for forecast in forecasts))} memory"
    yield ", ".join([*parts, operations(flops), f"up to {size(disk)} disk", memory])
    if terms := added(forecast.terms for forecast in forecasts):
        yield f"of this time{''.join(shares(terms))}"


def entries(plan: Plan, command: Callable[[LoadedCheckpoint, Sequence[Job]], list[str]]) -> list[dict[str, Any]]:
    """A JSON object for each job, cheapest first, for schedulers. command: makes the arguments of `bench run`."""
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
            "problem": forecast.job.problem,
        }
        for checkpoint, forecasts in plan
        for forecast in forecasts
    ]
    return sorted(values, key=lambda entry: (entry["seconds"] is None, entry["seconds"] or 0.0))
