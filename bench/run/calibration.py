"""How long a unit of work takes: measured on this machine and kept in the cache, or assumed of a machine that is not
there.

Assumed machines (`--assume`) are for plans before there is the machine. A peak is a data sheet's; the share of it that
programs reach, and all else, are assumptions, each on its line.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from bench.results.environment import hardware
from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, training_flops
from checkpoints.frozen import FrozenExport
from engine.files import digest, write_atomic
from engine.neighbours import search, unit_rows
from engine.printing import did_you_mean, say
from engine.tasks import Task, Workspace
from engine.work import IMAGES, Kind, Part, Work
from imagesets.sets import ImageSet, open_set
from probes.features.extract import Extractor, Reader, forward_batch, run_extraction, transform_of
from probes.features.kinds import FeatureKind
from probes.linear.augmented import TrainTransform

# What a part without a measured unit is estimated by, from its operations: the like that is measured.
LIKE: Mapping[Kind, str] = {
    "features": "forward",
    "crops": "forward",
    "evaluation": "forward",
    "training": "training",
    "head steps": "product",
    "head images": "product",
    "comparisons": "product",
    "fit rows": "product",
}


class Speed(Protocol):
    """A machine, measured or assumed."""

    def seconds(self, part: Part, protocol: str) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on one machine, with one architecture, device and precision."""

    date: str  # ISO 8601, UTC
    took: float  # seconds of measuring
    machine: Mapping[str, Any]  # as results say it
    device: str
    precision: str
    architecture: str
    units: Mapping[Kind, float] = field(default_factory=dict)  # kind of work -> seconds of a unit, for all tasks
    # protocol -> kind of work -> seconds of a unit, as its task rehearsed it
    of_task: Mapping[str, Mapping[Kind, float]] = field(default_factory=dict)
    # forward, training, product -> floating-point operations a second
    flops: Mapping[str, float] = field(default_factory=dict)
    # protocol -> kind of work -> operations of a unit, of models that a task builds
    models: Mapping[str, Mapping[Kind, float]] = field(default_factory=dict)
    reading: float = 0.0  # seconds that a core takes to read, decode and crop an image
    memory_free: float = 0.0  # bytes

    def unit(self, kind: Kind, protocol: str) -> float | None:
        """Seconds per unit, or None if unmeasured."""
        return self.of_task.get(protocol, {}).get(kind, self.units.get(kind))

    def seconds(self, part: Part, protocol: str) -> float:
        """Seconds that a part takes; estimated from its FLOPs where its unit was not measured."""
        unit = self.unit(part.kind, protocol)
        if unit is None:
            rate = self.flops.get(LIKE.get(part.kind, ""), 0.0)
            unit = part.flops / rate if rate else 0.0
        return unit * part.count


def seconds_of_work(work: Work, speed: Speed, protocol: str) -> float:
    """All parts one after the other, as a task does them."""
    return sum(speed.seconds(part, protocol) for part in work.parts)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind, whose work is divided evenly."""

    name: str
    peak: Mapping[str, float]  # precision -> floating-point operations a second of one GPU
    memory: float  # bytes of one GPU
    precision: str = "bfloat16"  # of the networks; heads, searches and fits are in float32
    gpus: int = 1  # in all nodes together
    loaders: int = 8  # processes that read images, for each GPU: what this tool starts; --workers asks for more
    # Shares of the peak that are reached: networks forward, and forward and back; products in float32.
    forward: float = 0.40
    training: float = 0.35
    product: float = 0.40
    divided: float = 0.90  # share of the speed that is left of each GPU of several
    # Images that a core reads a second: of ImageNet 300 are decoded and cropped (probes/features/extract.py), 100
    # augmented by RandAugment (probes/finetune/training_groups.py).
    reads: float = 300.0
    augments: float = 100.0
    start: float = 30.0  # seconds until a training begins
    update: float = 0.01  # seconds of a step of the optimiser
    closing: float = 0.04  # seconds of one resample of a dense task: COCO's 4000 take 160 s (engine/resampling.py)
    libraries: float = 10.0  # seconds until they are imported
    states: float = 5.0  # seconds until one is saved

    def __post_init__(self) -> None:
        assert self.precision in self.peak and "float32" in self.peak

    def seconds(self, part: Part, protocol: str) -> float:
        """Seconds that a part takes: the longer of reading its images and computing."""
        fixed = {name: getattr(self, name) for name in ("start", "closing", "libraries", "states")}
        if part.kind in fixed:
            return part.count * fixed[part.kind]
        if part.kind == "updates":
            return part.count * self.update
        computing = part.count * part.flops / self.rate(part.kind)
        if part.kind not in IMAGES:
            return computing / self.power
        speed = self.augments if part.kind == "training" else self.reads
        return max(computing, part.count / (self.loaders * speed)) / self.power

    def rate(self, kind: Kind) -> float:
        """Operations that one GPU does in a second of this kind of work."""
        if kind in IMAGES:
            return self.peak[self.precision] * (self.training if kind == "training" else self.forward)
        return self.peak["float32"] * self.product

    @property
    def power(self) -> float:
        """How many times one GPU's speed."""
        return self.gpus * self.divided if self.gpus > 1 else 1.0

    def lines(self) -> list[str]:
        """What is assumed, for people."""
        peaks = ", ".join(f"{precision} {peak / 1e12:g} TFLOP/s" for precision, peak in self.peak.items())
        return [
            f"assumed, not measured: {self.gpus} x {self.name}, peaks {peaks} (data sheet)",
            f"assumed: {self.forward:.0%} of the peak in {self.precision} forward, {self.training:.0%} in training, "
            f"{self.product:.0%} in float32 products; {self.divided:.0%} of each GPU of several",
            f"assumed: {self.loaders} loaders a GPU, each of which decodes {self.reads:g} images a second or augments "
            f"{self.augments:g}; `bench plan` on the machine itself measures all of this",
        ]


# NVIDIA's data sheets, dense (without sparsity).
MACHINES = {
    "h100": Machine(  # H100 Tensor Core GPU Datasheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 67 TFLOPS fp32, 80 GB
        name="NVIDIA H100 SXM", peak={"bfloat16": 989e12, "float32": 67e12}, memory=80e9
    ),
    "a100": Machine(  # A100 Tensor Core GPU Datasheet, SXM4: 312 TFLOPS bf16, 19.5 TFLOPS fp32, 80 GB
        name="NVIDIA A100 80GB SXM", peak={"bfloat16": 312e12, "float32": 19.5e12}, memory=80e9
    ),
}


def machine(name: str, gpus: int, loaders: int | None, precision: str) -> Machine:
    """`gpus` of the machine of that name. ValueError for an unknown one."""
    if name not in MACHINES:
        raise ValueError(f"--assume {name}: no such machine is known{did_you_mean(name, list(MACHINES))}")
    found = MACHINES[name]
    return replace(found, gpus=gpus, loaders=loaders or found.loaders, precision=precision)


SECONDS = 3.0  # of each measurement of images, about
READ = 16  # images of the first, untimed pass
MOST = 1024  # images of a timed pass
GALLERY, QUERIES = 20_000, 512  # rows that are compared
PRODUCT = 1024  # rows and columns of a matrix product


def calibration_path(space: Workspace, export: FrozenExport, fingerprints: Mapping[str, str]) -> Path:
    """Where the calibration of this machine, export and image set is kept."""
    key = [hardware(), space.device, space.precision, space.decode, space.batch_size, space.workers, space.world.size]
    named = digest([*key, asdict(export.spec), dict(fingerprints)])[:16]
    return space.cache / "calibration" / f"{named}.json"


def read_calibration(path: Path) -> Calibration | None:
    """One that was kept; None where there is none, or a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def calibrated(
    path: Path, export: FrozenExport, space: Workspace, tasks: Iterable[tuple[str, Task]], classes: int, fresh: bool
) -> Calibration:
    """What is measured for these tasks on the set `space.data`: kept where it was before, else measured now.

    tasks: protocol and task. classes: of that set. fresh: measure again.
    """
    kept = None if fresh else read_calibration(path)
    missing = [(name, task) for name, task in tasks if kept is None or name not in kept.of_task]
    if kept is not None and not missing:
        return kept
    started = time.perf_counter()
    with scratch(space) as inside:
        rehearsed = {name: rehearsal(name, task, export, inside) for name, task in missing}
        kept = kept or measured(export, inside, reads_scenes=any(task.LAYOUT for _, task in missing))
        models = {name: dict(task.model_flops(export.spec, classes)) for name, task in missing if rehearsed[name]}
    probes = [rehearsed[name] for name, task in missing if not task.LAYOUT]
    trained = [found["training"] for found in probes if "training" in found]
    flops = {**kept.flops, **({"training": training_flops(export.spec) / min(trained)} if trained else {})}
    result = replace(
        kept,
        of_task={**kept.of_task, **rehearsed},
        models={**kept.models, **models},
        flops=flops,
        took=round(kept.took + time.perf_counter() - started, 1),
    )
    write_atomic(path, json.dumps(asdict(result), indent=1) + "\n")
    return result


@contextmanager
def scratch(space: Workspace) -> Iterator[Workspace]:
    """A workspace of this process alone, in a folder that goes; sets that are open stay open."""
    with tempfile.TemporaryDirectory(prefix="bench-calibration-") as folder:
        yield replace(space, cache=Path(folder), wanted={}, limit=None)


def rehearsal(name: str, task: Task, export: FrozenExport, space: Workspace) -> dict[Kind, float]:
    """What a task rehearses; nothing where it cannot, which is said."""
    try:
        return dict(task.benchmark(export, space))
    except Exception as error:  # what keeps it from a rehearsal will keep it from running, and say more there
        say(
            f"{name} was not rehearsed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            errors=True,
        )
        return {}


def measured(export: FrozenExport, space: Workspace, reads_scenes: bool) -> Calibration:
    """What all tasks share. Of scenes nothing is shared but the matrix products."""
    product = seconds_of(lambda: _product(space.device))
    flops = {"product": 2.0 * PRODUCT**3 / product}
    units: dict[Kind, float] = {}
    reading = 0.0
    if not reads_scenes:
        train = space.images("train", open_set)
        reading, features = passes(export, train, space, augmented=False)
        units = {"features": features, "crops": passes(export, train, space, augmented=True)[1]}
        units["comparisons"] = comparison_seconds(export.spec.width, space)
        computing = max(features - reading / torch.get_num_threads(), features / 10)
        flops["forward"] = forward_flops(export.spec) / computing
    else:
        flops["forward"] = bare_forward(export, space)
    flops["training"] = flops["forward"]
    return Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        took=0.0,
        machine=hardware(),
        device=space.device,
        precision=space.precision,
        architecture=export.spec.label,
        units=units,
        flops=flops,
        reading=reading,
        memory_free=free_memory(space.device),
    )


def bare_forward(export: FrozenExport, space: Workspace) -> float:
    """Operations a second of the network on images in memory."""
    backbone, count = Backbone(export, space.device, space.precision), 2
    images = backbone.prepare(torch.zeros(count, 3, *export.spec.size, dtype=torch.uint8, device=space.device))
    last = [(export.spec.depth - 1, False)]
    seconds = seconds_of(lambda: backbone.views(images, last)[last[0]].patches.sum().item())
    return count * forward_flops(export.spec) / seconds


def passes(export: FrozenExport, train: ImageSet, space: Workspace, augmented: bool) -> tuple[float, float]:
    """Seconds that one core takes to read an image, and that this machine takes for an image through the network."""
    transform: Any = transform_of(export, space)
    if augmented:
        names = np.arange(len(train))
        transform = TrainTransform(
            size=export.spec.size, interpolation="bilinear", rule="torchvision", seed=0, epoch=0, names=names
        )
    chunk = space.batch_size or forward_batch(space.device)
    kind = FeatureKind("cls" if export.spec.has_class_token else "avg")
    backbone = Backbone(export, space.device, space.precision)
    extractor = Extractor(backbone=backbone, kinds=[kind], image_set=train)
    spread = train.limited(min(len(train), MOST))

    def through(count: int) -> float:
        spans = {number: range(at, min(at + chunk, count)) for number, at in enumerate(range(0, count, chunk))}
        started = time.perf_counter()
        run_extraction(Reader(spread, transform, spans, skip_bad=True), extractor, lambda done: None, space.workers)
        return time.perf_counter() - started

    count = min(max(READ, chunk), len(spread))
    through(count)
    each = through(count) / count
    count = int(min(len(spread), max(count, SECONDS / each)))
    whole = through(count) / count
    started = time.perf_counter()
    for index in range(min(READ, len(spread))):
        transform(spread, index)
    return (time.perf_counter() - started) / min(READ, len(spread)), whole


def comparison_seconds(width: int, space: Workspace) -> float:
    """Seconds of one comparison of FAISS, or of torch where there is none."""
    generator = np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((GALLERY, width), np.float32))
    try:
        search(rows[:1000], rows[:8], 8)
    except ValueError:
        return seconds_of(lambda: search(rows, rows[:QUERIES], 200, "torch", space.device)) / (GALLERY * QUERIES)
    return seconds_of(lambda: search(rows, rows[:QUERIES], 200)) / (GALLERY * QUERIES)


def _product(device: str) -> float:
    matrix = torch.ones(PRODUCT, PRODUCT, device=device)
    return (matrix @ matrix)[0, 0].item()


def seconds_of(work: Callable[[], object]) -> float:
    """The least of three calls, after one that is slower."""
    found = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def free_memory(device: str) -> float:
    """Bytes that are free on the device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return 0.0
