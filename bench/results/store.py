"""The result files of a folder: read, listed and moved away.

What was read is kept in OUT/cache/results.json with the stamp of each file: times of change, size and inode. A file is
read again only where its stamp changed. Results and leaderboards do not depend on this cache: it may be deleted, and
one that is damaged or was made with other types is made again. Processes may write it at once; what one leaves out, the
next command reads and adds.

`bench results` lists result files or moves some away. Nothing is deleted: what is removed goes to OUT/removed/<time>/,
under its own path, until the user deletes that.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np

from bench.cli.output import table
from bench.results.record import (
    DataUsed,
    Result,
    failure_beside,
    number_text,
    read_arrays,
    read_result,
    result_files,
)
from engine.files import digest, write_atomic
from engine.printing import did_you_mean

VERSION = 1  # raise it when the same file would be read otherwise

Stamp = tuple[int, int, int, int]
NO_FILE: Stamp = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """A result, its file, and the arrays beside it. identity: changes whenever the files do; "" where it is unknown."""

    path: Path  # of the JSON file
    result: Result
    identity: str = ""

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> array of the `.npz` file, read once. ValueError where it cannot be read."""
        return read_arrays(self.path)

    def forget_arrays(self) -> None:
        """Free their memory; they are read again when asked for."""
        self.__dict__.pop("arrays", None)

    @cached_property
    def conditions_digest(self) -> str:
        """Equal where results differ in checkpoint and seed alone."""
        return digest(self.result.conditions)


class _CachedResult(TypedDict):
    """A result, and its file's stamp from before it was read."""

    stamp: Stamp
    result: Result


class _ResultCache(TypedDict):
    """The content of OUT/cache/results.json. results: path below OUT/results -> what was read there."""

    version: str
    results: dict[str, _CachedResult]


def stamp(path: Path | str) -> Stamp:
    """Times of change (ns), size and inode of a file; NO_FILE where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return NO_FILE
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def stamps(out: Path) -> dict[str, Stamp]:
    """Path below OUT/results -> stamp, for every result file, in the order of `result_files`."""
    root = str(out / "results")
    names = []
    for folder, _, files in os.walk(root):
        below = os.path.relpath(folder, root)
        names += [os.path.normpath(f"{below}/{name}") for name in files if name.endswith(".json")]
    stamped = {name: stamp(f"{root}/{name}") for name in sorted(names, key=lambda name: name.split("/"))}
    return {name: current for name, current in stamped.items() if current != NO_FILE}


def read_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder, and a line for each file that could not be read."""
    known = _cached(out)
    cached: dict[str, _CachedResult] = {}
    results, problems = [], []
    for name, current in stamps(out).items():
        path, entry = out / "results" / name, known.get(name)
        if entry is None or entry["stamp"] != current:
            try:
                entry = {"stamp": current, "result": read_result(path)}
            except (ValueError, OSError) as error:
                problems.append(str(error))
                continue
        cached[name] = entry
        # The arrays are written before their file but may be lost after it.
        arrays = stamp(f"{str(path).removesuffix('.json')}.npz")
        identity = digest([str(path).removeprefix(str(out)), current, arrays])[:24]
        results.append(StoredResult(path=path, result=entry["result"], identity=identity))
    if cached != known:
        write_cache(_cache_file(out), msgspec.json.encode({"version": _version(), "results": cached}))
    return results, problems


def comparable_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder, those of images that were overwritten since as results of a set of their own,
    `NAME-CONTENTS8`; and a line for each such set and for each file that could not be read."""
    results, problems = read_results(out)
    newest: dict[str, DataUsed] = {}
    for stored in sorted(results, key=lambda stored: stored.result.date):
        if stored.result.data.contents and stored.result.status == "ok":
            newest[stored.result.data.name] = stored.result.data
    comparable, lines = [], dict.fromkeys(problems)
    for stored in results:
        data = stored.result.data
        if data.name in newest and (splits := newest[data.name].differ_from(data)):
            name = f"{data.name}-{digest(dict(data.contents))[:8]}"
            stored = replace(stored, result=replace(stored.result, data=replace(data, name=name)))
            overwritten = f"files of {' and '.join(splits)} were overwritten"
            lines[f"{data.name}: {overwritten}; results from before are {name}"] = None
        comparable.append(stored)
    return comparable, list(lines)


def write_cache(path: Path, content: bytes) -> None:
    """Write what only saves time; where that cannot be, as in a folder of somebody else, do without."""
    with suppress(OSError):
        write_atomic(path, content)


def _cached(out: Path) -> dict[str, _CachedResult]:
    try:
        content = msgspec.json.decode(_cache_file(out).read_bytes(), type=_ResultCache)
    except (OSError, ValueError):
        return {}
    return content["results"] if content["version"] == _version() else {}


def _cache_file(out: Path) -> Path:
    return out / "cache" / "results.json"


@cache
def _version() -> str:
    # Another field of a result makes what was read without it useless.
    return digest([VERSION, msgspec.json.schema(Result)])


STATUSES = ("ok", "failed", "unreadable")  # of a result file


def find(out: Path, options: Mapping[str, str | None]) -> dict[Path, Result | str]:
    """The result files that fit all options: path -> the result, or why it cannot be read.

    options: checkpoint, data, protocol, status -> the user's word; None: any. ValueError, with the choices, for a word
    that fits no file.
    """
    filters = {option: word for option, word in options.items() if word is not None}
    contents = {path: _read(path) for path in result_files(out)}
    names = {path: _names_of(out, path, content) for path, content in contents.items()}
    for option, word in filters.items():
        if option != "status" and not any(word in names[path][option] for path in contents):
            choices = {
                name
                for path, content in contents.items()
                for name in (names[path][option] if isinstance(content, Result) or option != "protocol" else ())
            }
            raise ValueError(f"--{option} {word}: no result of it in {out}{did_you_mean(word, sorted(choices))}")
    fits = [path for path in contents if all(word in names[path][option] for option, word in filters.items())]
    return {path: contents[path] for path in fits}


def _read(path: Path) -> Result | str:
    try:
        return read_result(path)
    except (ValueError, OSError) as error:
        return str(error)


def _folders(out: Path, path: Path) -> tuple[str, str]:
    """`NAME-DIGEST8` of the checkpoint and the name of the image set, as the path says; "" where it says neither."""
    parts = path.relative_to(out / "results").parts
    return (parts[0], parts[1]) if len(parts) == 3 else ("", "")


def _names_of(out: Path, path: Path, content: Result | str) -> dict[str, list[str]]:
    """Option -> what a user may call this file by."""
    checkpoint, data = _folders(out, path)
    name, _, digest8 = checkpoint.rpartition("-")
    words = path.stem.split("-")  # an unreadable file's name begins with that of its protocol
    beginnings = ["-".join(words[:count]) for count in range(1, len(words) + 1)]
    return {
        "checkpoint": [checkpoint, name, f"{name} ({digest8})"],
        "data": [data],
        "protocol": [content.protocol.name, content.task] if isinstance(content, Result) else beginnings,
        "status": [content.status if isinstance(content, Result) else "unreadable"],
    }


def lines_of(out: Path, contents: Mapping[Path, Result | str]) -> list[str]:
    """A line for each file: status, checkpoint, protocol and seed, then the first number or why there is none."""
    rows = []
    for path, content in contents.items():
        checkpoint, data = _folders(out, path)
        if isinstance(content, str):
            rows.append(("unreadable", checkpoint, f"{data}/{path.stem}", content))
            continue
        again = ", made again" if path.stem.endswith(".failed") else ""
        ending = content.message
        if content.status == "ok":
            name, metric = next(iter(content.metrics.items()))
            ending = f"{name} {number_text(metric.value, metric.unit)}  {content.date[:10]}"
        rows.append((content.status, checkpoint, f"{content.group} seed {content.seed}{again}", ending))
    statuses = [row[0] for row in rows]
    return [*table(rows), ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES)]


def remove(out: Path, paths: Iterable[Path]) -> Path:
    """Move result files, with all that lies beside them, to a new folder; returns it.

    The result itself goes first, so that no reader finds one without its arrays.
    """
    folder = out / "removed" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    for file in dict.fromkeys(file for path in paths for file in _files_of(path)):
        target = folder / file.relative_to(out / "results")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
    return folder


def _files_of(path: Path) -> list[Path]:
    """A result, its arrays and log, and the failure to make it again with its log: those that exist."""
    results = [path] if path.stem.endswith(".failed") else [path, failure_beside(path)]
    files = [result.with_suffix(suffix) for result in results for suffix in (".json", ".npz", ".log")]
    return [file for file in files if file.exists()]


def refuse_ambiguous(out: Path, paths: Iterable[Path], name: str | None) -> None:
    """ValueError where `name` is that of several checkpoints: more would be removed than was meant."""
    folders = list(dict.fromkeys(_folders(out, path)[0] for path in paths))
    if name and len(folders) > 1:
        raise ValueError(f"--checkpoint {name}: the name of {len(folders)} checkpoints; give {' or '.join(folders)}")
