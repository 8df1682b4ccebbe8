"""What the functions of `import bench` share: options, names of checkpoints and images, output that is kept back."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from checkpoints.frozen import FrozenExport, FrozenSpec
    from engine.tasks import Workspace
    from imagesets.schemes.memory import HeldSets


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how networks run; the defaults are those of the command line."""

    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # Of forward passes. auto: float32, but bfloat16 for pretraining on a GPU. float16 is for pretraining alone.
    precision: Literal["auto", "float32", "bfloat16", "float16"] | None = "auto"  # None: as auto
    compiled: bool = False  # transformer blocks by torch.compile
    decode: Literal["exact", "fast"] = "exact"  # PIL as in the papers, or torchvision on uint8 tensors
    skip_bad: bool = False  # count unreadable images instead of stopping
    batch_size: int | None = None  # images in a forward pass of a process, at most; None: by the device
    workers: int | None = None  # loader workers; None: by the machine

    def __post_init__(self) -> None:
        check("Options.", **{name: getattr(self, name) for name in ("device", "precision", "decode")})
        check("Options.", batch_size=self.batch_size, workers=self.workers)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


# Argument -> whether a value is right, and what to give instead.
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("protocol", "suite", "kind", "method", "recipe"), (lambda value: isinstance(value, str), "a text")
    ),
    **dict.fromkeys(("name", "statistics"), (lambda value: isinstance(value, str | None), "a text")),
    "settings": (lambda value: isinstance(value, Mapping | None), "a dictionary, such as {'k': (10, 20)}"),
    "options": (lambda value: isinstance(value, Options | None), "bench.Options(...)"),
    "select": (lambda value: value in (None, "holdout", "val"), "'holdout' or 'val'"),
    "seed": (_whole(0), "a whole number from 0 on"),
    "limit": (lambda value: value is None or _whole(1)(value), "a whole number from 1 on"),
    "device": (lambda value: isinstance(value, str), "'auto', 'cpu', 'cuda' or 'cuda:N'"),
    "precision": (
        lambda value: value in (None, "auto", "float32", "bfloat16", "float16"),
        "'auto', 'float32', 'bfloat16' or 'float16'",
    ),
    "decode": (lambda value: value in ("exact", "fast"), "'exact' or 'fast'"),
    "batch_size": (lambda value: value is None or _whole(1)(value), "a whole number from 1 on"),
    "workers": (lambda value: value is None or _whole(0)(value), "a whole number from 0 on"),
}


def check(prefix: str = "", **given: Any) -> None:
    """ValueError, in one line, for the first argument of the wrong kind."""
    for name, value in given.items():
        right, what = EXPECTED[name]
        if not right(value):
            raise ValueError(f"{prefix}{name}={value!r}: give {what}")


@contextmanager
def commands() -> Iterator[None]:
    """Our packages, where no module of the user's hides one; what commands say to people on standard output is kept
    back, and options of the command line are called by the arguments that stand for them."""
    from bench.__main__ import hiding_module

    if path := hiding_module():
        raise ImportError(
            f"{str(path)!r} hides the package {path.stem!r} of bench; rename it, or start Python elsewhere"
        )
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except ValueError as error:
        error.args = tuple(in_python(part) if isinstance(part, str) else part for part in error.args)
        raise


# Options of the command line whose arguments have other names; of all others the hyphens become underscores.
ARGUMENTS = {"set": "settings", "compile": "Options.compiled"}
OPTIONS = ("device", "precision", "decode", "skip-bad", "batch-size", "workers")
COMMAND_LINE = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])(:)?( )?")


IMPORT_COMMAND = re.compile(r"bench import (?:'([^']*)'|(\S+)) --out FOLDER((?: --[a-z-]+ [^\s;,)]+)*)")


def in_python(message: str) -> str:
    """A message with the names of arguments in place of those of options: "--statistics" becomes "statistics=", and
    `bench import FILE --out FOLDER --heads N` becomes `bench.load('FILE', heads=N)`."""

    def call(match: re.Match[str]) -> str:
        words = match[3].split()
        named = [f"{name[2:].replace('-', '_')}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        return f"bench.load({', '.join([repr(match[1] or match[2]), *named])})"

    def argument(match: re.Match[str]) -> str:
        option, colon, space = match[1], match[2] or "", match[3] or ""
        name = (
            f"Options.{option.replace('-', '_')}"
            if option in OPTIONS
            else ARGUMENTS.get(option, option.replace("-", "_"))
        )
        if colon:
            return f"{name}:{space}"
        return (
            f"{name}=" if not match.start() else f"{name}={space}"
        )  # a message begins with the value that it is about

    calls = IMPORT_COMMAND.sub(call, message).replace("bench import with ", "bench.load with ")
    calls = calls.replace("(bench import --", "(bench.load: --")
    return COMMAND_LINE.sub(argument, calls)


def workspace(out: Path, options: Options | None, seed: int, limit: int | None) -> "Workspace":
    """Where tasks run whose results are in `out`; the runner names the data."""
    from bench.cli.devices import ready_device
    from engine.tasks import Workspace

    options = options or Options()
    if options.precision == "float16":
        raise ValueError("--precision float16: it is for pretraining; choose float32 or bfloat16")
    return Workspace(
        cache=out / "cache",
        data="",
        device=ready_device(options.device, options.compiled),
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        compiled=options.compiled,
        decode=options.decode,
        seed=seed,
        limit=limit,
        skip_bad=options.skip_bad,
        batch_size=options.batch_size,
        workers=options.workers,
    )


def is_module(checkpoint: Any) -> bool:
    """Whether it is a module of torch, which is then imported already."""
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and isinstance(checkpoint, torch.nn.Module)


def reference_to(checkpoint: "FrozenExport | str | Path", out: Path) -> str:
    """What names a checkpoint in a request: an export in memory is kept in `out`/exports, as imports of a run are.

    A network of the user's own is not: its function is asked for it again."""
    if isinstance(checkpoint, str | Path):
        return str(checkpoint)
    from bench.run.checkpoints import checked_name, kept_export, save_once
    from checkpoints.export import ViTExport

    if not isinstance(checkpoint, ViTExport):
        return checkpoint.spec.reference
    folder = kept_export(out, checked_name(str(checkpoint.facts.get("name") or "checkpoint"), "name"), checkpoint)
    if not folder.exists():
        save_once(checkpoint, folder)
    return str(folder)


def source_pool(spec: "FrozenSpec") -> Literal["cls", "avg"]:
    """What the checkpoint's source evaluates; of a network of the user's own the class token, where it has one."""
    from checkpoints.spec import ViTSpec

    if isinstance(spec, ViTSpec):
        return spec.pool
    return "cls" if spec.has_class_token else "avg"


def named_url(data: str) -> str:
    """`NAME=URL`, as it is; a URL alone is named after the last part of its path, or its scheme."""
    from bench.places import name_from
    from bench.run.checkpoints import SAFE_NAME

    name, equals, _ = data.partition("=")
    return data if equals and SAFE_NAME.fullmatch(name) else f"{name_from(data)}={data}"


def named_data(data: Any) -> "tuple[list[str], list[HeldSets]]":
    """`NAME=URL` of each image set, and what is held of those that are in memory. data: URLs, `NAME=URL`, pairs
    (train, val) of datasets or of arrays, or a mapping of names to these."""
    from imagesets.schemes.memory import hold

    if isinstance(data, Mapping):
        sets = dict(data)
    else:
        several = isinstance(data, list | tuple) and not _is_pair(data)
        given = list(data) if several else [data]
        sets = {named_url(each).partition("=")[0] if isinstance(each, str) else "images": each for each in given}
        if len(sets) < len(given):
            names = [named_url(each) for each in given if isinstance(each, str)]
            raise ValueError(f"data: two image sets have one name ({', '.join(names)}); give a dictionary, name -> set")
    urls, held = [], []
    for name, each in sets.items():
        if not isinstance(each, str):
            held.append(hold(name, *each) if _is_pair(each) else hold(name, each))
            urls.append(f"{name}={held[-1].url}")
        else:
            urls.append(named_url(each) if not isinstance(data, Mapping) else f"{name}={each}")
    return urls, held


def _is_pair(data: Any) -> bool:
    """Whether it is a pair (train, val) of datasets or arrays."""
    return isinstance(data, tuple) and len(data) == 2 and not any(isinstance(part, str) for part in data)
