"""Preparation of a run: protocols, images, checkpoints and jobs, which of these are done, what is left out and why."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from bench.options import EvaluationOptions, check_writable, checked_name, chosen_device, named_url, with_names
from bench.results.heads import is_kept
from bench.results.record import (
    DataUsed,
    NewerSchema,
    ProtocolUsed,
    Result,
    failure_path,
    is_good,
    pixels_text,
    read_result,
    result_path,
    result_stem,
    short,
)
from bench.run.checkpoints import LoadedCheckpoint, check_activations, keeps_size, load_checkpoint
from bench.run.suites import ChosenProtocol, catalogue, changed_protocols, choose_protocols
from checkpoints.frozen import FrozenExport, FrozenSpec
from checkpoints.import_options import ImportOptions
from downstream.data.scenes import (
    TINY,
    SceneSet,
    draw_tiny_sets,
    in_both_warnings,
    layout_of,
    open_scenes,
    scene_schemes,
    served_layouts,
    serves,
)
from engine.distributed import World
from engine.errors import UserError, in_one_line, option
from engine.extensions import extensions, warn_of
from engine.files import sha256_of_file
from engine.printing import millions, say
from engine.tasks import Task, Workspace, settings_of
from engine.work import Scale, Work
from imagesets.sets import MissingSplit, open_set, open_uncached, parse_url

State = Literal["new", "failed before", "done"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One result to compute: a checkpoint's, by one protocol on one image set."""

    chosen: ChosenProtocol
    protocol: ProtocolUsed  # as recorded in the result
    settings: Mapping[str, Any]  # of the task, as JSON values
    data: DataUsed
    path: Path  # of the result file
    state: State
    seed: int = 0  # of everything random
    limit: int | None = None  # at most this many images of each split; None: all
    image_size: int | tuple[int, int] | None = None  # of the images that the network gets; None: the protocol decides
    problem: str = ""  # why the job would fail, if that is known before it runs
    work: Work = field(default_factory=Work)  # of a job to do
    head: Path | None = None  # where its head is to be kept

    @property
    def title(self) -> str:
        """`knn@dino on digits`, or `knn@dino on digits with k=5 seed=1`."""
        changes = " ".join(f"{name}={short(value)}" for name, value in self.protocol.changes.items())
        changes = f"{changes} seed={self.seed}".lstrip() if self.seed else changes
        return f"{self.protocol.name} on {self.data.name}" + (f" with {changes}" if changes else "")

    @property
    def images(self) -> dict[str, int]:
        """Split -> number of images that the job uses."""
        return limited(self.data, self.limit)

    def workspace(self, space: Workspace) -> Workspace:
        """The workspace of the run with the job's image set, limit and seed."""
        return replace(space, data=self.data.url, limit=self.limit, seed=self.seed)

    def network(self, export: FrozenExport) -> FrozenExport:
        """The checkpoint's export at the image size of the job."""
        return export.evaluated_at(self.image_size) if self.image_size else export


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a run will do, shared by `bench run`, its dry run, `bench plan`, `--cluster` and the Python API."""

    space: Workspace  # with the connected processes; image sets are the jobs' own
    protocols: Sequence[ChosenProtocol]  # for which there are images
    jobs: Sequence[tuple[LoadedCheckpoint, Sequence[Job]]]  # of each checkpoint: cheap ones first, failed ones last
    left_out: Sequence[str]  # what is not evaluated and why, a line for each reason
    exports: dict[tuple[str, str], FrozenExport]  # those that this process has loaded, by `CheckpointUsed.key`


def workspace_of(options: EvaluationOptions, world: World = World()) -> Workspace:  # noqa: B008
    """The workspace of a run: cache, device, precision and so on. ValueError for a device that this machine lacks."""
    if options.precision == "float16":
        raise UserError("precision", "it is for pretraining; choose float32 or bfloat16", "float16")
    return Workspace(
        cache=options.out / "cache",
        data="",
        device=chosen_device(options.device),
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        compiled=options.compiled,
        decode=options.decode,
        seed=options.seeds[0],
        limit=options.limit,
        skip_bad=options.skip_bad,
        batch_size=options.batch_size,
        workers=options.workers,
        world=world,
        reread=options.rerun,
        keep_heads=options.keep_heads,
    )


def prepare(
    options: EvaluationOptions,
    world: World = World(),  # noqa: B008
    known: Sequence[DataUsed] = (),
    dry_run: bool = False,
) -> Preparation:
    """Prepare protocols, images, checkpoints and jobs of a run. ValueError for invalid options.

    Every process opens the images; rank 0 imports, verifies and saves the checkpoints and plans the jobs of all.
    known: image sets that need not be opened, in addition to those of the options. dry_run: nothing is written.
    """
    space = workspace_of(options, world)
    with_names(options.checkpoint, options.name)  # raises an error for a wrong number of names before images are opened
    protocols = world.on_all_ranks(lambda: _chosen_protocols(options, world))
    val_alone = any(not chosen.task.NEEDS_TRAIN for chosen in protocols)
    data = [*known, *(_open_all(options, space, val_alone) if options.data or not known else ())]
    exports: dict[tuple[str, str], FrozenExport] = {}
    checkpoints = world.on_rank0(lambda: _load_checkpoints(options, exports, dry_run))
    protocols, jobs, left_out = world.on_rank0(
        lambda: plan_jobs(options.out, space, checkpoints, data, protocols, options.seeds)
    )
    world.on_rank0(lambda: _check_activations(jobs, exports))
    return Preparation(
        space=space,
        protocols=protocols,
        jobs=jobs,
        left_out=left_out,
        exports=exports,
    )


def _chosen_protocols(options: EvaluationOptions, world: World) -> list[ChosenProtocol]:
    """The protocols of --suite with the changes of --set; warns of broken task files."""
    known = catalogue(suite=options.suite)
    if world.is_rank0:
        warn_of(known.broken)
    return changed_protocols(choose_protocols(options.suite, known), options.set, options.select)


def _open_all(options: EvaluationOptions, space: Workspace, val_alone: bool) -> list[DataUsed]:
    """Open the image sets once for all tasks, in every process; one process of each machine lists their files first."""
    urls = named_urls(options.data, options.suite)
    draw_tiny_sets(urls.values(), space.cache, space.world)
    open_each = partial(open_data, space=space, val_alone=val_alone)
    data = space.world.first_on_each_machine(lambda: [open_each(name, url) for name, url in urls.items()])
    for images in data if space.world.is_rank0 else ():
        say(*(f"{images.name}: {warning}" for warning in images.warnings), errors=True)
    return data


def _load_checkpoints(
    options: EvaluationOptions, exports: dict[tuple[str, str], FrozenExport], dry_run: bool
) -> list[LoadedCheckpoint]:
    """Load and verify all checkpoints, and put their exports into `exports`. ValueError if one cannot be loaded."""
    if not dry_run:
        check_writable(options.out)  # rather than after the first task has run for hours
        if options.keep_heads:
            check_writable(options.keep_heads, "keep_heads")
    imports = ImportOptions(statistics=options.statistics)
    checkpoints = {}
    for reference, name in dict.fromkeys(with_names(options.checkpoint, options.name)):
        checkpoint, export = load_checkpoint(
            reference, name, options.out, save=not dry_run, options=imports, image_size=options.image_size
        )
        checkpoints[checkpoint.used.key] = checkpoint
        exports[checkpoint.used.key] = export
    return list(checkpoints.values())


def _check_activations(
    plans: Sequence[tuple[LoadedCheckpoint, Sequence[Job]]], exports: Mapping[tuple[str, str], FrozenExport]
) -> None:
    """ValueError for a checkpoint whose activations differ. Of those with something to do: building takes seconds."""
    for checkpoint, jobs in plans:
        if any(job.state != "done" for job in jobs):
            check_activations(checkpoint, exports[checkpoint.used.key])


def plan_jobs(
    out: Path,
    space: Workspace,
    checkpoints: Sequence[LoadedCheckpoint],
    data: Sequence[DataUsed],
    protocols: Sequence[ChosenProtocol],
    seeds: Sequence[int] = (0,),
) -> tuple[list[ChosenProtocol], list[tuple[LoadedCheckpoint, list[Job]]], list[str]]:
    """Protocols for which there are images, jobs of each checkpoint, and a line for each reason to leave one out.

    Protocols that draw nothing at random have a job for the first seed alone.

    ValueError for an image set or a checkpoint that no protocol can evaluate.
    """
    lines = []
    lacking_data = without_data(data, protocols)
    if lacking_data:
        tasks = ", ".join(dict.fromkeys(chosen.name.partition("@")[0] for chosen in lacking_data))
        lines.append(f"{len(lacking_data)} protocols are left out, as no --data is for them: {tasks}")
    refused_by_set = refused_sets(data, protocols, space)
    for images in data:
        if refused := refused_by_set.get(images.name):
            problem = "no training images" if images.lacks_train else "several labels per image"
            lines.append(f"{images.name} has {problem}, so these are left out on it: {', '.join(refused)}")
        if not any(fits(chosen, images) for chosen in protocols):
            readers = dict.fromkeys(c.family for c in catalogue().protocols.values() if fits(c, images))
            others = f", but by those of {', '.join(readers)}" if readers else ""
            lines.append(f"{option('data', images.name)} is read by no chosen protocol{others}")
    protocols = [chosen for chosen in protocols if chosen not in lacking_data]
    if space.keep_heads and (headless := [chosen.name for chosen in protocols if not chosen.task.predicts]):
        if len(headless) == len(protocols):
            raise UserError("keep_heads", f"no head of {', '.join(headless)} can be kept; omit it", space.keep_heads)
        lines.append(f"no head is kept of {', '.join(headless)}")
    pairs = [
        (chosen, *with_reads(images, chosen, space)) for chosen in protocols for images in data if fits(chosen, images)
    ]
    jobs = []
    for checkpoint in checkpoints:
        reasons = refused_networks(checkpoint, protocols)
        name = checkpoint.used.name
        for reason, unsuitable in reasons.items():
            names = dict.fromkeys(chosen.name for chosen in unsuitable)
            lines.append(f"{name} is evaluated without {', '.join(names)}: {reason}")
        unsuitable_protocols = [chosen for unsuitable in reasons.values() for chosen in unsuitable]
        planned = [
            _job(out, replace(space, seed=seed), checkpoint, images, chosen, problem)
            for seed in seeds
            for chosen, images, problem in pairs
            if (seed == seeds[0] or chosen.task.is_random)
            and chosen not in unsuitable_protocols
            and chosen.name not in refused_by_set.get(images.name, ())
        ]
        jobs.append((checkpoint, sorted(planned, key=lambda job: job.state == "failed before")))
        if lacking := [job.title for job in planned if job.state != "done" and job.head and is_good(job.path)]:
            where = "evaluated again, with what out/cache holds of its training"
            lines.append(f"{name}, {', '.join(lacking)}: has a result, but no head in {space.keep_heads}; {where}")
    return protocols, jobs, lines


def without_problems(preparation: Preparation) -> tuple[list[tuple[LoadedCheckpoint, list[Job]]], int]:
    """The jobs without known problems, and how many others there are; prints why. ValueError if no job can run."""
    lines: dict[str, list[str]] = {}
    failing = 0
    for checkpoint, jobs in preparation.jobs:
        for job in jobs:
            if job.problem:
                failing += 1
                lines.setdefault(f"{job.title}: {job.problem}", []).append(checkpoint.used.name)
    if failing and failing == sum(len(jobs) for _, jobs in preparation.jobs):
        raise ValueError(f"nothing can run: {next(iter(lines))}")
    for line, names in lines.items():
        which = f" for {', '.join(names)}" if len(names) < len(preparation.jobs) else ""
        say(f"left out{which}: {line}")
    return [(checkpoint, [job for job in jobs if not job.problem]) for checkpoint, jobs in preparation.jobs], failing


def checkpoint_title(checkpoint: LoadedCheckpoint) -> str:
    """A checkpoint in one line: `vit_tiny: dino, vit_tiny_patch16_224, 5.5 M parameters, digest 1a2b3c4d`."""
    used = checkpoint.used
    facts = [used.method, used.architecture, millions(used.parameters), f"digest {used.digest[:8]}"]
    return f"{used.name}: {', '.join(filter(None, facts))}"


def size_lines(checkpoint: LoadedCheckpoint, jobs: Sequence[Job]) -> Iterator[str]:
    """A line with the image size at which jobs evaluate a checkpoint, what it costs, and why it is this one."""
    from checkpoints.flops import forward_flops

    used, spec = checkpoint.used, checkpoint.evaluated or checkpoint.spec
    if used.is_raw_pixels or not any(job.image_size for job in jobs):
        return
    line = f"  images of {spec.size_text}, {forward_flops(spec) / 1e9:.3g} GFLOP each"
    if spec.image_size != used.image_size:
        line += f"; its published evaluation has {pixels_text(used.image_size)} px"
    elif used.table_size:
        own = f"{checkpoint.spec.size_text}, {forward_flops(checkpoint.spec) / 1e9:.3g} GFLOP"
        line += f", as in its published evaluation; its positions are for {own} (--image-size)"
    yield line


def fits(chosen: ChosenProtocol, images: DataUsed) -> bool:
    """Whether a protocol can evaluate on a set: dense ones need scenes of their layout, or of one that serves it."""
    return serves(images.url, chosen.layout) if chosen.layout else not layout_of(images.url)


def without_data(data: Sequence[DataUsed], selected: Sequence[ChosenProtocol]) -> list[ChosenProtocol]:
    """The protocols that can evaluate on none of the image sets. ValueError if these are all protocols."""
    lacking_data = [chosen for chosen in selected if not any(fits(chosen, images) for images in data)]
    if selected and len(lacking_data) == len(selected):
        first = lacking_data[0]
        example, needed = "cifar10=folder:/data/cifar10", "images with labels"
        if first.layout:
            example = f"{first.layout}={first.layout}:/data/{first.layout}"
            serving = [name for name in extensions("layouts") if first.layout in (name, *served_layouts(name))]
            needed = f"scenes ({', '.join(f'{name}:ROOT' for name in serving)})"
        urls = ", ".join(f"{images.name}={images.url}" for images in data)
        layout = next(filter(None, (layout_of(images.url) for images in data)), "")
        instead = f", or choose a protocol for these scenes, which `bench list {layout}` shows" if layout else ""
        raise UserError("data", f"{first.name} needs {needed}; for example {option('data', example)}{instead}", urls)
    return lacking_data


def refused_sets(
    data: Sequence[DataUsed], selected: Sequence[ChosenProtocol], space: Workspace
) -> dict[str, list[str]]:
    """Name of each set of several labels per image, or of validation images alone -> protocols that refuse it.
    ValueError if all of them do."""
    refused_by_set: dict[str, list[str]] = {}
    for images in data:
        candidates = [chosen for chosen in selected if fits(chosen, images)]
        image_set = space.opened.known(images.url, "val")
        refused = [
            chosen.name
            for chosen in candidates
            if (images.lacks_train and chosen.task.NEEDS_TRAIN)
            or (image_set is not None and not chosen.task.takes(image_set))
        ]
        if refused and len(refused) == len(candidates):
            reason = "its images have several labels, which none of the chosen protocols can evaluate"
            reason = f"{reason}; add logreg@dinov2 to --suite"
            if images.lacks_train:
                reason = f"it has no training images, which {refused[0]} needs; add them, or leave the set out"
            raise UserError("data", reason, f"{images.name}={images.url}")
        refused_by_set |= {images.name: refused} if refused else {}
    return refused_by_set


def refused_networks(
    checkpoint: LoadedCheckpoint, selected: Sequence[ChosenProtocol]
) -> dict[str, list[ChosenProtocol]]:
    """Reason why a checkpoint's network cannot be evaluated -> its protocols. ValueError if these are all protocols."""
    protocols_by_reason: dict[str, list[ChosenProtocol]] = {}
    for chosen in selected:
        try:
            chosen.task.check_network(checkpoint.spec_of(chosen.task))
        except ValueError as error:
            protocols_by_reason.setdefault(in_one_line(error), []).append(chosen)
    if selected and sum(map(len, protocols_by_reason.values())) == len(selected):
        reason, refused = next(iter(protocols_by_reason.items()))
        raise UserError(
            "suite", f"none of the chosen protocols can evaluate {checkpoint.used.name}; {refused[0].name}: {reason}"
        )
    return protocols_by_reason


def named_urls(texts: Sequence[str], suite: str) -> dict[str, str]:
    """`--data NAME=URL ...` as a mapping; only the smoke suite has a default. ValueError for an invalid value."""
    if not texts:
        if suite == "smoke":
            names = ["digits", *(TINY + layout for layout in extensions("layouts") if not served_layouts(layout))]
            return {name: f"{name}:" for name in names}
        raise UserError("data", "which images? give NAME=URL, for example cifar10=folder:/data/cifar10")
    urls: dict[str, str] = {}
    for text in texts:
        name, url = named_url(text)
        if name in urls:
            raise UserError("data", f"the name {name!r} is given twice; give each set its own name", text)
        urls[checked_name(name, "data")] = url
    return urls


def open_data(name: str, url: str, space: Workspace, val_alone: bool = False) -> DataUsed:
    """Open both splits for all tasks, so that a wrong URL stops the run before it starts; generates tiny scenes.

    val_alone: whether a set may lack training images.
    """
    unlimited = replace(space, data=url, limit=None)
    try:
        if not layout_of(url):
            parse_url(url, scene_schemes())
        open_images = open_uncached if space.reread else open_set
        opener = partial(open_scenes, cache=space.cache) if layout_of(url) else open_images
        sets = {"val": unlimited.images("val", opener)}
        try:
            sets = {"train": unlimited.images("train", opener), **sets}
        except MissingSplit:
            if not val_alone:
                raise
    except ValueError as error:
        raise UserError("data", str(error).removeprefix(f"{url}: "), f"{name}={url}") from error
    warnings = [warning for images in sets.values() for warning in images.warnings]
    scenes = [images for images in sets.values() if isinstance(images, SceneSet)]
    warnings += in_both_warnings(*scenes) if len(scenes) == 2 else []
    return DataUsed(
        name=name,
        url=url,
        fingerprints={split: images.fingerprint for split, images in sets.items()},
        contents={split: images.contents for split, images in sets.items() if images.contents},
        images={split: len(images) for split, images in sets.items()},
        classes=None if layout_of(url) else len(getattr(sets["val"], "classes", ())),
        warnings=tuple(warnings),
    )


def with_reads(data: DataUsed, chosen: ChosenProtocol, space: Workspace) -> tuple[DataUsed, str]:
    """An image set with what a protocol reads besides its splits, and why this cannot be used, "" if it can."""
    if space.opened.known(data.url, "train") is None:  # not opened in plans for an assumed machine
        return data, ""
    try:
        sources = chosen.task.reads(replace(space, data=data.url, limit=None, world=World()))
        files = {name: sha256_of_file(source) for name, source in sources.items() if isinstance(source, Path)}
        sets = {name: source for name, source in sources.items() if not isinstance(source, Path)}
        reads = files | {name: images.fingerprint for name, images in sets.items()}
        contents = {name: images.contents for name, images in sets.items() if images.contents}
    except Exception as error:  # as in `_job`
        return data, in_one_line(error)
    return replace(data, reads=reads, contents={**data.contents, **contents}), ""


def _job(
    out: Path, space: Workspace, checkpoint: LoadedCheckpoint, data: DataUsed, chosen: ChosenProtocol, problem: str
) -> Job:
    """The job of a checkpoint, an image set and a protocol, with what is known before it runs, such as a problem."""
    settings = settings_of(chosen.task)
    protocol = ProtocolUsed(
        name=chosen.name,
        version=chosen.protocol.version,
        source=chosen.protocol.source,
        plugin=chosen.plugin,
        modified=bool(chosen.changes),
        changes=chosen.changes,
    )
    limit, spec = effective_limit(space.limit, data), checkpoint.spec_of(chosen.task)
    image_size = None if keeps_size(chosen.task) else spec.image_size
    pixels = pixels_text(spec.image_size) if spec.image_size != checkpoint.spec.image_size else ""
    stem = result_stem(protocol, settings, replace(space, limit=limit), pixels)
    path = result_path(out, checkpoint.used, data.name, stem)
    head = space.keep_heads / path.relative_to(out / "results") if space.keep_heads and chosen.task.predicts else None
    state: State = "new" if space.reread or problem else job_state(path, data, chosen.task, space.skip_bad, head)
    work = Work()
    if not problem and state != "done":
        job_space = replace(space, data=data.url, limit=limit, world=World())
        try:
            work = chosen.task.cost(scale_of(data, limit, spec, job_space))
            if space.opened.known(data.url, "val") is not None:  # not opened in plans for an assumed machine
                chosen.task.check_images(job_space)
        except Exception as error:  # mostly settings that do not fit; a plugin may raise anything
            problem = in_one_line(error).removeprefix(f"{data.url}: ")
    return Job(
        chosen=chosen,
        protocol=protocol,
        settings=settings,
        data=data,
        path=path,
        state=state,
        seed=space.seed,
        limit=limit,
        image_size=image_size,
        head=head,
        problem=problem,
        work=work,
    )


CLASSES = {"imagenet": 1000, "ade20k": 150, "cityscapes": 19, "coco": 80}  # of sets that --assume takes by name


def scale_of(data: DataUsed, limit: int | None, spec: FrozenSpec, space: Workspace) -> Scale:
    """What the work of a task on an image set depends on besides its settings."""
    image_set: Any = space.opened.known(data.url, "val")  # None for sets that --assume takes by name
    size = None
    if layout_of(data.url) and image_set is not None:
        with suppress(OSError, ValueError), Image.open(image_set.image_path(0)) as image:
            size = image.height, image.width
    return Scale(
        spec=spec,
        images=limited(data, limit),
        classes=len(image_set.classes) if image_set is not None else CLASSES.get(data.name, 0),
        several_labels=getattr(image_set, "has_several_labels", False),
        size=size,
        batch_size=space.batch_size,
        device=space.device,
    )


def limited(data: DataUsed, limit: int | None) -> dict[str, int]:
    """Split -> number of images that a job uses."""
    return {split: min(count, limit or count) for split, count in data.images.items()}


def effective_limit(limit: int | None, data: DataUsed) -> int | None:
    """The limit, or None if no split has more images: such a result equals the one without a limit."""
    return None if limit is None or all(count <= limit for count in data.images.values()) else limit


def job_state(path: Path, data: DataUsed, task: Task, skip_bad: bool, head: Path | None = None) -> State:
    """Whether a job has a result already, and a head, if it is to be kept.

    ValueError if this is of other images, or of other settings than the protocol has in the same version.
    """
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
    _refuse_other_settings(path, result, task)
    if data.reads.keys() - result.data.reads.keys():  # added since
        return "new"
    if result.skipped and not skip_bad:  # without --skip-bad, a result needs all images
        return "failed before" if failure_path(path).exists() else "new"
    return "done" if head is None or is_kept(head, data, task) else "new"


def _refuse_other_images(path: Path, result: Result, data: DataUsed) -> None:
    """ValueError if an existing result was measured on other images than those of the same name now."""
    if result.data.fingerprints != data.fingerprints:
        before, now = result.data, data
        splits = [split for split in now.fingerprints if before.fingerprints.get(split) != now.fingerprints[split]]
        counts = ", ".join(f"{split} {before.images.get(split)} then, {now.images.get(split)} now" for split in splits)
        raise UserError(
            "data",
            f"{path} was measured on other images under the name {data.name!r} ({before.url}; images: {counts}; names, "
            f"sizes or labels differ); use another name, or {option('rerun', True)} to replace it",
            f"{data.name}={data.url}",
        )
    removed = [name for name in result.data.reads if name not in data.reads]
    if changed := [*data.differ_from(result.data), *removed]:
        raise UserError(
            "data",
            f"since {path} was measured, files of {' and '.join(changed)} were overwritten or removed; use another "
            f"name, or {option('rerun', True)} to replace it",
            f"{data.name}={data.url}",
        )


def _refuse_other_settings(path: Path, result: Result, task: Task) -> None:
    """ValueError if a protocol's settings were changed without a new version since an existing result was measured."""
    if changed := result.changed_since(task):
        name, version = result.protocol.name, result.protocol.version
        changes = ", ".join(
            f"{setting} {short(before)} then, {short(now)} now" for setting, (before, now) in changed.items()
        )
        raise UserError(
            "suite",
            f"{path} was measured with other settings of {name}, version {version} ({changes}); raise the protocol's "
            f"version, or {option('rerun', True)} to replace the result",
            name,
        )
