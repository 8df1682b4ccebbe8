"""`bench plan`: what the jobs of a run take on this machine, or on an assumed one, before any of them runs."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.planning.amounts import duration, operations, size
from bench.planning.calibration import calibrated, calibration_path
from bench.planning.machines import Machine
from bench.planning.rates import Calibration, Speed
from bench.published.values import SETS
from bench.results.environment import cores
from bench.results.record import DataUsed
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.forecast import Forecast, classes_of_opened, forecasts, text_of_forecast
from bench.run.plan import Job
from bench.run.runner import RunRequest, checkpoint_title, surveyed
from checkpoints.frozen import FrozenExport
from engine.printing import say

CLASSES = {"imagenet": 1000, "ade20k": 150, "cityscapes": 19, "coco": 80}  # of the sets that papers evaluate on
Command = Callable[[LoadedCheckpoint, Job], list[str]]  # words of the `bench run` of one job


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """The jobs of one checkpoint, cheap ones first."""

    checkpoint: LoadedCheckpoint
    jobs: Sequence[Forecast]


def foreseen(request: RunRequest, assumed: Machine | None, fresh: bool) -> tuple[list[Foreseen], list[str]]:
    """All jobs without a result, and lines about what their times rest on. ValueError for a wrong request.

    Images of an assumed machine may be named alone, as `imagenet`: their counts are known.
    """
    named = [text for text in request.data if text in SETS]
    if named and not assumed:
        raise ValueError(f"--data {named[0]}: to measure this machine, images are read: give NAME=URL, or add --assume")
    rest = replace(request, data=tuple(text for text in request.data if text not in SETS))
    survey = surveyed(rest, known=[_known(name) for name in named])
    say(*survey.left_out, errors=True)
    opened = classes_of_opened(request.space)

    def classes(job: Job) -> int:
        return CLASSES[job.data.name] if job.data.name in named else opened(job)

    found, lines = [], list(assumed.lines()) if assumed else []
    for checkpoint, export, jobs in survey.plans:
        todo = [job for job in jobs if job.state != "done"]
        speeds: dict[str, Speed] = {job.data.name: assumed for job in jobs} if assumed else {}
        if not assumed:
            measured = _calibrated(request, export, todo, classes, fresh)
            lines += [line for name, each in measured.items() for line in calibration_lines(name, each)]
            speeds |= measured
        each = forecasts(jobs, export, request.space, speeds, classes)
        found.append(Foreseen(checkpoint=checkpoint, jobs=[one for one in each if one.job.state != "done"]))
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


def report(found: Sequence[Foreseen], lines: Sequence[str], memory: float, gpus: int) -> Iterator[str]:
    """A line for each job, and what they come to."""
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


def entries(found: Sequence[Foreseen], command: Command, gpus: int) -> list[dict[str, Any]]:
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
