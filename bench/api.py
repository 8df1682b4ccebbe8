"""`import bench`: the commands as functions, for notebooks and programs.

Each function builds the request that its command builds and runs it in the same way, so results of one are those of
the other: what `bench run` left in a folder is not evaluated again, and `bench leaderboard` shows what a notebook
measured. What the commands print is returned; progress and warnings go to standard error.

Users' mistakes are ValueErrors of one line, which names the command's option, such as `--data`. Nothing heavy is
imported before a function is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.calls import Options, commands, named_url, reference_to, source_pool, workspace

if TYPE_CHECKING:
    from bench.results.board import Board
    from bench.results.record import Result
    from bench.statistics.report import Comparisons
    from checkpoints.export import ViTExport
    from checkpoints.frozen import FrozenExport
    from probes.features.extract import FeatureSet

OUT = Path("bench-results")  # folder of results and features, where none is named
BOARD_WIDTH = 120  # characters of a printed leaderboard


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """All results of a folder, by checkpoint and protocol. Prints as tables; a notebook shows it as Markdown.

    board: groups, metrics and cells (bench/results/board.py). files: format -> the file that was written.
    """

    board: "Board"
    files: Mapping[str, Path]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary a number, as `pandas.DataFrame` takes them: checkpoint, group, metric, value, unit, low, high
        (ends of the 95 % interval, or None), std (over seeds), seeds, and published (a paper's, not measured)."""
        return [
            {"checkpoint": row.checkpoint.name, "group": group, "metric": metric, "value": cell.mean, "unit": cell.unit}
            | dict(zip(("low", "high"), cell.interval or (None, None), strict=True))
            | {"std": cell.std, "seeds": cell.seeds, "published": row.published}
            for row in self.board.rows
            for (group, metric), cell in row.cells.items()
        ]

    def __str__(self) -> str:
        from bench.board.tables import to_terminal

        return to_terminal(self.board, BOARD_WIDTH)

    def _repr_markdown_(self) -> str:
        return self.files["markdown"].read_text(encoding="utf-8")


def load(
    checkpoint: str | Path,
    *,
    branch: str | None = None,
    prefix: str | None = None,
    heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    statistics: str | None = None,
    architecture: str | None = None,
) -> "FrozenExport":
    """The checkpoint as an export, imported if need be; nothing is written.

    checkpoint: an export folder, a checkpoint file, the folder of a training, timm:NAME, hf-hub:ID, IMPORTER:PATH,
    pixels:SIDE, or module:PACKAGE:FUNCTION, any network of your own, whose code then runs. The other arguments are the
    options of `bench import`, for facts that no tensor shows. `export.build()` is the network: images (B, 3, H, W) ->
    for each layer asked for, the last one by default, tokens (B, P+L, D) of P prefix tokens and L patches.

    ValueError where it cannot be read, is not what was exported, or its format is not clear.
    """
    with commands():
        from bench.run.checkpoints import default_name, opened
        from checkpoints.import_options import ImportOptions
        from checkpoints.own_networks import SCHEME
        from checkpoints.resolve import load_frozen

        options = ImportOptions(
            branch=branch,
            prefix=prefix,
            heads=heads,
            image_size=image_size,
            statistics=statistics,
            architecture=architecture,
        )
        if str(checkpoint).startswith(f"{SCHEME}:"):
            return load_frozen(checkpoint, options)
        reference, export = opened(str(checkpoint), options)
        name = export.facts.get("name") or default_name(reference, export.digest)
        return replace(export, facts=dict(export.facts) | {"name": name})


def extract(
    checkpoint: "FrozenExport | str | Path",
    data: str,
    split: Literal["train", "val"] = "val",
    *,
    pool: Literal["cls", "avg"] | None = None,
    layer: int = -1,
    norm: bool = True,
    limit: int | None = None,
    out: str | Path = OUT,
    options: Options | None = None,
) -> "FeatureSet":
    """Frozen features of one split of an image set, from `out`/cache where an evaluation or a call left them.

    Of the n readable images: `.features` (n, D) float32, `.labels` (n,) int64, `.indices` (n,) int64, the place of each
    row in the set. pool: class token or mean of the patches; None: what the checkpoint's source evaluates. layer: block
    number, negative from the end. norm: with the final LayerNorm. limit: at most so many images, evenly spread.

    ValueError for a set or a checkpoint that cannot be read, a feature that the network lacks, and features that are
    not finite; UnreadableImage, which is one, with the path of an image, unless `options.skip_bad`.
    """
    with commands():
        from imagesets.sets import open_set
        from probes.features.extract import extract as extracted
        from probes.features.kinds import FeatureKind

        export = load(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
        kind = FeatureKind(pool or source_pool(export.spec), layer, norm)
        kind.check(export.spec, "TASK")
        space = replace(workspace(Path(out), options, seed=0, limit=limit), data=named_url(data).partition("=")[2])
        return extracted(export, space.images(split, open_set), [kind], space)


def evaluate(
    checkpoint: "FrozenExport | str | Path",
    protocol: str,
    data: str,
    *,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    select: Literal["holdout", "val"] | None = None,
    seed: int = 0,
    limit: int | None = None,
    rerun: bool = False,
    out: str | Path = OUT,
    options: Options | None = None,
) -> "Result":
    """What one protocol says about a checkpoint on an image set, as `bench run` measures and records it.

    protocol: such as "knn@dino" (`bench list --protocols`). data: "NAME=URL", or a URL alone, whose last part is then
    the name: "folder:/data/cifar10" is "cifar10". name: of the checkpoint in results. settings: changed settings of the
    protocol, such as {"k": (10, 20)}; the result is marked. A result that is in `out` already is returned, unless
    `rerun`. `result.metrics["top1_k20"]` has `.value`, in its `.unit`, and `.interval`, the 95 % interval over
    validation images; `result.numbers` has the values alone.

    ValueError for a wrong request. The task's own error where it fails, which is also recorded.
    engine.training.interruptions.Stopped where a signal stopped a training: the same call goes on.
    """
    changes = {f"{protocol}.{field}": value for field, value in (settings or {}).items()}
    with commands():
        from bench.run.suites import catalogue, choose_protocols

        meant = [chosen.name for chosen in choose_protocols(protocol, catalogue())]
    if len(meant) > 1:
        raise ValueError(
            f"{protocol!r} means {len(meant)} protocols, such as {meant[0]!r}: name one, or use evaluate_suite"
        )
    (found,) = evaluate_suite(
        [checkpoint],
        protocol,
        [data],
        names=[name] if name else (),
        settings=changes,
        select=select,
        seed=seed,
        limit=limit,
        rerun=rerun,
        out=out,
        options=options,
    )
    return found


def evaluate_suite(
    checkpoints: "Sequence[FrozenExport | str | Path]",
    suite: str,
    data: Sequence[str],
    *,
    names: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    select: Literal["holdout", "val"] | None = None,
    seed: int = 0,
    limit: int | None = None,
    rerun: bool = False,
    out: str | Path = OUT,
    options: Options | None = None,
) -> "list[Result]":
    """All results of several checkpoints, protocols and image sets; images are read and features extracted once.

    suite: a suite ("frozen"), a task ("knn"), a protocol, or several with commas between them. settings: by
    "TASK.FIELD", such as {"knn.k": (10, 20)}. Everything else as in `evaluate`. Protocols for which there is no set are
    left out. If tasks fail, the others are evaluated first; then the first error is raised, and all are recorded.
    """
    with commands():
        from bench.cli.settings import setting_text
        from bench.results.record import read_result
        from bench.run.runner import RunRequest, run_jobs

        folder = Path(out)
        request = RunRequest(
            checkpoints=tuple(reference_to(each, folder) for each in checkpoints),
            names=tuple(names),
            suite=suite,
            data=tuple(map(named_url, data)),
            select=select,
            changes=tuple(f"{field}={setting_text(value)}" for field, value in (settings or {}).items()),
            out=folder,
            space=workspace(folder, options, seed, limit),
            rerun=rerun,
        )
        tally = run_jobs(request)
        if tally.errors:
            raise tally.errors[0]
        return [read_result(job.path) for job in tally.jobs]


def compare(
    first: "str | Result",
    *others: "str | Result",
    data: str | None = None,
    protocol: str | None = None,
    metric: str | None = None,
    out: str | Path = OUT,
) -> "Comparisons":
    """Whether one checkpoint is better than another: paired tests on the same images, as `bench compare` prints them.

    first, others: names of checkpoints in `out`, or any results of theirs. data, protocol, metric: these alone. All
    comparisons of the call are corrected together (Holm), so name the metric that decides. `.found` holds them:
    `.paired.difference`, `.paired.low`, `.paired.high` in the metric's unit (points of a percentage), `.p_holm`.

    ValueError, with the choices, for what is not in `out`.
    """
    with commands():
        from bench.results.record import check_folder
        from bench.statistics.compare import Wanted
        from bench.statistics.compare import compare as compared

        check_folder(Path(out))
        names = [each if isinstance(each, str) else each.checkpoint.unique_name for each in (first, *others)]
        return compared(Path(out), names, Wanted(data=data, protocol=protocol, metric=metric))


def leaderboard(out: str | Path = OUT, *, published: bool = False, formats: Sequence[str] = ()) -> Leaderboard:
    """The board of all results in `out`, whose leaderboard.csv and leaderboard.md are written anew.

    published: with papers' numbers of the same protocols, marked. formats: other files to write, as for
    `bench leaderboard --format`: "latex", "html", "parquet". ValueError for a folder without results.
    """
    with commands():
        from bench.board.files import ALWAYS, FORMATS, rewrite
        from bench.results.record import check_folder
        from engine.choices import meant

        if unknown := [name for name in formats if name not in FORMATS]:
            raise ValueError(f"no format {unknown[0]!r}{meant(unknown[0], list(FORMATS))}")
        check_folder(Path(out))
        shown = rewrite(Path(out), published, formats).shown
        written = {name: Path(out) / FORMATS[name][0] for name in dict.fromkeys((*ALWAYS, *formats))}
        return Leaderboard(board=shown, files=written)


def report(
    out: str | Path = OUT, *, to: str | Path | None = None, published: bool = False, pictures: bool = True
) -> Path:
    """Write all results of `out` as one HTML page; returns its path, `out`/report.html unless `to` is given.

    ValueError for a folder without results.
    """
    with commands():
        from bench.report_page.page import report_page
        from bench.results.record import check_folder
        from engine.files import write_atomic

        check_folder(Path(out))
        path = Path(to or Path(out) / "report.html")
        write_atomic(path, report_page(Path(out), published, pictures))
        return path


def pretrain(
    method: str,
    recipe: str,
    images: str,
    out: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    seed: int = 0,
    export_every: int = 0,
    knn_every: int = 0,
    knn_data: str | None = None,
    options: Options | None = None,
) -> "ViTExport":
    """Pretrain an encoder with a method's recipe in the folder `out`, as `bench pretrain` does; returns the encoder.

    recipe: one of the method's (`bench list methods --recipes`). images: a URL. settings: changes of recipe, method or
    encoder, such as {"epochs": 100, "schedule.warmup": 5}. resume: go on where the training in `out` was, or start it.
    export_every, knn_every: epochs between two exports, and between two lines of the log with k-NN accuracy on
    `knn_data` (`images`). options: `batch_size` says how much of the recipe's batch a process has in a forward pass.
    `out`/start is the encoder before the first update, `out`/log.jsonl the log.

    ValueError for a recipe that does not fit, a folder that holds another training, and a loss that is not finite;
    engine.training.interruptions.Stopped where a signal stopped it, with its state saved.
    """
    with commands():
        from bench.cli.devices import ready_device
        from bench.cli.settings import setting_text
        from bench.pretraining.online_knn import OnlineKnn, knn_space
        from bench.pretraining.run import PretrainRequest, run_pretraining, training_precision
        from bench.run.checkpoints import opened
        from engine.training.interruptions import STOPPED, Stopped
        from pretrain.loop.trainer import Run

        options = options or Options()
        if options.decode != "exact":
            raise ValueError(f"--decode {options.decode}: it is for evaluations; a pretraining decodes exactly")
        device = ready_device(options.device, options.compiled)
        products = training_precision(options.precision or "auto", device)
        knn = OnlineKnn(space=knn_space(Path(out), knn_data or images, device, products, None, options.skip_bad))
        run = Run(
            out=Path(out),
            device=device,
            precision=products,
            compiled=options.compiled,
            seed=seed,
            workers=options.workers,
            micro_batch=options.batch_size,
            skip_bad=options.skip_bad,
            resume=resume,
            export_every=export_every,
            monitor_every=knn_every,
            monitor=knn if knn_every else None,
        )
        changes = tuple(f"{field}={setting_text(value)}" for field, value in (settings or {}).items())
        request = PretrainRequest(method=method, recipe=recipe, changes=changes, images=images, run=run)
        if run_pretraining(request) == STOPPED:
            raise Stopped(f"stopped by a signal, state saved in {out}; to go on, call it again with resume=True")
        return opened(str(out))[1]
