"""Checks of what option values name, before any work: folders, devices, suites, image sets and checkpoints.

Nothing heavy is imported, apart from torch for `--device`.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile

from bench.settings import named_values
from engine.errors import UserError, in_one_line, option
from engine.extensions import extensions
from engine.printing import did_you_mean


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


def with_names(references: Sequence[str], names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each reference of `--checkpoint` with its name; None without `--name`. ValueError for another number of names."""
    if names and len(names) != len(references):
        raise UserError(
            "names", f"{len(names)} names for {len(references)} checkpoints; give one for each, in their order"
        )
    return list(zip(references, names or (None,) * len(references), strict=True))


def check_names(checkpoints: Sequence[str], suite: str, data: Sequence[str]) -> None:
    """ValueError for the first name that is certainly unknown; the rest is checked later, when torch is loaded."""
    from checkpoints.import_options import check_reference
    from imagesets.sets import open_set, parse_url

    refuse_unknown(suite)
    layouts = extensions("layouts")
    for text in data:
        _, url = named_url(text)
        if url.partition(":")[0].removeprefix("tiny-") in layouts:
            continue
        try:
            parse_url(url, dict.fromkeys(layouts, "ROOT") | {f"tiny-{layout}": "" for layout in layouts})
            if absent_images(url):
                open_set(url, "train")  # raises the scheme's own message about what is missing
        except ValueError as error:
            raise UserError("data", str(error).removeprefix(f"{url}: "), text) from error
    for reference in checkpoints:
        try:
            check_reference(reference)
        except ValueError as error:
            raise UserError("checkpoint", str(error), reference) from error


def refuse_unknown(suite: str) -> None:
    """ValueError for a word of `--suite` that is the name of no suite, task or protocol.

    Nothing is refused if a task file is not in the index, since its names are known only when it is imported.
    """
    from bench.index import KINDS, is_stored, stored_index, suites_of

    tasks = [extension for kind in KINDS for extension in extensions(kind).values()]
    if not all(map(is_stored, tasks)):
        return
    index = stored_index()
    names = {*suites_of(index.values()), *index, *(name for entry in index.values() for name in entry.protocols)}
    words = names | {name.partition("@")[0] for name in names}
    for word in filter(None, map(str.strip, suite.split(","))):
        if word not in words:
            raise UserError(
                "suite",
                f"no suite, task or protocol {word!r}{did_you_mean(word, sorted(words), '`bench list --protocols`')}",
            )


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
