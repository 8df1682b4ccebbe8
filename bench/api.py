"""`import bench`: the commands as functions, for notebooks and programs.

Functions and commands run the same code with the same options, so both share their results: what `bench run` left in
a folder is not evaluated again, and `bench leaderboard` shows what a notebook measured. Functions return what the
commands print; warnings and bars of progress go to standard error.

Users' mistakes raise a UserError, a ValueError of one line that names the argument. No heavy library is imported before
a function is called.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bench.options import Options
from engine.errors import UserError
from engine.printing import heard_by, say
from engine.settings import NonNegativeInt, PositiveInt, convert

if TYPE_CHECKING:
    from torch import nn

    from bench.options import EvaluationOptions
    from bench.published.values import PublishedValue
    from bench.reports.leaderboard import Leaderboard
    from bench.reports.reproduce import Measurement
    from bench.results.record import Result
    from bench.results.table import Results
    from bench.run.predictions import LoadedHead
    from bench.run.runner import Tally
    from bench.statistics.compare import Comparisons
    from checkpoints.export import ViTExport
    from checkpoints.frozen import Forward, FrozenExport, FrozenSpec
    from imagesets.schemes.memory import HeldSets
    from pretrain.method import Method
    from probes.features.extract import FeatureSet


# Argument of functions -> its type, where it is not a field of options.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("protocol", "suite", "kind", "method"), str),
    **dict.fromkeys(("name", "recipe", "statistics"), str | None),
    "settings": Mapping | None,
    "options": Options | None,
    "seed": NonNegativeInt,
    "limit": PositiveInt | None,
}


def check(**arguments: Any) -> None:
    """Check arguments of functions by name. UserError for the first one of another type."""
    for name, value in arguments.items():
        try:
            convert(value, TYPES[name])
        except ValueError as error:
            raise UserError(name, str(error), value) from None


def changes_of(settings: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Changed settings as values of `--set`: `FIELD=VALUE ...`."""
    from engine.settings import setting_text

    return tuple(f"{field}={setting_text(value)}" for field, value in (settings or {}).items())


def is_module(checkpoint: Any) -> bool:
    """Whether it is a `torch.nn.Module`; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(checkpoint, torch.nn.Module)


def reference_to(checkpoint: "FrozenExport | str | Path", out: Path) -> str:
    """The reference by which options name a checkpoint.

    An export in memory is saved in `out`/exports, like imports of a run. A network of the user's own is not saved: its
    reference names the function that makes it.
    """
    if isinstance(checkpoint, str | Path):
        return str(checkpoint)
    from bench.options import checked_name
    from bench.run.checkpoints import save_export
    from checkpoints.export import ViTExport

    if not isinstance(checkpoint, ViTExport):
        return checkpoint.spec.reference
    name = checked_name(str(checkpoint.facts.get("name") or "checkpoint"), "name")
    return str(save_export(checkpoint, name, out))


def source_pool(spec: "FrozenSpec") -> Literal["cls", "avg"]:
    """The pooling that the checkpoint's source evaluates; for a user's own network the class token, if it has one."""
    from checkpoints.spec import ViTSpec

    if isinstance(spec, ViTSpec):
        return spec.pool
    return "cls" if spec.has_class_token else "avg"


def with_name(data: str) -> str:
    """`NAME=URL` unchanged; a URL without a name gets the last part of its path, or its scheme, as its name."""
    from bench.options import SAFE_NAME, name_from

    name, equals, _ = data.partition("=")
    return data if equals and SAFE_NAME.fullmatch(name) else f"{name_from(data)}={data}"


def named_data(data: Any) -> "tuple[list[str], list[HeldSets]]":
    """`NAME=URL` of each image set, and handles that keep the sets in memory registered.

    data: URLs, `NAME=URL`, pairs (train, val) of datasets or of arrays, or a mapping of names to these.
    """
    from imagesets.schemes.memory import hold

    if isinstance(data, Mapping):
        sets = {name: f"{name}={source}" if isinstance(source, str) else source for name, source in data.items()}
    else:
        sources = list(data) if isinstance(data, list | tuple) and not _is_pair(data) else [data]
        sources = [with_name(source) if isinstance(source, str) else source for source in sources]
        sets = {source.partition("=")[0] if isinstance(source, str) else "images": source for source in sources}
        if len(sets) < len(sources):
            names = [source for source in sources if isinstance(source, str)]
            text = f"two image sets have the same name ({', '.join(names)}); give a dictionary, name -> set"
            raise UserError("data", text)
    urls, held = [], []
    for name, source in sets.items():
        if isinstance(source, str):
            urls.append(source)
        else:
            try:
                held.append(hold(name, *source) if _is_pair(source) else hold(name, source))
            except (ValueError, TypeError) as error:
                raise UserError("data", str(error)) from error
            urls.append(f"{name}={held[-1].url}")
    return urls, held


def _is_pair(data: Any) -> bool:
    """Whether it is a pair (train, val) of datasets or arrays."""
    return isinstance(data, tuple) and len(data) == 2 and not any(isinstance(part, str) for part in data)


Progress = Callable[[str], object]  # is called with what a command would print, one or several lines
OUT = Path("bench-results")  # default folder of results and features


def load(
    checkpoint: "str | Path | nn.Module | FrozenExport",
    *,
    forward: "Forward | None" = None,
    branch: str | None = None,
    prefix: str | None = None,
    heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    statistics: str | None = None,
    architecture: str | None = None,
) -> "FrozenExport":
    """Load a checkpoint as an export, importing it if necessary; nothing is written.

    checkpoint: an export folder, a checkpoint file, the folder of a pretraining, timm:NAME, hf-hub:ID, IMPORTER:PATH,
    pixels:SIDE, or module:PACKAGE:FUNCTION, any network of your own, whose code then runs. Or a module in memory, which
    is copied: a ViT of timm or transformers becomes an export, any other module a frozen network (docs/python.md).
    forward: for a module, how its features are read: `forward(module, images)` of images (B, 3, H, W). The other
    arguments are the options of `bench import`, for facts that tensors do not show. `export.build()` is the network:
    images -> for each requested layer, by default the last one, tokens (B, P+L, D) of P prefix tokens and L patches.

    ValueError if it cannot be read, differs from what was exported, or its format is ambiguous.
    """
    check(statistics=statistics)
    from bench.run.checkpoints import default_name, load_export
    from checkpoints.export import ViTExport
    from checkpoints.frozen import SCHEME
    from checkpoints.import_options import ImportOptions
    from checkpoints.resolve import load_frozen, of_module

    options = ImportOptions(
        branch=branch,
        prefix=prefix,
        heads=heads,
        image_size=image_size,
        statistics=statistics,
        architecture=architecture,
    )
    if is_module(checkpoint):
        export = of_module(checkpoint, options, forward)
        reference = str(export.facts.get("source_file", type(checkpoint).__name__))
    elif forward is not None:
        raise UserError("forward", "it is for a torch.nn.Module")
    elif not isinstance(checkpoint, str | Path):
        if not hasattr(checkpoint, "digest"):
            kind = type(checkpoint).__name__
            text = f"it is of type {kind}; give a path or reference, a torch.nn.Module or an export"
            raise UserError("checkpoint", text)
        return checkpoint
    elif str(checkpoint).startswith(f"{SCHEME}:"):
        reference, export = str(checkpoint), load_frozen(checkpoint, options)
    else:
        reference, export = load_export(str(checkpoint), options)
    name = default_name(export, reference)
    assumed = export.facts.get("assumed") or ()
    say(*(f"bench: {name}: assumed: {assumption}" for assumption in assumed), errors=True)
    return replace(export, facts={**export.facts, "name": name}) if isinstance(export, ViTExport) else export


def extract(
    checkpoint: "FrozenExport | nn.Module | str | Path",
    data: Any,
    split: Literal["train", "val"] = "val",
    *,
    pool: Literal["cls", "avg"] | None = None,
    layer: int = -1,
    norm: bool = True,
    limit: int | None = None,
    out: str | Path = OUT,
    options: Options | None = None,
) -> "FeatureSet":
    """Frozen features of one split of an image set, from `out`/cache if an evaluation or an earlier call left them.

    Images have the size of the checkpoint's published evaluation, unless `load` got another `image_size`. data: a URL,
    or images in memory as for `evaluate`. Returns, for the n readable images: `.features` (n, D) float32,
    `.labels` (n,) int64, `.indices` (n,) int64, the index of each row's image in the set. pool: class token or mean of
    the patches; None: what the checkpoint's source evaluates. layer: block number, negative from the end. norm: with
    the final LayerNorm. limit: at most this many images, evenly spread.

    ValueError for a set or a checkpoint that cannot be read, a feature that the network lacks, and features that are
    not finite; its subclass UnreadableImage, with the path of the image, unless `options.skip_bad`.
    """
    check(limit=limit, options=options)
    from bench.options import EvaluationOptions, ready_device
    from bench.run.prepare import workspace_of
    from imagesets.sets import open_set
    from probes.features.extract import extract as extracted
    from probes.features.kinds import FeatureKind

    export, (urls, _held) = load(checkpoint), named_data(data)
    export = export.evaluated_at(export.evaluation_size)
    kind = FeatureKind(pool or source_pool(export.spec), layer, norm)
    kind.check(export.spec)
    shared = {**vars(options or Options()), "limit": limit, "out": Path(out)}
    evaluation = EvaluationOptions(**shared, checkpoint=(), suite="")
    ready_device(evaluation.device, evaluation.compiled)
    space = replace(workspace_of(evaluation), data=urls[0].partition("=")[2])
    return extracted(export, space.images(split, open_set), [kind], space)


def evaluate(
    checkpoint: "FrozenExport | nn.Module | str | Path",
    protocol: str,
    data: Any = None,
    *,
    images: Any = None,
    labels: Any = None,
    name: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    statistics: str | None = None,
    forward: "Forward | None" = None,
    settings: Mapping[str, Any] | None = None,
    select: Literal["holdout", "val"] | None = None,
    seed: int | Sequence[int] = 0,
    limit: int | None = None,
    rerun: bool = False,
    keep_heads: str | Path | None = None,
    out: str | Path = OUT,
    options: Options | None = None,
    progress: Progress | None = None,
) -> "Result | Any":
    """Evaluate a checkpoint on an image set by one protocol, and record the result, as `bench run` does.

    checkpoint, statistics, forward: as for `load`. image_size: side of the images in pixels, or height and width; None:
    that of the checkpoint's published evaluation; dense tasks keep their protocol's. protocol: such as "knn@dino"
    (`bench list protocols`). data: "NAME=URL", or a URL alone, whose last part is then the name:
    "folder:/data/cifar10" is "cifar10". Or a pair (train, val) of datasets like torchvision's, whose items are an image
    and its label.
    images, labels: arrays or lists, of which a fifth of each class is held out for validation, or pairs (train, val) of
    them; `data` is then their name. name: the checkpoint's name in results. settings: changed settings of the protocol,
    such as {"k": (10, 20)}; the result is marked. seed: of everything random; for several, [0, 1, 2], all results are
    returned, or one if nothing is random. A result that is in `out` already is returned, unless `rerun`.
    keep_heads: a folder for the trained head, for `load_head` and `predict`.
    progress: is called with the lines that `bench run` prints. `result.metrics["top1_k20"]` has `.value`, in its
    `.unit`, and `.interval`, the 95 % interval over validation images; `result.numbers` has only the values.

    ValueError for invalid arguments. If the task fails, its error, which is also recorded.
    engine.training.interruptions.Stopped if a signal stopped a training: the same call resumes it.
    """
    check(protocol=protocol, name=name, settings=settings)
    changes = {f"{protocol}.{field}": value for field, value in (settings or {}).items()}
    from bench.options import checked_name
    from bench.run.suites import catalogue, choose_protocols

    try:
        names = [matching.name for matching in choose_protocols(protocol, catalogue(suite=protocol))]
    except UserError as error:
        raise UserError("protocol", error.text, protocol) from None
    if len(names) > 1:
        raise UserError(
            "protocol", f"{len(names)} protocols, such as {names[0]!r}: name one, or use evaluate_suite", protocol
        )
    if images is not None or labels is not None:
        if images is None or labels is None or not isinstance(data, str | None):
            raise UserError("images", "give it with labels, and no datasets; data is then only a name for them")
        if isinstance(images, tuple) != isinstance(labels, tuple) or (
            isinstance(images, tuple) and not len(images) == len(labels) == 2
        ):
            raise UserError("images", "give it and labels as one array or list each, or each as a pair (train, val)")
        splits = tuple(zip(images, labels, strict=True)) if isinstance(images, tuple) else ((images, labels), None)
        data = {data or "images": splits}
    elif data is None:
        raise UserError("data", "which images? give it, such as 'folder:/data/cifar10', or images and labels")
    elif not isinstance(data, str | Mapping):
        data = {"images": data}
    if isinstance(data, Mapping) and len(data) != 1:  # such as the splits of Hugging Face's DatasetDict
        sets = ", ".join(map(str, data)) or "none"
        raise UserError(
            "data",
            f"{len(data)} image sets, {sets}: give one, or datasets as (train, val); evaluate_suite takes several",
        )
    if is_module(checkpoint) or statistics is not None or forward is not None:  # a module's own size may be unknown
        of_module = image_size if is_module(checkpoint) else None
        checkpoint = load(checkpoint, image_size=of_module, statistics=statistics, forward=forward)
    results = evaluate_suite(
        [checkpoint],
        protocol,
        data,
        names=[checked_name(name, "name")] if name else (),
        image_size=image_size,
        settings=changes,
        select=select,
        seed=seed,
        limit=limit,
        rerun=rerun,
        keep_heads=keep_heads,
        out=out,
        options=options,
        progress=progress,
    )
    return results if isinstance(seed, Sequence) else results[0]


def evaluate_suite(
    checkpoints: "FrozenExport | nn.Module | str | Path | Sequence[FrozenExport | nn.Module | str | Path]",
    suite: str,
    data: Any,
    *,
    names: Sequence[str] = (),
    image_size: int | tuple[int, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    select: Literal["holdout", "val"] | None = None,
    seed: int | Sequence[int] = 0,
    limit: int | None = None,
    rerun: bool = False,
    keep_heads: str | Path | None = None,
    out: str | Path = OUT,
    options: Options | None = None,
    progress: Progress | None = None,
) -> "Results":
    """Evaluate one or several checkpoints by several protocols on several image sets.

    Protocols with the same crop and interpolation share a checkpoint's pass over the images.

    suite: a suite ("frozen"), a task ("knn"), a protocol, or several of these separated by commas. data: URLs, or a
    dictionary, name -> URL or images in memory as for `evaluate`. settings: by "TASK.FIELD", such as
    {"knn.k": (10, 20)}. Everything else as in `evaluate`. Protocols for which no image set is given are left out. If
    tasks fail, the others are still evaluated; then the first error is raised. All errors are recorded.
    """
    seeds = tuple(seed) if isinstance(seed, Sequence) else (seed,)
    check(suite=suite, settings=settings, options=options)
    for one in seeds:
        check(seed=one)
    from bench.options import EvaluationOptions
    from bench.results.record import read_result
    from bench.results.table import Results

    folder, (urls, _held) = Path(out), named_data(data)
    networks = list(checkpoints) if isinstance(checkpoints, list | tuple) else [checkpoints]
    exports = [network if isinstance(network, str | Path) else load(network) for network in networks]
    evaluation = EvaluationOptions(
        **vars(options or Options()),
        checkpoint=tuple(reference_to(export, folder) for export in exports),
        name=(names,) if isinstance(names, str) else tuple(names),
        image_size=image_size,
        suite=suite,
        data=tuple(urls),
        select=select,
        set=changes_of(settings),
        out=folder,
        seed=seeds,
        limit=limit,
        rerun=rerun,
        keep_heads=Path(keep_heads) if keep_heads else None,
    )
    with heard_by(progress):
        tally = run_evaluation(evaluation)
    if tally.errors:
        raise tally.errors[0]
    results = Results(read_result(job.path) for job in tally.jobs)
    if any(isinstance(network, str | Path) for network in networks):  # for others `load` has printed it
        assumed = {result.checkpoint.name: result.checkpoint.assumed for result in results}
        say(*(f"bench: {name}: assumed: {text}" for name, text in assumed.items() if text), errors=True)
    return results


def run_evaluation(options: "EvaluationOptions") -> "Tally":
    """Run all jobs, write the leaderboard of the folder and return how the jobs ended, as `bench run` does.

    Prints the tables of the leaderboard that have results of these jobs, a line for each number that is published for
    the same weights, and what failed. The leaderboard is written after an error and a signal, too. ValueError for
    invalid options.
    """
    from shutil import get_terminal_size

    from bench.published.values import against_published
    from bench.reports.leaderboard import to_terminal, write_leaderboard
    from bench.run.runner import Tally, run_jobs

    tally = Tally()
    try:
        run_jobs(options, tally)
    finally:
        if tally.jobs and tally.is_rank0:
            for result, facts in tally.results:
                digests = [result.checkpoint.digest, *filter(None, [facts.get("source_sha256")])]
                lines = against_published(result, digests, branch_of(facts))
                say(*(f"{result.checkpoint.name}, {result.protocol.name} on {result.data.name}: {x}" for x in lines))
            board, paths = write_leaderboard(options.out), {job.path for job in tally.jobs}
            results = [stored.result for stored in board.results if stored.path in paths]
            groups = {result.group for result in results if result.status == "ok"}
            say("", *to_terminal(board, get_terminal_size().columns, groups).split("\n"), "")
    if tally.is_rank0:
        say(*(f"failed: {line}" for line in tally.failed))
        left_out = f"{tally.left_out} left out (above), " if tally.left_out else ""
        counts = f"{tally.done} done, {tally.skipped} skipped, {left_out}{len(tally.failed)} failed"
        say(f"{counts}; see {options.out / 'leaderboard.md'}")
        if tally.failed:
            say("tracebacks are in the .log files next to the failed results; run the same command again to retry them")
    return tally


def branch_of(facts: Mapping[str, Any]) -> str:
    """The branch of its file that an export is, such as `student`; "" for its importer's default."""
    from engine.extensions import extensions, load_extension

    name, importer = str(facts.get("branch") or ""), str(facts.get("importer"))
    if not name or importer not in extensions("importers"):
        return ""
    return "" if name == next(iter(load_extension("importers", importer).BRANCHES)) else name


def load_head(
    head: str | Path,
    checkpoint: "FrozenExport | nn.Module | str | Path",
    *,
    statistics: str | None = None,
    options: Options | None = None,
) -> "LoadedHead":
    """A head that an evaluation with `keep_heads` kept, and its backbone: `.predict(images)` of paths or PIL images.

    head: either of its files. checkpoint: the one that it was trained on. options: device, batch size and workers;
    precision and decoder are those of the evaluation. `.classes` are the names of the classes, `.file` has settings,
    statistics and metrics. `.predict` returns for each image the probabilities of the classes (C,), the class of each
    pixel (H, W), or depths in metres (H, W), computed as in the evaluation: from the same pixels and, unless given,
    in batches of the same size.

    ValueError for a file that is no head, and for another checkpoint than the one it was trained on.
    """
    check(options=options)
    from bench.results.heads import read_head
    from bench.run.predictions import with_backbone

    file = read_head(Path(head))
    return with_backbone(file, Path(head), load(checkpoint, statistics=statistics), options or Options())


def predict(
    checkpoint: "FrozenExport | nn.Module | str | Path",
    head: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    split: Literal["train", "val"] | None = None,
    statistics: str | None = None,
    options: Options | None = None,
) -> Path:
    """Predict a folder of images, or a split of the set at a URL, by a kept head, as `bench predict` does.

    Returns the path of the table, `out`/predictions.csv, which has a row for each image. Sets of any size are predicted
    image by image; the same call goes on after a kill. options: as for `load_head`; with `skip_bad`, rows of unreadable
    images say why.

    ValueError as there, for an image that cannot be read, and for a folder with other predictions.
    """
    from bench.options import check_writable
    from bench.reports.visualize import image_set_of
    from bench.run.predictions import write_predictions

    if Path(images).is_file():
        raise UserError("images", "one file; give its folder, or use load_head(...).predict([file])", str(images))
    if Path(out).resolve().is_relative_to(Path(str(images).removeprefix("images:")).resolve()):
        raise UserError("out", "it lies in the folder of images, whose images it would add to: choose another", out)
    image_set = image_set_of(str(images), split)
    check_writable(Path(out))
    return write_predictions(load_head(head, checkpoint, statistics=statistics, options=options), image_set, Path(out))


def compare(
    first: "str | Result",
    *others: "str | Result",
    data: str | None = None,
    protocol: str | None = None,
    metric: str | None = None,
    out: str | Path = OUT,
) -> "Comparisons":
    """Test whether one checkpoint is better than another: the paired tests on the same images of `bench compare`.

    first, others: names of checkpoints in `out`, or any results of theirs. data, protocol: compare only these. metric:
    instead of the main one of each protocol; or "all". All comparisons of a call are corrected together (Holm).
    `.found` holds the comparisons: `.paired.difference`, `.paired.low`, `.paired.high` in the metric's unit (percentage
    points for "%"), `.p_holm`.

    ValueError, with the choices, for a name that is not in `out`.
    """
    from bench.published.values import published_lines
    from bench.results.record import check_folder
    from bench.statistics.compare import compare as compared

    sides = (first, *others)
    if invalid := [side for side in sides if not (isinstance(side, str) or hasattr(side, "checkpoint"))]:
        text = f"{invalid[0]!r} is neither the name of a checkpoint nor a result; give names of checkpoints in {out}"
        raise UserError("others" if first is not invalid[0] else "first", text)
    check_folder(Path(out))
    names = [side if isinstance(side, str) else side.checkpoint.unique_name for side in sides]
    comparisons = compared(Path(out), names, data, protocol, metric)
    columns = {(comparison.group, comparison.metric) for comparison in comparisons.found}
    return replace(comparisons, published=published_lines(comparisons.results, columns))


def leaderboard(out: str | Path = OUT, *, published: bool = False, formats: Sequence[str] = ()) -> "Leaderboard":
    """The leaderboard of all results in `out`; rewrites leaderboard.csv and leaderboard.md.

    published: with papers' numbers of the same protocols, marked. formats: additional files to write, as for
    `bench leaderboard --format`: "latex", "html", "parquet". ValueError for a folder without results.
    """
    from bench.reports.leaderboard import FORMATS, write_leaderboard
    from bench.reports.page import tables_page
    from bench.results.record import check_folder
    from engine.printing import did_you_mean

    formats = [formats] if isinstance(formats, str) else formats
    if unknown := [name for name in formats if name not in FORMATS]:
        raise UserError("formats", f"no format {unknown[0]!r}{did_you_mean(unknown[0], list(FORMATS))}")
    check_folder(Path(out))
    return write_leaderboard(Path(out), published, formats, tables_page)


def reproduce(
    plan: str, *, suite: str | None = None, out: str | Path = OUT
) -> "list[tuple[PublishedValue, Measurement | None]]":
    """Published numbers beside those measured in `out`, as `bench reproduce PLAN` prints them.

    plan: a table of a source, such as "moca:table5j", "today" or "laptop" (`bench reproduce` lists them). suite: only
    the values that these protocols measure. Returns each published value (`.value` in its `.unit`, NaN if no source
    printed it, `.std`, `.source`) with its measurement (`.number`, `.interval`, and `.remarks` on what differs), or
    None if `out` has none.

    ValueError for an unknown plan, or if nothing of `suite` is in it.
    """
    from bench.reports.reproduce import measurement, plan_of
    from bench.results.store import comparable_results

    values = plan_of(plan, suite)
    results, problems = comparable_results(Path(out))
    say(*(f"left out: {problem}" for problem in problems), errors=True)
    return [(value, measurement(value, results)) for value in values]


def report(
    out: str | Path = OUT, *, to: str | Path | None = None, published: bool = False, pictures: bool = True
) -> Path:
    """Write all results of `out` as one HTML page; returns its path, `out`/report.html unless `to` is given.

    ValueError for a folder without results.
    """
    from bench.reports.page import report_page
    from bench.results.record import check_folder
    from engine.files import write_atomic
    from engine.optional import require

    check_folder(Path(out))
    require("matplotlib")
    path = Path(to or Path(out) / "report.html")
    write_atomic(path, report_page(Path(out), published, pictures))
    return path


def method(
    name: str,
    recipe: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
    seed: int = 0,
) -> "Method":
    """A pretraining method as an `nn.Module`, for a training loop of your own.

    Args:
        name: Name of the method, such as "mae" (`bench list methods`).
        recipe: One of its recipes, which defines the encoder and the settings; with `init`, None adapts one to it.
        settings: Changes of the method or its encoder, such as {"mask_ratio": 0.6}.
        init: A checkpoint that the encoder starts from, as for `bench pretrain --init`.
        seed: Seed of the random initial weights.

    Returns:
        The module. Called with RGB images (PIL) or with a batch of `views()`, it returns a `pretrain.method.Step`
        (loss, logs, observed). `encoders()` are the networks to export.

    Raises:
        ValueError: There is no such method or recipe, or the settings or the checkpoint do not fit it.

    Example:
        >>> import bench
        >>> from PIL import Image
        >>> mae = bench.method("mae", "smoke")
        >>> mae([Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")]).loss.backward()
    """
    check(method=name, recipe=recipe, settings=settings, seed=seed)
    from bench.options import PretrainOptions
    from bench.pretraining.run import recipe_of
    from pretrain.loop.trainer import build

    start, changes = str(init) if init else None, changes_of(settings)
    chosen = recipe_of(PretrainOptions(method=name, recipe=recipe, images="", out=OUT, set=changes, init=start))
    module = build(chosen.module, chosen.recipe, seed)
    if chosen.init:
        chosen.init.load_into(module)
    return module


def pretrain(
    method: str,
    recipe: str | None,
    images: str,
    out: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
    freeze_first_epochs: int | None = None,
    resume: bool = False,
    seed: int = 0,
    shuffle_window: int = 0,
    export_every: int = 0,
    knn_every: int = 0,
    knn_data: str | None = None,
    knn_limit: int | None = None,
    health_every: int = 0,
    health_data: str | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> "ViTExport":
    """Pretrain an encoder with a method's recipe in the folder `out`, as `bench pretrain` does; returns the encoder.

    recipe: one of the method's (`bench list recipes`), or, with `init`, None to adapt one to it. images: a
    URL. settings: changes of recipe, method or encoder, such as {"epochs": 100, "schedule.warmup": 5}. init: a
    checkpoint that the encoder starts from, as for `bench pretrain --init`; freeze_first_epochs: number of epochs in
    which only the other parameters train. resume: continue the training in `out`, or start it. shuffle_window: shards
    of `wds:` or `parquet:` whose images are shuffled together (0: all). export_every: epochs between two exports.
    knn_every, health_every: epochs between two lines of the log with the k-NN accuracy on `knn_data` (default:
    `images`; at most `knn_limit` of each split), or with ranks and spread of the features of `health_data` (default:
    `images`). options: `batch_size`
    limits the images of a process in a forward pass; the recipe's batch is accumulated. `out`/start is the encoder
    before the first update, `out`/log.jsonl the log.

    ValueError for a recipe that does not fit, a folder that holds another training, and a loss that is not finite;
    engine.training.interruptions.Stopped if a signal stopped it, with its state saved.
    """
    check(method=method, recipe=recipe, settings=settings, options=options)
    from bench.options import PretrainOptions
    from bench.pretraining.run import run_pretraining
    from bench.run.checkpoints import load_export

    training = PretrainOptions(
        **vars(options or Options()),
        method=method,
        recipe=recipe,
        images=images,
        out=Path(out),
        set=changes_of(settings),
        init=str(init) if init else None,
        freeze_first_epochs=freeze_first_epochs,
        resume=resume,
        seed=seed,
        shuffle_window=shuffle_window,
        export_every=export_every,
        knn_every=knn_every,
        knn_data=knn_data,
        knn_limit=knn_limit,
        health_every=health_every,
        health_data=health_data,
    )
    with heard_by(progress):
        run_pretraining(training)
    return load_export(str(out))[1]


def visualize(
    kind: str,
    checkpoints: "FrozenExport | nn.Module | str | Path | Sequence[FrozenExport | nn.Module | str | Path]",
    images: str | Path | Sequence[str | Path],
    out: str | Path = OUT / "pictures",
    *,
    settings: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    split: Literal["train", "val"] | None = None,
    limit: int | None = 4,
    image_size: int | None = None,
    square: bool = False,
    seed: int = 0,
    device: str = "auto",
    precision: Literal["float32", "bfloat16"] = "float32",
    formats: Sequence[Literal["png", "svg"]] = ("png",),
) -> list[Path]:
    """Draw what checkpoints see, several side by side, as `bench visualize` does; returns the paths of the pictures.

    kind: "attention", "pca", "norms", "retrieval" or "predictions" (docs/visualize.md). images: image files, folders,
    or URLs. settings: of the kind, such as {"layer": -2}. limit: images of each folder or URL. image_size: short side
    of the images for the networks, in pixels; None: that of each checkpoint's published evaluation. square: crop each
    image to the square in its middle. precision: of the networks' forward passes.

    ValueError for an unknown kind or setting, images that cannot be read, and networks that are not ViTs.
    """
    check(kind=kind, settings=settings)
    from bench.options import check_writable, chosen_device, with_names
    from bench.reports.drawing import Format
    from bench.reports.kinds import KINDS
    from engine.optional import require
    from engine.printing import did_you_mean

    require("matplotlib")
    networks = checkpoints if isinstance(checkpoints, list | tuple) else [checkpoints]
    if kind not in KINDS:
        raise UserError("kind", f"there is no such picture{did_you_mean(kind, list(KINDS))}", kind)
    if unknown := [form for form in formats if form not in get_args(Format)]:
        raise UserError("formats", f"choose {' or '.join(get_args(Format))}", unknown[0])
    if not networks:
        raise UserError("checkpoint", "it is missing: name one or several, as bench run takes them")
    with_names(networks, names)  # before torch is imported, which takes seconds
    if not images:
        raise UserError("images", "it is missing: name image files, folders of images, or URLs such as digits:")
    from bench.reports.visualize import PictureRequest, chosen_kind, draw_pictures

    chosen = chosen_kind(kind, changes_of(settings))
    loaded = [network if isinstance(network, str | Path) else load(network) for network in networks]
    request = PictureRequest(
        references=tuple(reference_to(network, Path(out)) for network in loaded),
        names=tuple(names),
        sources=tuple(map(str, images if isinstance(images, list | tuple) else [images])),
        split=split,
        limit=limit,
        image_size=image_size,
        square=square,
        seed=seed,
        device=chosen_device(device),
        precision=precision,
    )
    check_writable(Path(out))
    paths = []
    for path in draw_pictures(chosen, request, Path(out), tuple(dict.fromkeys(formats))):
        say(f"written: {path}")
        paths.append(path)
    return paths
