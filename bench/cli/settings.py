"""What a user writes: values and names of options, read and checked before the work, and `--set NAME=VALUE`.

TASK.FIELD=VALUE changes the tasks of a run (bench/run/suites.py), FIELD=VALUE a pretraining recipe
(bench/pretraining/recipes.py) or a picture; engine/settings.py turns a text into the annotated type. What a setting
means is the comment beside its field, or above it, read from the source of the dataclass.

Every command imports this file to say its options: nothing heavy is imported here, and torch for `--device` alone.
"""

import argparse
import ast
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from bench.cli.output import in_one_line
from bench.options import Options
from engine.extensions import extensions
from engine.printing import did_you_mean
from engine.settings import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    annotations,
    from_text,
    plain_type,
    union_members,
)

REFERENCES = "export folder, checkpoint file, folder of a training, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE"

T = TypeVar("T")
OnCluster = TypeVar("OnCluster", bound="ClusterOptions")
Positional = Annotated[T, "positional"]  # a value without the name of its option before it
STANDS_FOR = re.compile(r"([A-Z][A-Z0-9/.=]*): (.*)")


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What every command takes; the options of a command are the fields of a dataclass that is derived from this one.

    A field is the option `--name`. Its type says what is read: a tuple takes several values, a Literal has choices, a
    bool is a switch. The comment beside it, or above it, is its help, and may begin with what stands for the value, as
    in `N: at most N images`. Metadata are further arguments of argparse; `flags` are other names of the option.
    """

    debug: bool = False  # show the traceback of an error
    keep_memory: bool = True  # let glibc keep freed memory: faster forward passes on a CPU


def add_options(parser: argparse.ArgumentParser, kind: type, with_help: bool) -> None:
    """The fields of a dataclass as options; those that a base with a GROUP defines stand below that title.

    with_help: with their comments, which take a twentieth of a second to read.
    """
    hints, texts = annotations(kind), meanings(kind) if with_help else {}
    left = {field.name: field for field in fields(kind)}
    for ancestor in kind.__mro__:
        group = parser.add_argument_group(vars(ancestor)["GROUP"]) if "GROUP" in vars(ancestor) else parser
        for name in vars(ancestor).get("__annotations__", {}):
            if field := left.pop(name, None):
                group.add_argument(*flags_of(field, hints[name]), **_keywords(field, hints[name], texts.get(name, "")))


def is_positional(hint: Any) -> bool:
    """Whether the value of a field is written without the name of the option."""
    return "positional" in getattr(hint, "__metadata__", ())


def flags_of(field: dataclasses.Field, hint: Any) -> tuple[str, ...]:
    """How a field is written on the command line."""
    if is_positional(hint):
        return (field.name,)
    return field.metadata.get("flags", (f"--{field.name.replace('_', '-')}",))


def _keywords(field: dataclasses.Field, hint: Any, text: str) -> dict[str, Any]:
    """What argparse has to know of a field with this annotated type and comment."""
    named, is_required = STANDS_FOR.fullmatch(text), field.default is dataclasses.MISSING
    keywords: dict[str, Any] = {"help": (named[2] if named else text).replace("%", "%%")}
    if not is_required:
        keywords["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if is_positional(hint):
        hint = hint.__origin__
        keywords |= {} if is_required else {"nargs": "?"}
    else:
        keywords |= {"dest": field.name, "required": is_required}
    hint = Union[tuple(kind for kind in union_members(hint) if kind is not NoneType)]  # noqa: UP007
    if get_origin(hint) is tuple and ... in get_args(hint):
        hint = get_args(hint)[0]
        keywords |= {"nargs": "+", "action": "extend"}
    if hint is bool:
        keywords["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
    elif get_origin(hint) is Literal:
        keywords["choices"] = get_args(hint)
    else:
        keywords |= {"type": option_type(hint), "metavar": named[1] if named else field.name.upper()}
    return keywords | {name: value for name, value in field.metadata.items() if name != "flags"}


def options_from(arguments: Any, kind: type[T], **others: Any) -> T:
    """The dataclass whose fields `arguments` has, parsed ones or other options; `others` in place of some."""
    names = [field.name for field in fields(kind) if hasattr(arguments, field.name)]  # type: ignore[arg-type]
    values = {name: getattr(arguments, name) for name in names} | others
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def option_type(hint: Any) -> Callable[[str], Any]:
    """The `type` of an option whose values are those of an annotated type. A pair may have an x in place of a comma."""
    is_size = any(plain_type(kind) is tuple for kind in union_members(hint))

    def read(text: str) -> Any:
        try:
            return from_text(re.sub(r"^(\d+)[xX](\d+)$", r"\1,\2", text) if is_size else text, hint)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return read


class JoinedByCommas(argparse.Action):
    """`a,b c` -> `a,b,c`: words behind an option, or behind several of it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, ",".join([*([earlier] if earlier else []), *values]))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options, CommandOptions):
    """Of commands that run networks on image sets."""

    batch_size: PositiveInt | None = None  # N: images in a forward pass of a process, at most (by device)
    workers: NonNegativeInt | None = None  # N: loader workers (by machine)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(NetworkOptions):
    """Of commands that evaluate checkpoints."""

    name: tuple[str, ...] = ()  # NAME: label in results, one per checkpoint
    # S: imagenet, half, clip, or six numbers M,M,M,S,S,S: mean and std that the source trained with, of checkpoint
    # files that do not name them
    statistics: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublicationOptions(CommandOptions):
    """Of commands that make what is published."""

    # NAME=ORG/NAME: an image set's id on the Hugging Face Hub, such as cifar10=uoft-cs/cifar10
    hub_dataset: tuple[str, ...] = ()
    source: str = ""  # URL: where results, logs and commands are published


def check_writable(out: Path) -> None:
    """Make the folder, if need be, and write into it. ValueError, naming the option, where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _naming(out, error) from error


def _naming(out: Path, error: OSError) -> ValueError:
    return ValueError(f"--out: {in_one_line(OSError(error.errno, error.strerror, str(out)))}")


def check_new_export(out: Path) -> None:
    """ValueError, naming the option, where an export folder `out` could not be written; nothing is left behind."""
    try:
        others = out.exists() and any(out.iterdir())
        nearest = next(place for place in (out, *out.absolute().parents) if place.exists())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _naming(out, error) from error
    if others and not (out / "config.json").exists():
        raise ValueError(f"--out {out}: this folder is not empty and not an export: choose a new one")


def ready_device(text: str, compiled: bool) -> str:
    """`chosen_device`, where a compiler is needed with one. ValueError says what is missing."""
    device = chosen_device(text)
    if compiled:
        from engine.precision import check_compiler

        check_compiler(device)
    return device


def chosen_device(text: str) -> str:
    """`auto` -> "cuda" or "cpu"; otherwise `text` itself. ValueError for a device that is not here."""
    import torch

    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device {text}: choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {text}: choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {text}: torch sees no GPU here; use --device cpu, or see `bench doctor`")
    if device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--device {text}: each process takes the GPU of its local rank; use --device cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {text}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return text


TASK_KINDS = ("probes", "downstream")
NAME = r"[a-z0-9_]+@[A-Za-z0-9_.]+"


def check_names(checkpoints: Sequence[str], suite: str, data: Sequence[str]) -> None:
    """ValueError for the first of the names that certainly means nothing; others are found later, with torch."""
    from checkpoints.import_options import check_reference
    from imagesets.sets import open_set, parse_url

    refuse_unknown(suite)
    for text in data:
        _, url = named_url(text)
        scheme = url.partition(":")[0]
        if scheme.removeprefix("tiny-") not in extensions("layouts"):
            try:
                layouts = extensions("layouts")
                parse_url(url, dict.fromkeys(layouts, "ROOT") | {f"tiny-{layout}": "" for layout in layouts})
                if absent_images(url):
                    open_set(url, "train")  # says what its scheme misses
            except ValueError as error:
                raise ValueError(f"--data {text}: {str(error).removeprefix(f'{url}: ')}") from error
    for reference in checkpoints:
        try:
            check_reference(reference)
        except ValueError as error:
            raise ValueError(f"--checkpoint {reference}: {error}") from error


def refuse_unknown(suite: str) -> None:
    """ValueError for a word of `--suite` that no task file has.

    The files are read, not imported: a protocol's name stands in them as a whole, or up to a `_` where a function makes
    it. Plugins may make theirs in any way, so nothing is refused where there are any.
    """
    tasks = [extension for kind in TASK_KINDS for extension in extensions(kind).values()]
    if any(task.plugin for task in tasks):
        return
    folders = {task.path.parents[1] for task in tasks}
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    stems = {name for text in texts for name in re.findall(f'"({NAME})"', text)}
    suites = {
        name
        for text in texts
        for part in re.findall(r"^SUITES = \{(.*?)^\}", text, re.M | re.S)
        for name in re.findall(r'"([^"@]+)":', part)
    }
    words = {*suites, *(task.key for task in tasks), *(stem.partition("@")[0] for stem in stems)}
    for word in filter(None, map(str.strip, suite.split(","))):
        if word not in words and not any(word == stem or word.startswith(f"{stem}_") for stem in stems):
            named = {name for text in texts for name in re.findall(f'"({NAME})":', text)}
            raise ValueError(
                f"--suite: no suite, task or protocol {word!r}"
                f"{did_you_mean(word, sorted(words | named), '`bench list --protocols`')}"
            )


def absent_images(url: str) -> Path | None:
    """The path in `SCHEME:PATH` of images where nothing is there; None where there is something, or no path."""
    from imagesets.sets import OPTIONS

    scheme, _, place = OPTIONS.sub("", url).partition(":")
    return _absent(place) if any(scheme in extensions(kind) for kind in ("imagesets", "layouts")) else None


def absent_file(reference: str) -> Path | None:
    """The path in a reference to a checkpoint, PATH or IMPORTER:PATH, where nothing is there; None as above."""
    from checkpoints.import_options import TIMM_SCHEMES

    scheme, colon, place = reference.partition(":")
    if colon and scheme in TIMM_SCHEMES:
        return None
    return _absent(place if colon and scheme in extensions("importers") else reference)


def _absent(place: str) -> Path | None:
    path = Path(place).expanduser()
    return path if place and not path.exists() else None


def named_url(text: str) -> tuple[str, str]:
    """The two halves of `--data NAME=URL`. ValueError says what to write."""
    ((name, url),) = named_values([text], "--data", f"NAME=URL, for example {quote(example(text))}").items()
    return name, url


def example(url: str) -> str:
    """A likely meaning of a URL or a path without a name: `x=folder:/tmp/x`."""
    scheme, colon, _ = url.partition(":")
    if colon and scheme.isalnum():
        return f"{name_from(url)}={url}"
    if "/" in url or Path(url).is_dir():
        return f"{name_from(url) or 'images'}=folder:{url}"
    return "digits=digits:"


def name_from(url: str) -> str:
    """A name for the set at a URL or a path: the last part of the path, else the scheme."""
    from imagesets.sets import OPTIONS

    scheme, colon, place = OPTIONS.sub("", url).partition(":")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", Path(place if colon else url).name) or (scheme if colon else "")


def named_values(texts: Sequence[str], option: str, form: str, pattern: str = ".+") -> dict[str, str]:
    """Name -> value of `NAME=VALUE ...`, the last one of a repeated name. ValueError, which says what to write, for
    another text and for a value that does not match the pattern."""
    values = {}
    for text in texts:
        match = re.fullmatch(rf"\s*([^=\s].*?)\s*=\s*({pattern})\s*", text)
        if not match:
            raise ValueError(f"{option} {text}: write {form}")
        values[match[1]] = match[2]
    return values


def read_changes(texts: Sequence[str], form: str, example: str) -> dict[str, str]:
    """Name -> `NAME=VALUE`, as `--set` takes it. ValueError, with the `form` and an `example`."""
    changes = named_values(texts, "--set", f"{form}, for example {example}", ".*?")
    return {name: f"{name}={value}" for name, value in changes.items()}


def changed(value: Any, changes: Mapping[str, str], whose: str = "") -> Any:
    """A dataclass with the settings at some paths (`k`, `schedule.warmup`) set, all at once.

    changes: path -> `NAME=VALUE`, as it was written. ValueError names the change that is wrong by itself; or says what
    is wrong with all together, `whose` first. Of a field for which an alternative is named (`schedule=Multistep`,
    `schedule.start=0.1`) the new value keeps what the old one has under the same name.
    """
    hints, values = types_of(value), {}
    for name, kinds in alternatives(value).items():
        if name in changes:
            values[name] = _alternative(getattr(value, name), name, changes, kinds)
    for path, change in changes.items():
        if path.partition(".")[0] not in values:
            values[path] = _value(change, path, hints, type(value))
    try:
        return replaced(value, values)
    except ValueError as error:
        raise ValueError(f"--set: {whose}{error}") from error


def _value(change: str, path: str, hints: Mapping[str, Any], kind: type) -> Any:
    if path not in hints:
        raise ValueError(f"--set {change}: {kind.__name__} has no setting {path!r}{did_you_mean(path, list(hints))}")
    try:
        return from_text(change.partition("=")[2], hints[path])
    except ValueError as error:
        raise ValueError(f"--set {change}: {error}") from error


def alternatives(value: Any) -> dict[str, Mapping[str, type]]:
    """Field -> name -> dataclass that its value may be of, where a field of `value` says so in its metadata."""
    fields = dataclasses.fields(value)
    return {field.name: kinds for field in fields if (kinds := field.metadata.get("alternatives"))}


def _alternative(old: Any, name: str, changes: Mapping[str, str], kinds: Mapping[str, type]) -> Any:
    kind = kinds.get(changes[name].partition("=")[2])
    if kind is None:
        raise ValueError(f"--set {changes[name]}: choose one of {', '.join(kinds)}")
    fields = dataclasses.fields(kind)
    hints = {field.name: annotations(kind)[field.name] for field in fields}
    values = {field.name: getattr(old, field.name) for field in fields if hasattr(old, field.name)}
    parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{name}.")}
    values |= {part: _value(change, part, hints, kind) for part, change in parts.items()}
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if lacking := [f"{name}.{part}" for part in required if part not in values]:
        raise ValueError(f"--set {changes[name]}: set {', '.join(lacking)} as well")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def types_of(value: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> annotated type of every setting of a dataclass and of the dataclasses in it, in their order."""
    types: dict[str, Any] = {}
    hints = annotations(type(value))  # type: ignore[arg-type]  # mypy's: a type is hashable
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            types |= types_of(inner, f"{prefix}{field.name}.")
        else:
            types[prefix + field.name] = hints[field.name]
    return types


def replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    """A dataclass with the values at some paths changed, inner dataclasses first."""
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        name, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(name, {})[rest] = new
        else:
            own[name] = new
    inner = {name: replaced(getattr(value, name), parts) for name, parts in nested.items()}
    return dataclasses.replace(value, **own, **inner)


def setting_text(value: Any) -> str:
    """A value as `--set` reads it: `0.2,1.0`."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def meanings(kind: type) -> dict[str, str]:
    """Field -> its comment, of a dataclass and those that it inherits from; fields without a comment are not in it.

    The comment on the last line of the field, else all comment lines directly above it. Empty without a source file.
    """
    texts: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if is_dataclass(ancestor) and "__annotations__" in vars(ancestor):
            texts |= _own(ancestor)
    return texts


@cache  # a recipe is told field by field
def _own(kind: type) -> dict[str, str]:
    lines, definitions = _classes(kind.__module__)
    texts = {}
    for entry in definitions[kind.__name__].body if kind.__name__ in definitions else ():
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            beside = lines[(entry.end_lineno or 0) - 1].encode()[entry.end_col_offset :].decode()
            above = takewhile(lambda line: line.startswith("#"), map(str.strip, lines[entry.lineno - 2 :: -1]))
            comments = [beside] if "#" in beside else [*above][::-1]
            texts[entry.target.id] = " ".join(comment.lstrip("# ").strip() for comment in comments)
    return {name: text for name, text in texts.items() if text}


@cache
def _classes(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The lines of a module, and its classes by name."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # made at run time, or from a compiled file
        return [], {}
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return source.splitlines(), {node.name: node for node in reversed(nodes)}


DAY = 24 * 60  # minutes
YEAR = 365 * DAY
# As sbatch takes them: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
SLURM_ALONE = ("partition", "account", "qos", "mem", "cpus", "slurm", "nodes")  # not of --cluster local


def minutes_of(text: str) -> int:
    """SLURM's ways to write a time, as whole minutes, rounded up."""
    match = SLURM_TIME.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected minutes, H:MM:SS or D-HH:MM:SS, not {text!r}")
    days, first, second, third = (int(part or 0) for part in match.groups())
    has_hours = match["days"] is not None or match["third"] is not None
    hours, minutes, seconds = (first, second, third) if has_hours else (0, first, second)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise argparse.ArgumentTypeError("expected a time above 0")
    return -(-total // 60)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where the jobs of a command run."""

    GROUP: ClassVar[str] = "on a cluster (docs/cluster.md)"
    # slurm: submit the work as jobs, which go on by themselves; local: as jobs on this machine
    cluster: Literal["slurm", "local"] | None = None
    partition: str | None = None  # P: of SLURM
    gpus: NonNegativeInt = 0  # G: GPUs of a job on each node, a process for each
    processes: NonNegativeInt = 0  # N: processes of a job on each node (one for each GPU)
    nodes: PositiveInt = 1  # N: nodes of a job (1)
    jobs: PositiveInt | None = None  # N: of several jobs, how many run at once, at most (slurm: all; local: 1)
    # T: of a job, as sbatch takes it, until it is stopped and queued again (1-00)
    time: int | None = dataclasses.field(default=None, metadata={"type": minutes_of})
    account: str | None = None  # A: of SLURM
    qos: str | None = None  # Q: of SLURM
    mem: str | None = None  # M: memory of a job on each node, such as 200G
    cpus: PositiveInt | None = None  # N: CPUs of each process, for its loaders
    slurm: tuple[str, ...] = ()  # KEY=VALUE: further options of sbatch

    @property
    def minutes(self) -> int:
        """That a job may take until it is queued again."""
        return self.time or (YEAR if self.cluster == "local" else DAY)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(CheckpointOptions, ClusterOptions):
    """What is evaluated, as `bench run` and `bench plan` are told."""

    # X: export folder, checkpoint file, folder of a training, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE, or
    # module:PACKAGE:FUNCTION, a network of your own, whose code runs
    checkpoint: tuple[str, ...]
    # SUITE: smoke, frozen, full, everything, paper:moca, tasks (knn) and protocols (knn@dino)
    suite: str = dataclasses.field(metadata={"nargs": "+", "action": JoinedByCommas})
    # NAME=URL: image sets, such as cifar10=folder:/data/cifar10 (of --suite smoke: digits and tiny scenes)
    data: tuple[str, ...] = ()
    out: Path  # DIR: folder of results and leaderboard
    # what chooses heads and epochs: held-out training images, or those of validation as in many papers, which gives too
    # much and is marked (as each protocol says: NAME_paper val, other linear probes holdout, other fine-tuning its last
    # epoch)
    select: Literal["holdout", "val"] | None = None
    # TASK.FIELD=VALUE: change a setting, such as knn.k=10,20; the results are marked as modified
    set: tuple[str, ...] = ()
    seed: NonNegativeInt = 0  # N: of everything random in a task (0)
    limit: PositiveInt | None = None  # N: at most N images of each split, for smoke runs
    rerun: bool = False  # run again what has a result already


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NetworkOptions, ClusterOptions):
    """What is trained, and how, as `bench pretrain` is told."""

    method: Positional[str]  # such as mae
    recipe: str | None = None  # R: one of the method's recipes, which bench list METHOD shows
    images: str  # URL: images:PATH, any folder of images; the training images of folder:PATH, imagenet:ROOT, ...
    out: Path  # DIR: folder of this run alone
    # FIELD=VALUE: change recipe, method or encoder, such as epochs=100 schedule.warmup=5 mask_ratio=0.6
    set: tuple[str, ...] = ()
    # CHECKPOINT: start the encoder from these weights: a training's folder, an export, timm:NAME, a file, ...
    init: str | None = None
    freeze_first_epochs: NonNegativeInt = 0  # N: with --init: train the other parameters alone for N epochs (0)
    resume: bool = False  # go on where this run was; start it where there is none
    dry_run: bool = False  # print the recipe and its sizes, and do nothing
    seed: NonNegativeInt = 0  # N: of everything random (0)
    # SHARDS: shuffle the images of so many shards of wds: or parquet: at a time, read from start to end (0: all)
    shuffle_window: NonNegativeInt = 0
    # N: at most N images of a process in a forward pass; the recipe's batch is made of several
    batch_size: PositiveInt | None = dataclasses.field(default=None, metadata={"flags": ("--micro-batch", "--at-once")})
    skip_bad: bool = False  # replace and count unreadable images
    save_minutes: PositiveFloat = 10.0  # M: between two states (10)
    export_every: NonNegativeInt = 0  # EPOCHS: write the export that often, not at the end alone
    knn_every: NonNegativeInt = 0  # EPOCHS: log the encoder's k-NN accuracy that often
    knn_data: str | None = None  # URL: labelled images for that (--images)
    knn_k: PositiveInt | None = None  # K: neighbours that vote in it (20)
    # F: share of the training images in its gallery (1); ExtreMA's: --knn-k 200 --knn-fraction 0.1
    knn_fraction: Fraction | None = None
    knn_limit: PositiveInt | None = None  # N: at most N images of each split for that
    # EPOCHS: log effective ranks, spread and dead dimensions of the encoder's features that often
    health_every: NonNegativeInt = 0
    health_data: str | None = None  # URL: images for that, whose validation split is taken (--images)
    health_limit: PositiveInt | None = None  # N: at most N images for that (25 600)
    wandb: str | None = None  # PROJECT: log to Weights & Biases as well


def cluster_of(options: OnCluster) -> OnCluster | None:
    """The options of `--cluster` with what follows from it and each other; None without `--cluster`. ValueError for
    those that go with another one."""
    changed = [field.name for field in fields(ClusterOptions) if getattr(options, field.name) != field.default]
    if not options.cluster:
        if changed:
            raise ValueError(f"--{changed[0]} without --cluster: add --cluster slurm, or leave it")
        return None
    is_local = options.cluster == "local"
    if is_local and (wrong := [name for name in changed if name in SLURM_ALONE]):
        raise ValueError(f"--{wrong[0]} is of --cluster slurm, not of local: leave it")
    for text in options.slurm:
        if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
            raise ValueError(f"--slurm {text}: write KEY=VALUE as sbatch knows it, such as constraint=a100")
    return dataclasses.replace(
        options,
        processes=options.processes or options.gpus or 1,
        jobs=options.jobs or (1 if is_local else None),
    )
