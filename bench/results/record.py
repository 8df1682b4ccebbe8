"""Results: what one protocol measured for one checkpoint on one image set, as JSON files. Fields: docs/results.md.

The path of a result identifies it completely: a result exists if its file does, and two runs that share a folder never
write different results to one file. A good result is only replaced by another good one: if it is made again and fails,
the failure is written next to it, as `<stem>.failed.json`.
"""

import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import floor, log10
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import msgspec
import numpy as np

from engine.errors import option
from engine.files import digest, open_regular, plain, read_json, write_atomic
from engine.tasks import Task, Workspace, added_settings, as_json, settings_of
from imagesets.sets import contents_differ

# Field of TrainingCost -> its unit in texts.
COST_UNITS = {
    "hours": "hours",
    "seconds_per_epoch": "s an epoch",
    "images_per_second": "images/s",
    "gflop_per_image": "GFLOP an image",
    "memory_gib": "GiB",
    "gpu_memory_gib": "GiB of a GPU",
}


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of a pretraining, as measured by pretrain/loop/records.py: the fact "cost" of an export.

    Empty for a checkpoint that was not trained by this tool.
    """

    hours: float | None = None  # of updates on `devices`, waiting for images included
    seconds_per_epoch: float | None = None  # mean
    images_per_second: float | None = None  # mean
    gflop_per_image: float | None = None  # 1e9 floating-point operations, forward and backward, of all networks
    memory_gib: float | None = None  # peak of the process that used most, without its loaders
    gpu_memory_gib: float | None = None  # peak of a GPU's tensors
    devices: str = ""  # such as `8 x NVIDIA A100-SXM4-80GB`

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "TrainingCost":
        """The cost in an export's facts; values that are not numbers are ignored."""
        cost = facts.get("cost")
        values = cost if isinstance(cost, dict) else {}
        numbers = {name: value for name in COST_UNITS if type(value := values.get(name)) in (int, float)}
        return cls(**numbers, devices=str(values.get("devices") or ""))

    @property
    def images(self) -> float | None:
        """Number of images seen, to the precision of the two values that it is made of; None if unknown."""
        return self.hours * 3600 * self.images_per_second if self.hours and self.images_per_second else None

    @property
    def tflop(self) -> float | None:
        """1e12 floating-point operations of the training; None if unknown."""
        return self.gflop_per_image * self.images / 1000 if self.gflop_per_image and self.images else None

    @property
    def text(self) -> str:
        """The known values, `60.2 h, 722 s an epoch, ... on 8 x V100`; "" if there are none."""
        by_unit = {unit: getattr(self, name) for name, unit in COST_UNITS.items() if name != "hours"}
        numbers = [f"{value:.4g} {unit}" for unit, value in by_unit.items() if value is not None]
        spent = [] if self.hours is None else [time_text(self.hours)]
        return ", ".join([*spent, *numbers]) + (f" on {self.devices}" if self.devices else "")


def time_unit(hours: float) -> tuple[str, float]:
    """The unit for a time, the largest of h, min and s in which it is 1 or more, and the units in an hour."""
    return ("h", 1.0) if hours >= 1 else ("min", 60.0) if hours * 60 >= 1 else ("s", 3600.0)


def time_text(hours: float) -> str:
    """A time as text: `60.2 h`, `1.61 min` or `0.79 s`."""
    unit, per_hour = time_unit(hours)
    return f"{hours * per_hour:{'.3g' if hours < 1000 else ',.0f'}} {unit}"


def decimals(value: float, unit: str) -> int:
    """Decimal places of a number: of a percentage 2, or 4 below 1 % and where 2 would make it 100; otherwise enough for
    three digits."""
    if value == 0:
        return 2
    if unit == "%":
        return 4 if abs(value) < 1 or 99.995 <= abs(value) < 100 else 2
    return max(0, 2 - floor(log10(abs(value))))


def number_text(value: float, unit: str) -> str:
    """A number as text: `97.20` for a percentage, `0.0123 s`, `1412 MB`, `0.731` without a unit."""
    return f"{value:.{decimals(value, unit)}f}{suffix(unit)}"


def number_with_interval(value: float, unit: str, interval: tuple[float, float] | None) -> str:
    """A number with its interval, if it has one, as text: `97.60 [96.0, 98.7]`."""
    ends = ", ".join(f"{end:.{interval_decimals(value, unit)}f}" for end in interval or ())
    return number_text(value, unit) + (f" [{ends}]" if ends else "")


def suffix(unit: str) -> str:
    """The unit as it follows a number, ` MB`; "" for a percentage."""
    return f" {unit}" if unit not in ("%", "") else ""


def interval_decimals(value: float, unit: str) -> int:
    """Decimal places of the ends of the interval around a value: 1 for percentages and percentage points, and 3 for
    those that 1 would make 0 or 100."""
    if unit == "%":
        return 3 if 0 < abs(value) < 0.05 or 99.95 <= abs(value) < 100 else 1
    return decimals(value, unit)


def end_text(value: float, unit: str) -> str:
    """An end of an interval as text: `96.1`, `0.702 s`."""
    return f"{value:.{interval_decimals(value, unit)}f}{suffix(unit)}"


SIZE = "image size"  # among the conditions of a result, if another than the checkpoint's own was chosen
SCHEMA = 2
BY_NAME = ("timm", "transformers")  # importers of many methods; the name of the model tells which


class NewerSchema(ValueError):
    """A file written by a later version of this tool, which must not be replaced, unlike a damaged one."""


@dataclass(frozen=True, kw_only=True)
class ProtocolUsed:
    """The recipe that was followed."""

    name: str  # `knn@dino`
    version: int  # raised whenever a number in the recipe changes
    source: str = ""  # the paper or code that the recipe follows
    plugin: str = ""  # the package that provides the task, and its version, `benchtoys 1.0`; empty for ours
    modified: bool = False  # true when `--set` changed a setting
    changes: Mapping[str, Any] = field(default_factory=dict)  # the changed settings and their values


@dataclass(frozen=True, kw_only=True)
class MetricRecord:
    """One number with its meaning, as in engine.tasks.Metric, and its interval."""

    value: float  # the number, in `unit`
    unit: str = "%"  # `%`, `s`, `MB`; empty if it has none
    higher_is_better: bool | None = True  # null if neither direction is better
    interval: tuple[float, float] | None = None  # low and high end, in `unit`; null without an array
    chosen_on_val: bool = False  # whether it is the best of several on the same validation images
    deviation_of: str | None = None  # metric whose standard deviation over the task's repetitions this is
    array: str | None = None  # name of its array in the `.npz` file
    # what that array holds: a value for every validation image, or for every resample of them
    array_over: Literal["images", "resamples"] = "images"
    # number of units that resamples are drawn from, such as videos; absent where they are the validation images
    resampled_units: int | None = None

    def __str__(self) -> str:
        return number_with_interval(self.value, self.unit, self.interval)


@dataclass(frozen=True, kw_only=True)
class CheckpointUsed:
    """The export that was evaluated."""

    name: str  # label, `--name` or from the reference
    digest: str  # SHA-256 over architecture, image preparation and all weights
    method: str = ""  # pretraining method, if the export names it
    recipe: str = ""  # recipe of the pretraining, likewise
    branch: str = ""  # which network of the pretraining, likewise: `teacher`, `student`
    architecture: str = ""  # such as `ViT-S/16`; `ViT-64x4/4` is width 64, depth 4, patch 4
    source: str = ""  # the imported file, or the reference given
    parameters: int = 0  # number of weights
    plugin: str = ""  # the package whose importer or method made the export, `benchtoys 1.0`; empty for ours
    # side in pixels, or height and width, of the images of its published evaluation, the default; null in results of
    # earlier versions
    image_size: int | tuple[int, int] | None = None
    table_size: int | tuple[int, int] | None = None  # likewise of the images that its positions are for, if they differ
    assumed: str = ""  # assumptions about what neither the file nor the user specified, such as image statistics
    training_cost: TrainingCost = field(default_factory=TrainingCost)  # cost of a pretraining by this tool:

    @property
    def key(self) -> tuple[str, str]:
        """Name and digest, which identify a checkpoint."""
        return self.name, self.digest

    @property
    def unique_name(self) -> str:
        """`NAME-DIGEST8`: the name of its folder in results, unique among checkpoints of one name."""
        return f"{self.name}-{self.digest[:8]}"

    @property
    def known_method(self) -> str:
        """The pretraining method; "" if only an importer that reads networks of many methods is known."""
        return "" if self.method in BY_NAME else self.method

    @property
    def is_raw_pixels(self) -> bool:
        """Whether these are raw pixels: no network, but a baseline that every network should beat."""
        return self.method == "pixels"


def labels_of(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Name and digest of each checkpoint -> its label: `name`, or `name (digest8)` if two checkpoints share a name."""
    unique = set(keys)
    counts = Counter(name for name, _ in unique)
    return {(name, digest): f"{name} ({digest[:8]})" if counts[name] > 1 else name for name, digest in unique}


@dataclass(frozen=True, kw_only=True)
class DataUsed:
    """The image set."""

    name: str  # as given by `--data NAME=URL`
    url: str  # likewise
    # split -> SHA-256 over class names, labels, file names and sizes
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    # split -> digests of a few files' bytes and of modification times, which distinguish sets of one fingerprint
    contents: Mapping[str, str] = field(default_factory=dict)
    # name of each file or set that the protocol reads besides the splits -> its SHA-256 or fingerprint
    reads: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)  # split -> number of images, before `limit`
    classes: int | None = None  # number of classes; null for scenes, and in results of older versions
    warnings: tuple[str, ...] = ()  # warnings about the images, a line each

    def differ_from(self, other: "DataUsed") -> list[str]:
        """What was changed between `other` and this: splits and whatever else both read that have other fingerprints,
        and those of the same fingerprint whose files were overwritten."""
        sources, others = {**self.fingerprints, **self.reads}, {**other.fingerprints, **other.reads}
        overwritten = [
            name
            for name, contents in self.contents.items()
            if sources.get(name) == others.get(name) and contents_differ(contents, other.contents.get(name, ""))
        ]
        return overwritten + [name for name, source in sources.items() if others.get(name, source) != source]

    @property
    def lacks_train(self) -> bool:
        """Whether it has validation images alone."""
        return [*self.images] == ["val"]

    def joined(self, other: "DataUsed") -> "DataUsed":
        """The same images with what `other`, of another protocol, reads as well."""
        return replace(
            self,
            fingerprints={**other.fingerprints, **self.fingerprints},
            contents={**other.contents, **self.contents},
            reads={**other.reads, **self.reads},
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The metrics of one job, or its failure. The order of fields is that in the file and in docs/results.md."""

    schema: int = SCHEMA  # version of this table
    status: Literal["ok", "failed"]  # how the task ended
    message: str = ""  # why it failed, in one line; empty when `ok`
    task: str  # key of the task file
    protocol: ProtocolUsed  # the recipe:
    metrics: Mapping[str, MetricRecord] = field(default_factory=dict)  # the numbers by name, in the task's order:
    interval_method: str = ""  # how the intervals were computed; empty without any
    checkpoint: CheckpointUsed  # what was evaluated:
    data: DataUsed  # the images:
    seed: int  # seed of everything random in the task
    random: bool = True  # false when another seed cannot give other numbers
    limit: int | None = None  # at most this many images of each split were used
    # side in pixels, or height and width, of the images that the network got; null if the protocol decides, as in dense
    # tasks, and in results of earlier versions, where it is that of the checkpoint's positions
    image_size: int | tuple[int, int] | None = None
    precision: str = "float32"  # `float32` or `bfloat16`, of the forward pass
    decode: str = "exact"  # `exact` (PIL) or `fast` (torchvision, uint8 tensors)
    # unreadable images were counted and left out; `facts` names them (`train.skipped`, `val.skipped`)
    skip_bad: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # all settings of the task
    # what else the task recorded about its numbers, independent of interruptions. `read_instead`: feature that the
    # protocol reads but the model lacks -> feature that was read instead
    facts: Mapping[str, Any] = field(default_factory=dict)
    # names of the other arrays in the `.npz` file: areas, detections, predictions
    arrays: tuple[str, ...] = ()
    # SHA-256 of the `.npz` file; empty without one, in a record that left an array out, and in earlier results
    arrays_sha256: str = ""
    device: str = ""  # `cpu`, `cuda`, `cuda:1`
    compiled: bool = False  # torch.compile computed the transformer blocks (`--compile`; dense tasks never)
    processes: int = 1  # number of processes (torchrun)
    seconds: float = 0.0  # wall time of the task
    # what this run spent: `forwards` (images through the backbone) in `extraction_seconds`
    cost: Mapping[str, float] = field(default_factory=dict)
    images_per_second: float | None = None  # `forwards` per second; null when all features were on disk
    date: str = ""  # when it ended, ISO 8601, UTC
    versions: Mapping[str, Any] = field(default_factory=dict)  # Python, libraries, this tool and its git commit
    hardware: Mapping[str, Any] = field(default_factory=dict)  # processor, cores, threads, memory, GPUs, system

    @property
    def variant(self) -> tuple[str, ...]:
        """Everything that makes it incomparable with the plain protocol: version, changed settings, limit, ..."""
        variant = [f"v{self.protocol.version}"] if self.protocol.version > 1 else []
        variant += [f"{name}={short(value)}" for name, value in self.protocol.changes.items()]
        variant += [f"limit={self.limit}"] if self.limit is not None else []
        variant += [f"{self.chosen_size}px"] if self.chosen_size else []
        variant += [self.precision] if self.precision != "float32" else []
        variant += [self.decode] if self.decode != "exact" else []
        variant += [f"skipped={self.skipped}"] if self.skipped else []
        return tuple(variant)

    @property
    def chosen_size(self) -> str:
        """`448` or `384x512` if the images have another size than the checkpoint's published evaluation, else ""."""
        return "" if self.image_size in (None, self.checkpoint.image_size) else pixels_text(self.image_size)

    @property
    def group(self) -> str:
        """The key of comparable results: `digits/knn@dino`, or `digits/knn@dino[k=5+10 limit=100]`."""
        variant = f"[{' '.join(self.variant)}]" if self.variant else ""
        return f"{self.data.name}/{self.protocol.name}{variant}"

    @property
    def doubted_metrics(self) -> set[str]:
        """Metrics that one of the task's warnings, `METRIC: reason`, is about."""
        return self.metrics.keys() & {warning.partition(":")[0] for warning in self.facts.get("warnings", ())}

    def changed_since(self, task: Task) -> dict[str, tuple[Any, Any]]:
        """Setting -> its value then and that of the task now, where they differ; those that only one of them has do not
        count."""
        before, now = as_json(added_settings(task)) | dict(self.settings), settings_of(task, complete=True)
        return {name: (before[name], now[name]) for name in before if name in now and before[name] != now[name]}

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything that a number depends on, except checkpoint and seed."""
        return {
            "protocol version": self.protocol.version,
            **{f"{split} images": fingerprint[:8] for split, fingerprint in self.data.fingerprints.items()},
            **{name: fingerprint[:8] for name, fingerprint in self.data.reads.items()},
            **{f"{self.task}.{name}": value for name, value in self.settings.items()},
            "limit": self.limit,
            **({SIZE: self.chosen_size} if self.chosen_size else {}),
            "precision": self.precision,
            "decode": self.decode,
        }

    @property
    def numbers(self) -> dict[str, float]:
        """Metric -> its value, without interval and unit."""
        return {name: metric.value for name, metric in self.metrics.items()}

    def __str__(self) -> str:
        """One line: `dino_small, knn@dino on cifar10: top1_k10 97.60 [96.0, 98.7], top5_k10 99.80 [...]`."""
        ending = ", ".join(f"{name} {metric}" for name, metric in self.metrics.items()) or self.message
        return f"{self.checkpoint.name}, {self.protocol.name} on {self.data.name}: {ending}"

    @property
    def skipped(self) -> int:
        """Number of unreadable images that were left out, of both splits and all other sets together."""
        return len(skipped_paths(self.facts))

    def to_json(self) -> str:
        """The text of the result file. ValueError for a value that JSON cannot represent (NaN, infinity, an object)."""
        try:
            content = msgspec.to_builtins(self, enc_hook=plain)
            for metric in content["metrics"].values():
                if metric.get("resampled_units", "") is None:
                    del metric["resampled_units"]
            return json.dumps(content, indent=1, allow_nan=False) + "\n"
        except TypeError as error:
            raise ValueError(f"{self.protocol.name}: a fact is not a JSON value: {error}") from error


def skipped_paths(facts: Mapping[str, Any]) -> set[str]:
    """The paths of all unreadable images in a result's facts: of splits and of other sets, such as shifted ones."""
    paths: set[str] = set()
    for name, value in facts.items():
        if name == "skipped":
            paths |= set(value or ())
        else:
            parts = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, Mapping)]
            paths = paths.union(*map(skipped_paths, parts))
    return paths


def pixels_text(size: int | tuple[int, int] | None) -> str:
    """A size as it is given to --image-size: `224`, or `384x512` of a height and width; "" for None."""
    return "x".join(map(str, dict.fromkeys(size))) if isinstance(size, tuple) else str(size or "")


def sizes_note(results: Mapping[str, Result]) -> str:
    """A sentence on the sizes of the images, if networks have different ones; else "". results: label -> result."""
    sizes = {
        label: pixels_text(result.image_size)
        for label, result in results.items()
        if result.image_size and not result.checkpoint.is_raw_pixels
    }
    if len(set(sizes.values())) < 2:
        return ""
    texts = ", ".join(f"{label} {size} px" for label, size in sizes.items())
    return f"Images have the size at which each network's source evaluates it: {texts}."


def short(value: Any) -> str:
    """A setting's value without commas, which are not allowed in column names: `5+10`."""
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def result_path(out: Path, checkpoint: CheckpointUsed, data_name: str, stem: str) -> Path:
    """The path of a result file: `OUT/results/<name>-<digest8>/<data name>/<stem>.json`."""
    return out / "results" / checkpoint.unique_name / data_name / f"{stem}.json"


def result_stem(protocol: ProtocolUsed, settings: Mapping[str, Any], space: Workspace, pixels: str = "") -> str:
    """The stem of a result file's name.

    `<protocol>[-v<version>][-<settings digest8>][-limitN][-<pixels>px][-bfloat16][-fast]-seed<seed>`

    pixels: size of the images, if it is another than that of the checkpoint's positions.
    """
    parts = [protocol.name]
    parts += [f"v{protocol.version}"] if protocol.version > 1 else []
    parts += [digest(dict(settings))[:8]] if protocol.modified else []
    parts += [f"limit{space.limit}"] if space.limit is not None else []
    parts += [f"{pixels}px"] if pixels else []
    parts += [space.precision] if space.precision != "float32" else []
    parts += [space.decode] if space.decode != "exact" else []
    return "-".join([*parts, f"seed{space.seed}"])


def failure_path(path: Path) -> Path:
    """The file for a failed attempt to make the good result at `path` again."""
    return path.with_suffix(".failed.json")


def record(path: Path, result: Result, arrays: Mapping[str, np.ndarray], log: str = "") -> Path:
    """Write the result to `path`, or a failure next to a good result that exists; returns the path written to."""
    failure = failure_path(path)
    if result.status == "failed" and is_good(path):
        write_result(failure, result, arrays, log)
        return failure
    write_result(path, result, arrays, log)
    for leftover in (failure, failure.with_suffix(".log")):
        leftover.unlink(missing_ok=True)
    return path


def is_good(path: Path) -> bool:
    """Whether the file exists, is undamaged, and its result did not fail."""
    try:
        return read_result(path).status == "ok"
    except (FileNotFoundError, ValueError):
        return False


def write_result(path: Path, result: Result, arrays: Mapping[str, np.ndarray], log: str = "") -> None:
    """Write the arrays and the log of a result, then the result; arrays and logs of earlier runs are removed."""
    npz = npz_of(arrays)
    text = replace(result, arrays_sha256=hashlib.sha256(npz).hexdigest() if npz else "").to_json()
    companions = {".npz": npz, ".log": log.encode()}
    for suffix, content in companions.items():
        if content:
            write_atomic(path.with_suffix(suffix), content)
    write_atomic(path, text)
    for suffix, content in companions.items():
        if not content:
            path.with_suffix(suffix).unlink(missing_ok=True)


def npz_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of an `.npz` file; nothing if there are no arrays."""
    buffer = io.BytesIO()
    if arrays:
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # NumPy types the keywords as its own flags
    return buffer.getvalue()


def read_result(path: Path) -> Result:
    """Read a result file; unknown keys are ignored. ValueError for a damaged file, NewerSchema for a newer schema."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: not a result file: {str(error).removeprefix(f'{path}: ')}") from error
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise ValueError(f"{path}: not a result file: it has no schema version")
    if value["schema"] > SCHEMA:
        raise NewerSchema(
            f"{path}: written with result schema {value['schema']}, this version reads up to {SCHEMA}; "
            "upgrade with: pip install --upgrade ssl-vit-bench"
        )
    try:
        return msgspec.convert(value, Result)
    except ValueError as error:  # names the field
        raise ValueError(f"{path}: not a result file: {error}") from error


def read_arrays(path: Path, sha256: str = "") -> dict[str, np.ndarray]:
    """All arrays of a result, from the `.npz` file next to it.

    ValueError if they cannot be read, or the file's SHA-256 is another than `sha256`; "" if that is unknown.
    """
    arrays_path = path.with_suffix(".npz")
    again = f"make the result again with {option('rerun', True)}"
    try:
        with open_regular(arrays_path) as file:
            is_own = not sha256 or hashlib.file_digest(file, "sha256").hexdigest() == sha256
            file.seek(0)
            with np.load(file) as arrays:
                values = dict(arrays)
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{arrays_path}: its arrays cannot be read; {again}") from error
    if not is_own:
        raise ValueError(
            f"{arrays_path}: the arrays of another result than {path.name}, as one of the files was copied alone or "
            f"the run was killed between them; copy both, or {again}"
        )
    return values


def check_folder(out: Path) -> None:
    """ValueError for a folder that no run wrote to."""
    if not (out / "results").is_dir():
        problem = "holds no results" if out.is_dir() else "does not exist"
        raise ValueError(f"{out} {problem}; give a folder of results, as `bench run` writes it")


def result_files(out: Path) -> Iterator[Path]:
    """All result files of a folder, in a stable order."""
    return iter(sorted((out / "results").rglob("*.json")))


def images_seen(data: DataUsed, limit: int | None) -> int:
    """Number of validation images that a task evaluates, given its limit."""
    return min(data.images["val"], data.images["val"] if limit is None else limit)
