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
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

from bench.cli.output import in_one_line
from engine.extensions import extensions
from engine.printing import did_you_mean
from engine.settings import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, annotations, from_text

if TYPE_CHECKING:
    from checkpoints.import_options import ImportOptions

REFERENCES = "export folder, checkpoint file, folder of a training, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE"


def option_type(hint: Any) -> Callable[[str], Any]:
    """The `type` of an option whose values are those of an annotated type."""

    def read(text: str) -> Any:
        try:
            return from_text(text, hint)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return read


positive_integer, whole_number = option_type(PositiveInt), option_type(NonNegativeInt)
share, above_zero = option_type(Fraction), option_type(PositiveFloat)


class JoinedByCommas(argparse.Action):
    """`a,b c` -> `a,b,c`: words behind an option, or behind several of it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, ",".join([*([earlier] if earlier else []), *values]))


def image_size(text: str) -> int | tuple[int, int]:
    """Pixels of a side, or height and width with an x between them."""
    try:
        return from_text(text.lower().replace("x", ","), PositiveInt | tuple[PositiveInt, PositiveInt])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be pixels, as 224 or 384x512 (height x width)") from None


def statistics(text: str) -> str:
    """Image statistics that there are, as typed."""
    from checkpoints.import_options import ImportOptions

    try:
        _ = ImportOptions(statistics=text).preparation
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--statistics ")) from error
    return text


def add_statistics(parser: argparse.ArgumentParser) -> None:
    """--statistics, of commands that import checkpoints."""
    parser.add_argument(
        "--statistics",
        type=statistics,
        metavar="S",
        help="imagenet, half, clip, or six numbers M,M,M,S,S,S: mean and std that the source trained with, of "
        "checkpoint files that do not name them",
    )


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """What a user may say of a checkpoint that no tensor of its file shows."""
    add_statistics(parser)
    parser.add_argument("--branch", metavar="B", help="student, teacher, ...: whichever the format has")
    parser.add_argument(
        "--prefix",
        metavar="P",
        help="what the names of the network's tensors begin with, in a file of other training code",
    )
    parser.add_argument(
        "--heads", type=positive_integer, metavar="N", help="attention heads, where no tensor tells them"
    )
    parser.add_argument(
        "--image-size",
        type=image_size,
        metavar="N",
        help="resize the position tables to N pixels, or to HxW, height and width",
    )
    parser.add_argument("--architecture", metavar="NAME", help="timm's name of the model, for a file of its weights")


def import_options(arguments: argparse.Namespace) -> "ImportOptions":
    """The options of imports that the command line has."""
    from checkpoints.import_options import ImportOptions

    return ImportOptions(**{option.name: getattr(arguments, option.name) for option in fields(ImportOptions)})


def add_compile(parser: argparse.ArgumentParser) -> None:
    """--compile, of commands that run networks."""
    parser.add_argument(
        "--compile",
        action="store_true",
        help="transformer blocks by torch.compile, which needs a compiler and a minute or two, and rounds otherwise",
    )


def add_decode(parser: argparse.ArgumentParser) -> None:
    """--decode, of commands that run networks on images."""
    parser.add_argument(
        "--decode",
        choices=("exact", "fast"),
        default="exact",
        help="exact: PIL, as in the papers; fast: torchvision on uint8 tensors (exact)",
    )


def add_publication(parser: argparse.ArgumentParser) -> None:
    """--hub-dataset and --source, of commands that make what is published."""
    parser.add_argument(
        "--hub-dataset",
        nargs="+",
        default=[],
        metavar="NAME=ORG/NAME",
        help="an image set's id on the Hugging Face Hub, such as cifar10=uoft-cs/cifar10",
    )
    parser.add_argument("--source", default="", metavar="URL", help="where results, logs and commands are published")


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
        _, url = name_and_url(text)
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


def name_and_url(text: str) -> tuple[str, str]:
    """The two halves of `--data NAME=URL`. ValueError says what to write."""
    name, equals, url = text.partition("=")
    if not (equals and name and url):
        raise ValueError(f"--data {text}: write NAME=URL, for example {quote(example(text))}")
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


@dataclass(frozen=True, kw_only=True)
class Change:
    """One `NAME=VALUE` as it was written: `knn@dino.k=10,20`, `schedule.warmup=5`."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def read_changes(texts: Sequence[str], form: str, example: str) -> list[Change]:
    """`NAME=VALUE ...`; the last value of a repeated name. ValueError, with the `form` and an `example`."""
    changes: dict[str, Change] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and name):
            raise ValueError(f"--set {text}: write {form}, for example {example}")
        changes[name] = Change(name=name, value=value)
    return list(changes.values())


def changed(value: Any, changes: Mapping[str, Change], whose: str = "") -> Any:
    """A dataclass with the settings at some paths (`k`, `schedule.warmup`) set from text, all at once.

    ValueError names the change that is wrong by itself; or says what is wrong with all together, `whose` first.
    """
    hints, values = types_of(value), chosen_alternatives(value, changes)
    for path, change in changes.items():
        if path.partition(".")[0] not in values:
            values[path] = _value(change, path, hints, type(value))
    try:
        return replaced(value, values)
    except ValueError as error:
        raise ValueError(f"--set: {whose}{error}") from error


def _value(change: Change, path: str, hints: Mapping[str, Any], kind: type) -> Any:
    if path not in hints:
        raise ValueError(f"--set {change}: {kind.__name__} has no setting {path!r}{did_you_mean(path, list(hints))}")
    try:
        return from_text(change.value, hints[path])
    except ValueError as error:
        raise ValueError(f"--set {change}: {error}") from error


def alternatives(value: Any) -> dict[str, Mapping[str, type]]:
    """Field -> name -> dataclass that its value may be of, where a field of `value` says so in its metadata."""
    fields = dataclasses.fields(value)
    return {field.name: kinds for field in fields if (kinds := field.metadata.get("alternatives"))}


def chosen_alternatives(value: Any, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Field -> new value, of fields for which an alternative is named (`schedule=Multistep`, `schedule.start=0.1`).

    It keeps what the old value has under the same name. ValueError for settings that it lacks or does not have.
    """
    chosen = {}
    for name, kinds in alternatives(value).items():
        if name in changes:
            parts = {path.partition(".")[2]: change for path, change in changes.items() if path.startswith(f"{name}.")}
            chosen[name] = _alternative(getattr(value, name), changes[name], parts, kinds)
    return chosen


def _alternative(old: Any, choice: Change, parts: Mapping[str, Change], kinds: Mapping[str, type]) -> Any:
    if choice.value not in kinds:
        raise ValueError(f"--set {choice}: choose one of {', '.join(kinds)}")
    kind = kinds[choice.value]
    fields = dataclasses.fields(kind)
    hints = {field.name: annotations(kind)[field.name] for field in fields}
    values = {field.name: getattr(old, field.name) for field in fields if hasattr(old, field.name)}
    values |= {name: _value(change, name, hints, kind) for name, change in parts.items()}
    required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if lacking := [f"{choice.name}.{name}" for name in required if name not in values]:
        raise ValueError(f"--set {choice}: set {', '.join(lacking)} as well")
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
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class that was made at run time, or from a compiled file
        return {}
    lines, (definition,) = source.splitlines(), ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for entry in definition.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            beside = lines[(entry.end_lineno or 0) - 1].encode()[entry.end_col_offset :].decode()
            above = takewhile(lambda line: line.startswith("#"), map(str.strip, lines[entry.lineno - 2 :: -1]))
            comments = [beside] if "#" in beside else [*above][::-1]
            texts[entry.target.id] = " ".join(comment.lstrip("# ").strip() for comment in comments)
    return {name: text for name, text in texts.items() if text}


DAY = 24 * 60  # minutes
YEAR = 365 * DAY
# As sbatch takes them: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
SLURM_ALONE = ("partition", "account", "qos", "mem", "cpus", "slurm", "nodes")  # not of --cluster local
CLUSTER_PREFIX = "cluster_"  # of the names under which argparse keeps these options


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where the jobs of a command run."""

    kind: Literal["slurm", "local"]
    gpus: int = 0  # of a job on each node
    processes: int = 1  # of a job on each node: as many as GPUs, where there are any
    nodes: int = 1  # of a job
    jobs: int | None = None  # that run at once, at most; none: as many as the cluster starts
    minutes: int = DAY  # that a job may take until it is stopped and queued again
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    mem: str | None = None  # of a job on each node, as sbatch takes it
    cpus: int | None = None  # of each process
    slurm: tuple[str, ...] = ()  # KEY=VALUE, further options of sbatch


def add_cluster(parser: argparse.ArgumentParser, jobs: bool) -> None:
    """The options; `--jobs` where a command has several."""
    group = parser.add_argument_group("on a cluster (docs/cluster.md)")

    def add(name: str, **settings: object) -> None:
        group.add_argument(f"--{name}", dest=CLUSTER_PREFIX + name, **settings)  # type: ignore[arg-type]

    group.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="slurm: submit the work as jobs, which go on by themselves; local: as jobs on this machine",
    )
    add("partition", metavar="P", help="of SLURM")
    add("gpus", type=positive_integer, metavar="G", help="GPUs of a job on each node, a process for each")
    add("processes", type=positive_integer, metavar="N", help="processes of a job on each node (one for each GPU)")
    add("nodes", type=positive_integer, metavar="N", help="nodes of a job (1)")
    if jobs:
        add("jobs", type=positive_integer, metavar="N", help="jobs that run at once, at most (slurm: all; local: 1)")
    add("time", type=minutes_of, metavar="T", help="of a job, as sbatch takes it, until it is queued again (1-00)")
    add("account", metavar="A", help="of SLURM")
    add("qos", metavar="Q", help="of SLURM")
    add("mem", metavar="M", help="memory of a job on each node, such as 200G")
    add("cpus", type=positive_integer, metavar="N", help="CPUs of each process, for its loaders")
    add("slurm", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="further options of sbatch")


def minutes_of(text: str) -> int:
    """SLURM's ways to write a time, as whole minutes, rounded up."""
    match = SLURM_TIME.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected minutes, H:MM:SS or D-HH:MM:SS, not {text!r}")
    days, *parts = (int(part or 0) for part in match.groups())
    first, second, third = parts
    if match["days"] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif match["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    if not seconds:
        raise argparse.ArgumentTypeError("expected a time above 0")
    return -(-seconds // 60)


def cluster_of(arguments: argparse.Namespace) -> ClusterOptions | None:
    """The options of `--cluster`, None without `--cluster`. ValueError for those that go with another one."""
    options = {
        name.removeprefix(CLUSTER_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(CLUSTER_PREFIX) and value not in (None, [])
    }
    if not arguments.cluster:
        _refuse(options, options.keys(), "without --cluster: add --cluster slurm, or leave it")
        return None
    if arguments.cluster == "local":
        _refuse(options, SLURM_ALONE, "is of --cluster slurm, not of local: leave it")
        options = {"jobs": 1, "time": YEAR} | options
    for text in options.get("slurm", ()):
        if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
            raise ValueError(f"--slurm {text}: write KEY=VALUE as sbatch knows it, such as constraint=a100")
    gpus = options.get("gpus", 0)
    return ClusterOptions(
        kind=arguments.cluster,
        minutes=options.pop("time", DAY),
        processes=options.pop("processes", gpus or 1),
        **options | {"slurm": tuple(options.get("slurm", ()))},
    )


def _refuse(given: Collection[str], names: Collection[str], why: str) -> None:
    if wrong := [name for name in given if name in names]:
        raise ValueError(f"--{wrong[0]} {why}")
