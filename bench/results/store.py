"""Reading, listing and moving the result files of a folder.

Results that were read are cached in OUT/cache/results.json with the stamp of each file: modification times, size and
inode. A file is read again only if its stamp changed. The cache only saves time: it may be deleted, and it is rebuilt
if it is damaged or was written with other types. Several processes may write it at the same time; results that one
omits are added by the next command.

`bench results` lists result files or moves some away. Nothing is deleted: removed files go to OUT/removed/<time>/, with
their paths, until the user deletes that folder.
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

from bench.results.record import DataUsed, Result, failure_path, number_text, read_arrays, read_result
from engine.errors import UserError
from engine.files import digest, read_json, write_atomic
from engine.printing import did_you_mean, table

VERSION = 1  # raise it when the same file would be read differently

Stamp = tuple[int, int, int, int]
NO_FILE: Stamp = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """A result with the path of its file, and its arrays, which are read when they are first used."""

    path: Path  # of the JSON file
    result: Result
    identity: str = ""  # changes whenever the result file or its arrays do; "" if unknown

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> array of the `.npz` file, read once. ValueError if it cannot be read."""
        return read_arrays(self.path)

    def forget_arrays(self) -> None:
        """Free the memory of the arrays; they are read again when they are next used."""
        self.__dict__.pop("arrays", None)

    @cached_property
    def conditions_digest(self) -> str:
        """A digest of the result's conditions, equal if results differ only in checkpoint and seed."""
        return digest(self.result.conditions)


class _CachedResult(TypedDict):
    """A result, and the stamp of its file when it was read."""

    stamp: Stamp
    result: Result


class _ResultCache(TypedDict):
    """The content of OUT/cache/results.json. results: path relative to OUT/results -> result."""

    version: str
    results: dict[str, _CachedResult]


def stamp(path: Path | str) -> Stamp:
    """Modification and change time (ns), size and inode of a file; NO_FILE if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return NO_FILE
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def stamps(out: Path) -> dict[str, Stamp]:
    """Path relative to OUT/results -> stamp, for every result file, in the order of `result_files`."""
    root = str(out / "results")
    names = []
    for folder, _, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        names += [os.path.normpath(f"{relative}/{name}") for name in files if name.endswith(".json")]
    stamped = {name: stamp(f"{root}/{name}") for name in sorted(names, key=lambda name: name.split("/"))}
    return {name: current for name, current in stamped.items() if current != NO_FILE}


def read_files(out: Path) -> dict[Path, "StoredResult | str"]:
    """Path of every result file of a folder -> its result, or why it cannot be read."""
    earlier = _read_cache(out)
    cached: dict[str, _CachedResult] = {}
    files: dict[Path, StoredResult | str] = {}
    for name, current in stamps(out).items():
        path, entry = out / "results" / name, earlier.get(name)
        if entry is None or entry["stamp"] != current:
            try:
                entry = {"stamp": current, "result": read_result(path)}
            except (ValueError, OSError) as error:
                files[path] = str(error)
                continue
        cached[name] = entry
        # Arrays are written before their result file, but they may be lost later.
        arrays = stamp(f"{str(path).removesuffix('.json')}.npz")
        identity = digest([str(path).removeprefix(str(out)), current, arrays])[:24]
        files[path] = StoredResult(path=path, result=entry["result"], identity=identity)
    if cached != earlier:
        write_cache(_cache_file(out), msgspec.json.encode({"version": _version(), "results": cached}))
    return files


def read_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder, and a line for each file that could not be read."""
    files = read_files(out).values()
    return [stored for stored in files if isinstance(stored, StoredResult)], [f for f in files if isinstance(f, str)]


def comparable_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder, such that those on image sets of one name are on the same images.

    Results on images that were overwritten since get a set name of their own, `NAME-CONTENTS8`. Also returns a line for
    each such set, and for each file that could not be read. Results of earlier versions, which did not record a size,
    get that of the checkpoint's positions where a later result is at that of its published evaluation.
    """
    results, problems = read_results(out)
    sized = {
        (stored.result.checkpoint.key, stored.result.group): stored.result.checkpoint
        for stored in results
        if stored.result.image_size and stored.result.checkpoint.table_size
    }
    for index, stored in enumerate(results):
        used = sized.get((stored.result.checkpoint.key, stored.result.group))
        if used and stored.result.image_size is None:
            result = replace(stored.result, checkpoint=used, image_size=used.table_size)
            results[index] = replace(stored, result=result)
    newest: dict[str, DataUsed] = {}
    for stored in sorted(results, key=lambda stored: stored.result.date):
        data = stored.result.data
        if (data.contents or data.reads) and stored.result.status == "ok":
            newest[data.name] = data.joined(newest.get(data.name, data))
    comparable, lines = [], dict.fromkeys(problems)
    for stored in results:
        data = stored.result.data
        if data.name in newest and (splits := newest[data.name].differ_from(data)):
            name = f"{data.name}-{digest({**data.reads, **data.contents})[:8]}"
            stored = replace(stored, result=replace(stored.result, data=replace(data, name=name)))
            overwritten = f"files of {' and '.join(splits)} were overwritten"
            lines[f"{data.name}: {overwritten}; results from before are listed as {name}"] = None
        comparable.append(stored)
    return comparable, list(lines)


def write_cache(path: Path, content: bytes) -> None:
    """Write a cache file if possible; errors are ignored, for example in a read-only folder."""
    with suppress(OSError):
        write_atomic(path, content)


def _read_cache(out: Path) -> dict[str, _CachedResult]:
    """Path relative to OUT/results -> cached result; empty if the cache is missing, damaged or of another version."""
    try:
        content = read_json(_cache_file(out), type=_ResultCache)
    except (OSError, ValueError):
        return {}
    return content["results"] if content["version"] == _version() else {}


def _cache_file(out: Path) -> Path:
    return out / "cache" / "results.json"


@cache
def _version() -> str:
    # Results that were cached before a field was added lack its values.
    return digest([VERSION, msgspec.json.schema(Result)])


STATUSES = ("ok", "failed", "unreadable")  # of a result file


def find_results(out: Path, options: Mapping[str, str | None]) -> dict[Path, Result | str]:
    """The result files that match all options: path -> the result, or why it cannot be read.

    options: checkpoint, data, protocol, status -> the user's value; None: any. ValueError, with the choices, for a
    value that matches no file.
    """
    files = read_files(out).items()
    contents = {path: stored if isinstance(stored, str) else stored.result for path, stored in files}
    names = {path: _names_of(out, path, content) for path, content in contents.items()}
    for option, word in options.items():
        choices = {name for of_file in names.values() for name in of_file[option]}
        if word is not None and option != "status" and word not in choices:
            raise UserError(option, f"{out} has no such result{did_you_mean(word, sorted(choices))}", word)
        contents = {path: content for path, content in contents.items() if word is None or word in names[path][option]}
    return contents


def _folders(out: Path, path: Path) -> tuple[str, str]:
    """The folders in the path of a result: checkpoint (`NAME-DIGEST8`) and image set; "" if the path has others."""
    parts = path.relative_to(out / "results").parts
    return (parts[0], parts[1]) if len(parts) == 3 else ("", "")


def _names_of(out: Path, path: Path, content: Result | str) -> dict[str, list[str]]:
    """Option -> the values of that option which match this file."""
    checkpoint, data = _folders(out, path)
    name, _, digest8 = checkpoint.rpartition("-")
    return {
        "checkpoint": [checkpoint, name, f"{name} ({digest8})"],
        "data": [data],
        "protocol": [content.protocol.name, content.task] if isinstance(content, Result) else [],
        "status": [content.status if isinstance(content, Result) else "unreadable"],
    }


def listing(out: Path, contents: Mapping[Path, Result | str]) -> list[str]:
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
    """Move result files, with their arrays, logs and failures, to a new folder; returns it.

    A result file is moved before its arrays, so that no reader finds a result without them.
    """
    folder = out / "removed" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    for file in dict.fromkeys(file for path in paths for file in _files_of(path)):
        target = folder / file.relative_to(out / "results")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
    return folder


def _files_of(path: Path) -> list[Path]:
    """The existing files of a result: itself, its arrays and log, and a failed attempt to make it again."""
    results = [path] if path.stem.endswith(".failed") else [path, failure_path(path)]
    files = [result.with_suffix(suffix) for result in results for suffix in (".json", ".npz", ".log")]
    return [file for file in files if file.exists()]


def refuse_ambiguous(out: Path, paths: Iterable[Path], name: str | None) -> None:
    """ValueError if several checkpoints have the `name`: more would be removed than the user meant."""
    folders = list(dict.fromkeys(_folders(out, path)[0] for path in paths))
    if name and len(folders) > 1:
        raise UserError("checkpoint", f"{len(folders)} checkpoints have this name; give {' or '.join(folders)}", name)
