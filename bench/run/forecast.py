"""What a run will take, for `bench plan`, `--dry-run` and the first line of a run: tasks count their work, and a few
rates of the machine (bench/run/calibration.py) time it.

Work that several jobs share, such as the forward pass for frozen features, counts for the first of them.
"""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from bench.options import EvaluationOptions, ready_device
from bench.published.values import SETS
from bench.results.record import DataUsed
from bench.run.calibration import Key, Machine, measurements
from bench.run.prepare import Job, Preparation, checkpoint_title, prepare, scale_of, size_lines
from bench.run.sharing import shared_by
from checkpoints.frozen import FrozenExport
from engine.distributed import start_world
from engine.errors import UserError, in_one_line
from engine.printing import counted, say, size
from engine.progress import span
from engine.tasks import Shared, Workspace
from engine.work import Part, Work

LIMIT = 15.0  # approximate seconds of all measurements of a plan
ANNOUNCED_FROM = {"cpu": 2e12, "cuda": 1e15}  # operations from which on a run states its work and time: a minute or so
ANNOUNCED_IN = 3.0  # approximate seconds of the measurements for this


def duration(seconds: float) -> str:
    """A forecast time as text: `4.2 s`, `3 min 20 s`."""
    return span(seconds) if seconds >= 10 else f"{seconds:.1f} s"


def operations(count: float) -> str:
    """A number of floating-point operations as text: `0.03 TFLOP`, `1.5 PFLOP`."""
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A job that is to be done, with its work and what takes time in it."""

    job: Job
    network: FrozenExport  # at the image size of the job
    work: Work = field(default_factory=Work)  # without shared work that counts for earlier jobs
    terms: Mapping[str, float] | None = None  # what takes time -> seconds; None: not known

    @property
    def seconds(self) -> float:
        """The time of the job; 0 if it is not known."""
        return sum((self.terms or {}).values())

    @property
    def counts(self) -> str:
        """`60000 images in 1.0 passes, 0.4 PFLOP, 15 MB disk, 0.4 GB memory`, for a training with its iterations.

        A pass is over all images of the set; images whose features another job extracts are not counted again.
        """
        work = self.work
        if self.job.problem:
            return f"would fail: {self.job.problem}"
        if not work.parts:
            return f"{self.job.chosen.key} does not count its work"
        passes = work.images / max(sum(self.job.images.values()), 1)
        counts = [f"{work.images:.0f} images in {passes:.1f} passes" if work.images else "no images to read"]
        counts += [f"{work.iterations:.0f} iterations"] if work.iterations else []
        return ", ".join([*counts, operations(work.flops), f"{size(work.disk)} disk", f"{size(work.memory)} memory"])

    def timed(self, machine: Machine) -> "Forecast":
        """The forecast with times; without, if the task does not count its work or a rate is not known."""
        parts = [machine.terms(part) for part in self.work.parts]
        if not parts or None in parts:
            return self
        return replace(self, terms=added([{"start": machine.job}, *filter(None, parts)]))


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each term over several parts."""
    terms: dict[str, float] = {}
    for part in parts:
        terms |= {name: terms.get(name, 0.0) + seconds for name, seconds in part.items()}
    return terms


def count_jobs(jobs: Sequence[Job], export: FrozenExport, space: Workspace) -> list[Forecast]:
    """Forecasts, without times, of the jobs of one export that are not done, in their order."""
    done: dict[Hashable, float] = {}  # key of shared work -> units that earlier jobs do
    to_do = [job for job in jobs if job.state != "done"]
    for job in [job for job in jobs if to_do and job.state == "done" and not job.chosen.layout]:
        with suppress(Exception):  # features on disk, but no crops, which are not stored
            work = job.chosen.task.cost(scale_of(job.data, job.limit, job.network(export).spec, space))
            parts = tuple(part for part in work.parts if part.kind != "crops")
            remaining_work(replace(work, parts=parts), shared_by(job, export, space), job.data.url, done)
    forecasts = []
    for job in to_do:
        work = Work() if job.problem else remaining_work(job.work, shared_by(job, export, space), job.data.url, done)
        forecasts.append(Forecast(job=job, network=job.network(export), work=work))
    return forecasts


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


def timed(
    forecasts: Sequence[Forecast], space: Workspace, limit: float, rates: dict[Key, float]
) -> tuple[list[Forecast], list[str]]:
    """The forecasts with times on this machine, and a line for each rate that cannot be measured.

    limit: approximate seconds in which all rates that are needed are measured. rates: those of earlier calls, which are
    not measured again; gets the new ones.
    """
    by_job = [measurements(forecast.work, forecast.network, forecast.job.workspace(space)) for forecast in forecasts]
    needed = {key: measure for measures in by_job for key, measure in measures.items() if key not in rates}
    problems = []
    for key, measure in needed.items():
        try:
            rates[key] = measure(limit / len(needed))
        except Exception as error:  # the run itself would fail, too, and report it in full
            problems.append(f"  {key[0]} not measured: {in_one_line(error)}")
    machines = [Machine.here(space, {key[0]: rates[key] for key in keys if key in rates}) for keys in by_job]
    return [forecast.timed(machine) for forecast, machine in zip(forecasts, machines, strict=True)], problems


def announcement(jobs: Sequence[Job], export: FrozenExport, space: Workspace, rates: dict[Key, float]) -> Iterator[str]:
    """A line with the work of the jobs that are not done, and about how long it takes; none for little work.

    rates: as in `timed`.
    """
    forecasts = count_jobs(jobs, export, space)
    flops = sum(forecast.work.flops for forecast in forecasts)
    if flops < ANNOUNCED_FROM["cuda" if space.device.startswith("cuda") else "cpu"]:
        return
    if space.world.size == 1:
        forecasts, _ = timed(forecasts, space, ANNOUNCED_IN, rates)
    images = sum(forecast.work.images for forecast in forecasts)
    known = [forecast for forecast in forecasts if forecast.terms]
    of_them = "" if len(known) == len(forecasts) else f" for {len(known)} of them"
    about = f", about {duration(sum(forecast.seconds for forecast in known))}{of_them}" if known else ""
    yield f"  {counted(len(forecasts), 'job')}: {images:,.0f} images through the network, {operations(flops)}{about}"


def show_jobs(preparation: Preparation) -> list[Forecast]:
    """Print all jobs with their images and work; returns forecasts, without times, of those that are not done."""
    forecasts: list[Forecast] = []
    for checkpoint, jobs in preparation.jobs:
        say(checkpoint_title(checkpoint), *size_lines(checkpoint, jobs))
        of_checkpoint = count_jobs(jobs, preparation.exports[checkpoint.used.key], preparation.space)
        counts = {forecast.job.path: forecast.counts for forecast in of_checkpoint}
        for job in jobs:
            images = " + ".join(f"{count} {split}" for split, count in job.images.items())
            again = "failed before; " if job.state == "failed before" else ""
            say(f"  {job.title}: {images} images; {again}{counts.get(job.path, 'exists')}")
        forecasts += of_checkpoint
    return forecasts


def dry_run(options: EvaluationOptions) -> int:
    """Prepare a run and print what it would do. Returns 1 if a task would fail."""
    with start_world(ready_device(options.device, options.compiled)) as world:
        preparation = prepare(options, world, dry_run=True)
        return world.on_rank0(lambda: _show(preparation))


def _show(preparation: Preparation) -> int:
    say(*preparation.left_out)
    forecasts = show_jobs(preparation)
    failing = sum(bool(forecast.job.problem) for forecast in forecasts)
    would_fail = f", of which {failing} would fail" if failing else ""
    say(f"{len(forecasts)} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing else 0


def plan(options: EvaluationOptions, assumed: Machine | None = None) -> list[Forecast]:
    """Print the work of all jobs at once, then their times, and the sums. ValueError for invalid options.

    assumed: instead of this machine, whose rates are then not measured; image sets may then be given by name, such as
    `imagenet`, whose counts are known.
    """
    named = [text for text in options.data if text in SETS]
    if named and not assumed:
        text = "images are needed to measure this machine: give NAME=URL, or add --assume MACHINE"
        raise UserError("data", text, named[0])
    with_urls = replace(options, data=tuple(text for text in options.data if text not in SETS))
    known = [DataUsed(name=name, url=SETS[name].url, images=SETS[name].images) for name in named]
    preparation = prepare(with_urls, known=known)
    say(*preparation.left_out, errors=True)
    forecasts = show_jobs(preparation)
    if assumed:
        forecasts = [forecast.timed(assumed) for forecast in forecasts]
    elif any(forecast.work.parts for forecast in forecasts):
        say(f"measuring this machine for about {LIMIT:.0f} s:")
        started = time.perf_counter()
        forecasts, problems = timed(forecasts, preparation.space, LIMIT, {})
        say(*problems, f"measured in {duration(time.perf_counter() - started)}")
    for forecast in forecasts:
        if forecast.work.parts:
            text = duration(forecast.seconds) + "".join(shares(forecast.terms)[:1]) if forecast.terms else "not known"
            say(f"  {forecast.job.title}: {text}")
    say(*totals(forecasts))
    return forecasts


def shares(terms: Mapping[str, float]) -> list[str]:
    """Shares of the total as text, `, 87% decoding`, the largest first, without those below half a percent."""
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda term: -term[1])
    return [f", {seconds / total:.0%} {name}" for name, seconds in largest if seconds > 0.005 * total]


def totals(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Lines about all jobs together: their time and work, and what the time is spent on."""
    if not forecasts:
        yield "nothing is left to run: every result exists"
        return
    known = [forecast for forecast in forecasts if forecast.terms]
    unknown = [forecast.work.flops for forecast in forecasts if not (forecast.terms or forecast.job.problem)]
    times = f"{len(known)} of {len(forecasts)} jobs one after another: {duration(sum(f.seconds for f in known))}"
    parts = [times] if known else []
    parts += [f"time not known of {counted(len(unknown), 'job')} with {operations(sum(unknown))}"] if unknown else []
    flops, disk = (sum(getattr(forecast.work, name) for forecast in forecasts) for name in ("flops", "disk"))
    memory = f"{size(max(forecast.work.memory for forecast in forecasts))} memory"
    yield ", ".join([*parts, operations(flops), f"up to {size(disk)} disk", memory])
    if known:
        yield f"of this time{''.join(shares(added([forecast.terms or {} for forecast in known])))}"
