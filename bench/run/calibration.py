"""How long a unit of work takes: measured on this machine and kept in the cache, or assumed for another machine.

Assumed machines (`--assume`) allow plans without access to the machine. Peaks are from data sheets; the fraction of the
peak that programs reach, and everything else, are assumptions, each stated on its line.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from engine.files import digest, read_json, write_atomic
from engine.machine import hardware
from engine.printing import did_you_mean
from engine.tasks import Workspace
from engine.work import IMAGES, NETWORK_SLOWDOWN, Kind, Part, Work, product_rate
from imagesets.decoding import UnreadableImage, releasing_large_images
from imagesets.sets import ImageSet, open_set
from imagesets.transforms import Photo
from probes.features.extract import Extractor, OnBatch, Reader, batch_spans, for_each_batch, forward_batch, transform_of
from probes.features.kinds import FeatureKind
from probes.linear.train_transform import TrainTransform

VERSION = 3  # of the files; raise it when the meaning of a kind of work changes
# Passes through the frozen network, which take all tasks equally long.
SHARED: tuple[Kind, ...] = ("features", "crops", "further crops")
MIN_IMAGES, MAX_IMAGES = 16, 1024  # of a timed pass
DECODING = "decoding"  # entry of a calibration's units: the seconds of SHARED in which images are read and decoded


@dataclass(kw_only=True)
class Calibration:
    """Seconds per unit of work on this machine, with one architecture, device, precision and image set."""

    path: Path  # its file
    rate: float  # floating-point operations per second, for work that is not timed itself
    date: str = ""  # of the newest measurement, ISO 8601, UTC
    # Key -> kind of work -> seconds of a unit. The key is a task with its settings, "" for passes that all tasks share,
    # or DECODING for the part of these passes in which images are decoded.
    units: dict[str, dict[Kind, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, space: Workspace, export: FrozenExport, fingerprints: Mapping[str, str]) -> "Calibration":
        """Earlier measurements for this export and image set; empty if there are none."""
        options = [space.device, space.precision, space.decode, space.batch_size, space.workers]
        machine = [hardware(), torch.get_num_threads()]
        name = digest([VERSION, *machine, *options, asdict(export.spec), dict(fingerprints)])[:16]
        calibration = cls(
            path=space.cache / "calibration" / f"{name}.json", rate=product_rate(space.device) / NETWORK_SLOWDOWN
        )
        try:
            stored = read_json(calibration.path, type=dict[str, Any])
            return replace(calibration, date=stored["date"], units=stored["units"])
        except (FileNotFoundError, ValueError, KeyError):  # a damaged file is replaced by new measurements
            return calibration

    def save(self, task: str, units: Mapping[Kind, float]) -> None:
        """Add measurements for a task, or for all tasks (""), and write the file."""
        self.units[task] = {**self.units.get(task, {}), **units}
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomic(self.path, json.dumps({"date": self.date, "units": self.units}, indent=1) + "\n")

    def unmeasured(self, work: Work, task: str) -> set[Kind]:
        """Kinds of a task's work that are still to be timed: all kinds for a new task, else only shared passes."""
        timed = {*self.units.get("", {}), *self.units.get(task, {})}
        kinds = {part.kind for part in work.parts}
        return kinds.intersection(SHARED) - timed if task in self.units else kinds

    def seconds(self, part: Part, task: str = "") -> float:
        """Seconds that a part takes; estimated from its FLOPs if it was not timed."""
        unit = self.units.get(task, {}).get(part.kind, self.units.get("", {}).get(part.kind))
        return part.count * (part.flops / self.rate if unit is None else unit)

    def decoding(self, part: Part) -> float:
        """The seconds of a part in which the network waits for images to be read and decoded."""
        return part.count * self.units.get(DECODING, {}).get(part.kind, 0.0)


@contextmanager
def scratch(space: Workspace) -> Iterator[Workspace]:
    """A copy of a workspace whose cache is a temporary folder; opened image sets are shared with the original."""
    with tempfile.TemporaryDirectory(prefix="bench-calibration-") as folder:
        yield replace(space, cache=Path(folder), wanted={}, limit=None)


def pass_seconds(kind: Kind, export: FrozenExport, space: Workspace, seconds: float) -> tuple[float, float]:
    """Seconds per image of a pass, training images if there are any, and those in which the network waits for images.

    A pass reads an image, crops it ("features": at the centre; "crops": at random) and sends it through the network.
    For "further crops", reading is left out: some images stay decoded. Takes about `seconds` to measure.
    """
    train = space.images("val" if space.opened.known(space.data, "train") is None else "train", open_set)
    transform: Any = transform_of(export, space)
    if kind != "features":
        transform = TrainTransform(
            size=export.spec.size,
            interpolation="bilinear",
            rule="torchvision",
            seed=0,
            epoch=0,
            image_numbers=np.arange(len(train)),
            decode=space.decode,
        )
    chunk = space.batch_size or forward_batch(space.device)
    backbone = Backbone(export, space.device, space.precision)
    feature = FeatureKind("cls" if export.spec.has_class_token else "avg")
    spread = train.limited(min(len(train), MAX_IMAGES))
    extractor = Extractor(backbone=backbone, kinds=[feature], image_set=train)

    def extract(count: int, work: OnBatch = extractor) -> float:
        spans = batch_spans(count, chunk)
        started = time.perf_counter()
        for_each_batch(Reader(spread, transform, spans, skip_bad=True), work, space.device, space.workers)
        return (time.perf_counter() - started) / count

    warmup = min(max(MIN_IMAGES, chunk), len(spread))
    if kind == "further crops":
        transform = DecodedCrops(transform, spread, warmup)
    extract(warmup)  # the first pass is slower
    count = min(len(spread), max(warmup, int(seconds / extract(warmup))))
    whole, reading = extract(count), extract(count, lambda loaded, span: None)
    if torch.device(space.device).type == "cpu":  # the same cores read images and compute, by turns
        return whole, min(whole, reading)
    return whole, whole if reading > 0.9 * whole else 0.0  # loaders read while the GPU computes


class DecodedCrops:
    """Crops of the first images of a set, which are kept decoded. UnreadableImage for those that cannot be read."""

    def __init__(self, crop: TrainTransform, image_set: ImageSet, count: int) -> None:
        self.crop, self.shape, self.name = crop, crop.shape, crop.name
        self.photos = [Photo(image_set, index) for index in range(count)]
        for photo in self.photos:
            with suppress(UnreadableImage), releasing_large_images():
                crop.apply(photo)

    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        return self.crop.apply(self.photos[index % len(self.photos)])


# Images of ImageNet's size per second and core: cropped at the centre, at random, or augmented and mixed as for
# fine-tuning; 300 as stated in probes/features/extract.py, the others by their ratios to it (docs/speed.md). Further
# crops are of images that are already decoded.
READS: Mapping[str, Mapping[str, float]] = {
    "exact": {"features": 300.0, "evaluation": 300.0, "crops": 420.0, "further crops": 1140.0, "training": 190.0},
    "fast": {"features": 540.0, "evaluation": 540.0, "crops": 500.0, "further crops": 1450.0, "training": 225.0},
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind, among which the work is divided evenly."""

    name: str
    peak: Mapping[str, float]  # precision -> floating-point operations per second of one GPU
    memory: float  # bytes of one GPU
    precision: str = "bfloat16"  # of the networks; heads, searches and fits are in float32
    gpus: int = 1  # in all nodes together
    loaders: int = 8  # processes per GPU that read images: this tool's default; --workers may raise it
    # Fractions of the peak that are reached: networks forward, and forward and backward; products in float32.
    forward: float = 0.40
    training: float = 0.35
    product: float = 0.40
    divided: float = 0.90  # fraction of its speed that each GPU keeps if there are several
    decode: Literal["exact", "fast"] = "exact"
    start: float = 30.0  # seconds until a training begins
    update: float = 0.01  # seconds of a step of the optimiser
    closing: float = 0.04  # seconds of one resample of a dense task: COCO's 4000 take 160 s (engine/tasks.py)
    libraries: float = 10.0  # seconds until they are imported
    states: float = 5.0  # seconds until one is saved

    def __post_init__(self) -> None:
        assert self.precision in self.peak and "float32" in self.peak

    def seconds(self, part: Part, task: str = "") -> float:
        """Seconds that a part takes: the maximum of those for reading its images and for computing."""
        fixed = {name: getattr(self, name) for name in ("start", "closing", "libraries", "states")}
        if part.kind in fixed:
            return part.count * fixed[part.kind]
        if part.kind == "updates":
            return part.count * self.update
        computing = part.count * part.flops / self.rate(part.kind)
        return max(computing / self.power, self.reading(part))

    def reading(self, part: Part) -> float:
        """Seconds that the loaders take for the images of a part."""
        if part.kind not in IMAGES:
            return 0.0
        return part.count / (READS[self.decode][part.kind] * self.loaders * self.power)

    def decoding(self, part: Part) -> float:
        """Seconds of a part if its images take longer to load than the network computes; else 0."""
        seconds = self.seconds(part)
        return seconds if self.reading(part) >= seconds else 0.0

    def rate(self, kind: Kind) -> float:
        """Floating-point operations per second of one GPU in this kind of work."""
        if kind in IMAGES:
            return self.peak[self.precision] * (self.training if kind == "training" else self.forward)
        return self.peak["float32"] * self.product

    @property
    def power(self) -> float:
        """The speed of all GPUs together, as a multiple of one GPU's."""
        return self.gpus * self.divided if self.gpus > 1 else 1.0

    def lines(self) -> list[str]:
        """The assumptions, as lines of text."""
        reads = READS[self.decode]
        peaks = ", ".join(f"{precision} {peak / 1e12:g} TFLOP/s" for precision, peak in self.peak.items())
        return [
            f"assumed, not measured: {self.gpus} x {self.name}, peaks {peaks} (data sheet)",
            f"assumed: {self.forward:.0%} of the peak in {self.precision} forward, {self.training:.0%} in training, "
            f"{self.product:.0%} in float32 products; of several GPUs each keeps {self.divided:.0%} of its speed",
            f"assumed: {self.loaders} loaders per GPU, each of which decodes {reads['features']:g} images a second "
            f"({self.decode}), {reads['crops']:g} for random crops, {reads['further crops']:g} for further crops of "
            f"these, or augments {reads['training']:g}; `bench plan` on the machine itself measures all of this",
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


def machine(
    name: str, gpus: int, loaders: int | None, precision: str, decode: Literal["exact", "fast"] = "exact"
) -> Machine:
    """The machine of that name with `gpus` GPUs. ValueError for an unknown name."""
    if name not in MACHINES:
        raise ValueError(f"--assume {name}: no such machine is known{did_you_mean(name, list(MACHINES))}")
    preset = MACHINES[name]
    return replace(preset, gpus=gpus, loaders=loaders or preset.loaders, precision=precision, decode=decode)


def free_memory(device: str) -> float:
    """Bytes that are free on the device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return 0.0
