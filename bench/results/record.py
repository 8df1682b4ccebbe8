"""Result: what one protocol found about one checkpoint on one image set, as a JSON file. Schema: docs/results.md.

The path of a result says everything that is asked for, so that a result is looked up by asking whether its file exists,
and two runs that share a folder never write different things to one file. A good result is only replaced by another
good one: when it was made again and that failed, the failure is `<stem>.failed.json` beside it.
"""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from zipfile import BadZipFile

import numpy as np

from engine.files import digest, write_atomic
from engine.tasks import Workspace

SCHEMA = 1


class NewerSchema(ValueError):
    """A file that a later version of this tool wrote: to be left alone, unlike a damaged one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointUsed:
    """The export that was evaluated."""

    name: str
    digest: str
    method: str = ""
    recipe: str = ""
    branch: str = ""
    architecture: str = ""
    source: str = ""
    parameters: int = 0
    plugin: str = ""  # package whose importer or method made it, `benchtoys 1.0`

    @property
    def is_floor(self) -> bool:
        """Whether these are raw pixels: no network, but what every network has to beat."""
        return self.method == "pixels"


@dataclass(frozen=True, kw_only=True)
class ProtocolUsed:
    """The recipe that was followed; `changes` holds the settings that differ from it."""

    name: str
    version: int
    source: str = ""
    plugin: str = ""  # package that brings the task, `benchtoys 1.0`
    modified: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataUsed:
    """The image set, by the user's name for it, and per split its fingerprint and number of images."""

    name: str
    url: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured fact, or one failure. Field order is the order in the file."""

    schema: int = SCHEMA
    status: Literal["ok", "failed"]
    message: str = ""
    task: str
    protocol: ProtocolUsed
    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # metric -> (low, high)
    interval_method: str = ""
    checkpoint: CheckpointUsed
    data: DataUsed
    seed: int
    random: bool = True
    limit: int | None = None
    precision: str = "float32"
    decode: str = "exact"
    skip_bad: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    per_image: list = field(default_factory=list)  # names of the arrays in the .npz file beside this one
    resampled: list = field(default_factory=list)  # metrics whose values on resampled images are there, see below
    device: str = ""
    processes: int = 1
    seconds: float = 0.0
    cost: Mapping[str, float] = field(default_factory=dict)
    images_per_second: float | None = None
    date: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> tuple[str, ...]:
        """What makes this number incomparable with the plain protocol's: version, changed settings, limit, ..."""
        found = [f"v{self.protocol.version}"] if self.protocol.version > 1 else []
        found += [f"{name}={short(value)}" for name, value in self.protocol.changes.items()]
        found += [f"limit={self.limit}"] if self.limit is not None else []
        found += [self.precision] if self.precision != "float32" else []
        found += [self.decode] if self.decode != "exact" else []
        found += [f"skipped={self.skipped}"] if self.skipped else []
        return tuple(found)

    @property
    def traced(self) -> tuple[str, ...]:
        """Metrics of which the arrays say how they follow from the images, so that they can be tested."""
        return tuple(name for name in self.metrics if name in self.per_image or name in self.resampled)

    @property
    def skipped(self) -> int:
        """How many unreadable images were left out, of both splits together."""
        paths: set[str] = set()
        for split in ("train", "val"):
            facts = self.facts.get(split)
            paths |= set(facts.get("skipped") or ()) if isinstance(facts, Mapping) else set()
        return len(paths)

    def to_json(self) -> str:
        """The file's text. ValueError for a value that JSON does not have (NaN, infinity, an object)."""
        try:
            return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"
        except TypeError as error:
            raise ValueError(f"{self.protocol.name}: a fact is not a JSON value: {error}") from error


def short(value: Any) -> str:
    """A setting without commas, which column names must not hold: `5+10`."""
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def result_path(out: Path, checkpoint: CheckpointUsed, data_name: str, result_stem: str) -> Path:
    """`OUT/results/<name>-<digest8>/<data name>/<stem>.json`."""
    return out / "results" / f"{checkpoint.name}-{checkpoint.digest[:8]}" / data_name / f"{result_stem}.json"


def stem(protocol: ProtocolUsed, settings: Mapping[str, Any], space: Workspace) -> str:
    """`<protocol>[-v<version>][-<settings digest8>][-limitN][-bfloat16][-fast]-seed<seed>`."""
    parts = [protocol.name]
    parts += [f"v{protocol.version}"] if protocol.version > 1 else []
    parts += [digest(dict(settings))[:8]] if protocol.modified else []
    parts += [f"limit{space.limit}"] if space.limit is not None else []
    parts += [space.precision] if space.precision != "float32" else []
    parts += [space.decode] if space.decode != "exact" else []
    return "-".join([*parts, f"seed{space.seed}"])


def failure_beside(path: Path) -> Path:
    """Where the failure to make a good result again is kept."""
    return path.with_suffix(".failed.json")


def record(path: Path, result: Result, arrays: Mapping[str, np.ndarray], log: str = "") -> Path:
    """Write the result to `path`, or a failure beside the good result that is there; returns the path written to."""
    beside = failure_beside(path)
    if result.status == "failed" and is_good(path):
        write_result(beside, result, arrays, log)
        return beside
    write_result(path, result, arrays, log)
    for leftover in (beside, beside.with_suffix(".log")):
        leftover.unlink(missing_ok=True)
    return path


def is_good(path: Path) -> bool:
    """Whether a result is there, undamaged, that did not fail."""
    try:
        return read_result(path).status == "ok"
    except (FileNotFoundError, ValueError):
        return False


def write_result(path: Path, result: Result, arrays: Mapping[str, np.ndarray], log: str = "") -> None:
    """Write the result, its arrays before it and its log; whatever an earlier run left beside it goes."""
    text = result.to_json()
    beside = {".npz": _npz(arrays) if arrays else b"", ".log": log.encode()}
    for suffix, content in beside.items():
        if content:
            write_atomic(path.with_suffix(suffix), content)
    write_atomic(path, text)
    for suffix, content in beside.items():
        if not content:
            path.with_suffix(suffix).unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Read one file. Unknown keys are ignored; ValueError, one line, for a newer schema or a damaged file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a result file: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise ValueError(f"{path}: not a result file: it states no schema version")
    if value["schema"] > SCHEMA:
        raise NewerSchema(
            f"{path}: written with result schema {value['schema']}, this version reads up to {SCHEMA}; "
            "upgrade with: pip install --upgrade ssl-vit-bench"
        )
    return _from_json(Result, value, str(path))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of the `.npz` file beside a result file; ValueError, one line, when they cannot be had."""
    beside = path.with_suffix(".npz")
    try:
        with np.load(beside) as arrays:
            return dict(arrays)
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{beside}: its arrays cannot be read; make the result again with --rerun") from error


def check_folder(out: Path) -> None:
    """ValueError for a folder that no run wrote to."""
    if not (out / "results").is_dir():
        raise ValueError(f"{out} holds no results; give the folder that `bench run --out` wrote to")


def result_files(out: Path) -> Iterator[Path]:
    """All result files of a folder, in a stable order."""
    return iter(sorted((out / "results").rglob("*.json")))


def validation_images(data: DataUsed, limit: int | None) -> int:
    """How many images a task saw that leaves none out."""
    return min(data.images["val"], data.images["val"] if limit is None else limit)


def resampled_name(metric: str) -> str:
    """Name of the array, beside those of `per_image`, that holds a metric's values on resampled images."""
    return f"{metric}_resampled"


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # as NumPy types it, an array might be a flag
    return buffer.getvalue()


def _from_json(kind: type, value: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    given = {}
    for entry in fields(kind):
        hint = hints[entry.name]
        if entry.name not in value:
            continue
        found = value[entry.name]
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(found, dict):
            found = _from_json(hint, found, f"{where}: {entry.name}")
        elif not _fits(found, hint):
            raise ValueError(f"{where}: not a result file: {entry.name} is {found!r}")
        given[entry.name] = _as_declared(found, hint)
    try:
        return kind(**given)
    except TypeError as error:  # required fields that the file lacks
        raise ValueError(f"{where}: not a result file: {error}") from error


def _as_declared(value: Any, hint: Any) -> Any:
    # JSON has lists where a mapping of tuples is declared.
    if get_origin(hint) is Mapping and get_origin(get_args(hint)[1]) is tuple:
        return {key: tuple(found) for key, found in value.items()}
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in choices
    if origin is UnionType:
        return any(_fits(value, choice) for choice in choices)
    if hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(choices) and all(map(_fits, value, choices))
    if origin is Mapping:
        return isinstance(value, dict) and (choices[1] is Any or all(_fits(v, choices[1]) for v in value.values()))
    return isinstance(value, hint)
