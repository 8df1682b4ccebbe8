"""All results of a folder, read again only where a file changed since it was last read.

What was read is kept in OUT/cache/results.json with the stamp of each file: times of change, size and inode. Results
and boards made of them do not depend on it: it may be deleted, and one that is damaged or was made with other types is
made again. Processes may write it at once; what one leaves out, the next command reads and adds.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from bench.results.record import Result, read_result
from engine.files import digest, write_atomic

VERSION = 1  # raise it when the same file would be read otherwise

Stamp = tuple[int, int, int, int]
NO_FILE: Stamp = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """A result, and its file's stamp from before it was read."""

    stamp: Stamp
    result: Result


@dataclass(frozen=True, kw_only=True)
class Index:
    """The file's content. results: path below OUT/results -> what was read there."""

    version: str
    results: Mapping[str, Indexed]


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
    found = []
    for folder, _, names in os.walk(root):
        below = os.path.relpath(folder, root)
        found += [os.path.normpath(f"{below}/{name}") for name in names if name.endswith(".json")]
    ordered = sorted(found, key=lambda name: name.split("/"))
    stamped = {name: stamp(f"{root}/{name}") for name in ordered}
    return {name: seen for name, seen in stamped.items() if seen != NO_FILE}


def read_results(out: Path) -> tuple[dict[Path, Indexed], list[str]]:
    """All results of a folder by their paths, and a line for each file that could not be read."""
    known, found, problems = _known(out), {}, []
    for name, seen in stamps(out).items():
        there = known.get(name)
        if there is None or there.stamp != seen:
            try:
                there = Indexed(stamp=seen, result=read_result(out / "results" / name))
            except (ValueError, OSError) as error:
                problems.append(str(error))
                continue
        found[name] = there
    if found != known:
        write_kept(_place(out), msgspec.json.encode(Index(version=_version(), results=found)))
    return {out / "results" / name: entry for name, entry in found.items()}, problems


def write_kept(path: Path, content: bytes) -> None:
    """Write what only saves time; where that cannot be, as in a folder of somebody else, do without."""
    with suppress(OSError):
        write_atomic(path, content)


def _known(out: Path) -> Mapping[str, Indexed]:
    try:
        index = msgspec.json.decode(_place(out).read_bytes(), type=Index)
    except (OSError, ValueError):
        return {}
    return index.results if index.version == _version() else {}


def _place(out: Path) -> Path:
    return out / "cache" / "results.json"


@cache
def _version() -> str:
    # Another field of a result makes what was read without it useless.
    return digest([VERSION, msgspec.json.schema(Result)])
