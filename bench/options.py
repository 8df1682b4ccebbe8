"""The options of commands and of the Python API: dataclasses, whose fields the command line turns into its options, and
checks of what their values name, before any work: folders, devices, image sets and checkpoints.

Everything imports this file: nothing heavy is imported here, apart from torch for `--device`.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from engine.errors import UserError, command, in_one_line, option
from engine.extensions import extensions
from engine.settings import (
    Fraction,
    ImageShape,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Validated,
    annotations,
    named_values,
    validate,
)

T = TypeVar("T")
OnCluster = TypeVar("OnCluster", bound="ClusterOptions")
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")  # of checkpoints and image sets, parts of file names
Positional = Annotated[T, "positional"]  # a value without the name of its option before it


@dataclass(frozen=True, kw_only=True)
class Checked(Validated):
    """Base of options: values are checked against their annotations. UserError, naming the option, for others."""

    def __post_init__(self) -> None:
        validate(self, UserError)


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Where and how networks run; the defaults are those of the command line."""

    device: str = "auto"  # auto, cpu, cuda or cuda:N (auto)
    # precision of forward passes (auto: float32, but bfloat16 for pretraining on a GPU); float16 only for pretraining
    precision: Literal["auto", "float32", "bfloat16", "float16"] | None = "auto"
    # compile transformer blocks by torch.compile, which needs a compiler and a minute or two, and rounds differently
    compiled: bool = field(default=False, metadata={"flags": ("--compile",)})
    # how images are decoded and resized: exact: PIL, as in the papers; fast: torchvision on uint8 tensors (exact)
    decode: Literal["exact", "fast"] = "exact"
    skip_bad: bool = False  # count unreadable images instead of stopping
    batch_size: PositiveInt | None = None  # N: at most N images in a forward pass of a process (by device)
    workers: NonNegativeInt | None = None  # N: processes that load images (by machine)


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Checked):
    """The options of every command; each command derives a dataclass from it, whose fields are its options.

    A field `name` is the option `--name`. Its type determines how the value is parsed: a tuple takes several values, a
    Literal has choices, a bool is a switch. The comment on its line, or above it, is its help, and may begin with the
    placeholder of the value, as in `N: at most N images`. Metadata: `flags` replace
    `--name`, `parse` reads a value, and the values of a `joined` option are joined by commas.
    """

    debug: bool = False  # show the traceback of an error


def is_positional(hint: Any) -> bool:
    """Whether a field with this annotation is a positional argument."""
    return "positional" in getattr(hint, "__metadata__", ())


def flags_of(field: dataclasses.Field, hint: Any) -> tuple[str, ...]:
    """The names of a field on the command line: `("--batch-size",)`."""
    if is_positional(hint):
        return (field.name,)
    return field.metadata.get("flags", (f"--{field.name.replace('_', '-')}",))


def options_from(arguments: Any, kind: type[T], **overrides: Any) -> T:
    """Options of type `kind` from the attributes of `arguments`, argparse's or other options; `overrides` win."""
    names = [field.name for field in fields(kind) if hasattr(arguments, field.name)]  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names} | overrides)


def argv_of(name: str, options: "ClusterOptions", on_cluster: bool = False) -> list[str]:
    """The arguments of `bench` for a command with these options, without defaults and, by default, `--cluster`'s."""
    hints = annotations(type(options))  # type: ignore[arg-type]
    of_cluster = [] if on_cluster else [entry.name for entry in fields(ClusterOptions)]
    positional: list[str] = [name]
    words: dict[str, Any] = {}
    for entry in fields(options):
        value, hint = getattr(options, entry.name), hints[entry.name]
        flag = flags_of(entry, hint)[0].removeprefix("--")
        if value == entry.default or entry.name in of_cluster:
            continue
        if is_positional(hint):
            positional.append(str(value))
        else:
            value = "x".join(map(str, value)) if entry.name == "image_size" and isinstance(value, tuple) else value
            words[flag] = value
    return command(*positional, **words)[1:]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options, CommandOptions):
    """The options of commands that run networks on image sets."""


DAY = 24 * 60  # minutes
# As sbatch takes them: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def minutes_of(text: str) -> int:
    """Minutes, rounded up, of a time in any of SLURM's formats."""
    match = SLURM_TIME.fullmatch(text)
    if not match:
        raise ValueError(f"expected minutes, H:MM:SS or D-HH:MM:SS, not {text!r}")
    days, first, second, third = (int(part or 0) for part in match.groups())
    has_hours = match["days"] is not None or match["third"] is not None
    hours, minutes, seconds = (first, second, third) if has_hours else (0, first, second)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError("expected a time above 0")
    return -(-total // 60)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Checked):
    """The options of commands that can run as jobs of a cluster."""

    GROUP: ClassVar[str] = "on a cluster (docs/cluster.md)"
    cluster: Literal["slurm"] | None = None  # submit the work as jobs, which continue by themselves
    partition: str | None = None  # P: SLURM's partition
    gpus: NonNegativeInt = 0  # G: GPUs of a job on each node, one process per GPU
    processes: NonNegativeInt = 0  # N: processes of a job on each node (one for each GPU)
    nodes: PositiveInt = 1  # N: nodes of a job (1)
    jobs: PositiveInt | None = None  # N: run at most N jobs of bench run at once (all)
    # T: time limit in sbatch's format, after which a job is stopped and queued again (1-00)
    time: int = field(default=DAY, metadata={"parse": minutes_of})
    account: str | None = None  # A: SLURM's account
    qos: str | None = None  # Q: SLURM's quality of service
    mem: str | None = None  # M: memory of a job on each node, such as 200G
    cpus: PositiveInt | None = None  # N: CPUs of each process, for its loaders
    slurm: tuple[str, ...] = ()  # KEY=VALUE: further options of sbatch


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(NetworkOptions, ClusterOptions):
    """The options of commands that evaluate checkpoints by protocols: `bench run` and `bench plan`."""

    # X: export folder, checkpoint file, folder of a pretraining, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE, or
    # module:PACKAGE:FUNCTION, a network of your own, whose code runs
    checkpoint: tuple[str, ...]
    name: tuple[str, ...] = ()  # NAME: label in results, one per checkpoint
    # S: imagenet, half, clip, or six numbers M,M,M,S,S,S: mean and std that the source trained with, for checkpoint
    # files that do not contain them
    statistics: str | None = None
    # S: side in pixels, or HxW, of the images of tasks on image sets; dense tasks and raw pixels keep theirs (that of
    # each checkpoint's published evaluation, which bench inspect shows)
    image_size: PositiveInt | ImageShape | None = None
    # SUITE: smoke, quick, frozen, full, everything, paper:moca, tasks (knn) and protocols (knn@dino)
    suite: str = field(metadata={"joined": True})
    # NAME=URL: image sets, such as cifar10=folder:/data/cifar10 (for --suite smoke: digits and tiny scenes)
    data: tuple[str, ...] = ()
    out: Path  # DIR: folder of results and leaderboard
    # what heads and epochs are selected on: held-out training images, or the validation images as in many papers, which
    # is optimistic and marked in results (by protocol: NAME_paper val, other linear probes holdout, other fine-tuning
    # its last epoch)
    select: Literal["holdout", "val"] | None = None
    # TASK.FIELD=VALUE: change a setting, such as knn.k=10,20; the results are marked as modified
    set: tuple[str, ...] = ()
    # N: seed of everything random in a task; several: each protocol that draws anything is repeated with each (0)
    seed: tuple[NonNegativeInt, ...] = ()
    limit: PositiveInt | None = None  # N: at most N images of each split, for smoke runs
    rerun: bool = False  # run again even what has a result already
    keep_heads: Path | None = None  # DIR: keep the trained heads that results report, for bench predict

    @property
    def seeds(self) -> tuple[int, ...]:
        """The different seeds, one or more."""
        return tuple(dict.fromkeys(self.seed)) or (0,)


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NetworkOptions, ClusterOptions):
    """The options of `bench pretrain`: what is trained, and how."""

    method: Positional[str]  # such as mae
    # R: one of the method's recipes, as listed by bench list METHOD (with --init: the nearest in size, adapted)
    recipe: str | None = None
    images: str  # URL: images:PATH, any folder of images; the training images of folder:PATH, imagenet:ROOT, ...
    out: Path  # DIR: a folder for this run only
    # FIELD=VALUE: change recipe, method or encoder, such as epochs=100 schedule.warmup=5 mask_ratio=0.6
    set: tuple[str, ...] = ()
    # CHECKPOINT: start the encoder from these weights: a training's folder, an export, timm:NAME, a file, ...
    init: str | None = None
    # N: with --init: train only the other parameters for N epochs (0; without --recipe 1 from 10 epochs on)
    freeze_first_epochs: NonNegativeInt | None = None
    resume: bool = False  # continue the run in --out, or start it if there is none
    dry_run: bool = False  # print the recipe and its sizes, and do nothing
    seed: NonNegativeInt = 0  # N: seed of everything random (0)
    # SHARDS: read wds: or parquet: in order and shuffle the images of this many shards at a time (0: all)
    shuffle_window: NonNegativeInt = 0
    # N: at most N images of a process in a forward pass; the recipe's batch is accumulated over several passes
    batch_size: PositiveInt | None = field(default=None, metadata={"flags": ("--micro-batch", "--at-once")})
    skip_bad: bool = False  # replace and count unreadable images
    save_minutes: PositiveFloat = 10.0  # M: minutes between two saved states (10)
    export_every: NonNegativeInt = 0  # EPOCHS: write an export every EPOCHS epochs, not only at the end
    knn_every: NonNegativeInt = 0  # EPOCHS: log the encoder's k-NN accuracy every EPOCHS epochs
    knn_data: str | None = None  # URL: labelled images for this k-NN evaluation (--images)
    knn_k: PositiveInt | None = None  # K: number of neighbours (20)
    # F: fraction of the training images in its gallery (1); ExtreMA's: --knn-k 200 --knn-fraction 0.1
    knn_fraction: Fraction | None = None
    knn_limit: PositiveInt | None = None  # N: at most N images of each split for it
    # EPOCHS: log effective ranks, spread and dead dimensions of the encoder's features every EPOCHS epochs
    health_every: NonNegativeInt = 0
    health_data: str | None = None  # URL: images for these, from the validation split (--images)
    health_limit: PositiveInt | None = None  # N: at most N images for these (25 600)
    wandb: str | None = None  # PROJECT: log to Weights & Biases as well


def cluster_of(options: OnCluster) -> OnCluster | None:
    """The options with the defaults that depend on `--cluster` filled in; None without `--cluster`.

    ValueError for an option of clusters without `--cluster`.
    """
    changed = [field.name for field in fields(ClusterOptions) if getattr(options, field.name) != field.default]
    if not options.cluster:
        if changed:
            raise UserError(changed[0], "it is for --cluster: add --cluster slurm, or omit it")
        return None
    for text in options.slurm:
        if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
            raise UserError("slurm", "write KEY=VALUE as sbatch knows it, such as constraint=a100", text)
    return dataclasses.replace(options, processes=options.processes or options.gpus or 1)


def check_writable(out: Path, argument: str = "out") -> None:
    """Create the folder if it does not exist, and try to write into it. UserError for `argument` if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _out_error(out, error, argument) from error


def _out_error(out: Path, error: OSError, argument: str = "out") -> UserError:
    return UserError(argument, in_one_line(OSError(error.errno, error.strerror, str(out))))


def check_new_export(out: Path) -> None:
    """ValueError, naming --out, if an export could not be written to the folder `out`; nothing is left behind."""
    try:
        has_files = out.exists() and any(out.iterdir())
        nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _out_error(out, error) from error
    if has_files and not (out / "config.json").exists():
        raise UserError("out", "this folder is not empty and not an export: choose a new one", out)


def ready_device(text: str, compiled: bool) -> str:
    """`chosen_device`, after a check that torch.compile works there if `compiled`. ValueError if it does not."""
    device = chosen_device(text)
    if compiled:
        from engine.precision import check_compiler

        check_compiler(device)
    return device


def chosen_device(text: str) -> str:
    """`auto` -> "cuda" or "cpu"; otherwise `text` itself. ValueError for a device that this machine lacks."""
    import torch

    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UserError("device", "choose auto, cpu, cuda or cuda:N", text) from None
    if device.type not in ("cpu", "cuda"):
        raise UserError("device", "choose auto, cpu, cuda or cuda:N", text)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device", f"torch sees no GPU here; use {option('device', 'cpu')}, or see `bench doctor`", text)
    if device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("device", f"each process takes the GPU of its local rank; use {option('device', 'cuda')}", text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError("device", f"there are {torch.cuda.device_count()} GPUs, numbered from 0", text)
    return text


def checked_name(name: str, argument: str) -> str:
    """The name itself. UserError, naming the `argument`, if it cannot be part of a file name on every system."""
    if not SAFE_NAME.fullmatch(name):
        text = "use ASCII letters, digits and . _ @ + - only, not starting with . @ + or -"
        raise UserError(argument, text, name)
    return name


def with_names(references: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, str | None]]:
    """Each reference of `--checkpoint` with its name; None without `--name`.

    UserError for another number of names, and for one that cannot be part of a file name.
    """
    if names and len(names) != len(references):
        raise UserError(
            "names", f"{len(names)} names for {len(references)} checkpoints; give one for each, in their order"
        )
    checked = [checked_name(name, "names") for name in names]
    return list(zip(references, checked or (None,) * len(references), strict=True))


def absent_images(url: str) -> Path | None:
    """The path in `SCHEME:PATH` of images if it does not exist; None if it exists, or if the URL has no path."""
    from imagesets.sets import URL_OPTIONS

    scheme, _, path = URL_OPTIONS.sub("", url).partition(":")
    return _absent(path) if any(scheme in extensions(kind) for kind in ("imagesets", "layouts")) else None


def absent_file(reference: str) -> Path | None:
    """The path in a reference to a checkpoint, PATH or IMPORTER:PATH, if it does not exist; None otherwise."""
    from checkpoints.import_options import TIMM_SCHEMES

    scheme, colon, path = reference.partition(":")
    if colon and scheme in TIMM_SCHEMES:
        return None
    return _absent(path if colon and scheme in extensions("importers") else reference)


def _absent(text: str) -> Path | None:
    """The path if it is not empty and does not exist; else None."""
    path = Path(text).expanduser()
    return path if text and not path.exists() else None


def named_url(text: str) -> tuple[str, str]:
    """The name and the URL of `--data NAME=URL`. ValueError, with an example, for another form."""
    ((name, url),) = named_values([text], "data", f"NAME=URL, for example {quote(example(text))}").items()
    return name, url


def example(url: str) -> str:
    """What a URL or a path without a name probably means: `/tmp/x` -> `x=folder:/tmp/x`."""
    scheme, colon, _ = url.partition(":")
    if colon and scheme.isalnum():
        return f"{name_from(url)}={url}"
    if "/" in url or Path(url).is_dir():
        return f"{name_from(url) or 'images'}=folder:{url}"
    return "digits=digits:"


def name_from(url: str) -> str:
    """A name for the image set at a URL or path: the last part of the path, or the scheme if there is no path."""
    from imagesets.sets import URL_OPTIONS

    scheme, colon, path = URL_OPTIONS.sub("", url).partition(":")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", Path(path if colon else url).name) or (scheme if colon else "")
