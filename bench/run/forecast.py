"""What the jobs of a run will do and take: counted by their tasks, timed by a calibration or an assumed machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.cli.messages import in_one_line
from bench.planning.amounts import duration, operations, size
from bench.planning.calibration import calibration_path, read_calibration
from bench.planning.rates import Calibration, Speed, seconds_of_work
from bench.planning.sharing import Shares, shared_keys
from bench.run.plan import Job, problem_of
from checkpoints.frozen import FrozenExport
from engine.tasks import Workspace
from engine.work import Scale, Work
from imagesets.sets import open_set

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
        if problem := problem_of(job, export.spec, space):
            found.append(Forecast(job=job, images=images, problem=problem))
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
    return job.chosen.task.work(scale)


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
