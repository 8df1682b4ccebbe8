"""The plan of a run: a job for every image set and protocol, and which results exist already."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.cli.messages import in_one_line
from bench.places import example
from bench.results.index import read_results
from bench.results.record import (
    CheckpointUsed,
    DataUsed,
    NewerSchema,
    ProtocolUsed,
    Result,
    failure_beside,
    read_result,
    result_path,
    result_stem,
    short,
)
from bench.run.checkpoints import LoadedCheckpoint, checked_name
from bench.run.fitting import fits, left_out, refused_networks, without_data
from bench.run.suites import ChosenProtocol
from checkpoints.frozen import FrozenSpec
from downstream.data.scenes import TINY, layout_of, open_scenes, scene_schemes, stands_in_for
from engine.distributed import World
from engine.extensions import extensions
from engine.tasks import Workspace, settings_of
from imagesets.sets import SPLITS, open_anew, open_set, parse_url

State = Literal["new", "failed before", "done"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One result to obtain."""

    chosen: ChosenProtocol
    protocol: ProtocolUsed  # what the result says of the protocol
    settings: Mapping[str, Any]  # of the task, as JSON values
    data: DataUsed
    path: Path  # of the result file
    state: State
    limit: int | None = None  # images of each split that it may use; None: no limit, or one that leaves none out

    @property
    def title(self) -> str:
        """`knn@dino on digits`"""
        changes = " ".join(f"{name}={short(value)}" for name, value in self.protocol.changes.items())
        return f"{self.protocol.name} on {self.data.name}" + (f" with {changes}" if changes else "")

    @property
    def images(self) -> dict[str, int]:
        """How many images of each split it uses."""
        return {split: min(count, self.limit or count) for split, count in self.data.images.items()}

    def place(self, space: Workspace) -> Workspace:
        """The same space with the images that it uses."""
        return replace(space, data=self.data.url, limit=self.limit)


def named_urls(texts: Sequence[str], suite: str) -> dict[str, str]:
    """`--data NAME=URL ...` as a mapping. Only the smoke suite has a default. ValueError says what to write."""
    if not texts:
        if suite == "smoke":
            names = ["digits", *(TINY + layout for layout in extensions("layouts") if not stands_in_for(layout))]
            return {name: f"{name}:" for name in names}
        raise ValueError("which images? give --data NAME=URL, for example --data cifar10=folder:/data/cifar10")
    found: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not (equals and name and url):
            raise ValueError(f"--data {text}: write NAME=URL, for example {shlex.quote(example(text))}")
        if name in found:
            raise ValueError(f"--data {text}: the name {name!r} is given twice; give each set its own")
        found[checked_name(name, "--data")] = url
    return found


def open_data(name: str, url: str, space: Workspace, rerun: bool = False) -> DataUsed:
    """Open both splits for all tasks, so that a wrong URL stops the run before it starts. Draws tiny scenes."""
    whole, anew = replace(space, data=url, limit=None), open_anew if rerun else open_set
    try:
        if not layout_of(url):
            parse_url(url, scene_schemes())
        opener = partial(open_scenes, cache=space.cache) if layout_of(url) else anew
        sets = {split: whole.images(split, opener) for split in SPLITS}
    except ValueError as error:
        raise ValueError(f"--data {name}={url}: {str(error).removeprefix(f'{url}: ')}") from error
    return DataUsed(
        name=name,
        url=url,
        fingerprints={split: images.fingerprint for split, images in sets.items()},
        contents={split: images.contents for split, images in sets.items() if images.contents},
        images={split: len(images) for split, images in sets.items()},
        warnings=tuple(filter(None, (getattr(images, "pages_note", "") for images in sets.values()))),
    )


def plan(
    out: Path,
    checkpoint: LoadedCheckpoint,
    data: Sequence[DataUsed],
    selected: Sequence[ChosenProtocol],
    space: Workspace,
    rerun: bool,
) -> list[Job]:
    """Jobs in the order to run them: cheap ones first; those that failed before come last.

    ValueError for a set or a checkpoint that no protocol takes (bench/run/fitting.py).
    """
    lacking, left = without_data(data, selected), left_out(data, selected, space)
    there = [chosen for chosen in selected if chosen not in lacking]
    refused = {name for names in refused_networks(checkpoint, there).values() for name in names}
    jobs = [
        _job(out, checkpoint.used, images, chosen, space, rerun)
        for chosen in there
        for images in data
        if fits(chosen, images) and chosen.name not in refused.union(left.get(images.name, ()))
    ]
    return sorted(jobs, key=lambda job: job.state == "failed before")


def _job(
    out: Path, checkpoint: CheckpointUsed, data: DataUsed, chosen: ChosenProtocol, space: Workspace, rerun: bool
) -> Job:
    settings = settings_of(chosen.task)
    protocol = ProtocolUsed(
        name=chosen.name,
        version=chosen.protocol.version,
        source=chosen.protocol.source,
        plugin=chosen.plugin,
        modified=bool(chosen.changes),
        changes=chosen.changes,
    )
    limit = effective_limit(space.limit, data)
    path = result_path(out, checkpoint, data.name, result_stem(protocol, settings, replace(space, limit=limit)))
    state: State = "new" if rerun else job_state(path, data, space.skip_bad)
    return Job(chosen=chosen, protocol=protocol, settings=settings, data=data, path=path, state=state, limit=limit)


def problem_of(job: Job, spec: FrozenSpec, space: Workspace) -> str:
    """Why a job would fail with a network of this architecture; "" where that is not known before it runs."""
    if job.state == "done":
        return ""
    try:
        job.chosen.task.sizes(spec, job.images)
        if space.opened.known(job.data.url, "train") is not None:  # else images of an assumed machine
            job.chosen.task.check_images(replace(job.place(space), world=World()))
    except Exception as error:  # mostly settings that do not fit; a plugin may raise anything
        return in_one_line(error).removeprefix(f"{job.data.url}: ")
    return ""


def effective_limit(limit: int | None, data: DataUsed) -> int | None:
    """The limit, or None where it leaves no image of any split out: such a result is the one without a limit."""
    return None if limit is None or all(count <= limit for count in data.images.values()) else limit


def job_state(path: Path, data: DataUsed, skip_bad: bool) -> State:
    """Whether a job has a result by now. ValueError where that is of other images."""
    try:
        result = read_result(path)
    except FileNotFoundError:
        return "new"
    except NewerSchema:
        raise
    except ValueError:
        return "new"  # a damaged file is replaced
    if result.status == "failed":
        return "failed before"
    _refuse_other_images(path, result, data)
    if result.skipped and not skip_bad:  # this run asks for all images
        return "failed before" if failure_beside(path).exists() else "new"
    return "done"


def _refuse_other_images(path: Path, result: Result, data: DataUsed) -> None:
    if result.data.fingerprints != data.fingerprints:
        before, now = result.data, data
        splits = [split for split in now.fingerprints if before.fingerprints.get(split) != now.fingerprints[split]]
        counts = ", ".join(f"{split} {before.images.get(split)} then, {now.images.get(split)} now" for split in splits)
        raise ValueError(
            f"--data {data.name}={data.url}: {path} was measured on other images under the name {data.name!r} "
            f"({before.url}; images of {counts}; names, sizes or labels differ); use another name, or --rerun to "
            "replace it"
        )
    if splits := data.differ_from(result.data):
        raise ValueError(
            f"--data {data.name}={data.url}: files of {' and '.join(splits)} were overwritten since {path} was "
            "measured, by others of the same names and sizes; use another name, or --rerun to replace it"
        )


def refuse_mixed_contents(out: Path, jobs: Sequence[Job]) -> None:
    """ValueError where results of other contents of the same files would stay on the board beside those of `jobs`."""
    if not any(job.data.contents for job in jobs):
        return
    replaced = {job.path for job in jobs if job.state != "done"}
    data = {job.data.name: job.data for job in jobs}
    for path, entry in read_results(out)[0].items() if (out / "results").is_dir() else ():
        now, result = data.get(entry.result.data.name), entry.result
        if now and path not in replaced and result.status == "ok" and (splits := now.differ_from(result.data)):
            raise ValueError(
                f"--data {now.name}={now.url}: files of {' and '.join(splits)} were overwritten since {path} was "
                "measured, which stays on the board; give --rerun with all its checkpoints and protocols, move it away "
                f"(bench results rm), or use another name than {now.name}"
            )
