"""Reading the result files of a folder.

Results that were read are cached in OUT/cache/results.json with the stamp of each file: modification times, size and
inode. A file is read again only if its stamp changed. The cache only saves time: it may be deleted, and it is rebuilt
if it is damaged or was written with other types. Several processes may write it at the same time; results that one
omits are added by the next command.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np

from bench.results.record import DataUsed, Result, read_arrays, read_result
from engine.files import digest, json_bytes, read_json, write_atomic

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
        return read_arrays(self.path, self.result.arrays_sha256)

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


def read_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder, and a line for each file that could not be read."""
    earlier = _read_cache(out)
    cached: dict[str, _CachedResult] = {}
    results: list[StoredResult] = []
    problems: list[str] = []
    for name, current in stamps(out).items():
        path, entry = out / "results" / name, earlier.get(name)
        if entry is None or entry["stamp"] != current:
            try:
                entry = {"stamp": current, "result": read_result(path)}
            except (ValueError, OSError) as error:
                problems.append(str(error))
                continue
        cached[name] = entry
        # Arrays are written before their result file, but they may be lost later.
        arrays = stamp(f"{str(path).removesuffix('.json')}.npz")
        identity = digest([str(path).removeprefix(str(out)), current, arrays])[:24]
        results.append(StoredResult(path=path, result=entry["result"], identity=identity))
    if cached != earlier:
        write_cache(_cache_file(out), json_bytes({"version": _version(), "results": cached}))
    return results, problems


def comparable_results(out: Path) -> tuple[list[StoredResult], list[str]]:
    """All results of a folder as `regrouped`, and a line for each that could not be read or does not count as it is."""
    results, problems = read_results(out)
    results, lines = regrouped(results)
    return results, list(dict.fromkeys([*problems, *lines]))


def regrouped(results: Sequence[StoredResult]) -> tuple[list[StoredResult], list[str]]:
    """The results, such that those of a group are on the same images, and each checkpoint has one for each seed.

    Results on other images than the newest of the same set name get a set name of their own, `NAME-CONTENTS8`. Of
    several with the same checkpoint, group and seed, as in merged folders, the newest is kept. Also returns a line for
    each such set and each result left out. Results of earlier versions, which did not record a size, get that of the
    checkpoint's positions where a later result is at that of its published evaluation.
    """
    results, lines = _apart_by_images(_with_sizes(results))
    newest: dict[tuple[object, ...], StoredResult] = {}
    for stored in sorted(results, key=lambda stored: stored.result.date):
        result = stored.result
        key = (result.checkpoint.key, result.group, result.seed, result.status)
        if earlier := newest.pop(key, None):
            lines.append(f"{earlier.path}: not counted, as {stored.path} has the same checkpoint, protocol and seed")
        newest[key] = stored
    kept = {stored.path for stored in newest.values()}
    return [stored for stored in results if stored.path in kept], lines


def _with_sizes(results: Sequence[StoredResult]) -> Iterator[StoredResult]:
    """The results, those of earlier versions with the size of their images where a later result tells it."""
    sized = {
        (stored.result.checkpoint.key, stored.result.group): stored.result.checkpoint
        for stored in results
        if stored.result.image_size and stored.result.checkpoint.table_size
    }
    for stored in results:
        used = sized.get((stored.result.checkpoint.key, stored.result.group))
        if used and stored.result.image_size is None:
            stored = replace(stored, result=replace(stored.result, checkpoint=used, image_size=used.table_size))
        yield stored


def _apart_by_images(results: Iterable[StoredResult]) -> tuple[list[StoredResult], list[str]]:
    """The results, those on other images than the newest under another set name, and a line for each such name."""
    results = list(results)
    newest: dict[str, DataUsed] = {}
    for stored in sorted(results, key=lambda stored: stored.result.date):
        data = stored.result.data
        if stored.result.status == "ok":
            newest[data.name] = data.joined(newest.get(data.name, data))
    lines: dict[str, None] = {}
    for index, stored in enumerate(results):
        data = stored.result.data
        if data.name in newest and (changed := newest[data.name].differ_from(data)):
            name = f"{data.name}-{digest({**data.fingerprints, **data.reads, **data.contents})[:8]}"
            results[index] = replace(stored, result=replace(stored.result, data=replace(data, name=name)))
            problem = f"{' and '.join(changed)} differ between results"
            lines[f"{data.name}: {problem}; some on the earlier files are listed as {name}"] = None
    return results, list(lines)


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
