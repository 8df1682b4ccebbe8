"""All results of a folder, read again only where a file changed since it was last read.

What was read is kept in OUT/cache/results.json with the stamp of each file: times of change, size and inode. Results
and boards made of them do not depend on it: it may be deleted, and one that is damaged or was made with other types is
made again. Processes may write it at once; what one leaves out, the next command reads and adds.

`bench results` lists these files or moves some away. Nothing is deleted: what is removed goes to OUT/removed/<time>/,
under its own path, until the user deletes that.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from bench.results.board import group_of
from bench.results.record import Result, failure_beside, number_text, read_result, result_files
from engine.files import digest, write_atomic
from engine.printing import did_you_mean

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


Status = Literal["ok", "failed", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One result file. checkpoint: the name of its folder, `<name>-<digest8>`; data: likewise, the image set's name."""

    path: Path
    checkpoint: str
    data: str
    status: Status
    result: Result | None = None
    problem: str = ""

    @property
    def names(self) -> set[str]:
        """What a user may call the checkpoint."""
        name, _, digest8 = self.checkpoint.rpartition("-")
        return {self.checkpoint, name, f"{name} ({digest8})"}

    @property
    def protocols(self) -> set[str]:
        """What a user may call the protocol: its own name and its task's; of an unreadable file what its name begins
        with."""
        if self.result:
            return {self.result.protocol.name, self.result.task}
        words = self.path.stem.split("-")
        return {"-".join(words[:count]) for count in range(1, len(words) + 1)}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which results; None: all."""

    checkpoint: str | None = None
    data: str | None = None
    protocol: str | None = None
    status: Status | None = None

    def __contains__(self, each: Stored) -> bool:
        return (
            self.checkpoint in (None, *each.names)
            and self.data in (None, each.data)
            and self.protocol in (None, *each.protocols)
            and self.status in (None, each.status)
        )

    @property
    def is_all(self) -> bool:
        return self == Filter()


def find(out: Path, wanted: Filter) -> list[Stored]:
    """The results of a folder that are `wanted`. ValueError, with the choices, for a word that fits none of them."""
    everything = [_read(out, path) for path in result_files(out)]
    known = {
        "checkpoint": {each.checkpoint for each in everything},
        "data": {each.data for each in everything},
        "protocol": {name for each in everything if each.result for name in each.protocols},
    }
    for option, choices in known.items():
        word = getattr(wanted, option)
        if word is not None and not any(each in Filter(**{option: word}) for each in everything):
            raise ValueError(f"--{option} {word}: no result of it in {out}{did_you_mean(word, sorted(choices))}")
    return [each for each in everything if each in wanted]


def _read(out: Path, path: Path) -> Stored:
    parts = path.relative_to(out / "results").parts
    checkpoint, data = parts[:2] if len(parts) == 3 else ("", "")
    try:
        result = read_result(path)
    except (ValueError, OSError) as error:
        return Stored(path=path, checkpoint=checkpoint, data=data, status="unreadable", problem=str(error))
    return Stored(path=path, checkpoint=checkpoint, data=data, status=result.status, result=result)


def lines_of(found: Sequence[Stored]) -> list[str]:
    """A line for each: status, checkpoint, protocol and seed, then the first number or why there is none."""
    rows = [(each.status, each.checkpoint, _what(each), _says(each)) for each in found]
    sizes = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    padded = [[cell.ljust(size) for cell, size in zip(row[:3], sizes, strict=True)] for row in rows]
    lines = ["  ".join([*cells, row[3]]) for cells, row in zip(padded, rows, strict=True)]
    count = {status: sum(each.status == status for each in found) for status in ("ok", "failed", "unreadable")}
    return [*lines, ", ".join(f"{number} {status}" for status, number in count.items())]


def _what(each: Stored) -> str:
    if each.result is None:
        return f"{each.data}/{each.path.stem}"
    again = ", made again" if each.path.stem.endswith(".failed") else ""
    return f"{group_of(each.result)} seed {each.result.seed}{again}"


def _says(each: Stored) -> str:
    if each.result is None:
        return each.problem
    if each.status != "ok":
        return each.result.message
    name, metric = next(iter(each.result.metrics.items()))
    return f"{name} {number_text(metric.value, metric.unit)}  {each.result.date[:10]}"


def remove(out: Path, found: Iterable[Stored]) -> Path:
    """Move the results, with all that lies beside them, to a new folder; returns it.

    The result itself goes first, so that no reader finds one without its arrays.
    """
    place = out / "removed" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    for path in dict.fromkeys(path for each in found for path in files_of(each.path)):
        target = place / path.relative_to(out / "results")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    return place


def files_of(path: Path) -> list[Path]:
    """What there is of a result: itself, its arrays and log, and the failure to make it again with its log."""
    results = [path] if path.stem.endswith(".failed") else [path, failure_beside(path)]
    beside = [each.with_suffix(suffix) for each in results for suffix in (".json", ".npz", ".log")]
    return [each for each in beside if each.exists()]


def refuse_ambiguous(found: Iterable[Stored], name: str | None) -> None:
    """ValueError where `name` is that of several checkpoints: more would be removed than was meant."""
    folders = list(dict.fromkeys(each.checkpoint for each in found))
    if name and len(folders) > 1:
        raise ValueError(f"--checkpoint {name}: the name of {len(folders)} checkpoints; give {' or '.join(folders)}")
